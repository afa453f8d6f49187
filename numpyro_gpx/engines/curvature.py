"""How wide the posterior of hyperparameters is about a point, by the bound there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.program.compile_cache import compiled
from numpyro_gpx.program.elbo import ELBO

__all__ = ["hessian_by_differences", "root_at_point", "root_of_covariance"]

# Step of the differences of gradients, in units of the real line.
_STEP = 1e-3
# Precisions no smaller than this: a prior of standard deviation 3 on the real line.
_LEAST_PRECISION = 0.1


def root_at_point(guide, fit, key):
    """Root of the hyperparameters' covariance of a guide that has them as points.

    `None` if the guide has a covariance of its own, or there are no hyperparameters.

    Args:
        guide: A guide.
        fit: Its fit.
        key: For the bound's draws, if it has any.
    """
    points = isinstance(guide, GaussianGuide) and guide.theta == "point"
    if not (points and guide.structure.hyperparameters):
        return None
    call, structure = fit.call, guide.structure

    def loss(theta, params, key, call):
        z = guide.unravel_unconstrained(structure.hyperparameters, theta)
        values = structure.constrain(z)
        change = sum(
            jnp.sum(structure.latents[n].transform.log_abs_det_jacobian(x, values[n]))
            for n, x in z.items()
        )
        here = {**params, guide.theta_name: theta}
        return -ELBO().mean(key, here, guide, call) - change

    theta = jnp.asarray(fit.params[guide.theta_name])
    slope = compiled(jax.grad(loss), theta, fit.params, key, call)
    hessian = hessian_by_differences(
        lambda theta: slope(theta, fit.params, key, call), theta
    )
    return jnp.asarray(root_of_covariance(hessian))


def hessian_by_differences(slope, theta) -> np.ndarray:
    """Second derivatives from gradients, two for each coordinate."""
    steps = _STEP * np.eye(theta.size, dtype=theta.dtype)
    rows = [
        (np.asarray(slope(theta + step)) - np.asarray(slope(theta - step)))
        / (2.0 * _STEP)
        for step in steps
    ]
    found = np.stack(rows)
    return 0.5 * (found + found.T)


def root_of_covariance(
    hessian: np.ndarray, least: float = _LEAST_PRECISION
) -> np.ndarray:
    """Lower factor of the inverse, its precisions no smaller than `least`."""
    values, vectors = np.linalg.eigh(np.nan_to_num(hessian))
    precision = np.maximum(values, least)
    return np.linalg.cholesky((vectors / precision) @ vectors.T)
