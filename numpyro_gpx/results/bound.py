"""Estimates of what a variational fit maximised."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.random as jr
import numpy as np

from numpyro_gpx.numerics.threads import single_blas_thread
from numpyro_gpx.program.elbo import ELBO, Loss
from numpyro_gpx.results.posteriors import GuidePosterior
from numpyro_gpx.results.predict import bound_estimates

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["Estimate", "estimate"]


class Estimate(NamedTuple):
    """A Monte Carlo estimate with its standard error."""

    value: float
    standard_error: float


def estimate(fit: Fit, loss: Loss, num_particles: int, key) -> Estimate:
    """The mean of `num_particles` estimates of a loss; NaN for samplers.

    One is enough where nothing is drawn.
    """
    posterior = fit.posterior
    if not isinstance(posterior, GuidePosterior):
        return Estimate(float("nan"), float("nan"))
    by_rule = isinstance(loss, ELBO) and not loss.draw_latents
    exact = (
        posterior.deterministic_objective()
        if by_rule
        else posterior.deterministic_given_beliefs()
    )
    if exact and not (fit.batch_size or fit.structure.noise):
        num_particles = 1
    fit.program.check_unchanged()
    call = fit.call.batched(fit.batch_size)
    keys = jr.split(fit.key if key is None else key, num_particles)
    with single_blas_thread():
        found = bound_estimates(call, posterior.guide, fit.params, keys, loss)
    values = np.asarray(found)
    error = 0.0
    if num_particles > 1:
        error = float(values.std(ddof=1) / np.sqrt(num_particles))
    return Estimate(float(values.mean()), error)
