"""Noise between the layers of a deep GP: `propagate`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array

from numpyro_gpx import checks
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.processes.replicates import shared_draw
from numpyro_gpx.sites.gp_calls import current_axis
from numpyro_gpx.sites.marks import Noise, as_infer

__all__ = ["propagate"]


def propagate(name: str, latent: Gaussian) -> Array:
    r"""Draw a latent function to pass it on, as between the layers of a deep GP.

    Registers `name/noise` :math:`\varepsilon \sim \mathcal N(0, 1)`, which engines draw
    afresh for each evaluation of the density (doubly stochastic VI, Salimbeni &
    Deisenroth 2017), and `name` :math:`= \mu + \sigma\varepsilon` as deterministic.

    Args:
        name: Name of the deterministic site.
        latent: `f(X)`; with `full_cov=True` the rows are drawn jointly.

    Returns:
        The draw, `(N,)` or `(N, P)`.
    """
    checks.instance("latent", latent, Gaussian, "such as f(X)")
    axis = current_axis()
    replicates = () if axis is None else (jax.lax.axis_size(axis),)
    zeros = jnp.zeros(replicates + latent.shape, latent.mean.dtype)
    noise = numpyro.sample(
        f"{name}/noise",
        dist.Normal(zeros, 1.0).to_event(len(latent.shape) - 1),
        infer=as_infer(Noise(latent.sites)),
    )
    if axis is None:
        deviation = latent.correlate(noise)
    else:
        deviation = shared_draw(name, latent, noise, axis)
    return numpyro.deterministic(name, latent.mean + deviation)
