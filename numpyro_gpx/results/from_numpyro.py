"""What a fit is made of, from plain NumPyro results."""

from __future__ import annotations

from typing import Any

import jax
import jax.random as jr
import numpy as np

from numpyro_gpx.guides.parts.base import check_draws_all_rows
from numpyro_gpx.guides.parts.doubts import doubts_of
from numpyro_gpx.guides.parts.laplace import as_gaussian
from numpyro_gpx.notes import Note
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import require_params
from numpyro_gpx.program.elbo import Loss
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import structure_of
from numpyro_gpx.results.chain_notes import arviz_names, kernel_notes, mixing_notes
from numpyro_gpx.results.facts import VARIATIONAL, Facts, kernel_facts, kernel_params
from numpyro_gpx.results.loss_notes import loss_notes
from numpyro_gpx.results.posteriors import ChainPosterior, GuidePosterior

__all__ = ["mcmc_parts", "svi_parts"]


def svi_parts(svi, result, *args, key, **kwargs) -> dict[str, Any]:
    """Arguments of `Fit`; see `Fit.from_svi`."""
    params = result if isinstance(result, dict) else result.params
    losses = None if isinstance(result, dict) else np.asarray(result.losses)
    batch_size = kwargs.pop("batch_size", None)
    key = jr.key(0) if key is None else key
    with one_at_a_time():
        program = Program.unchecked(Call.create(svi.model, args, kwargs))
        if batch_size is not None:
            batched = structure_of(program.call.batched(batch_size))
            check_draws_all_rows(svi.guide, batched)
        guide, params, notes = as_gaussian(svi.guide, params, program)
        doubts = doubts_of(guide, program)
    doubts += _not_finite(params)
    if losses is not None:
        notes += loss_notes(losses)
    return {
        "program": program,
        "posterior": GuidePosterior(guide, params, program.call, key=key),
        "notes": (*doubts, *notes),
        "facts": Facts("svi", VARIATIONAL),
        "params": params,
        "batch_size": batch_size,
        "info": {} if losses is None else {"losses": losses},
        "loss": svi.loss if isinstance(svi.loss, Loss) else None,
    }


def mcmc_parts(mcmc, *args, engine, params, **kwargs) -> dict[str, Any]:
    """Arguments of `Fit`; see `Fit.from_mcmc`."""
    batch_size = kwargs.pop("batch_size", None)
    with one_at_a_time():
        call = Call.create(mcmc.sampler.model, args, kwargs)
        program = Program.unchecked(call, discrete=True)
    params = kernel_params(mcmc.sampler) if params is None else params
    require_params(program.structure, params)
    draws = mcmc.get_samples(group_by_chain=True)
    extra = mcmc.get_extra_fields(group_by_chain=True)
    structure = program.structure
    missing = [name for name in structure.latents if name not in draws]
    if missing:
        raise ValueError(
            f"`mcmc` has no draws of {missing}, which the model samples and "
            "predictions need. Sites that NumPyro has summed out: sample them with "
            "`numpyro.infer.DiscreteHMCGibbs`."
        )
    posterior = ChainPosterior({name: draws[name] for name in structure.latents})
    mixing = mixing_notes(posterior.draws, discrete=structure.discrete)
    facts = kernel_facts(mcmc.sampler)
    stats = arviz_names(extra)
    return {
        "program": program,
        "posterior": posterior,
        "facts": facts._replace(name=engine or facts.name),
        "params": params,
        "batch_size": batch_size,
        "sample_stats": stats,
        "notes": (*kernel_notes(mcmc.sampler, stats, batch_size), *mixing),
    }


def _not_finite(params: dict) -> tuple[Note, ...]:
    """A note on parameters that are NaN or infinite."""
    bad = sorted(
        name
        for name, x in params.items()
        if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(x))
    )
    if not bad:
        return ()
    return (
        Note(
            "not_finite", "wrong",
            f"Parameters {bad} are not finite: nothing can be said with them.",
            "Lower the learning rate, or fit with `gpx.fit_svi`, which stops at the "
            "first such number and says where it comes from.",
            {"parameters": bad},
        ),
    )  # fmt: skip
