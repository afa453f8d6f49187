"""Mixtures of components with equal weights: moments, densities, quantiles.

`chunk`s are `Predictive`s whose leaves have a leading axis over the components.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.scipy.special import logsumexp

__all__ = [
    "cdf", "cov", "first", "log_prob", "moments", "probabilities", "quantile",
    "sample", "shape_of",
]  # fmt: skip

# Components evaluated at once: some likelihoods need many nodes for each row.
_BATCH = 16


def shape_of(chunk) -> tuple[int, ...]:
    """Shape of the targets of a chunk, its padding included: `(N,)` or `(N, P)`."""
    zeros = jax.vmap(lambda one: jnp.zeros(one.shape))
    return jax.eval_shape(zeros, chunk).shape[1:]


def moments(chunk):
    """Mean and variance of each entry."""
    means, variances = _each(lambda fn: (fn.mean, fn.variance), chunk)
    mean = jnp.mean(means, axis=0)
    return mean, jnp.mean(variances + (means - mean) ** 2, axis=0)


def log_prob(chunk, y):
    """Log density of each row."""
    rows = _each(lambda one: one.log_prob(y), chunk)  # (S, N)
    return logsumexp(rows, axis=0) - jnp.log(rows.shape[0])


def probabilities(chunk):
    """Probability of each label."""
    return jnp.mean(_each(lambda one: one.probabilities(), chunk), axis=0)


def cov(chunk):
    """Covariance between the outputs of each row."""
    means, covs = _each(lambda one: (one.mean, one.cov), chunk)
    apart = means - jnp.mean(means, axis=0)
    between = jnp.einsum("snp,snq->npq", apart, apart) / means.shape[0]
    return jnp.mean(covs, axis=0) + between


def cdf(chunk, y):
    """Probability of at most `y`, entry by entry."""
    return jnp.mean(_each(lambda one: one.cdf(y), chunk), axis=0)


def quantile(chunk, level):
    """Where the distribution function reaches `level`.

    Its derivative is that of the equation: bisection has none, but one step of Newton's
    from where it ends has.
    """
    y = jax.lax.stop_gradient(_bisected(jax.lax.stop_gradient(chunk), level))
    reached, density = jax.jvp(lambda y: cdf(chunk, y), (y,), (jnp.ones_like(y),))
    density = jax.lax.stop_gradient(density)
    steep = density > 0.0
    step = (reached - level) / jnp.where(steep, density, 1.0)
    return y - jnp.where(steep, step, 0.0)


def _bisected(chunk, level):
    """By bisection; the bracket starts at the mean and grows until it is one."""
    mean, var = moments(chunk)
    width = jnp.sqrt(var)

    def grow(_, bracket):
        low, high, width = bracket
        low = jnp.where(cdf(chunk, low) < level, low, low - width)
        high = jnp.where(cdf(chunk, high) >= level, high, high + width)
        return low, high, 2.0 * width

    def halve(_, bracket):
        low, high = bracket
        y = 0.5 * (low + high)
        reached = cdf(chunk, y) >= level
        return jnp.where(reached, low, y), jnp.where(reached, y, high)

    low, high, _ = jax.lax.fori_loop(0, 10, grow, (mean - width, mean + width, width))
    low, high = jax.lax.fori_loop(0, 45, halve, (low, high))
    return 0.5 * (low + high)


def first(chunk):
    """The distribution of the first component."""
    return jax.tree.map(lambda x: x[0], chunk)


def _each(fn, chunk):
    """`fn` of each component, a bounded number at once."""
    return jax.lax.map(fn, chunk, batch_size=_BATCH)


def sample(chunk, key, num_draws: int):
    """Draws `(num_draws, N, ...)`, components taken in turn."""
    number = jax.tree.leaves(chunk)[0].shape[0]
    if num_draws < number:  # from all over the components, not the first chain's
        index = np.linspace(0, number - 1, num_draws).round().astype(int)
        chunk = jax.tree.map(lambda x: x[index], chunk)
        number = num_draws
    rounds = -(-num_draws // number)
    keys = jr.split(key, number)
    draws = jax.vmap(lambda fn, k: fn.sample(k, (rounds,)))(chunk, keys)
    draws = jnp.moveaxis(draws, 0, 1)  # (rounds, S, N, ...): components in turn
    return draws.reshape((-1, *draws.shape[2:]))[:num_draws]
