r"""Whether a training had come to rest when it ended, and where.

The mean loss of the last tenth is laid beside that of the tenth before, and beside that
of the lowest tenth. Whether a difference is noise, means of ten batches say: these see
the correlation between neighbouring steps.

Where a schedule has lowered the learning rate, a loss may lie still because hardly
anything moves any more. A fall is then taken for what it would have been at a tenth of
the highest rate: a training at that rate throughout is judged alike. A fall that comes
from the rate itself, since noise of the steps costs less, is no less of one: longer
schedules end lower.
"""

from __future__ import annotations

import numpy as np

from numpyro_gpx.notes import Note

__all__ = ["loss_notes"]

# Batches of two tenths together.
_BATCHES = 10
# A slope of so many standard errors is no noise: of Student's t with 8 degrees of
# freedom one in 1000 lies beyond it.
_CLEARLY = 4.5
# The lowest of ten means lies below the others by chance already.
_MOST_CLEARLY = 6.0
# A fall of fewer nats than this changes no posterior that anybody could see: at most a
# total variation of 0.16.
_MATTERS = 0.05
# Fewer steps say nothing.
_FEWEST = 20
# The rate at which falls are judged, as a share of the highest: 0.01 of 0.1.
_USUAL_RATE = 0.1

_ADVICE = "Raise `num_steps`, pass `tolerance=`, or go on from here: `init=fit`."


def loss_notes(losses, rates=None) -> list[Note]:
    """What is to be doubted of a training.

    Args:
        losses: One a step, `(steps,)`.
        rates: Learning rates of the steps, `(steps,)`, if a schedule lowered them.
    """
    losses = np.asarray(losses, float)
    if not np.all(np.isfinite(losses)):
        return [_not_finite(losses)]
    if len(losses) < _FEWEST:
        return [
            Note(
                "not_converged", "doubt",
                f"{len(losses)} steps are too few to tell whether the loss has come "
                "to rest.",
                _ADVICE, {"num_steps": len(losses)},
            )
        ]  # fmt: skip
    return _falling(losses, _slowing(losses, rates)) or _above(losses)


def _not_finite(losses: np.ndarray) -> Note:
    step = int(np.flatnonzero(~np.isfinite(losses))[0])
    return Note(
        "not_finite", "wrong",
        f"The loss was {losses[step]} at step {step}: what came after it says nothing.",
        "Lower the learning rate, standardise the data, or fit with `gpx.fit_svi`, "
        "which starts again with a larger jitter.",
        {"step": step},
    )  # fmt: skip


def _slowing(losses, rates) -> float:
    """How many times as fast the end of a training would go at the usual rate."""
    if rates is None:
        return 1.0
    rates = np.asarray(rates, float)
    window = max(len(losses) // 10, _FEWEST // 2)
    # The fall is between the middles of the last two tenths.
    end = rates[-window - window // 2 : len(rates) - window // 2].mean()
    return max(_USUAL_RATE * float(rates.max() / end), 1.0)


def _falling(losses: np.ndarray, slowing: float) -> list[Note]:
    """A note if the losses were still falling at their end."""
    window = max(len(losses) // 10, _FEWEST // 2)
    fall = float(losses[-2 * window : -window].mean() - losses[-window:].mean())
    slope, error = _line(losses[-2 * window :])
    if not (slowing * fall > _MATTERS and -slope > _CLEARLY * error):
        return []
    error *= _BATCHES / 2  # of the fall from one tenth to the next
    return [
        Note(
            "not_converged", "doubt",
            f"The loss still falls by {100.0 * fall / window:.2g} per 100 steps: in "
            f"the last {window} of {len(losses)} it fell by {fall:.2g} nats (standard "
            f"error {error:.1g}){_at_this_rate(slowing)}.",
            _ADVICE,
            {"fall": fall, "standard_error": error, "steps": window},
        )
    ]  # fmt: skip


def _at_this_rate(slowing: float) -> str:
    if slowing == 1.0:
        return ""
    return f"; a learning rate {slowing:.2g} times as high would show more"


def _above(losses: np.ndarray) -> list[Note]:
    """A note if the losses end above where they have been."""
    window = max(len(losses) // 10, _FEWEST // 2)
    tenths = losses[len(losses) % window :].reshape(-1, window)
    last, best = tenths[-1], tenths[np.argmin(tenths.mean(axis=1))]
    rise = float(last.mean() - best.mean())
    error = float(np.hypot(_standard_error(last), _standard_error(best)))
    if not (rise > _MATTERS and rise > _MOST_CLEARLY * error):
        return []
    return [
        Note(
            "diverged", "doubt",
            f"The loss ends {rise:.2g} nats above where it has been (means of {window} "
            f"steps, standard error {error:.1g}): training has left a better place.",
            "Lower the learning rate, `optimizer=optax.adam(1e-3)`, or raise "
            "`batch_size`.",
            {"rise": rise, "standard_error": error, "steps": window},
        )
    ]  # fmt: skip


def _batch_means(losses, number: int = _BATCHES) -> np.ndarray:
    return np.array([part.mean() for part in np.array_split(losses, number)])


def _standard_error(losses) -> float:
    """Of the mean of a tenth."""
    number = _BATCHES // 2  # batches as long as those of two tenths
    return float(np.std(_batch_means(losses, number), ddof=1) / np.sqrt(number))


def _line(losses) -> tuple[float, float]:
    """Slope of a line through the means of batches, with its standard error."""
    means = _batch_means(losses)
    place = np.arange(_BATCHES) - 0.5 * (_BATCHES - 1)
    slope = place @ means / (place @ place)
    rest = means - means.mean() - slope * place
    variance = rest @ rest / (_BATCHES - 2)
    return float(slope), float(np.sqrt(variance / (place @ place)))
