r"""Whether a training had come to rest when it ended.

The mean loss of the last tenth is laid beside that of the tenth before. Whether their
difference is noise or a fall, a line through the means of ten batches says: these see
the correlation between neighbouring steps.
"""

from __future__ import annotations

import numpy as np

from numpyro_gpx.notes import Note

__all__ = ["falling"]

# Batches of the two tenths together.
_BATCHES = 10
# A slope of so many standard errors is no noise: of Student's t with 8 degrees of
# freedom one in 1000 lies beyond it.
_CLEARLY = 4.5
# A fall of fewer nats than this changes no posterior that anybody could see: at most a
# total variation of 0.16.
_MATTERS = 0.05
# Fewer steps say nothing.
_FEWEST = 20

_ADVICE = "Raise `num_steps`, pass `tolerance=`, or go on from here: `init=fit`."


def falling(losses) -> list[Note]:
    """A note if the losses `(steps,)` were still falling at their end, else none."""
    losses = np.asarray(losses, float)
    if len(losses) < _FEWEST:
        return [
            Note(
                "not_converged", "doubt",
                f"{len(losses)} steps are too few to tell whether the loss has come "
                "to rest.",
                _ADVICE, {"num_steps": len(losses)},
            )
        ]  # fmt: skip
    window = max(len(losses) // 10, _FEWEST // 2)
    fall = float(losses[-2 * window : -window].mean() - losses[-window:].mean())
    slope, error = _line(losses[-2 * window :])
    if not (fall > _MATTERS and -slope > _CLEARLY * error):
        return []
    error *= _BATCHES / 2  # of the fall from one tenth to the next
    return [
        Note(
            "not_converged", "doubt",
            f"The loss still falls by {100.0 * fall / window:.2g} per 100 steps: in "
            f"the last {window} of {len(losses)} it fell by {fall:.2g} nats (standard "
            f"error {error:.1g}).",
            _ADVICE,
            {"fall": fall, "standard_error": error, "steps": window},
        )
    ]  # fmt: skip


def _line(losses) -> tuple[float, float]:
    """Slope of a line through the means of batches, with its standard error."""
    means = np.array([part.mean() for part in np.array_split(losses, _BATCHES)])
    place = np.arange(_BATCHES) - 0.5 * (_BATCHES - 1)
    slope = place @ means / (place @ place)
    rest = means - means.mean() - slope * place
    variance = rest @ rest / (_BATCHES - 2)
    return float(slope), float(np.sqrt(variance / (place @ place)))
