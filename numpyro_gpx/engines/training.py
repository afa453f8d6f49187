"""What the training of a guide shares: set-up, warm starts, the bound reported."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import (
    AutoGuide,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
)

from numpyro_gpx import checks
from numpyro_gpx.engines.engine import Outcome, Start
from numpyro_gpx.engines.retry import finding_a_start
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.guides.parts.base import SiteGuide, set_up
from numpyro_gpx.guides.parts.doubts import doubts_of
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.guides.parts.laplace import as_gaussian
from numpyro_gpx.notes import Note
from numpyro_gpx.program.call import Call, site_log_prob
from numpyro_gpx.program.compile_cache import once
from numpyro_gpx.program.elbo import Loss, replayed_values
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.bound import bound_of
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import GuidePosterior
from numpyro_gpx.sites.marks import is_auxiliary

__all__ = ["Training", "guide_of", "means_of", "without_density"]

# Draws of the bound that a fit with latent inputs reports.
_REPORTED_DRAWS = 1000
# Draws of an objective that has noise.
_OBJECTIVE_DRAWS = 100
# By how many nats a row the objective of a rule may exceed the bound without a word.
_TOLERATED_EXCESS = 0.1


def guide_of(guide, program: Program):
    """The guide of a program: the one given, or one of its class."""
    return checks.guide(guide, program.model)


def without_density(guide) -> str | None:
    """Why a guide that has no density cannot be trained by the bound alone."""
    if getattr(guide, "has_density", True):
        return None
    return (
        f"It would never train the discriminator of {type(guide).__name__}; use "
        "`gpx.fit_implicit`."
    )


class Training:
    """A guide on a program, ready to be trained.

    Attributes:
        program: The model.
        svi: Model, guide, optimiser and loss.
        params: Where parameters start, if that is known.
    """

    def __init__(self, program: Program, guide, optimizer, loss, start: Start):
        guide = guide_of(guide, program)
        if start.values:
            guide = _starting_at(guide, start.values, program)
        self.program = program
        self.svi = SVI(program.model, guide, optimizer, loss)
        with finding_a_start():
            set_up(guide, program)
        self.params = _warm_start(start.fit, guide, program)

    @property
    def guide(self):
        return self.svi.guide

    def posterior(self, params: dict, key) -> GuidePosterior:
        """The guide with these parameters, on all rows."""
        return GuidePosterior(self.guide, params, self.program.call, key=key)

    def where_not_finite(self, params: dict) -> str:
        """Where the first number that is not finite comes from, for a message."""
        bad = sorted(n for n, x in params.items() if not np.all(np.isfinite(x)))
        if bad:
            return f": the gradient of {bad[:3]} was not finite"
        names: list[str] = []

        def terms(call, params):
            found = self._log_densities(call, params)
            names.extend(name for name, _ in found)  # texts do not leave a program
            return [term for _, term in found]

        found = once(terms)(self.program.batched, params)
        for name, term in zip(names, found, strict=True):
            if not np.isfinite(term):
                return f": the log density of site `{name}` is {float(term)}"
        return ""

    def _log_densities(self, call: Call, params: dict) -> list[tuple[str, Array]]:
        """Of every site of guide and model, in their order, at one draw."""
        key_guide, key_model = jr.split(jr.key(0))
        with handlers.block():
            guide_trace = call.trace(params, key_guide, model=self.guide)
            values = {**params, **replayed_values(guide_trace, {})}
            model_trace = call.trace(values, key_model)
        return [
            (name, jnp.sum(site_log_prob(site)))
            for trace in (guide_trace, model_trace)
            for name, site in trace.items()
            # NumPyro marks factors of the model, too, as auxiliary.
            if site["type"] == "sample"
            and (site["is_observed"] or not is_auxiliary(site))
        ]

    def outcome(
        self, params: dict, key, info: dict[str, Any], notes, watch: Watch
    ) -> Outcome:
        """What the training comes to.

        Args:
            params: Of model and guide.
            key: Fixes the draws.
            info: What was recorded.
            notes: What is to be known of it.
            watch: Says whether there is time for an estimate of the bound.
        """
        loss = self.svi.loss if isinstance(self.svi.loss, Loss) else None
        guide, params, singular = as_gaussian(self.guide, params, self.program)
        doubts = [*doubts_of(self.guide, self.program), *singular]
        posterior = GuidePosterior(guide, params, self.program.call, key=key)
        found = [*doubts, *notes, *_unmoved(posterior)]
        if loss and posterior.integrates_latents() and not watch.stopped:
            reported, more = _report_bound(self.program, posterior, loss)
            info, found = {**info, **reported}, [*found, *more]
        return Outcome(posterior, params, info, notes=tuple(found), loss=loss)


def _unmoved(posterior: GuidePosterior) -> list[Note]:
    """On GPs about which nothing was learnt: means that are still exactly 0."""
    guide = posterior.guide
    if not isinstance(guide, GaussianGuide):
        return []
    names = {
        f"{site}_{guide.prefix}_loc": site
        for site in guide.structure.gps
        if not guide.structure.latents[site].inner
    }
    still = sorted(
        site
        for name, site in names.items()
        if name in posterior.params and not np.any(np.asarray(posterior.params[name]))
    )
    if not still:
        return []
    return [
        Note(
            "unmoved", "wrong",
            f"The means of {still} are exactly 0, where they started: as with factors "
            "of a product, whose gradient is 0 while all of them are.",
            "Start from another fit (`init=`), or sample with `gpx.fit_nuts`.",
        )
    ]  # fmt: skip


def _report_bound(program, posterior: GuidePosterior, loss: Loss):
    """A bound beside the objective, which with few points is none; doubts about it."""
    call = program.batched
    bound = bound_of(program, call, posterior, loss.bound(), _REPORTED_DRAWS)
    objective = bound_of(program, call, posterior, loss, _OBJECTIVE_DRAWS)
    info = {
        "elbo": bound.value,
        "elbo_standard_error": bound.standard_error,
        "objective": objective.value,
    }
    noise = bound.standard_error + objective.standard_error
    num_rows = sum(plate.size for plate in program.structure.row_plates.values())
    excess = objective.value - bound.value
    if not (excess > 10.0 * noise and excess > _TOLERATED_EXCESS * num_rows):
        return info, []
    if posterior.closed_form_latents():
        cause = (
            "closed-form expectations have lost their digits, as they do where "
            "inducing inputs are nearly dependent."
        )
        advice = "Fit with a larger jitter, such as `with gpx.jitter(1e-6):`."
    else:
        cause = "the fit exploits the few points of its rule."
        advice = (
            "Use more of them, such as `gpx.cubature.GaussHermite(5)`, or "
            "`MonteCarlo` with `WhitenedGaussian`."
        )
    message = (
        f"The objective, {objective.value:.5g}, is far above the bound, "
        f"{bound.value:.5g} (standard error {bound.standard_error:.2g}): {cause}"
    )
    return info, [Note("objective", "wrong", message, advice, info)]


def _starting_at(guide, values: dict, program: Program):
    """The guide with these starting values; it is the user's, and stays as it was."""
    gps = sorted(set(values) & set(program.structure.gps))
    if gps and isinstance(guide, SiteGuide):
        raise ValueError(
            f"`init` has values of the GP sites {gps}, which guides start at 0. Give "
            f"hyperparameters, {list(program.structure.hyperparameters)}, or an "
            "earlier fit."
        )
    if not isinstance(guide, AutoGuide):
        raise ValueError(
            "`init` as a dictionary needs a guide that looks for starting values, "
            "such as those of `gpx.guides`; or pass an earlier fit."
        )
    guide = copy.copy(guide)
    otherwise = guide.init_loc_fn

    def strategy(site=None):
        if site is None:
            return functools.partial(strategy)  # NumPyro asks it for its `func`
        if site["type"] == "sample" and site["name"] in values:
            return values[site["name"]]
        return otherwise(site)

    guide.init_loc_fn = strategy
    return guide


def _warm_start(init: Fit | None, guide, program: Program) -> dict[str, Any] | None:
    """Parameters of another fit: the model's by name, the guide's if it is alike.

    A name means different things in different guides (`f_auto_loc` is a mean of `v` or
    a pseudo-target); of an unlike guide only its mean hyperparameters are taken.
    """
    if init is None:
        return None
    same = {}
    for function in (program.model, guide):
        trace = program.batched.abstract_trace(function)
        for name, site in trace.items():
            if site["type"] == "param" and name in init.params:
                ours = function is not guide or _means_the_same(init, guide, name)
                if ours and _shapes(site["value"]) == _shapes(init.params[name]):
                    same[name] = init.params[name]
    found = {**_mean_theta(init, guide), **same}
    if not found:
        raise ValueError(
            "`init` must be a fit of a like model or guide: none of its parameters "
            f"{sorted(init.params)} and none of its hyperparameters "
            f"{list(init.structure.hyperparameters)} fit this one."
        )
    return found


def _shapes(param) -> list:
    """Of a parameter's arrays: NumPyro's networks are trees of them."""
    leaves = jax.tree_util.tree_leaves_with_path(param)
    return [(place, jnp.shape(x)) for place, x in leaves]


def _means_the_same(init: Fit, guide, name: str) -> bool:
    """Whether a parameter means the same in the guide of another fit."""
    other = getattr(init.posterior, "guide", None)
    if isinstance(guide, SiteGuide) and isinstance(other, SiteGuide):
        return guide.meaning(name) == other.meaning(name)
    # What a Laplace approximation has come to is a normal about the same place.
    alike = {AutoLaplaceApproximation: AutoMultivariateNormal}
    return type(other) in (type(guide), alike.get(type(guide)))


def _mean_theta(init: Fit, guide) -> dict:
    """The start of a Gaussian guide's `q(theta)` at the mean of other draws."""
    if not isinstance(guide, GaussianGuide):
        return {}
    sites, names = guide.structure.latents, guide.structure.hyperparameters
    means = means_of(init, names)
    if not names or not all(
        n in means and means[n].shape == sites[n].shape for n in names
    ):
        return {}
    return {guide.theta_name: ravel_pytree(guide.structure.unconstrain(means))[0]}


def means_of(fit: Fit, names) -> dict[str, Array]:
    """Means of these sites over the draws of a fit, as far as it has them."""
    draws = fit.draws()
    return {n: jnp.asarray(draws[n].mean(axis=0)) for n in names if n in draws}
