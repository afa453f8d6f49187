"""Predictive distributions: a mixture over posterior components, row by row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_gpx import checks
from numpyro_gpx.program.compile_cache import run

__all__ = ["Prediction"]

_NUM_DRAWS = 1000


class Prediction:
    """The predictive distribution of N rows, a mixture of S components.

    Made by `Fit.predict`. Rows are predicted one by one; for functions with correlated
    rows see `Fit.functions`.

    Args:
        chunks: `Predictive`s of consecutive rows, leaves with a leading axis S.
        sizes: How many rows of each chunk count; the rest is padding.
        key: Fixes `draws`.
        shift: Added to predictions, in original units (see `standardise`).
        scale: Multiplies predictions.
    """

    def __init__(self, chunks, sizes, key, *, shift=0.0, scale=1.0):
        self._chunks = chunks
        self._sizes = sizes
        self._key = key
        self._shift, self._scale = shift, scale

    def __len__(self) -> int:
        return sum(self._sizes)

    @functools.cached_property
    def _chunk_moments(self):
        """Means and variances of each chunk, its padding included."""
        return [run(_mixture_moments, chunk) for chunk in self._chunks]

    @functools.cached_property
    def _moments(self):
        parts = zip(*self._chunk_moments, strict=True)
        return tuple(self._join(list(part)) for part in parts)

    @property
    def mean(self) -> np.ndarray:
        """Predictive mean, `(N,)` or `(N, P)`."""
        return self._shift + self._scale * self._moments[0]

    @property
    def var(self) -> np.ndarray:
        """Predictive variance, `(N,)` or `(N, P)`."""
        return self._scale**2 * self._moments[1]

    @functools.cached_property
    def cov(self) -> np.ndarray:
        """Covariance between the outputs of each row, `(N, P, P)`."""
        pieces = [run(_mixture_cov, chunk) for chunk in self._chunks]
        scale = np.broadcast_to(self._scale, self.mean.shape[1:])
        return scale[:, None] * self._join(pieces) * scale[None, :]

    @property
    def sd(self) -> np.ndarray:
        """Predictive standard deviation."""
        return np.sqrt(self.var)

    @functools.cached_property
    def draws(self) -> np.ndarray:
        """1000 draws, `(1000, N)` or `(1000, N, P)`; rows are drawn independently."""
        return self.sample(self._key, _NUM_DRAWS)

    def sample(self, key, num_draws: int) -> np.ndarray:
        """Draws `(num_draws, N, ...)`, components taken in turn."""
        checks.key(key)
        keys = jr.split(key, len(self._chunks))
        drawn = [
            jnp.moveaxis(run(_mixture_sample, chunk, k, num_draws), 0, 1)
            for chunk, k in zip(self._chunks, keys, strict=True)
        ]
        return self._shift + self._scale * np.moveaxis(self._join(drawn), 1, 0)

    @functools.cached_property
    def probabilities(self) -> np.ndarray:
        """Predictive probability of each label, `(N, C)`, for targets that are labels.

        Labels are those of `Categorical`, `RobustMax` and `Ordinal`; for binary targets
        `mean` is the probability of 1.
        """
        return self._join(
            [run(_mixture_probabilities, chunk) for chunk in self._chunks]
        )

    def quantile(self, q) -> np.ndarray:
        """Quantiles, `(N, ...)` or `(Q, N, ...)`.

        By bisection of the predictive distribution function where that is a mixture of
        normals (Gaussian likelihoods, latent functions), else those of `draws`: with
        1000 of them their levels are off by about 0.01.
        """
        levels = np.asarray(q, float)
        if not np.all((levels > 0.0) & (levels < 1.0)):
            raise ValueError(f"`q` must lie between 0 and 1; got {q}.")
        found = [self._quantile(float(level)) for level in levels.ravel()]
        return np.stack(found).reshape(levels.shape + found[0].shape)

    def _quantile(self, level):
        one = _first(self._chunks[0])
        if one.is_normal_mixture:
            at = jnp.asarray(level)
            pieces = [run(_mixture_quantile, chunk, at) for chunk in self._chunks]
            return self._shift + self._scale * self._join(pieces)
        if one.support.is_discrete:  # whole numbers stay whole
            return np.quantile(self.draws, level, axis=0, method="inverted_cdf")
        return np.quantile(self.draws, level, axis=0)

    def log_prob(self, y) -> np.ndarray:
        """Log predictive density of each row, `(N,)`, in the units of `y`."""
        y = checks.real("y", np.asarray(y))
        if y.shape != self._moments[0].shape:
            raise ValueError(
                f"`y` must have the shape {self._moments[0].shape} of the predictions; "
                f"got {y.shape}."
            )
        checks.finite("y", y)
        standard = (y - self._shift) / self._scale if self._rescaled else y
        pieces, start = [], 0
        chunks = zip(self._chunks, self._chunk_moments, self._sizes, strict=True)
        for chunk, (mean, _), size in chunks:
            rows = _padded(standard[start : start + size], len(mean))
            _first(chunk).check(rows)
            pieces.append(run(_mixture_log_prob, chunk, jnp.asarray(rows)))
            start += size
        outputs = 1 if y.ndim == 1 else y.shape[1]
        # A Python float, which leaves float32 as it is.
        log_jacobian = float(np.sum(np.log(np.broadcast_to(self._scale, (outputs,)))))
        return self._join(pieces) - log_jacobian

    def rescaled(self, shift, scale) -> Prediction:
        """The prediction of `shift + scale * y`, with a positive scale."""
        if not np.all(np.asarray(scale) > 0.0):
            raise ValueError(f"`scale` must be positive; got {scale}.")
        checks.finite("scale", scale, hint="")
        checks.finite("shift", shift, hint="")
        return Prediction(
            self._chunks,
            self._sizes,
            self._key,
            shift=shift + scale * self._shift,
            scale=scale * self._scale,
        )

    @property
    def _rescaled(self):
        return np.any(np.asarray(self._scale) != 1.0) or np.any(
            np.asarray(self._shift) != 0.0
        )

    def _join(self, pieces):
        """Concatenate chunks along rows (axis 0), without their padding."""
        kept = [x[:size] for x, size in zip(pieces, self._sizes, strict=True)]
        if any(isinstance(x, jax.core.Tracer) for x in kept):  # inside `jit` or `grad`
            return jnp.concatenate(kept)
        return np.concatenate([np.asarray(x) for x in kept])


def _padded(rows, size):
    return np.concatenate([rows, np.repeat(rows[-1:], size - rows.shape[0], axis=0)])


# Components evaluated at once: some likelihoods need many nodes for each row.
_BATCH = 16


def _mixture_moments(chunk):
    means, variances = _each(lambda fn: (fn.mean, fn.variance), chunk)
    mean = jnp.mean(means, axis=0)
    return mean, jnp.mean(variances + (means - mean) ** 2, axis=0)


def _mixture_log_prob(chunk, y):
    each = _each(lambda one: one.log_prob(y), chunk)  # (S, N)
    return logsumexp(each, axis=0) - jnp.log(each.shape[0])


def _mixture_probabilities(chunk):
    return jnp.mean(_each(lambda one: one.probabilities(), chunk), axis=0)


def _mixture_cov(chunk):
    means, covs = _each(lambda one: (one.mean, one.cov), chunk)
    apart = means - jnp.mean(means, axis=0)
    between = jnp.einsum("snp,snq->npq", apart, apart) / means.shape[0]
    return jnp.mean(covs, axis=0) + between


def _mixture_cdf(chunk, y):
    return jnp.mean(_each(lambda one: one.cdf(y), chunk), axis=0)


def _mixture_quantile(chunk, level):
    """Where the distribution function reaches `level`.

    The bracket starts at the mean and grows until it holds the quantile.
    """
    mean, var = _mixture_moments(chunk)
    width = jnp.sqrt(var)

    def grow(_, bracket):
        low, high, width = bracket
        low = jnp.where(_mixture_cdf(chunk, low) < level, low, low - width)
        high = jnp.where(_mixture_cdf(chunk, high) >= level, high, high + width)
        return low, high, 2.0 * width

    def halve(_, bracket):
        low, high = bracket
        y = 0.5 * (low + high)
        reached = _mixture_cdf(chunk, y) >= level
        return jnp.where(reached, low, y), jnp.where(reached, y, high)

    low, high, _ = jax.lax.fori_loop(0, 10, grow, (mean - width, mean + width, width))
    low, high = jax.lax.fori_loop(0, 45, halve, (low, high))
    return 0.5 * (low + high)


def _first(chunk):
    """The distribution of the first component."""
    return jax.tree.map(lambda x: x[0], chunk)


def _each(fn, chunk):
    """`fn` of each component, a bounded number at once."""
    return jax.lax.map(fn, chunk, batch_size=_BATCH)


def _mixture_sample(chunk, key, num_draws: int):
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
