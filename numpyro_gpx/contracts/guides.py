"""What every guide must satisfy."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from numpyro.infer.autoguide import AutoGuide

from numpyro_gpx import checks
from numpyro_gpx.contracts.fits import fitted, same, saved_and_loaded, sound_draws
from numpyro_gpx.contracts.guide_draws import (
    beliefs_are_those_of_draws,
    density_is_that_of_draws,
    drawn,
)
from numpyro_gpx.contracts.shared import finite
from numpyro_gpx.engines.engine import Engine
from numpyro_gpx.engines.implicit import Implicit
from numpyro_gpx.engines.svi import SVI
from numpyro_gpx.guides.parts.base import SiteGuide, set_up
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import num_compiled
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.sites.marks import is_auxiliary

__all__ = ["check_guide"]

# Numbers that a model may have for its moments to be told from few draws.
_MOST_NUMBERS = 50
# Steps of each training that is looked at.
_STEPS = 2


def check_guide(guide, model, *args, key=None, **kwargs) -> None:
    r"""Raise unless a guide is one, and is what it says of itself.

    * It draws each latent site of the model, and no other, with the site's shape and
      dtype, inside its support.
    * It is trained by `gpx.fit`, and goes on from its own fit: losses and parameters
      (so their start and gradients) are finite, and some parameter moves.
    * The same key and parameters give the same draws, whatever data the guide has met
      before; other data of the same shapes compile nothing anew.
    * Its beliefs are those of its draws: in their units draws have mean 0 and
      covariance I.
    * Its log density is a function of what it draws, and that of its draws: the mean
      of :math:`r / q` over them is 1 for any density :math:`r`; here two Gaussians with
      moments of other draws. (Not asked of guides without `has_density`.)
    * Saved and loaded it draws the same, to the last bit; what it says of its settings
      (`config`) makes it again.
    * For another model than its own it is refused.

    It does not see whether the family suits the model, nor what a guide tells the bound
    beside its beliefs: points of rules for latent inputs, bounds in closed form.

    Moments are compared with 2000 draws at 5.5 standard errors. With keys that nobody
    has looked at, a right guide fails less often than once in a thousand checks.

    Args:
        guide: A guide for the model, or its class: any `AutoGuide`, NumPyro's too.
        model: A small NumPyro model: at most 50 latent numbers.
        args: Its arguments: inputs, targets.
        key: Random key; fixed if left out.
        kwargs: Its further arguments.
    """
    key = jr.key(0) if key is None else key
    guide = checks.guide(guide, model)
    name = getattr(guide, "__name__", type(guide).__name__)
    program = Program.of(Call.create(model, args, kwargs, function="check_guide"))
    _check_small(program)
    fresh = copy.copy(guide)
    _refuses_another_model(guide, name)
    set_up(guide, program)
    _draws_the_sites(guide, program, name)
    _says_its_settings(guide, name)
    fit = _trained(guide, program, key, name)
    found = drawn(guide, fit.params, program.call, key)
    sound_draws(found.values, program, name, lead=1)
    _meets_other_data(guide, fresh, fit, key, name)
    beliefs_are_those_of_draws(found, name)
    if getattr(guide, "has_density", True):
        density_is_that_of_draws(found, name)
    _draws_the_same_from_a_file(fit, name)


def _check_small(program: Program) -> None:
    shapes = [x.unconstrained_shape for x in program.structure.latents.values()]
    number = sum(math.prod(shape) for shape in shapes)
    if not 0 < number <= _MOST_NUMBERS:
        raise ValueError(
            "`model` must have latent sites of 1 to "
            f"{_MOST_NUMBERS} numbers in all, whose moments few draws tell; it has "
            f"{number}. Pass a smaller one."
        )


def _refuses_another_model(guide, name: str) -> None:
    """Raise if a guide does not know which model it was made for."""
    if not isinstance(guide, AutoGuide):
        return  # plain functions do not say

    def another(*args, **kwargs):
        return guide.model(*args, **kwargs)

    try:
        checks.guide(guide, another)
    except ValueError:
        return
    raise AssertionError(
        f"{name}: is taken for the guide of another model; its `model` must be the one "
        "that it was made for"
    )


def _draws_the_sites(guide, program: Program, name: str) -> None:
    """Raise unless the guide's sites are the model's; nothing is computed."""
    sites = {
        site: x
        for site, x in program.call.abstract_trace(guide).items()
        if x["type"] == "sample" and not x["is_observed"] and not is_auxiliary(x)
    }
    latents, noise = program.structure.latents, program.structure.noise
    missing = sorted(set(latents) - set(sites))
    assert not missing, f"{name}: does not draw the model's sites {missing}"
    unknown = sorted(set(sites) - set(latents) - set(noise))
    assert not unknown, (
        f"{name}: draws {unknown}, which the model does not have; what is only a means "
        "needs `infer={'is_auxiliary': True}`"
    )
    for site, latent in latents.items():
        value = sites[site]["value"]
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        assert shape == latent.shape, (
            f"{name}: draws of `{site}` have shape {shape}, the site has {latent.shape}"
        )
        assert dtype == latent.dtype, (
            f"{name}: draws of `{site}` are {dtype}, the site is {latent.dtype}"
        )
    if isinstance(guide, AutoGuide):
        _has_a_posterior(guide, program, name)


def _has_a_posterior(guide: AutoGuide, program: Program, name: str) -> None:
    """Raise unless `sample_posterior` has draws of all sites; nothing is computed."""
    params = {
        n: site["value"]
        for n, site in program.call.abstract_trace(guide).items()
        if site["type"] == "param"
    }

    def draw(params, call, key):
        return guide.sample_posterior(
            key, params, *call.args, sample_shape=(2,), **call.kwargs
        )

    found = eqx.filter_eval_shape(draw, params, program.call, jr.key(0))
    for site, latent in program.structure.latents.items():
        shape = getattr(found.get(site), "shape", None)
        assert shape == (2, *latent.shape), (
            f"{name}: `sample_posterior(..., sample_shape=(2,))` gives `{site}` the "
            f"shape {shape}, not {(2, *latent.shape)}"
        )


def _trained(guide, program: Program, key, name: str) -> Fit:
    """A fit of some steps; raises unless the next ones change the guide."""
    engine = _trainer(guide)
    before = fitted(name, program.call, engine, key)
    after = fitted(name, program.call, engine, key, init=before)
    own = [
        n
        for n, site in program.call.abstract_trace(guide).items()
        if site["type"] == "param"
    ]
    for fit in (before, after):
        finite(fit.info["losses"], f"{name}: losses")
        for parameter in own:
            finite(fit.params[parameter], f"{name}: values of `{parameter}`")
    moved = [n for n in own if not same(before.params[n], after.params[n])]
    assert moved or not own, f"{name}: training moves none of its parameters {own}"
    return after


def _trainer(guide) -> Engine:
    if getattr(guide, "has_density", True):
        return SVI(guide, num_steps=_STEPS)
    return Implicit(guide, num_rounds=_STEPS)


def _meets_other_data(guide, fresh, fit: Fit, key, name: str) -> None:
    """Raise if draws depend on what a guide has met before, or compile anew."""
    call = _other_call(fit.program)
    compiled = num_compiled()
    found = drawn(guide, fit.params, call, key)
    assert num_compiled() == compiled, (
        f"{name}: other data of the same shapes are compiled anew; it reads numbers "
        "where it should keep arrays"
    )
    for site, x in found.values.items():
        finite(x, f"{name}: draws of `{site}` for other data")
    set_up(fresh, Program.of(dataclasses.replace(call, own_rows=frozenset())))
    again = drawn(fresh, fit.params, call, key)
    assert same(found.values, again.values), (
        f"{name}: the same key, parameters and data give other draws: they depend on "
        "the data that the guide has met first, or on chance outside the key"
    )


def _other_call(program: Program) -> Call:
    """The call with its targets in another order: other data, as good as these."""
    call = program.call
    labels = iter(call.labels())
    targets = set(program.targets.values())

    def turned(x):
        return x[::-1] if eqx.is_array(x) and next(labels) in targets else x

    args, kwargs = jax.tree.map(turned, (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def _says_its_settings(guide, name: str) -> None:
    """Raise unless a guide of this library can be made again from its settings."""
    if not (isinstance(guide, SiteGuide) and guide.can_be_rebuilt):
        return
    try:
        config = json.loads(json.dumps(guide.config))
    except TypeError as error:
        raise AssertionError(f"{name}: `config` cannot be saved: {error}") from None
    again = type(guide).rebuild(guide.model, config)
    assert again.config == guide.config, (
        f"{name}: `rebuild` makes a guide of {again.config}, not of {guide.config}"
    )


def _draws_the_same_from_a_file(fit: Fit, name: str) -> None:
    """Raise unless a fit that was saved and loaded draws to the last bit as it did."""
    loaded = saved_and_loaded(fit)
    key = jr.key(1)
    draws = [f.posterior.sample(key, 3) for f in (fit, loaded)]
    assert same(*draws), f"{name}: saved and loaded it draws otherwise"
