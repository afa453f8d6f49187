"""Predictive distributions: a mixture over posterior components, row by row."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_gpx import checks
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.results import mixtures

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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the targets, `(N,)` or `(N, P)`."""
        return len(self), *mixtures.shape_of(self._chunks[0])[1:]

    @functools.cached_property
    def _moments(self):
        self._refuse_labels("moments")
        found = [run(mixtures.moments, chunk) for chunk in self._chunks]
        return tuple(self._join(list(part)) for part in zip(*found, strict=True))

    def _refuse_labels(self, what: str) -> None:
        """Raise if targets are labels without an order."""
        if mixtures.first(self._chunks[0]).nominal:
            raise ValueError(
                f"The targets are labels without an order, and have no {what}; use "
                "`probabilities`, or `draws`."
            )

    @property
    def mean(self) -> np.ndarray:
        """Predictive mean, `(N,)` or `(N, P)`.

        Labels without an order (`Categorical`, `RobustMax`) have none, nor variances or
        quantiles: see `probabilities`.
        """
        return self._shift + self._scale * self._moments[0]

    @property
    def var(self) -> np.ndarray:
        """Predictive variance, `(N,)` or `(N, P)`."""
        return self._scale**2 * self._moments[1]

    @functools.cached_property
    def cov(self) -> np.ndarray:
        """Covariance between the outputs of each row, `(N, P, P)`."""
        self._refuse_labels("covariance")
        pieces = [run(mixtures.cov, chunk) for chunk in self._chunks]
        scale = np.broadcast_to(self._scale, self.shape[1:])
        return scale[:, None] * self._join(pieces) * scale[None, :]

    @property
    def sd(self) -> np.ndarray:
        """Predictive standard deviation."""
        # Not the root of `var`, which may be out of range where this is not.
        root = _like(self._moments[1]).sqrt(self._moments[1])
        return self._scale * root

    @functools.cached_property
    def draws(self) -> np.ndarray:
        """1000 draws, `(1000, N)` or `(1000, N, P)`; rows are drawn independently."""
        return self.sample(self._key, _NUM_DRAWS)

    def sample(self, key, num_draws: int) -> np.ndarray:
        """Draws `(num_draws, N, ...)`, components taken in turn."""
        checks.key(key)
        keys = jr.split(key, len(self._chunks))
        drawn = [
            jnp.moveaxis(run(mixtures.sample, chunk, k, num_draws), 0, 1)
            for chunk, k in zip(self._chunks, keys, strict=True)
        ]
        draws = self._join(drawn)
        return self._shift + self._scale * _like(draws).moveaxis(draws, 1, 0)

    @functools.cached_property
    def probabilities(self) -> np.ndarray:
        """Predictive probability of each label, `(N, C)`, for targets that are labels.

        Labels are those of `Categorical`, `RobustMax` and `Ordinal`; for binary targets
        `mean` is the probability of 1.
        """
        return self._join(
            [run(mixtures.probabilities, chunk) for chunk in self._chunks]
        )

    def quantile(self, q) -> np.ndarray:
        """Quantiles, `(N, ...)` or `(Q, N, ...)`.

        By bisection of the predictive distribution function where that is a mixture of
        normals (Gaussian likelihoods, latent functions), else those of `draws`: with
        1000 of them their levels are off by about 0.01.
        """
        levels = _levels(q)
        self._refuse_labels("quantiles")
        found = [self._quantile(float(level)) for level in levels.ravel()]
        return _like(found[0]).stack(found).reshape(levels.shape + found[0].shape)

    def _quantile(self, level):
        one = mixtures.first(self._chunks[0])
        if one.is_normal_mixture:
            at = jnp.asarray(level)
            pieces = [run(mixtures.quantile, chunk, at) for chunk in self._chunks]
            return self._shift + self._scale * self._join(pieces)
        draws = self.draws
        # Whole numbers stay whole.
        method = "inverted_cdf" if one.support.is_discrete else "linear"
        return _like(draws).quantile(draws, level, axis=0, method=method)

    def cdf(self, y) -> np.ndarray:
        """Predictive probability of at most `y`, entry by entry, `(N,)` or `(N, P)`.

        In closed form where `quantile` is, else the share of `draws`. Over held-out
        targets it is uniform if predictions are calibrated.
        """
        self._refuse_labels("order")
        y = self._as_targets(y)
        if not mixtures.first(self._chunks[0]).is_normal_mixture:
            return _like(self.draws).mean(self.draws <= y, axis=0)
        return self._of_targets(mixtures.cdf, y)

    def log_prob(self, y) -> np.ndarray:
        """Log predictive density of each row, `(N,)`, in the units of `y`."""
        y = self._as_targets(y)
        outputs = 1 if y.ndim == 1 else y.shape[1]
        # A Python float, which leaves float32 as it is.
        log_jacobian = float(np.sum(np.log(np.broadcast_to(self._scale, (outputs,)))))
        return self._of_targets(mixtures.log_prob, y) - log_jacobian

    def _as_targets(self, y):
        """`y`, checked."""
        checks.numbers("y", y)
        y = np.asarray(y) if not_jax_tracer(y) else y
        if y.shape != self.shape:
            raise ValueError(
                f"`y` must have the shape {self.shape} of the predictions; got "
                f"{y.shape}."
            )
        checks.finite("y", y)
        return y

    def _of_targets(self, fn, y):
        """`fn(chunk, y)` of all chunks, with `y` in the units of the model."""
        standard = (y - self._shift) / self._scale if self._rescaled else y
        pieces, start = [], 0
        for chunk, size in zip(self._chunks, self._sizes, strict=True):
            rows = _padded(standard[start : start + size], mixtures.shape_of(chunk)[0])
            if not_jax_tracer(rows):
                mixtures.first(chunk).check(rows)
            pieces.append(run(fn, chunk, jnp.asarray(rows)))
            start += size
        return self._join(pieces)

    def rescaled(self, shift, scale) -> Prediction:
        """The prediction of `shift + scale * y`, with a positive scale.

        Both are numbers or have one entry an output, the shift also one a row.
        """
        self._refuse_labels("units")
        # One factor an output: rows have no Jacobians of their own.
        shift = _number("shift", shift, self.shape)
        scale = _number("scale", scale, self.shape[1:])
        if not np.all(np.asarray(scale) > 0.0):
            raise ValueError(f"`scale` must be positive; got {scale}.")
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
        return _like(kept[0]).concatenate(kept)


def _number(name: str, value, shape: tuple[int, ...]):
    """A finite number, or numbers that spread over `shape`."""
    checks.numbers(name, value)
    checks.finite(name, value, hint="")
    came = np.shape(value)
    if came[::-1] != shape[::-1][: len(came)]:
        or_shape = f", or have shape {shape}" if shape else ""
        raise ValueError(f"`{name}` must be a number{or_shape}; got shape {came}.")
    # Python's own numbers leave float32 as it is.
    return np.asarray(value) if isinstance(value, list | tuple) else value


def _levels(q) -> np.ndarray:
    """Levels of quantiles as numbers."""
    try:
        levels = np.asarray(checks.numbers("q", q), float)
    except (TypeError, ValueError):
        levels = np.asarray(np.nan)
    # Also where it is NaN, which lies nowhere.
    if not (levels.size and np.all((levels > 0.0) & (levels < 1.0))):
        raise ValueError(f"`q` must lie between 0 and 1; got {q}.")
    return levels


def _padded(rows, size):
    xp = _like(rows)
    return xp.concatenate([rows, xp.repeat(rows[-1:], size - rows.shape[0], axis=0)])


def _like(x):
    """NumPy, or JAX's where values are not known yet: inside `jit`, `grad`, `vmap`."""
    return np if not_jax_tracer(x) else jnp
