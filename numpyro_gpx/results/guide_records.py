"""What it takes to make a guide again: its name, its settings, its parameters."""

from __future__ import annotations

from typing import Any

import numpyro.infer.autoguide
from jax.example_libraries import stax
from numpyro.infer import init_to_value
from numpyro.infer.autoguide import AutoGuide

from numpyro_gpx import cubature, guides
from numpyro_gpx.guides.parts.base import set_up
from numpyro_gpx.program.program import Program

__all__ = ["guide_record", "rebuilt"]

_FORWARD = "forward_mode_differentiation"
# NumPyro's guides that their settings say all of, by name; the prefix is one of all.
# These very classes: what somebody has derived from them may do anything.
_NUMPYRO: dict[str, tuple[str, ...]] = {
    "AutoDelta": (_FORWARD,),
    "AutoNormal": ("init_scale", _FORWARD),
    "AutoDiagonalNormal": ("init_scale",),
    "AutoMultivariateNormal": ("init_scale",),
    "AutoLowRankMultivariateNormal": ("init_scale", "rank"),
    "AutoBatchedMultivariateNormal": ("init_scale", "batch_ndim"),
    "AutoBatchedLowRankMultivariateNormal": ("init_scale", "rank", "batch_ndim"),
    "AutoIAFNormal": ("num_flows", "hidden_dims", "skip_connections"),
    "AutoBNAFNormal": ("num_flows", "hidden_factors"),
    "AutoDAIS": (
        "K", "base_dist", "eta_init", "eta_max", "gamma_init", "init_scale", _FORWARD,
    ),
}  # fmt: skip


def guide_record(guide) -> dict[str, Any] | None:
    """A record to make the guide from, in plain values; `None` if it cannot be.

    Where its parameters started is left out: they are where they are.
    """
    name = type(guide).__name__
    if isinstance(guide, guides.SiteGuide):
        if not _is_ours(guide):
            return None
        return {"of": "gpx", "name": name, "config": guide.config}
    if not (name in _NUMPYRO and _is_plain(guide)):
        return None
    config = {setting: _setting(guide, setting) for setting in _NUMPYRO[name]}
    return {"of": "numpyro", "name": name, "config": {**config, "prefix": guide.prefix}}


def rebuilt(record: dict[str, Any], program: Program, start: dict) -> AutoGuide:
    """The guide of a record, for the model that it was made for.

    Args:
        record: See `guide_record`.
        program: The model.
        start: Values of its sites with a finite density, from where NumPyro's guides
            look for others. Elsewhere they may find none.
    """
    if record["of"] == "gpx":
        guide = getattr(guides, record["name"]).rebuild(program.model, record["config"])
    else:
        kind = getattr(numpyro.infer.autoguide, record["name"])
        start = {} if program.batched_structure.local else start
        strategy = init_to_value(values=start)
        guide = kind(program.model, init_loc_fn=strategy, **record["config"])
    set_up(guide, program)
    return guide


def _is_ours(guide) -> bool:
    """Whether it is one of this library's, and made of nothing else."""
    if _named(guides, guide) is None or not guide.can_be_rebuilt:
        return False
    if not isinstance(guide, guides.UnscentedLatent):
        return True
    encoder = guide.encoder is None or _named(guides, guide.encoder) is not None
    return (
        encoder and _is_ours(guide.inner) and _named(cubature, guide.rule) is not None
    )


def _named(module, thing) -> type | None:
    """The class of `thing`, if it is the one that the module has by this name."""
    kind = type(thing)
    return kind if getattr(module, kind.__name__, None) is kind else None


def _is_plain(guide) -> bool:
    """Whether nothing was handed to a guide of NumPyro's but settings."""
    if _named(numpyro.infer.autoguide, guide) is None:
        return False
    usual = getattr(guide, "_nonlinearity", stax.Elu) is stax.Elu
    return usual and guide.create_plates is None


def _setting(guide, name: str):
    return getattr(guide, name) if hasattr(guide, name) else getattr(guide, f"_{name}")
