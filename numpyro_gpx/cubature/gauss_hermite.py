"""Gauss-Hermite quadrature: expectations of a function of one Gaussian variable."""

__all__ = ["expectation", "gauss_hermite", "log_expectation_exp", "nodes", "peak"]

import functools
from collections.abc import Callable
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from numpyro_gpx.numerics.factor import positive


class HermiteNodes(NamedTuple):
    """Nodes and weights for `N(0, 1)`, both `(K,)`; the weights sum to 1."""

    nodes: np.ndarray
    weights: np.ndarray


@functools.cache
def gauss_hermite(num_nodes: int) -> HermiteNodes:
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
    return HermiteNodes(nodes, weights)


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
    rule = gauss_hermite(num_nodes)
    x, weights = (jnp.asarray(a, f_mean.dtype) for a in rule)
    f_sd = jnp.sqrt(positive(f_var))
    points = f_mean[..., None] + f_sd[..., None] * x.reshape((1,) * f_mean.ndim + (-1,))
    # Nodes on the last axis: on a CPU sums over it are a little faster.
    return jax.vmap(fn, in_axes=-1, out_axes=-1)(points) @ weights


def nodes(
    f_mean: Float[Array, "*shape"], f_var: Float[Array, "*shape"], num_nodes: int
) -> tuple[Float[Array, "K *shape"], Float[Array, "K ..."]]:
    """Nodes for `N(f_mean, f_var)`, and their weights on the same first axis."""
    f_mean, f_var = _same_shape_and_dtype(f_mean, f_var)
    x, weights = _columns(gauss_hermite(num_nodes), f_mean)
    return _points(f_mean, f_var, x), weights


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
    moved = shift + shrink * x  # (K, ...)
    # Weights of N(0, 1) relative to N(shift, shrink^2).
    log_weights = jnp.log(weights) + jnp.log(shrink) + 0.5 * (x**2 - moved**2)
    terms = jax.vmap(log_fn)(_points(f_mean, f_var, moved)) + log_weights
    return logsumexp(terms, axis=0)


class Peak(TypedDict):
    """Where an integrand peaks and how wide it is, for `log_expectation_exp`."""

    shift: Array
    shrink: Array


def peak(
    log_fn: Callable, f_mean: Float[Array, "*shape"], f_var: Float[Array, "*shape"]
) -> Peak:
    r"""Peak and width of :math:`e^{l(f)}\,\mathcal N(f; m, v)`, by Newton's method.

    In :math:`z = (f - m)/\sqrt v` the logarithm :math:`l - z^2/2` has slope
    :math:`\sqrt v\,l' - z` and curvature :math:`v\,l'' - 1`. Made for concave `l`.

    Args:
        log_fn: The function `l`, elementwise, as in `expectation`.
        f_mean: Means.
        f_var: Variances.
    """
    f_mean, f_var = jax.lax.stop_gradient(_same_shape_and_dtype(f_mean, f_var))
    sd = jnp.sqrt(positive(f_var))

    def slope(f):
        return jax.jvp(log_fn, (f,), (jnp.ones_like(f),))[1]

    def derivatives(z):
        f = f_mean + sd * z
        first, second = jax.jvp(slope, (f,), (jnp.ones_like(f),))
        # No wider than the Gaussian, also where `l` is not concave.
        return sd * first - z, jnp.minimum(sd**2 * second, 0.0) - 1.0

    def newton(_, z):
        gradient, curvature = derivatives(z)
        # Two units of `f` at most: where `l` has an exponential, a longer step lands
        # where the way back is slow.
        longest = 2.0 / sd
        step = jnp.clip(-gradient / curvature, -longest, longest)
        return z + jnp.where(jnp.isfinite(step), step, 0.0)

    z = jax.lax.fori_loop(0, _NEWTON_STEPS, newton, jnp.zeros_like(f_mean))
    _, curvature = derivatives(z)
    # Where the density underflows there is nothing to find.
    curvature = jnp.where(jnp.isfinite(curvature), curvature, -1.0)
    return Peak(
        shift=jax.lax.stop_gradient(z),
        shrink=jax.lax.stop_gradient((-curvature) ** -0.5),
    )


# Enough for a peak 60 units of `f` away, and for the last digits there.
_NEWTON_STEPS = 40


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
