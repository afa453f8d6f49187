"""Draws of sites: those of the posterior, and what a model computes from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.program import Program
from numpyro_gpx.sites.marks import Noise, marked

__all__ = ["deterministic_sites", "with_deterministic"]


def deterministic_sites(program: Program) -> tuple[str, ...]:
    """Names of the `numpyro.deterministic`s that are functions of the latent sites.

    Layers of a deep GP are none: they are draws of noise, as large as the data.
    """
    layers = {name.removesuffix("/noise") for name in marked(program.trace, Noise)}
    return tuple(
        name
        for name, site in program.trace.items()
        if site["type"] == "deterministic" and name not in layers
    )


def with_deterministic(
    program: Program, params: dict, chains: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The draws `(chains, draws, ...)` with those of deterministic sites.

    Args:
        program: The model.
        params: Values of its `numpyro.param`s.
        chains: Draws of its latent sites.
    """
    names = deterministic_sites(program)
    if not (names and chains):
        return chains
    shape = next(iter(chains.values())).shape[:2]
    flat = {n: jnp.asarray(x.reshape(-1, *x.shape[2:])) for n, x in chains.items()}
    with one_at_a_time():
        found = run(_values_of, program.call, params, flat, names)
    found = {n: np.asarray(x).reshape(*shape, *x.shape[1:]) for n, x in found.items()}
    return {**chains, **found}


def _values_of(call: Call, params: dict, draws: dict, names: tuple[str, ...]):
    def one(draw):
        trace = call.trace({**params, **draw}, jr.key(0))
        return {name: jnp.asarray(trace[name]["value"]) for name in names}

    return jax.lax.map(one, draws)
