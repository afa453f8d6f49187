"""Draws of the prior as a fit: functions and predictions before any data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.primitives import Messenger

from numpyro_gpx import checks
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.density import require_params
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.facts import PRIOR, Facts
from numpyro_gpx.results.posteriors import ChainPosterior
from numpyro_gpx.sites.observation import made_here

__all__ = ["prior_parts"]


class _TargetsToCome(Messenger):
    """Takes observed sites without targets for what they are, not for latent ones."""

    def process_message(self, msg):
        waiting = msg["type"] == "sample" and not msg["is_observed"]
        if waiting and made_here(msg["fn"]):
            shape = msg["fn"].batch_shape + msg["fn"].event_shape
            msg["value"], msg["is_observed"] = jnp.zeros(shape), True


def prior_parts(model, *args, key, num_draws: int, params, **kwargs) -> dict[str, Any]:
    """Arguments of `Fit`; see `Fit.from_prior`."""
    checks.key(key)
    checks.at_least("num_draws", num_draws, 1)
    call = Call.create(_TargetsToCome(model), args, kwargs, function="from_prior")
    with one_at_a_time():
        program = Program.unchecked(call, discrete=True)
        require_params(program.structure, params)
        names = tuple(program.structure.latents)
        keys = jr.split(key, num_draws)
        draws = run(_prior_draws, program.call, params or {}, keys, names)
    chains = {name: np.asarray(x)[None] for name, x in draws.items()}
    return {
        "program": program,
        "posterior": ChainPosterior(chains, independent=True),
        "facts": Facts("prior", PRIOR, {"num_draws": num_draws}),
        "params": params,
    }


def _prior_draws(call: Call, params: dict, keys, names: tuple[str, ...]):
    def one(key):
        trace = call.trace(params, key)
        return {name: trace[name]["value"] for name in names}

    return jax.lax.map(one, keys)
