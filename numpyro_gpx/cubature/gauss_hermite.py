"""Gauss-Hermite quadrature: expectations of a function of one Gaussian variable."""

__all__ = ["expectation", "gauss_hermite", "log_expectation_exp"]

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from numpyro_gpx.linalg import positive


class Rule(NamedTuple):
    """Nodes and weights for `N(0, 1)`, both `(K,)`; the weights sum to 1."""

    nodes: np.ndarray
    weights: np.ndarray


@functools.cache
def gauss_hermite(num_nodes: int) -> Rule:
    """Nodes and weights that integrate polynomials under `N(0, 1)`.

    Exact up to degree `2 num_nodes - 1`.

    Args:
        num_nodes: Number of nodes, at least 1.

    Returns:
        Nodes and weights, NumPy arrays `(num_nodes,)` in float64.
    """
    if num_nodes < 1:
        raise ValueError(f"`num_nodes` must be at least 1; got {num_nodes}.")
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    weights = weights / np.sum(weights)
    # Shared by every caller through the cache, so nobody may write to them.
    nodes.flags.writeable = weights.flags.writeable = False
    return Rule(nodes, weights)


def expectation(
    fn: Callable,
    f_mean: Float[Array, "*shape"],
    f_var: Float[Array, "*shape"],
    num_nodes: int,
) -> Float[Array, "*shape"]:
    r"""Expectation :math:`\mathbb E[g(f)]` under :math:`f \sim \mathcal N(m, v)`.

    Args:
        fn: The function `g`, elementwise: an array of the shape of `f_mean` goes in
            and comes out. It may close over arrays, and be differentiated in them.
        f_mean: Means.
        f_var: Variances, at least 0, of the shape of `f_mean` after broadcasting.
        num_nodes: Number of Gauss-Hermite nodes.

    Returns:
        One expectation for each mean.
    """
    f_mean, f_var = _same_shape_and_dtype(f_mean, f_var)
    nodes, weights = _columns(gauss_hermite(num_nodes), f_mean)
    return jnp.sum(weights * jax.vmap(fn)(_points(f_mean, f_var, nodes)), axis=0)


def log_expectation_exp(
    log_fn: Callable,
    f_mean: Float[Array, "*shape"],
    f_var: Float[Array, "*shape"],
    num_nodes: int,
    *,
    shift: Float[Array, "*shape"] | float = 0.0,
    shrink: Float[Array, "*shape"] | float = 1.0,
) -> Float[Array, "*shape"]:
    r"""Logarithm of an expectation, :math:`\log \mathbb E[e^{l(f)}]`, without overflow.

    Where :math:`e^l` is narrow or far from `f_mean`, few plain nodes see it. Those
    who know where its product with the Gaussian peaks move the nodes there, to
    :math:`m + \sqrt v\,(\text{shift} + \text{shrink}\; x)`; the weights follow.

    Args:
        log_fn: The function `l`, elementwise, as in `expectation`.
        f_mean: Means.
        f_var: Variances, at least 0, of the shape of `f_mean` after broadcasting.
        num_nodes: Number of Gauss-Hermite nodes.
        shift: Peak of the integrand less `f_mean`, in standard deviations of `f`.
        shrink: Width of the integrand, in standard deviations of `f`.

    Returns:
        One value for each mean.

    References:
        Liu and Pierce (1994), "A note on Gauss-Hermite quadrature", equation 4.
    """
    f_mean, f_var = _same_shape_and_dtype(f_mean, f_var)
    x, weights = _columns(gauss_hermite(num_nodes), f_mean)
    # Where the nodes are does not change the integral: nothing to differentiate.
    shift = jnp.broadcast_to(jax.lax.stop_gradient(shift), (1, *f_mean.shape))
    shrink = jnp.broadcast_to(jax.lax.stop_gradient(shrink), (1, *f_mean.shape))
    nodes = shift + shrink * x  # (K, ...)
    # Weights of N(0, 1) relative to N(shift, shrink^2).
    log_weights = jnp.log(weights) + jnp.log(shrink) + 0.5 * (x**2 - nodes**2)
    terms = jax.vmap(log_fn)(_points(f_mean, f_var, nodes)) + log_weights
    return logsumexp(terms, axis=0)


def _points(f_mean, f_var, nodes):
    f_sd = jnp.sqrt(positive(f_var))
    return f_mean[None] + f_sd[None] * nodes  # (K, ...)


def _columns(rule, like):
    """Nodes and weights on an axis before those of `like`, in its dtype."""
    shape = (-1, *(1,) * like.ndim)
    return tuple(jnp.asarray(value, like.dtype).reshape(shape) for value in rule)


def _same_shape_and_dtype(f_mean, f_var):
    dtype = jnp.result_type(f_mean, f_var, jnp.float32)
    shape = jnp.broadcast_shapes(jnp.shape(f_mean), jnp.shape(f_var))
    f_mean, f_var = jnp.asarray(f_mean, dtype), jnp.asarray(f_var, dtype)
    return jnp.broadcast_to(f_mean, shape), jnp.broadcast_to(f_var, shape)
