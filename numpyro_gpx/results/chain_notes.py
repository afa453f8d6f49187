"""Whether chains have met, are long enough, and went wrong on the way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from numpyro_gpx.notes import Note
from numpyro_gpx.results.scalar_entries import entries_of

__all__ = [
    "ARVIZ_NAMES", "MAX_R_HAT", "MIN_ESS", "arviz_names", "hamiltonian_notes",
    "heat_notes", "kernel_notes", "mixing_notes",
]  # fmt: skip

# What states call it, and what ArviZ does.
ARVIZ_NAMES = {
    "diverging": "diverging",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
    "energy": "energy",
    "potential_energy": "lp",
    "temperature": "temperature",
}
# Chains whose R-hat lies above this have not met (Vehtari et al., 2021, ask for 1.01,
# which takes long chains to see).
MAX_R_HAT = 1.05
_HOW_TO_MEET = (
    "Raise `num_warmup` and `num_samples`, or start from a variational fit (`init=`)."
)
# Chains this far from each other may be in different modes.
_FAR_APART = 2.0
_OTHER_MODES = (
    "They may be in different modes, as where a sign or an order is free: look at "
    "`fit.chains()`. A common start (`init=`) would only hide it. Else raise "
    "`num_warmup`."
)
# Fewer effective draws than this and a mean is off by more than a tenth of the sd.
MIN_ESS = 100
# R-hat splits each chain in two, and a variance needs two draws.
_FEWEST = 4
# Heat by which standard deviations become a twentieth too large.
_TOO_HOT = 1.1
# Heat this many standard errors above 1 is no noise.
_CLEARLY = 4.0
# Noise never reaches this; a few wild draws do, and make the standard error useless.
_BOILING = 2.0
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
    numbers = _Numbers.of(chains, fixed, discrete)
    if not numbers.labels:
        return []
    num_chains, length = numbers.values.shape[:2]
    if length < _FEWEST:
        return [
            Note(
                "ess", "doubt", f"{num_chains} chains of {length} draws say nothing.",
                "Raise `num_samples`.", {"draws": num_chains * length},
            )
        ]  # fmt: skip
    notes, numbers = _not_finite(numbers)
    frozen = _frozen(numbers)
    if frozen or not numbers.labels:
        return notes + frozen
    return notes + _apart(numbers) + _worth_little(numbers)


class _Numbers(NamedTuple):
    """The scalars of all sites.

    Attributes:
        labels: One each.
        values: `(chains, draws, scalars)`.
        may_stay: Whether it is right to stay at one value, `(scalars,)`.
    """

    labels: list[str]
    values: np.ndarray
    may_stay: np.ndarray

    @classmethod
    def of(cls, chains, fixed, discrete) -> _Numbers:
        entries, may_stay = {}, []
        for name, draws in chains.items():
            if name in fixed or not draws.size:
                continue
            for label, x in entries_of(name, draws).items():
                if name not in discrete or np.ptp(x) > 0:
                    entries[label] = x
                    may_stay.append(name in discrete)
        values = np.stack(list(entries.values()), axis=-1) if entries else np.zeros(0)
        return cls(list(entries), values, np.array(may_stay, bool))

    def without(self, left_out: np.ndarray) -> _Numbers:
        labels = [x for x, out in zip(self.labels, left_out, strict=True) if not out]
        return _Numbers(labels, self.values[..., ~left_out], self.may_stay[~left_out])

    @property
    def scaled(self) -> np.ndarray:
        """Nothing of the units; squares of tiny or huge numbers would leave float64."""
        largest = np.max(np.abs(self.values), axis=(0, 1)).astype(float)
        relative = self.values / np.where(largest > 0.0, largest, 1.0)
        centred = relative - relative.mean(axis=(0, 1))
        return centred / np.max(np.abs(centred), axis=(0, 1))


def _not_finite(numbers: _Numbers) -> tuple[list[Note], _Numbers]:
    """A note on numbers that have overflowed, and the others."""
    bad = ~np.isfinite(numbers.values).all(axis=(0, 1))
    if not bad.any():
        return [], numbers
    labels = [numbers.labels[i] for i in np.flatnonzero(bad)]
    draws = int((~np.isfinite(numbers.values)).any(axis=-1).sum())
    note = Note(
        "not_finite", "wrong",
        f"{draws} draws of {_some(labels)} are not finite: moments of these say "
        "nothing.",
        "Use float64, a narrower prior, or a smaller step size.",
        {"draws": draws, "entries": len(labels)},
    )  # fmt: skip
    return [note], numbers.without(bad)


def _frozen(numbers: _Numbers) -> list[Note]:
    still = np.ptp(numbers.values, axis=1) == 0  # (chains, scalars)
    wrong = np.where(numbers.may_stay, still.all(axis=0), still.any(axis=0))
    if not wrong.any():
        return []
    labels = [numbers.labels[i] for i in np.flatnonzero(wrong)]
    return [
        Note(
            "frozen", "wrong",
            f"A chain has not moved at all in {_some(labels)}.",
            "Lower the step size, or start elsewhere (`init=`).",
            {"entries": len(labels)},
        )
    ]  # fmt: skip


def _apart(numbers: _Numbers) -> list[Note]:
    """A note if chains differ in place, or in spread."""
    x = numbers.scaled
    away = np.abs(x - np.median(x, axis=(0, 1)))
    with np.errstate(divide="ignore", invalid="ignore"):  # two values: no spread
        spread = np.nan_to_num(split_gelman_rubin(away), nan=1.0)
    r_hat = np.maximum(split_gelman_rubin(x), spread)
    if not np.max(r_hat) > MAX_R_HAT:
        return []
    worst, number = int(np.argmax(r_hat)), int(np.sum(r_hat > MAX_R_HAT))
    return [
        Note(
            "r_hat", "doubt",
            f"The chains have not met: R-hat is {r_hat[worst]:.3f} for "
            f"`{numbers.labels[worst]}`, above {MAX_R_HAT} for {number} of "
            f"{len(numbers.labels)} numbers.",
            _HOW_TO_MEET if r_hat[worst] < _FAR_APART else _OTHER_MODES,
            {"r_hat": float(r_hat[worst]), "entries": number},
        )
    ]  # fmt: skip


def _worth_little(numbers: _Numbers) -> list[Note]:
    """A note if the draws are worth few independent ones."""
    x = numbers.scaled
    total = x.shape[0] * x.shape[1]
    with np.errstate(divide="ignore"):  # autocorrelations that add up to nothing
        ess = effective_sample_size(x)
    ess = np.where(ess > 0.0, ess, total)
    if not np.min(ess) < MIN_ESS:
        return []
    worst, number = int(np.argmin(ess)), int(np.sum(ess < MIN_ESS))
    return [
        Note(
            "ess", "doubt",
            f"{total} draws are worth {ess[worst]:.0f} for "
            f"`{numbers.labels[worst]}`, fewer than {MIN_ESS} for {number} of "
            f"{len(numbers.labels)} numbers.",
            "Raise `num_samples` (of SGHMC also `num_integration_steps`).",
            {"ess": float(ess[worst]), "entries": number},
        )
    ]  # fmt: skip


def arviz_names(stats: dict) -> dict[str, np.ndarray]:
    """Records under ArviZ's names, where those of states are known."""
    found = {ARVIZ_NAMES.get(n, n): np.asarray(x) for n, x in stats.items()}
    if "potential_energy" in stats:  # `lp` is a log density
        found["lp"] = -found["lp"]
    return found


def kernel_notes(kernel, stats: dict, batch_size: int | None) -> tuple[Note, ...]:
    """Notes on what any of NumPyro's kernels has recorded.

    Args:
        kernel: The kernel.
        stats: Records of each draw, `(chains, draws)`, by ArviZ's names.
        batch_size: Rows of a minibatch, if there are any.
    """
    notes = hamiltonian_notes(stats, getattr(kernel, "_max_tree_depth", None))
    if "temperature" in stats:
        notes += heat_notes(stats["temperature"], batch_size)
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
                "Raise `target_accept_prob` (to 0.99), start from a variational fit "
                "(`init=`), or reparameterise effects of groups (`LocScaleReparam`).",
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
                    "Raise `max_tree_depth` if it was lowered, set `dense_mass=True`, "
                    "or start from a variational fit (`init=`).",
                    {"share": cut},
                )
            )  # fmt: skip
    return tuple(notes)


def heat_notes(temperature: np.ndarray, batch_size: int | None) -> tuple[Note, ...]:
    """A note if noise heats the chains, by how much.

    Args:
        temperature: Of each draw, `(chains, draws)`.
        batch_size: Rows of a minibatch, if there are any.
    """
    heat = float(np.mean(temperature))
    error = float(np.std(temperature) / np.sqrt(temperature.size))
    clearly = heat - 1.0 > _CLEARLY * error or heat > _BOILING
    if not (heat > _TOO_HOT and clearly):
        return ()
    wider = 100.0 * (np.sqrt(heat) - 1.0)
    whose = "noise of the minibatches" if batch_size else "steps that are too large"
    advice = (
        "Halve `step_size` (and double `num_integration_steps`), or raise `batch_size`."
        if batch_size
        else "Halve `step_size` and double `num_integration_steps`."
    )
    return (
        Note(
            "heat", "doubt",
            f"The chains are hot, {heat:.2f} where 1 is right, from {whose}: standard "
            f"deviations are about {wider:.0f} % too large.",
            advice,
            {"temperature": heat, "standard_error": error},
        ),
    )  # fmt: skip


def _some(labels: list[str]) -> str:
    shown = ", ".join(f"`{label}`" for label in labels[:3])
    return shown if len(labels) <= 3 else f"{shown} and {len(labels) - 3} more"
