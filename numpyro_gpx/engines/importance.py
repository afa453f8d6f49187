r"""Importance sampling through a guide, with Pareto-smoothed weights.

.. math:: x = c + R y, \quad y \sim \mathcal N(0, I), \qquad
    \log w = -U(x) + \tfrac12 |y|^2 + \log|R|

The reference starts wide and is estimated anew twice, from weighted draws. The shape of
the weights' largest fifth, k-hat, says whether to believe them: below 0.7 averages
converge at the usual rate, or nearly.

References:
    Vehtari, Simpson, Gelman, Yao & Gabry (2024), "Pareto smoothed importance sampling".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from numpyro_gpx.engines.coordinates import Reference
from numpyro_gpx.engines.through import Through
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.program.compile_cache import compiled

__all__ = ["Weighted", "importance", "smoothed"]

# Draws of the stages that only move the reference.
_STAGES = (1000, 2000)
# Draws of a compiled block.
_BLOCK = 500
# Log weights that differ by no more are equal.
_EQUAL = 1e-6
# Variance of the reference in the hyperparameters, relative to what it was made from:
# weights of a proposal that is too wide are bounded.
_WIDER = 1.5


class Weighted(NamedTuple):
    """Draws with weights.

    Attributes:
        x: In the guide's coordinates, `(S, K)`.
        weights: Pareto smoothed, adding up to 1, `(S,)`.
        k_hat: Shape of their tail.
        reference: What they were drawn from.
    """

    x: np.ndarray
    weights: np.ndarray
    k_hat: float
    reference: Reference

    @property
    def ess(self) -> float:
        """How many independent draws they are worth."""
        return float(1.0 / np.sum(self.weights**2))

    def resampled(self, key, number: int) -> np.ndarray:
        """Rows of `x` with equal weights, `(number, K)`, in random order.

        Systematically: a draw comes up as often as its weight says, give or take one.
        """
        key_start, key_order = jr.split(key)
        places = (float(jr.uniform(key_start)) + np.arange(number)) / number
        index = np.searchsorted(np.cumsum(self.weights), places)
        index = np.minimum(index, len(self.weights) - 1)
        return self.x[np.asarray(jr.permutation(key_order, index))]


def importance(
    through: Through, key, num_draws: int, watch: Watch, *, hopeless: float = np.inf
) -> Weighted:
    """Draws through a guide.

    Args:
        through: Model and guide.
        key: Random key.
        num_draws: Draws of the last stage; 0 leaves it out.
        watch: Runs the blocks.
        hopeless: k-hat of the stage before it from which it is left out, too.
    """
    reference = Reference.standard(through.size, through.num_theta, np.sqrt(_WIDER))
    program = _program(through, reference)
    stages = (*_STAGES, num_draws) if num_draws else _STAGES
    found = None
    for i, number in enumerate(stages):
        key_stage = jr.fold_in(key, i)
        last = i == len(stages) - 1
        if found is not None:
            if i == len(_STAGES) and found.k_hat > hopeless:
                break
            reference = _moved(found, through.num_theta)

        def block(_, first, number, reference=reference, key_stage=key_stage):
            whole = jnp.asarray(first), jnp.asarray(number)
            return None, program(key_stage, *whole, reference, through.state)

        _, record = watch.loop(
            f"importance {i + 1}/{len(stages)}", block, None, number, most=_BLOCK,
            useless=0 if last else number,
        )  # fmt: skip
        log_weights, x = record.values
        found = Weighted(x, *smoothed(log_weights), reference)
    assert found is not None
    return found


def smoothed(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Smoothed weights that add up to 1, and k-hat; infinite if hardly any counts."""
    import arviz as az

    finite = np.isfinite(log_weights)
    if finite.sum() < 0.5 * len(finite):
        raise FloatingPointError(
            f"The density is not finite at {np.sum(~finite)} of {len(finite)} draws of "
            "the guide."
        )
    log_weights = np.where(finite, log_weights, -np.inf)
    if np.ptp(log_weights) < _EQUAL:  # the guide is exact: there is no tail
        return np.full(len(finite), 1.0 / len(finite)), 0.0
    found, k_hat = az.psislw(np.maximum(log_weights, log_weights.max() - 700.0))
    weights = np.exp(found)
    k_hat = float(k_hat) if np.isfinite(k_hat) else np.inf
    return weights / weights.sum(), k_hat


def _program(through: Through, reference: Reference):
    """Some draws and their log weights, as one compiled program."""
    size = through.size

    def draws(key, first, number, reference, state):
        here = through.make(state)

        def step(i, kept):
            y = jr.normal(jr.fold_in(key, first + i), (size,))
            x = reference.forward(y)
            log_weight = 0.5 * jnp.sum(y**2) + reference.log_det - here.energy(x)
            log_weight = jnp.where(jnp.isnan(log_weight), -jnp.inf, log_weight)
            return kept[0].at[i].set(log_weight), kept[1].at[i].set(x)

        kept = jnp.zeros(_BLOCK), jnp.zeros((_BLOCK, size))
        return jax.lax.fori_loop(0, number, step, kept)

    whole = jnp.asarray(0)
    return compiled(draws, jr.key(0), whole, whole, reference, through.state)


def _moved(found: Weighted, num_theta: int) -> Reference:
    """The next reference: weighted moments of the hyperparameters, wider."""
    e, w = found.x[:, :num_theta], found.weights
    mean = w @ e
    apart = e - mean
    cov = _WIDER * (w[:, None] * apart).T @ apart
    # Few draws may carry all the weight: never narrower than a tenth of the guide.
    cov = cov + 0.01 * np.eye(num_theta)
    size = found.x.shape[1]
    whole = np.concatenate([mean, np.zeros(size - num_theta)])
    root = np.linalg.cholesky(cov) if num_theta else cov
    return Reference(*map(jnp.asarray, (whole, root, np.ones(size - num_theta))))
