"""Whether chains have met, are long enough, and went wrong on the way."""

from __future__ import annotations

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from numpyro_gpx.notes import Note
from numpyro_gpx.results.scalar_entries import entries_of

__all__ = ["hamiltonian_notes", "mixing_notes"]

# Chains whose R-hat lies above this have not met.
_MAX_R_HAT = 1.05
# Fewer effective draws than this and a mean is off by more than a tenth of the sd.
_MIN_ESS = 100
# R-hat splits each chain in two, and a variance needs two draws.
_FEWEST = 4
# Share of transitions cut off at the largest tree from which it matters.
_MAX_SATURATED = 0.05


def mixing_notes(chains: dict[str, np.ndarray], *, fixed=(), discrete=()) -> list[Note]:
    """Notes on R-hat and ESS of draws `(chains, draws, ...)` by site.

    Args:
        chains: The draws.
        fixed: Sites that are not sampled but fixed.
        discrete: Sites of labels or counts: one value may have all the probability, and
            a chain may well stay at a likely one.
    """
    entries, may_stay = {}, []
    for name, draws in chains.items():
        if name in fixed or not draws.size:
            continue
        for label, x in entries_of(name, draws).items():
            if name not in discrete or np.ptp(x) > 0:
                entries[label] = x
                may_stay.append(name in discrete)
    if not entries:
        return []
    num_chains, length = next(iter(entries.values())).shape
    if length < _FEWEST:
        return [
            Note(
                "ess", "doubt", f"{num_chains} chains of {length} draws say nothing.",
                "Raise `num_samples`.", {"draws": num_chains * length},
            )
        ]  # fmt: skip
    values = np.stack(list(entries.values()), axis=-1)
    labels = list(entries)
    still = np.ptp(values, axis=1) == 0  # (chains, entries)
    wrong = np.where(may_stay, still.all(axis=0), still.any(axis=0))
    frozen = [labels[i] for i in np.flatnonzero(wrong)]
    if frozen:
        return [
            Note(
                "frozen", "wrong",
                f"A chain has not moved at all in {_some(frozen)}.",
                "Lower the step size, or start elsewhere (`init=`).",
                {"entries": len(frozen)},
            )
        ]  # fmt: skip
    # Nothing of the units; squares of tiny or huge numbers would vanish or overflow.
    centred = values - values.mean(axis=(0, 1))
    scaled = centred / np.max(np.abs(centred), axis=(0, 1))
    r_hat = split_gelman_rubin(scaled)
    with np.errstate(divide="ignore"):  # autocorrelations that add up to nothing
        ess = effective_sample_size(scaled)
    ess = np.where(ess > 0.0, ess, values.shape[0] * values.shape[1])
    notes = []
    if np.max(r_hat) > _MAX_R_HAT:
        worst = int(np.argmax(r_hat))
        number = int(np.sum(r_hat > _MAX_R_HAT))
        notes.append(
            Note(
                "r_hat", "doubt",
                f"The chains have not met: R-hat is {r_hat[worst]:.2f} for "
                f"`{labels[worst]}`, above {_MAX_R_HAT} for {number} of "
                f"{len(labels)} numbers.",
                "Raise `num_warmup` and `num_samples`, start from a variational fit "
                "(`init=`), or reparameterise.",
                {"r_hat": float(r_hat[worst]), "entries": number},
            )
        )  # fmt: skip
    if np.min(ess) < _MIN_ESS:
        worst = int(np.argmin(ess))
        number = int(np.sum(ess < _MIN_ESS))
        notes.append(
            Note(
                "ess", "doubt",
                f"{num_chains * length} draws are worth {ess[worst]:.0f} for "
                f"`{labels[worst]}`, fewer than {_MIN_ESS} for {number} of "
                f"{len(labels)} numbers.",
                "Raise `num_samples`.",
                {"ess": float(ess[worst]), "entries": number},
            )
        )  # fmt: skip
    return notes


def hamiltonian_notes(stats: dict, max_tree_depth=None) -> tuple[Note, ...]:
    """Notes on divergences and on trees that were cut off.

    Args:
        stats: Records of each draw, `(chains, draws)`, by ArviZ's names.
        max_tree_depth: Of NUTS; of a pair, the second is for draws.
    """
    notes = []
    total = stats["diverging"].size if "diverging" in stats else 0
    number = int(np.sum(stats["diverging"])) if total else 0
    if number:
        notes.append(
            Note(
                "divergences", "doubt",
                f"{number} of {total} draws diverged: the posterior is not explored "
                "where it is narrow.",
                "Reparameterise (`LocScaleReparam`), or raise `target_accept_prob`.",
                {"divergences": number, "draws": total},
            )
        )  # fmt: skip
    if max_tree_depth is not None and "n_steps" in stats:
        depth = np.atleast_1d(max_tree_depth)[-1]
        cut = float(np.mean(stats["n_steps"] >= 2**depth - 1))
        if cut > _MAX_SATURATED:
            notes.append(
                Note(
                    "tree_depth", "remark",
                    f"{100 * cut:.0f} % of the trajectories were cut off at "
                    f"{2**depth - 1} steps (`max_tree_depth={depth}`): draws are "
                    "slow, and correlated.",
                    "Start from a variational fit (`init=`), set `dense_mass=True`, or "
                    "reparameterise.",
                    {"share": cut},
                )
            )  # fmt: skip
    return tuple(notes)


def _some(labels: list[str]) -> str:
    shown = ", ".join(f"`{label}`" for label in labels[:3])
    return shown if len(labels) <= 3 else f"{shown} and {len(labels) - 3} more"
