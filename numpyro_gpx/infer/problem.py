"""What variational fits share: arguments checked, warm starts, the bound reported."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide

from numpyro_gpx import checks
from numpyro_gpx.guides.parts.base import SiteGuide
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.infer.retry import with_retry
from numpyro_gpx.numerics.threads import single_blas_thread
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.elbo import Loss
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import GuidePosterior

__all__ = ["Result", "VariationalProblem"]

# Draws of the bound that a fit with latent inputs reports.
_REPORTED_DRAWS = 1000
# Draws of an objective that has noise.
_OBJECTIVE_DRAWS = 100
# By how many nats a row the objective of a rule may exceed the bound without a word.
_TOLERATED_EXCESS = 0.1


class Result(NamedTuple):
    """What a run comes to: parameters, losses, a key for the draws, and a record."""

    params: dict
    losses: np.ndarray
    key: jax.Array
    info: dict[str, Any]


class VariationalProblem:
    """Checked arguments at the start, a `Fit` at the end."""

    def __init__(
        self, call: Call, guide, key, *, optimizer, loss, init, batch_size=None
    ):
        self.started = time.perf_counter()
        checks.key(key)
        if isinstance(loss, type):
            raise TypeError(
                f"`loss` must be a loss; got the class {loss.__name__}. Make one: "
                f"`{loss.__name__}(...)`."
            )
        self.key = key
        if init is not None:
            checks.instance("init", init, Fit, "such as an earlier fit of the model")
        self.program = Program.of(call, batch_size)
        self.svi = SVI(call.model, guide, optimizer, loss)
        self.batch_size = batch_size
        _guide_setup(guide, self.program)
        self.start = _warm_start(init, guide, self.program)

    def solve(self, run: Callable[[], Result], *, engine: str) -> Fit:
        """Call `run`, once more with a larger jitter if need be; make it a fit."""

        def attempt(jitter):
            self.program = self.program.with_jitter(jitter)
            with single_blas_thread():
                return run()

        result = with_retry(attempt, self.program.batched, None)
        posterior = self.posterior(result.params, result.key)
        fit = Fit(
            self.program, posterior,
            engine=engine, params=result.params, batch_size=self.batch_size,
            seconds=time.perf_counter() - self.started,
            info={"losses": result.losses, **result.info}, loss=self._known_loss,
        )  # fmt: skip
        if posterior.integrates_latents():
            _report_bound(fit, closed=posterior.closed_form_latents())
        return fit

    @property
    def _known_loss(self):
        loss = self.svi.loss
        return loss if isinstance(loss, Loss) else None

    def posterior(self, params: dict, key) -> GuidePosterior:
        """The guide with these parameters, on all rows."""
        return GuidePosterior(self.svi.guide, params, self.program.call, key=key)


def _report_bound(fit: Fit, *, closed: bool) -> None:
    """Record a bound beside the objective, which with few points is none."""
    bound = fit.elbo(_REPORTED_DRAWS)
    fit.info["elbo"], fit.info["elbo_standard_error"] = bound
    objective = fit.objective(_OBJECTIVE_DRAWS)
    fit.info["objective"] = objective.value
    noise = bound.standard_error + objective.standard_error
    num_rows = sum(plate.size for plate in fit.structure.row_plates.values())
    excess = objective.value - bound.value
    if excess > 10.0 * noise and excess > _TOLERATED_EXCESS * num_rows:
        if closed:
            cause = (
                "closed-form expectations have lost their digits, as they do where "
                "inducing inputs are nearly dependent. Fit with a larger jitter, such "
                "as `with gpx.jitter(1e-6):`."
            )
        else:
            cause = (
                "the fit exploits the few points of its rule. Use more of them, such "
                "as `gpx.cubature.GaussHermite(5)`, or `MonteCarlo` with "
                "`WhitenedGaussian`."
            )
        warnings.warn(
            f"The objective, {objective.value:.5g}, is far above the bound, "
            f"{bound.value:.5g} (standard error {bound.standard_error:.2g}): {cause}",
            stacklevel=5,
        )


def _guide_setup(guide, program: Program) -> None:
    """Let the guide learn the model's sites from concrete arguments."""
    if isinstance(guide, SiteGuide):
        guide.adopt(program)
    elif isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        # NumPyro's guides keep the values of their first call, which must not be
        # tracers of a compiled `init`.
        with handlers.block(), handlers.seed(rng_seed=0):
            program.batched.run(guide)


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
                if ours and jnp.shape(site["value"]) == jnp.shape(init.params[name]):
                    same[name] = init.params[name]
    return {**_mean_theta(init, guide), **same}


def _means_the_same(init: Fit, guide, name: str) -> bool:
    """Whether a parameter means the same in the guide of another fit."""
    other = getattr(init.posterior, "guide", None)
    if isinstance(guide, SiteGuide) and isinstance(other, SiteGuide):
        return guide.meaning(name) == other.meaning(name)
    return type(other) is type(guide)


def _mean_theta(init: Fit, guide) -> dict:
    """The start of a Gaussian guide's `q(theta)` at the mean of other draws."""
    if not isinstance(guide, GaussianGuide):
        return {}
    draws, sites = init.draws(), guide.structure.latents
    names = guide.structure.hyperparameters
    if not names or not all(
        n in draws and draws[n].shape[1:] == sites[n].shape for n in names
    ):
        return {}
    means = {n: jnp.asarray(draws[n].mean(axis=0)) for n in names}
    return {guide.theta_name: ravel_pytree(guide.structure.unconstrain(means))[0]}
