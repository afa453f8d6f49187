r"""The default optimiser of `SVI`: Adam with a cosine decay over the fit.

.. math:: r(s) = r_0 \left(c + (1 - c)\, \tfrac12 (1 + \cos \pi s)\right),

where `s` is the share of the curve that is done and :math:`c = 1/100`: from
:math:`r_0` to a hundredth of it. The number of steps is an argument of the compiled
program, so that fits of another length share it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from numpyro_gpx.engines.retry import NotFinite
from numpyro_gpx.notes import Note
from numpyro_gpx.program.numpy_values import placed
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import GuidePosterior

__all__ = ["LOWER_RATE", "Schedule", "adam_at", "restarted", "schedule_of"]

# A second attempt after NaN peaks at this rate at most.
LOWER_RATE = 0.03
# Where the curve begins for guides that do not say so, such as NumPyro's
# (`benchmarks/schedules.py`).
_OTHERS = 0.03
# Where the curve ends, as a share of its peak.
_END = 0.01


class Schedule(NamedTuple):
    """Learning rates of a fit's steps.

    Attributes:
        peak: The rate at the beginning of the curve.
        begun: Share of the curve that an interrupted fit has left behind.
        num_steps: Steps from there to the end of the curve.
    """

    peak: float | Array
    begun: float | Array
    num_steps: int | Array

    def place(self, step):
        """Share of the curve that is done before this step, the first being 0."""
        return self.begun + (1.0 - self.begun) * step / self.num_steps

    def rate(self, step, *, cos=jnp.cos):
        """The learning rate of this step, or of these."""
        fall = 0.5 * (1.0 + cos(np.pi * self.place(step)))
        return self.peak * (_END + (1.0 - _END) * fall)

    def rates(self, num_steps: int) -> np.ndarray:
        """Those of the first steps, `(num_steps,)`."""
        return self.rate(np.arange(num_steps), cos=np.cos)

    def is_late(self, step: int) -> bool:
        """Whether this step is in the last fifth of the curve."""
        return bool(self.place(step) >= 0.8 - 1e-9)  # the share is rounded

    def as_arrays(self) -> Schedule:
        """The same as arguments of a program."""
        # As whole numbers the steps of an endless fit may have too many digits.
        return Schedule(*(placed(float(x)) for x in self))


def schedule_of(guide, program: Program, init: Fit | None, num_steps: int) -> Schedule:
    """Where on the curve a fit starts: at its beginning, or where another one stopped.

    An interrupted fit of this model by such a guide left the curve at some place; one
    that starts from it goes on there, and is at the end after its own `num_steps`. With
    the number of steps that were missing the rates are those of the whole fit.
    """
    if init is not None and _was_left(init, guide, program):
        peak, begun = init.info["learning_rate"], init.info["schedule_place"]
        return Schedule(float(peak), float(begun), num_steps)
    return Schedule(getattr(guide, "learning_rate", _OTHERS), 0.0, num_steps)


def _was_left(init: Fit, guide, program: Program) -> bool:
    """Whether a fit of this model by such a guide left its schedule before its end."""
    posterior = init.posterior
    return (
        bool(init.info.get("interrupted"))
        and "schedule_place" in init.info
        and isinstance(posterior, GuidePosterior)
        and type(posterior.guide) is type(guide)
        and init.program.fingerprint == program.fingerprint
    )


def adam_at(rate) -> optax.GradientTransformation:
    """Adam at a rate that may be traced; it keeps the parameters' dtype."""

    def scaled(updates, state, params=None):
        return jax.tree.map(lambda u: -jnp.asarray(rate, u.dtype) * u, updates), state

    scale = optax.GradientTransformation(lambda params: optax.EmptyState(), scaled)
    return optax.chain(optax.scale_by_adam(), scale)


def restarted(reason: NotFinite, before: float, rate: float) -> Note:
    """On a fit that was started again because it met NaN."""
    return Note(
        "learning_rate", "remark",
        f"{reason} The fit was started again with a learning rate that falls from "
        f"{rate:g} instead of {before:g}.",
        f"Name an optimiser to save the first attempt: `optimizer=optax.adam("
        f"{rate / 3.0:g})`.",
        {"learning_rate": rate, "step": reason.step},
    )  # fmt: skip
