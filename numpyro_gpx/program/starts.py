"""Where engines start."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import init_to_median

from numpyro_gpx.program.call import Call
from numpyro_gpx.program.structure import Structure

__all__ = ["init_to_prior_median", "initial_values"]


def init_to_prior_median(site=None):
    """Start at the prior median: exact where the distribution knows it.

    A NumPyro init strategy. `numpyro.infer.init_to_median` draws and sorts instead,
    which is what happens here for distributions without a quantile function.
    """
    if site is None:
        return functools.partial(init_to_prior_median)
    if site["type"] != "sample" or site["is_observed"]:
        return None
    fn = site["fn"]
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    try:
        median = fn.icdf(jnp.asarray(0.5))
    except (NotImplementedError, ImportError):  # some quantiles need TFP
        return init_to_median(site)
    shape = site["kwargs"].get("sample_shape", ()) + site["fn"].shape()
    return jnp.broadcast_to(median, shape)


def initial_values(
    call: Call,
    structure: Structure,
    key,
    *,
    init_strategy=init_to_prior_median,
    params: dict | None = None,
) -> dict:
    """Starting values on their supports: GP sites at 0, others by `init_strategy`."""
    zeros = {
        name: jnp.zeros(structure.latents[name].shape, structure.latents[name].dtype)
        for name in structure.gps
    }
    # The strategy looks at sites after the values below were handed out.
    model = handlers.substitute(call.model, data={**(params or {}), **zeros})
    start = handlers.substitute(
        handlers.seed(model, key), substitute_fn=_untouched(init_strategy)
    )
    tracer = handlers.trace(start)
    with handlers.block():
        call.run(tracer)
    return {name: tracer.trace[name]["value"] for name in structure.latents}


def _untouched(init_strategy):
    """Apply a NumPyro init strategy to latent sites that have no value yet."""

    def substitute_fn(site):
        if site["type"] != "sample" or site["is_observed"] or site["value"] is not None:
            return None
        return init_strategy(site)

    return substitute_fn
