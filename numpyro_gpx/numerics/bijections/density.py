"""Densities of what a flow makes of standard normal noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from numpyro_gpx.numerics.bijections.base import Bijection

__all__ = ["along_the_path", "log_density"]


def log_density(flow: Bijection, y: Float[Array, " K"]) -> Float[Array, ""]:
    """Log density at `y`, by the inverse."""
    x, log_det = flow.inverse(y)
    return jnp.sum(norm.logpdf(x)) + log_det


def along_the_path(
    flow: Bijection,
    x: Float[Array, " K"],
    y: Float[Array, " K"],
    log_det: Float[Array, ""],
) -> Float[Array, ""]:
    r"""`-log_det`, with another gradient: that of the log density through `y` alone.

    With :math:`y = g_\phi(x)` the derivative of :math:`\log q_\phi(y)` has a part
    through `y` and one through :math:`\phi` at a fixed `y`. The second has mean 0:
    left out, the gradient of a bound stays unbiased, and where `q` is the target it has
    no noise at all.

    Args:
        flow: The flow.
        x: Noise.
        y: Its image.
        log_det: The log-determinant there.

    References:
        Roeder, Wu & Duvenaud (2017), "Sticking the landing".
    """
    frozen = jax.lax.stop_gradient(flow)
    path = log_density(frozen, y) - jnp.sum(norm.logpdf(x))
    # The value without the rounding of the inverse.
    return path + jax.lax.stop_gradient(-log_det - path)
