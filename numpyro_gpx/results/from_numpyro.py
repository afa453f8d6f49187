"""What a fit is made of, from plain NumPyro results."""

from __future__ import annotations

from typing import Any

import jax.random as jr
import numpy as np

from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import require_params
from numpyro_gpx.program.elbo import Loss
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior, GuidePosterior
from numpyro_gpx.results.samplers import engine_name, kernel_params

__all__ = ["mcmc_parts", "svi_parts"]


def svi_parts(svi, result, *args, key, **kwargs) -> dict[str, Any]:
    """Arguments of `Fit`; see `Fit.from_svi`."""
    params = result if isinstance(result, dict) else result.params
    losses = None if isinstance(result, dict) else np.asarray(result.losses)
    batch_size = kwargs.pop("batch_size", None)
    key = jr.key(0) if key is None else key
    program = Program.unchecked(Call.create(svi.model, args, kwargs))
    return {
        "program": program,
        "posterior": GuidePosterior(svi.guide, params, program.call, key=key),
        "engine": "svi",
        "params": params,
        "batch_size": batch_size,
        "info": {} if losses is None else {"losses": losses},
        "loss": svi.loss if isinstance(svi.loss, Loss) else None,
    }


def mcmc_parts(mcmc, *args, engine, params, **kwargs) -> dict[str, Any]:
    """Arguments of `Fit`; see `Fit.from_mcmc`."""
    batch_size = kwargs.pop("batch_size", None)
    program = Program.unchecked(Call.create(mcmc.sampler.model, args, kwargs))
    params = kernel_params(mcmc.sampler) if params is None else params
    require_params(program.structure, params)
    draws = mcmc.get_samples(group_by_chain=True)
    extra = mcmc.get_extra_fields(group_by_chain=True)
    return {
        "program": program,
        "posterior": ChainPosterior({n: draws[n] for n in program.structure.latents}),
        "engine": engine or engine_name(mcmc.sampler),
        "params": params,
        "batch_size": batch_size,
        "sample_stats": {name: np.asarray(x) for name, x in extra.items()},
    }
