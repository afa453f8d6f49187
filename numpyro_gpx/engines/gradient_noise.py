r"""How much of a minibatch gradient is noise, and what SGHMC makes of it.

With gradients of variance `V` in units of the mass, a step of size `h` and friction
:math:`\gamma` adds :math:`c^2 h^2 V` to the momentum's variance,
:math:`c = e^{-\gamma h}`. Where `V` is known it is taken off the injected noise
:math:`1 - c^2`, as long as it is no larger; where it is not, standard deviations grow
by a factor of about :math:`\sqrt{1 + h V / 2 \gamma}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from numpyro_gpx.notes import Note

__all__ = [
    "NUM_POINTS", "check_noise", "gradient_variance", "inflation", "noise_notes",
]  # fmt: skip

# Minibatches that a variance is measured on, and points that it is averaged over.
_NUM_BATCHES, NUM_POINTS = 64, 8
# What is recommended leaves room for the error of the measurement.
_ROOM = 1.3
# Standard deviations that are too large by more than this are worth a word.
_INFLATED = 1.05


def gradient_variance(
    gradient: Callable, points, key, num_batches: int = _NUM_BATCHES
) -> Float[Array, " K"]:
    """Variance of each entry of a gradient over minibatches, mean over points.

    Args:
        gradient: `gradient(point, key)`, `(K,)`, on the minibatch that `key` draws.
        points: Where; leaves have a leading axis over points.
        key: Random key.
        num_batches: Minibatches at each point.
    """

    def at(pair):
        point, key = pair
        keys = jr.split(key, num_batches)
        drawn = jax.lax.map(lambda key: gradient(point, key), keys)
        return jnp.var(drawn, axis=0, ddof=1)

    number = len(jax.tree.leaves(points)[0])
    return jnp.mean(jax.lax.map(at, (points, jr.split(key, number))), axis=0)


def inflation(variance: np.ndarray, step_size: float, friction: float) -> float:
    """Factor by which noise widens the standard deviation that it widens most."""
    largest = float(np.max(variance, initial=0.0))
    return math.sqrt(1.0 + step_size * largest / (2.0 * friction))


def check_noise(
    variance: np.ndarray, step_size: float, friction: float, batch_size: int,
    num_rows: int,
) -> None:  # fmt: skip
    """Raise if gradients have more noise than the dynamics inject.

    Args:
        variance: Of the gradient, `(K,)`.
        step_size: Step size.
        friction: Friction.
        batch_size: Rows of a minibatch.
        num_rows: Rows in all.
    """
    largest = float(np.max(variance, initial=0.0))
    keep = math.exp(-friction * step_size) ** 2
    share = keep * step_size**2 * largest / (1.0 - keep)
    if share <= 1.0:
        return
    # exp(2 gamma h) - 1, what noise may come to, is no less than 2 gamma h.
    step = 2.0 * friction / (_ROOM * largest)
    enough = math.ceil(_ROOM * share * batch_size)
    batches = (
        f"`batch_size={enough}`"
        if enough < num_rows
        else f"all {num_rows} rows (`fit_guided`)"
    )
    raise ValueError(
        f"`step_size` {step_size:g} is too large for `batch_size={batch_size}`: the "
        f"gradients are so noisy (variance {largest:.3g} in the guide's coordinates, "
        f"where the posterior has 1) that the noise would heat the chains. Use "
        f"{batches}, or `step_size={_rounded_down(step)}` (with more "
        "`num_integration_steps`), or train the guide longer."
    )


def noise_notes(
    variance: np.ndarray, step_size: float, friction: float, batch_size: int,
    num_rows: int, *, first: str,
) -> tuple[Note, ...]:  # fmt: skip
    """A note if noise that nothing takes off widens the posterior.

    Args:
        variance: Of the gradient, in units of the mass, `(K,)`.
        step_size: Step size.
        friction: Friction.
        batch_size: Rows of a minibatch.
        num_rows: Rows in all.
        first: What to try before anything else.
    """
    wider = inflation(variance, step_size, friction)
    if not wider > _INFLATED:
        return ()
    largest = float(np.max(variance))
    allowed = (_INFLATED**2 - 1.0) * 2.0 * friction / step_size
    # The mass, 1 here, is noise and the rest, which larger batches leave alone.
    rest = max(1.0 - largest, 1e-6)
    times = largest * max(1.0 - allowed, 0.0) / (allowed * rest)
    enough = math.ceil(max(times, 2.0) * batch_size)
    larger = f"`batch_size={enough}`" if enough < num_rows else f"all {num_rows} rows"
    smaller = _rounded_down(step_size * (_INFLATED**2 - 1.0) / (wider**2 - 1.0))
    return (
        Note(
            "gradient_noise", "doubt",
            f"Noise of the minibatches is {100.0 * largest:.0f} % of the squared "
            f"gradient: standard deviations are up to {100.0 * (wider - 1.0):.0f} % "
            "too large, or more.",
            f"{first}, {larger}, or `step_size={smaller}` (with more "
            "`num_integration_steps`).",
            {"gradient_variance": largest, "inflation": wider},
        ),
    )  # fmt: skip


def _rounded_down(x: float) -> str:
    """Two digits, no larger than `x`."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return f"{math.floor(x / unit) * unit:.2g}"
