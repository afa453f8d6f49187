"""Distances whose derivatives are finite where two inputs coincide."""

__all__ = ["safe_sqrt", "squared_distance", "squared_distances"]

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.kernels.base import fit_columns


def safe_sqrt(t: Float[Array, "..."]) -> Float[Array, "..."]:
    r""":math:`\sqrt t`, with derivative 0, neither infinite nor NaN, at 0."""
    positive = t > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, t, 1.0)), 0.0)


def squared_distance(
    x: Float[Array, " D"], x2: Float[Array, " D"], lengthscale: Float[Array, "..."]
) -> Float[Array, ""]:
    r""":math:`\sum_d (x_d - x'_d)^2 / \ell_d^2`."""
    return jnp.sum(((x - x2) / fit_columns("lengthscale", lengthscale, x)) ** 2)


def squared_distances(
    X: Float[Array, "N D"],
    X2: Float[Array, "N2 D"] | None,
    lengthscale: Float[Array, "..."],
) -> Float[Array, "N N2"]:
    r"""`squared_distance` between all rows, `(N, N2)`.

    In float64 with more than three columns by one matrix product,
    :math:`|a|^2 + |b|^2 - 2 a^\top b`. Otherwise by differences: for few columns the
    product saves nothing, and in float32 it cancels nearly all digits of a short
    distance.
    """
    if X.dtype != jnp.float64 or X.shape[1] <= 3:
        return _by_differences(X, X if X2 is None else X2, lengthscale)
    # The distance does not depend on the centre, so neither does its gradient; small
    # numbers lose fewer digits to cancellation.
    centre = jax.lax.stop_gradient(jnp.mean(X, axis=0))
    A = X - centre[None]  # (N, D)
    B = A if X2 is None else X2 - centre[None]  # (N2, D)
    weights = fit_columns("lengthscale", lengthscale, X[0]) ** -2.0
    # Norms are part of the product, and lengthscales of its left factor alone (the
    # inducing inputs, as a rule): the derivative is then two products as well, without
    # sums over the rows and columns of an N x N2 matrix.
    W = jnp.broadcast_to(weights, A.shape)
    norms = jnp.sum(W * A**2, axis=1, keepdims=True)
    left = jnp.concatenate([-2.0 * W * A, W, norms], axis=1)  # (N, 2 D + 1)
    ones = jnp.ones((1, B.shape[0]), B.dtype)
    right = jnp.concatenate([B.T, B.T**2, ones], axis=0)  # (2 D + 1, N2)
    s = left @ right  # (N, N2)
    # Rounding can leave s below 0. Only the value is moved there: the derivative stays
    # that of the distance, also where two inputs coincide.
    s = s + jax.lax.stop_gradient(jnp.maximum(-s, 0.0))
    if X2 is None:
        s = jnp.where(jnp.eye(A.shape[0], dtype=bool), 0.0, s)
    return s


def _by_differences(X, X2, lengthscale):
    def row(x):
        return jax.vmap(lambda x2: squared_distance(x, x2, lengthscale))(X2)

    return jax.vmap(row)(X)
