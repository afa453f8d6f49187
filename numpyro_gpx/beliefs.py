r"""Gaussian beliefs about the inducing variables, integrated instead of drawn.

A site's value is a draw (an array) or a belief. The GP conditions on the first and
integrates the second, :math:`q(f) = \int p(f \mid v)\,q(v)\,dv`.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

__all__ = [
    "GUIDE",
    "Belief",
    "DiagonalBelief",
    "GaussianBelief",
    "Integrable",
    "Mark",
    "SharedBelief",
    "as_infer",
    "gaussian_base",
    "kl_to_prior",
    "not_gaussian",
]


# Keys of a site's `infer` dictionary: marks of the model, and of a guide
# (`sites/marks.py` has most of them, and reads them all).
MODEL, GUIDE = "gpx_model", "gpx_guide"


class Mark(eqx.Module):
    """A mark at a site; `owner` is the key that it travels under.

    Equal only to itself: JAX compares what NumPyro's traces carry along, and numbers
    of an earlier trace must not be looked at (`numpyro.render_model` does so).
    """

    owner: ClassVar[str] = MODEL

    def __eq__(self, other) -> bool:  # type: ignore[override]
        return self is other

    __hash__ = object.__hash__


class Integrable(Mark):
    """Asks Gaussian guides for a belief about a site that is no GP."""


def as_infer(mark: Mark) -> dict[str, Mark]:
    """The mark as `infer=` of `numpyro.sample`."""
    return {mark.owner: mark}


class Belief(eqx.Module):
    """A Gaussian over `(M,)` or, independently for each output, over `(P, M)`."""

    mean: eqx.AbstractVar[Array]

    @abc.abstractmethod
    def spread(self, A: Float[Array, "... M N"]) -> Float[Array, "... M N"]:
        r""":math:`S^\top A`, with :math:`SS^\top` the covariance of the belief.

        The covariance of :math:`A^\top v` is `spread(A).T @ spread(A)`.
        """

    @abc.abstractmethod
    def push(self, w: Array) -> Array:
        """`mean + S w`, both of the shape of `mean`."""

    @abc.abstractmethod
    def pull(self, v: Array) -> Array:
        """The `w` whose `push` is `v`."""

    @abc.abstractmethod
    def affine(self, shift: Array, matrix: Array) -> Belief:
        """The belief about `shift + matrix @ v`."""

    @abc.abstractmethod
    def distribution(self) -> dist.Distribution:
        """The belief as a NumPyro distribution, all of it event."""

    @abc.abstractmethod
    def variances(self) -> Array:
        """Marginal variances, of the shape of `mean`."""

    @abc.abstractmethod
    def log_determinant(self) -> Array:
        """Log determinant of the covariance, `()` or `(P,)`."""


class GaussianBelief(Belief):
    """Full covariance: `mean` is `(M,)` or `(P, M)`, `scale_tril` one axis more."""

    mean: Float[Array, "*P M"]
    scale_tril: Float[Array, "*P M M"]

    def spread(self, A):
        return jnp.swapaxes(self.scale_tril, -1, -2) @ A

    def push(self, w):
        return self.mean + jnp.einsum("...ij,...j->...i", self.scale_tril, w)

    def pull(self, v):
        # A root that `affine` has multiplied need not be triangular.
        return jnp.linalg.solve(self.scale_tril, (v - self.mean)[..., None])[..., 0]

    def affine(self, shift, matrix):
        mean = shift + jnp.einsum("...ij,...j->...i", matrix, self.mean)
        return GaussianBelief(mean, matrix @ self.scale_tril)

    def distribution(self):
        base = dist.MultivariateNormal(
            self.mean, scale_tril=self.scale_tril, validate_args=False
        )
        return base.to_event(self.mean.ndim - 1)

    def variances(self):
        return jnp.sum(self.scale_tril**2, axis=-1)

    def log_determinant(self):
        diagonal = jnp.diagonal(self.scale_tril, axis1=-2, axis2=-1)
        return 2.0 * jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1)


class DiagonalBelief(Belief):
    """Independent entries: `mean` and `scale` `(M,)` or `(P, M)`."""

    mean: Float[Array, "*P M"]
    scale: Float[Array, "*P M"]

    def spread(self, A):
        return self.scale[..., :, None] * A

    def push(self, w):
        return self.mean + self.scale * w

    def pull(self, v):
        return (v - self.mean) / self.scale

    def affine(self, shift, matrix):
        mean = shift + jnp.einsum("...ij,...j->...i", matrix, self.mean)
        scale = self.scale[..., None, :]
        matrix = jnp.broadcast_to(matrix, self.scale.shape + matrix.shape[-1:])
        return GaussianBelief(mean, matrix * scale)

    def distribution(self):
        return dist.Normal(self.mean, self.scale).to_event(self.mean.ndim)

    def variances(self):
        return self.scale**2

    def log_determinant(self):
        return 2.0 * jnp.sum(jnp.log(self.scale), axis=-1)


class SharedBelief(Belief):
    """Outputs with means of their own and one covariance for all of them.

    What the optimal belief looks like if all outputs have the same kernel and noise:
    `mean` is `(P, M)` and `scale_tril` `(M, M)`.
    """

    mean: Float[Array, "P M"]
    scale_tril: Float[Array, "M M"]

    def spread(self, A):
        return self.scale_tril.T @ A

    def push(self, w):
        return self.mean + w @ self.scale_tril.T

    def pull(self, v):
        return jnp.linalg.solve(self.scale_tril, (v - self.mean).T).T

    def affine(self, shift, matrix):
        mean = shift + jnp.einsum("...ij,...j->...i", matrix, self.mean)
        return SharedBelief(mean, matrix @ self.scale_tril)

    def distribution(self):
        factor = jnp.broadcast_to(self.scale_tril, (*self.mean.shape, self.size))
        return GaussianBelief(self.mean, factor).distribution()

    def variances(self):
        variances = jnp.sum(self.scale_tril**2, axis=-1)
        return jnp.broadcast_to(variances, self.mean.shape)

    def log_determinant(self):
        diagonal = jnp.diagonal(self.scale_tril)
        one = 2.0 * jnp.sum(jnp.log(jnp.abs(diagonal)))
        return jnp.broadcast_to(one, self.mean.shape[:1])

    @property
    def size(self) -> int:
        """Number of inducing variables M."""
        return self.mean.shape[-1]


def kl_to_prior(belief: Belief, prior: dist.Distribution) -> Array:
    r"""Closed-form :math:`\mathrm{KL}(q \,\|\, p)` from a belief to a site's prior.

    Kept here instead of in NumPyro's table of divergences: a registration on
    `Independent` would answer for any base distribution.

    Args:
        belief: Over `(M,)` or `(P, M)`.
        prior: `Normal(...).to_event` or `MultivariateNormal(...)`, as `gpx.gp` makes.

    Returns:
        A scalar, summed over the outputs.
    """
    base = gaussian_base(prior)
    num_entries = belief.mean.shape[-1]
    if isinstance(base, dist.Normal):
        scale = jnp.broadcast_to(base.scale, belief.mean.shape)
        whitened_mean = (belief.mean - base.loc) / scale
        trace = jnp.sum(belief.variances() / scale**2, axis=-1)
        prior_log_det = 2.0 * jnp.sum(jnp.log(scale), axis=-1)
    elif isinstance(base, dist.MultivariateNormal):
        L = jnp.broadcast_to(base.scale_tril, belief.mean.shape + (num_entries,))
        solve = jax.scipy.linalg.solve_triangular
        difference = (belief.mean - base.loc)[..., None]
        whitened_mean = solve(L, difference, lower=True)[..., 0]
        eye = jnp.eye(num_entries, dtype=belief.mean.dtype)
        W = solve(L, jnp.broadcast_to(eye, L.shape), lower=True)
        spread = belief.spread(jnp.swapaxes(W, -1, -2))
        trace = jnp.sum(spread**2, axis=(-2, -1))
        diagonal = jnp.diagonal(L, axis1=-2, axis2=-1)
        prior_log_det = 2.0 * jnp.sum(jnp.log(diagonal), axis=-1)
    else:
        raise not_gaussian(prior)
    twice_kl = (
        trace
        + jnp.sum(whitened_mean**2, axis=-1)
        - num_entries
        + prior_log_det
        - belief.log_determinant()
    )
    return 0.5 * jnp.sum(twice_kl)


def gaussian_base(
    prior: dist.Distribution,
) -> dist.Normal | dist.MultivariateNormal | None:
    """The normal inside `to_event` and `expand`, its parameters yet to be broadcast.

    `None` if the prior is no Gaussian.
    """
    base = _innermost(prior)
    return base if isinstance(base, dist.Normal | dist.MultivariateNormal) else None


def not_gaussian(prior: dist.Distribution) -> TypeError:
    """What to raise where a prior is no Gaussian."""
    return TypeError(
        "A Gaussian belief can only be integrated against a Normal or "
        f"MultivariateNormal prior; got {type(_innermost(prior)).__name__}."
    )


def _innermost(prior):
    while isinstance(prior, dist.Independent | dist.ExpandedDistribution):
        prior = prior.base_dist
    return prior
