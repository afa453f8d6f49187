"""Whether data lie where a model at its start could see them: units, mostly.

Asked only of data in odd units; data of mean 0 and scale 1 pay nothing.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.likelihoods import Gaussian
from numpyro_gpx.notes import Note
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import once
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.starts import initial_values
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.sites.gp_calls import recorded_calls
from numpyro_gpx.sites.observation import made_here, observation

__all__ = ["unit_notes"]

# Columns whose mean or spread lies beyond these are in odd units.
_LARGE, _SMALL = 30.0, 0.03
# Share of a row's prior variance that nothing nearby explains, at the median row.
_ALONE = 0.999
# Standard deviations from what is expected, at the median row.
_FAR = 30.0
# Rows of the full GP that are looked at.
_ROWS = 500

_ADVICE = "Standardise them: `data = gpx.standardise(X, y)`."


def unit_notes(program: Program) -> list[Note]:
    """Notes on inputs beyond the reach of the kernel, and targets far from the prior.

    At the starting values of the hyperparameters.
    """
    structure, call = program.batched_structure, program.batched
    odd = any(_is_odd(x) for x in call.arrays())
    if not odd or structure.row_sites or structure.noise or not structure.gps:
        return []
    alone, far = once(_looked_at)(_Plain(call, structure), jr.key(0))
    notes = []
    for name, share in alone.items():
        if float(share) > _ALONE:
            notes.append(
                Note(
                    "units", "doubt",
                    f"At the starting values the rows of GP `{name}` lie out of reach "
                    "of each other and of its inducing inputs: "
                    f"{100 * float(share):.3g} % of the prior's variance is explained "
                    "by nothing nearby, and the data cannot be seen.",
                    f"Are the inputs in other units than the lengthscales? {_ADVICE}",
                    {"unexplained": float(share)},
                )
            )  # fmt: skip
    for name, distance in far.items():
        if float(distance) > _FAR:
            notes.append(
                Note(
                    "units", "doubt",
                    f"At the starting values the targets of `{name}` lie "
                    f"{float(distance):.3g} standard deviations from what the model "
                    "expects.",
                    "Are they in other units than variances and noise? "
                    f"{_ADVICE}",
                    {"distance": float(distance)},
                )
            )  # fmt: skip
    return notes


class _Plain:
    """A call whose GPs are asked like any other, with its sites; static to `jit`."""

    def __init__(self, call: Call, structure: Structure):
        none: frozenset = frozenset()
        self.own = {c.site for c in call.own_rows}
        self.call = dataclasses.replace(call, own_rows=none, multiply_only=none)
        self.structure = structure


def _is_odd(x) -> bool:
    if not (not_jax_tracer(x) and jnp.issubdtype(x.dtype, jnp.floating) and x.size):
        return False
    columns = (
        np.asarray(x, float).reshape(len(x), -1) if np.ndim(x) else np.zeros((1, 1))
    )
    mean, sd = np.nanmean(columns, axis=0), np.nanstd(columns, axis=0)
    return bool(
        np.any(np.abs(mean) > _LARGE)
        or np.any(sd > _LARGE)
        or np.any((sd > 0.0) & (sd < _SMALL))
    )


def _looked_at(asked: _Plain, key):
    """By GP the unexplained share of the median row, by site its targets' distance."""
    call, sites = asked.call, asked.structure.latents
    start = initial_values(call, asked.structure, key)
    gps = asked.structure.gps
    wide = {n: _prior(sites[n]) for n in gps if sites[n].whitened}
    with recorded_calls() as seen:
        trace = call.trace({**start, **wide}, key)
    alone, far = {}, {}
    for record in seen.calls.values():
        name, prior = record.gp.name, record.gp.prior
        if name in asked.own:
            K = prior.kernels[0](record.X[:_ROWS])
            d = jnp.sqrt(jnp.diagonal(K))
            correlation = jnp.abs(K / d[:, None] / d[None]) - jnp.eye(len(d))
            share = 1.0 - jnp.max(correlation, axis=1) ** 2
        else:
            A = prior.project(record.X)
            share = 1.0 - jnp.sum(A**2, axis=-2) / prior.variance(record.X)
        alone[name] = jnp.median(share)
    for name in asked.structure.observed:
        site = trace[name]
        if not (made_here(site["fn"]) and wide):
            continue
        # Of counts and the like the units are no choice.
        if isinstance(observation(site).likelihood, Gaussian):
            found = observation(site).predictive()
            apart = jnp.abs(site["value"] - found.mean) / jnp.sqrt(found.variance)
            far[name] = jnp.nanmedian(apart)
    return alone, far


def _prior(site) -> GaussianBelief:
    eye = jnp.eye(site.shape[-1], dtype=site.dtype)
    zeros = jnp.zeros(site.shape, site.dtype)
    return GaussianBelief(zeros, jnp.broadcast_to(eye, (*site.shape, len(eye))))
