"""What a guide is known to get wrong on a model, before it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal

from numpyro_gpx.notes import Note
from numpyro_gpx.program.dependence import added_gps, dependence_of
from numpyro_gpx.program.program import Program

if TYPE_CHECKING:
    from numpyro.infer.autoguide import AutoGuide

__all__ = ["collapsing_scales", "doubts_of"]

# NumPyro's guides that hold all sites as points, and those that treat them as
# independent. These very classes.
_POINTS = (AutoDelta,)
_FACTORISED = (AutoNormal, AutoDiagonalNormal)


def doubts_of(guide: AutoGuide, program: Program) -> tuple[Note, ...]:
    """Notes on a guide for a model.

    Args:
        guide: Any of NumPyro's kind; what is not known here is not doubted.
        program: The model.
    """
    notes: list[Note] = []
    structure = program.structure
    name = type(guide).__name__
    points = type(guide) in _POINTS or getattr(guide, "theta", None) == "point"
    factorised = getattr(guide, "factorised", type(guide) in _FACTORISED)
    rows = [n for n in structure.row_sites if n not in getattr(guide, "row_sites", ())]
    if points and rows and structure.gps:
        notes.append(_points_of_rows(name, rows))
    if points:
        notes += collapsing_scales(program, structure.hyperparameters)
    elif factorised and structure.gps:
        notes += _effects_apart(name, program, getattr(guide, "follows_means", False))
    if factorised:
        notes += _gps_apart(name, program)
    return tuple(notes)


def _points_of_rows(name: str, rows: list[str]) -> Note:
    return Note(
        "row_points", "wrong",
        f"Latent inputs {rows} of the rows become points under {name} with "
        "`theta='point'`, and `fit.elbo()` is then no bound.",
        "Wrap a Gaussian guide, `gpx.guides.UnscentedLatent(gpx.guides."
        "WhitenedGaussian(model))`, or draw all sites: `theta='full'`, "
        "`gpx.guides.Flow(model)`.",
        {"sites": rows},
    )  # fmt: skip


def collapsing_scales(program: Program, points: Sequence[str]) -> list[Note]:
    """On sites that are points, with a prior as wide as another point says.

    The density of the two together has no maximum: it grows without end as the scale
    and the effects fall to 0.

    Args:
        program: The model.
        points: Sites that become points.
    """
    if len(points) < 2:
        return []
    spreads = dependence_of(program).spreads
    found = {
        site: sorted(read & set(points))
        for site, read in spreads.items()
        if site in points and read & set(points)
    }
    if not found:
        return []
    scales = sorted(set().union(*found.values()))
    return [
        Note(
            "collapse", "wrong",
            f"Sites {sorted(found)} become points and the spread of their prior "
            f"depends on the points {scales}: their density has no maximum, such a "
            "scale tends to collapse to 0, and the bound is none.",
            "Use `gpx.fit_nuts`, or `gpx.fit_svi` with `theta='full'`.",
            {"sites": sorted(found), "scales": scales},
        )
    ]  # fmt: skip


def _effects_apart(name: str, program: Program, follows_means: bool) -> list[Note]:
    """On what is added to GPs and believed independent of them.

    Args:
        name: Of the guide.
        program: The model.
        follows_means: Whether its beliefs about GPs follow their mean functions.
    """
    structure = program.structure
    drawn = set(structure.global_sites) - set(structure.gps)
    if not drawn:
        return []
    read = dependence_of(program)
    every = [*read.effects.values(), *([] if follows_means else read.means.values())]
    found = sorted(set().union(*every) & drawn)
    if not found:
        return []
    return [
        Note(
            "effects", "wrong",
            f"{found} enter the latent function beside GPs {list(structure.gps)}; "
            f"{name} treats them as independent of these, and their standard "
            "deviations will be far too small.",
            "Use `gpx.fit_nuts`.",
            {"sites": found},
        )
    ]  # fmt: skip


def _gps_apart(name: str, program: Program) -> list[Note]:
    """On GPs that are added and believed independent of each other."""
    return [
        Note(
            "parts", "doubt",
            f"GPs {list(gps)} are added at site `{site}`; {name} treats them as "
            "independent. Their sum is not harmed, but the standard deviations of each "
            "(`fit.parts`, `of=`) will be too small.",
            "Use `gpx.fit_nuts` for the parts, or one GP with a sum kernel.",
            {"sites": list(gps)},
        )
        for site, gps in added_gps(program).items()
    ]  # fmt: skip
