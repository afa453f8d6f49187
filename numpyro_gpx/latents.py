"""What is known about `f` at the rows of `X`, before a likelihood sees it.

`f(X)` is Gaussian in each row. Sums of independent GPs stay Gaussian; a product is a
mixture of Gaussians, one component for each Gauss-Hermite node of its first factor.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from numpyro_gpx.cubature.gauss_hermite import gauss_hermite
from numpyro_gpx.linalg import safe_cholesky

__all__ = [
    "GaussianLatent",
    "Latent",
    "MixtureLatent",
    "as_latent",
    "known_function",
    "stack",
]

# Exact for Gaussian likelihoods (polynomials), and enough for smooth links.
_PRODUCT_NODES = 20


class Latent(eqx.Module):
    """Marginals of one or more latent functions at N rows: `(N,)` or `(N, P)`."""

    # NumPy leaves `array + latent` to `__radd__`, instead of adding entry by entry.
    __array_ufunc__ = None

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(N,)` or `(N, P)`."""

    @abc.abstractmethod
    def components(self) -> tuple[Array, Array, Array]:
        """Log weights `(S,)`, means and variances `(S, N, *P)` of the mixture."""

    @abc.abstractmethod
    def sample(self, key, sample_shape=()) -> Array:
        """Draw `f`, of shape `sample_shape + shape`."""

    @abc.abstractmethod
    def __add__(self, other) -> Latent:
        """The sum with an independent latent, or with a known function."""

    @abc.abstractmethod
    def __mul__(self, other) -> Latent:
        """The product with an independent latent, or with a known function."""

    def __radd__(self, other):
        return self + other

    def __rmul__(self, other):
        return self * other

    def __sub__(self, other):
        return self + (-1.0) * other

    def __rsub__(self, other):
        return other + (-1.0) * self

    def __neg__(self):
        return (-1.0) * self


class GaussianLatent(Latent):
    """Gaussian rows: mean and variance `(N,)` or `(N, P)`.

    Attributes:
        mean: Mean of `f` at each row.
        var: Variance of `f` at each row.
        cov: Covariance between the rows, `(N, N)` or `(P, N, N)`, if asked for.
        sources: The pairs (GP, X) that were added up, apart from a known shift; empty
            after other arithmetic.
        sites: Names of the GP sites involved; independence is read off them.
        cov_scale: Prior variance that `cov` was subtracted from, for its jitter.
        shift: The known shift added to the sources; `None` for 0.
        matched: Whether the rows are not Gaussian, as at uncertain inputs, and `mean`
            and `var` are all that is known of them.
    """

    mean: Float[Array, " N *P"]
    var: Float[Array, " N *P"]
    cov: Array | None = None
    sources: tuple[tuple[Any, Array], ...] = ()
    sites: frozenset = eqx.field(static=True, default=frozenset())
    cov_scale: Float[Array, ""] | None = None
    shift: Array | None = None
    matched: bool = eqx.field(static=True, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mean.shape

    def components(self):
        return jnp.zeros(1, self.mean.dtype), self.mean[None], self.var[None]

    def sample(self, key, sample_shape=()) -> Array:
        """Draw `f`: jointly over the rows if `cov` is known, else row by row."""
        noise = jr.normal(key, sample_shape + self.mean.shape, self.mean.dtype)
        return self.mean + self.correlate(noise)

    def correlate(self, noise) -> Array:
        """Give standard normal `noise` `(..., N, *P)` the covariance of the rows."""
        if self.cov is None:
            return jnp.sqrt(self.var) * noise
        L = safe_cholesky(self.cov, self.cov_scale)
        if self.cov.ndim == 2:
            return jnp.einsum("nm,...m->...n", L, noise)
        return jnp.einsum("pnm,...mp->...np", L, noise)

    def __add__(self, other):
        if isinstance(other, MixtureLatent):
            return other + self
        if not isinstance(other, GaussianLatent):
            mean, var = jnp.broadcast_arrays(self.mean + other, self.var)
            shift = other if self.shift is None else self.shift + other
            shift = jnp.broadcast_to(shift, mean.shape)
            return dataclasses.replace(self, mean=mean, var=var, shift=shift)
        sites = _independent(self, other, "added")
        if self.matched:  # both may depend on the same input
            _refuse_matched(other, "added")
        cov = cov_scale = None
        if self.cov is not None and other.cov is not None:
            cov = self.cov + other.cov
            cov_scale = _sum_of_scales(self.cov_scale, other.cov_scale)
        known = self.sources and other.sources
        sources = self.sources + other.sources if known else ()
        mean, var = self.mean + other.mean, self.var + other.var
        return GaussianLatent(
            mean, var, cov, sources, sites, cov_scale,
            shift=_sum_of_shifts(self.shift, other.shift, mean.shape),
            matched=self.matched or other.matched,
        )  # fmt: skip

    def __mul__(self, other):
        if isinstance(other, MixtureLatent):
            return other * self
        if isinstance(other, Latent):
            return _as_mixture(self) * other
        factor = jnp.asarray(other, self.mean.dtype)
        cov = cov_scale = None
        if self.cov is not None and factor.ndim == 0:
            cov = factor**2 * self.cov
            cov_scale = None if self.cov_scale is None else factor**2 * self.cov_scale
        mean, var = factor * self.mean, factor**2 * self.var
        return GaussianLatent(
            mean, var, cov, (), self.sites, cov_scale, matched=self.matched
        )


class MixtureLatent(Latent):
    """A mixture of S Gaussians in each row; means and variances `(S, N, *P)`."""

    log_weights: Float[Array, " S"]
    means: Float[Array, "S N *P"]
    variances: Float[Array, "S N *P"]
    sites: frozenset = eqx.field(static=True, default=frozenset())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.means.shape[1:]

    @property
    def mean(self) -> Array:
        return jnp.tensordot(jnp.exp(self.log_weights), self.means, axes=1)

    @property
    def var(self) -> Array:
        spread = self.variances + (self.means - self.mean) ** 2
        return jnp.tensordot(jnp.exp(self.log_weights), spread, axes=1)

    def components(self):
        return self.log_weights, self.means, self.variances

    def sample(self, key, sample_shape=()) -> Array:
        key_component, key_noise = jr.split(key)
        shape = sample_shape + self.shape
        k = jr.categorical(
            key_component, self.log_weights, shape=shape
        )  # component of each entry
        pick = jax.vmap(lambda rows, index: rows[index], (1, -1), -1)
        flat = (self.means.shape[0], -1)
        index = k.reshape(sample_shape + (-1,))
        means = pick(self.means.reshape(flat), index).reshape(shape)
        variances = pick(self.variances.reshape(flat), index).reshape(shape)
        noise = jr.normal(key_noise, shape, self.means.dtype)
        return means + jnp.sqrt(variances) * noise

    def __add__(self, other):
        if not isinstance(other, Latent):
            return MixtureLatent(
                self.log_weights, self.means + other, self.variances, self.sites
            )
        sites = _independent(self, other, "added")
        log_weights, means, variances = _pairs(self, other, lambda a, b: a + b)
        return MixtureLatent(log_weights, means, variances, sites)

    def __mul__(self, other):
        if not isinstance(other, Latent):
            return MixtureLatent(
                self.log_weights,
                self.means * other,
                self.variances * other**2,
                self.sites,
            )
        sites = _independent(self, other, "multiplied")
        nodes, weights = gauss_hermite(_PRODUCT_NODES)
        dtype = self.means.dtype
        x = jnp.asarray(nodes, dtype).reshape((-1,) + (1,) * self.means.ndim)
        # Given the first factor the product is Gaussian: g = a f, f ~ N(m, s).
        a = self.means + x * jnp.sqrt(self.variances)  # (Q, S, N, *P)
        a = a.reshape((-1,) + self.shape)
        log_weights = jnp.log(jnp.asarray(weights, dtype))[:, None] + self.log_weights
        log_w, means, variances = other.components()
        log_weights = (log_weights.reshape(-1, 1) + log_w).reshape(-1)
        means = (a[:, None] * means).reshape((-1,) + self.shape)
        variances = (a[:, None] ** 2 * variances).reshape((-1,) + self.shape)
        return MixtureLatent(log_weights, means, variances, sites)


def as_latent(value) -> Latent:
    """`value` itself, or a known function (an array) as a latent without variance."""
    return value if isinstance(value, Latent) else known_function(value)


def known_function(value) -> GaussianLatent:
    """A function whose values are known, as a latent without variance."""
    mean = jnp.asarray(value)
    if not jnp.issubdtype(mean.dtype, jnp.floating):
        mean = mean.astype(jnp.result_type(float))
    tiny = jnp.full_like(mean, jnp.finfo(mean.dtype).eps ** 2)
    return GaussianLatent(mean, tiny)


def stack(*latents) -> GaussianLatent:
    """Join latent functions into the columns of one latent, `(N, P)`.

    For likelihoods of several latent functions whose GPs have different kernels,
    inducing points or inputs: `gpx.stack(f(X), g(X))`.

    Args:
        latents: Latents `(N,)` or `(N, P)` of different GP sites, or known functions.
    """
    parts: list[GaussianLatent] = []
    sites: frozenset = frozenset()
    for one in map(as_latent, latents):
        if not isinstance(one, GaussianLatent):
            raise TypeError(
                "`stack` joins Gaussian latents, such as f(X) or f(X) + g(X); got "
                f"{type(one).__name__}, a product."
            )
        if sites & one.sites:
            raise ValueError(
                "Latents that are stacked must come from different GP sites; several "
                f"use {sorted(sites & one.sites)}. For one kernel and several "
                "independent functions use `gpx.gp(..., num_outputs=...)`."
            )
        sites = sites | one.sites
        parts.append(one)

    def columns(x):
        return x[:, None] if x.ndim == 1 else x

    return GaussianLatent(
        jnp.concatenate([columns(one.mean) for one in parts], axis=1),
        jnp.concatenate([columns(one.var) for one in parts], axis=1),
        sites=sites,
        matched=any(one.matched for one in parts),
    )


def _sum_of_scales(first, second):
    return None if first is None or second is None else first + second


def _refuse_matched(latent, verb):
    if latent.matched:
        raise ValueError(
            f"Latents at uncertain inputs cannot be {verb}: only the mean and variance "
            "of each are known. Use a rule with points, such as "
            "`gpx.cubature.Unscented()`, or put the sum into the kernel."
        )


def _sum_of_shifts(first, second, shape):
    if first is None and second is None:
        return None
    zero = jnp.zeros(())
    parts = (zero if shift is None else shift for shift in (first, second))
    return jnp.broadcast_to(sum(parts), shape)


def _as_mixture(latent):
    if isinstance(latent, GaussianLatent):
        _refuse_matched(latent, "multiplied")
    log_weights, means, variances = latent.components()
    return MixtureLatent(log_weights, means, variances, latent.sites)


def _pairs(first, second, combine):
    """All pairs of components; `combine` acts on means and on variances."""
    log_w1, m1, s1 = first.components()
    log_w2, m2, s2 = second.components()
    log_weights = (log_w1[:, None] + log_w2).reshape(-1)
    means = combine(m1[:, None], m2)
    variances = combine(s1[:, None], s2)
    return (
        log_weights,
        means.reshape((-1,) + means.shape[2:]),
        variances.reshape((-1,) + variances.shape[2:]),
    )


def _independent(first, second, verb):
    shared = first.sites & second.sites
    if shared:
        raise ValueError(
            f"Latents that are {verb} must come from different GP sites; both use "
            f"{sorted(shared)}. Evaluate the GP once and scale it (`2.0 * f(X)`), or "
            "write the combination into the kernel."
        )
    return first.sites | second.sites
