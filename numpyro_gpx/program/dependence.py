"""Which latent sites of a model read which: read off its jaxpr, nothing computed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.program.dataflow import dependencies
from numpyro_gpx.program.program import Program
from numpyro_gpx.sites.gp_calls import silenced_functions
from numpyro_gpx.sites.marks import GPMark, marked
from numpyro_gpx.sites.observation import made_here, observation

__all__ = ["Dependence", "added_gps", "dependence_of"]

# What moves a prior without widening it.
_PLACES = ("loc", "low", "high")


class Dependence(NamedTuple):
    """Who reads whom.

    Attributes:
        spreads: Latent site to the latent sites that the spread of its prior reads.
        effects: Observed site to the latent sites that its latent function reads beside
            GPs: an intercept, the effect of a group, a factor.
        means: GP site to the latent sites that its mean function reads.
    """

    spreads: dict[str, frozenset[str]]
    effects: dict[str, frozenset[str]]
    means: dict[str, frozenset[str]]


def dependence_of(program: Program) -> Dependence:
    """Trace the model at unknown values of its latent sites; GPs count for nothing."""
    latents = program.structure.latents
    names = [name for name, site in latents.items() if not site.is_gp]
    shapes = [
        jax.ShapeDtypeStruct(latents[name].shape, latents[name].dtype) for name in names
    ]
    places: list[tuple[str, str]] = []

    def look(values):
        known = dict(zip(names, values, strict=True))
        with handlers.block(), silenced_functions():
            trace = program.call.trace(known, jr.key(0))
        found = []
        for name in names:
            for leaf in jax.tree.leaves(_spread(trace[name]["fn"])):
                places.append(("spreads", name))
                found.append(jnp.asarray(leaf))
        for name, mark in marked(trace, GPMark).items():
            for leaf in jax.tree.leaves(mark.prior.mean):
                places.append(("means", name))
                found.append(jnp.asarray(leaf))
        for name in program.structure.observed:
            if made_here(trace[name]["fn"]) and program.structure.gps:
                places.append(("effects", name))
                found.append(_mean(observation(trace[name])))
        return found

    read = dependencies(jax.make_jaxpr(look)(shapes))
    result: dict[str, dict[str, frozenset[str]]] = {
        kind: {} for kind in Dependence._fields
    }
    for (kind, name), inputs in zip(places, read, strict=True):
        of = frozenset(names[i] for i in inputs) - {name}
        result[kind][name] = result[kind].get(name, frozenset()) | of
    return Dependence(**result)


def added_gps(program: Program) -> dict[str, tuple[str, ...]]:
    """Observed site to the GPs that it sees the sum of, where there are several."""
    found = {}
    for name in program.structure.observed:
        if not made_here(program.trace[name]["fn"]):
            continue
        seen = program.observation(name)
        if seen.likelihood is None:
            continue
        latent = seen.latent()
        origin = latent.origin if isinstance(latent, Gaussian) else ()
        gps = tuple(dict.fromkeys(term.gp.name for term in origin))
        if len(gps) > 1:
            found[name] = gps
    return found


def _mean(found):
    """Of the latent function; that of `gpx.exact` has no GP that could be silenced."""
    return jnp.zeros(()) if found.likelihood is None else found.latent().mean


def _spread(fn: dist.Distribution) -> list:
    """The parameters of a distribution that say how wide it is."""
    names = [n for n in fn.arg_constraints if n not in _PLACES and n in vars(fn)]
    # Those inside: of what is independent, transformed, truncated, mixed, ...
    inside = [part for x in vars(fn).values() for part in _distributions(x)]
    found = [] if inside else [getattr(fn, name) for name in names]
    for part in inside:
        found += _spread(part)
    if isinstance(fn, dist.TransformedDistribution):
        found += jax.tree.leaves(fn.transforms)
    return found


def _distributions(x) -> list[dist.Distribution]:
    every = x if isinstance(x, list | tuple) else [x]
    return [part for part in every if isinstance(part, dist.Distribution)]
