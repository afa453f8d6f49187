"""Estimates of what a variational fit maximised."""

from __future__ import annotations

from typing import NamedTuple

import jax.random as jr
import numpy as np

from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.elbo import ELBO, Loss
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import GuidePosterior, Posterior
from numpyro_gpx.results.predict import bound_estimates

__all__ = ["Estimate", "bound_of"]


class Estimate(NamedTuple):
    """A Monte Carlo estimate with its standard error."""

    value: float
    standard_error: float


def bound_of(
    program: Program,
    call: Call,
    posterior: Posterior,
    loss: Loss,
    num_particles: int,
    key=None,
) -> Estimate:
    """The mean of estimates of a loss; NaN for samplers.

    Args:
        program: The model.
        call: It with its arguments, on all rows or on minibatches.
        posterior: A guide with its parameters.
        loss: What is estimated.
        num_particles: How many estimates; one is enough where nothing is drawn.
        key: Random key; by default always the same.
    """
    if not isinstance(posterior, GuidePosterior):
        return Estimate(float("nan"), float("nan"))
    by_rule = isinstance(loss, ELBO) and not loss.draw_latents
    exact = (
        posterior.deterministic_objective()
        if by_rule
        else posterior.deterministic_given_beliefs()
    )
    if exact and not (call.batch_size or program.structure.noise):
        num_particles = 1
    program.check_unchanged()
    keys = jr.split(jr.key(0) if key is None else key, num_particles)
    with one_at_a_time():
        found = bound_estimates(call, posterior.guide, posterior.params, keys, loss)
    values = np.asarray(found)
    error = 0.0
    if num_particles > 1:
        error = float(values.std(ddof=1) / np.sqrt(num_particles))
    return Estimate(float(values.mean()), error)
