"""The bound of a `ConditionalGaussian` in its pseudo-observations, and their update."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array

from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.processes.collapse import from_precision
from numpyro_gpx.program.call import Call, site_log_prob
from numpyro_gpx.program.elbo import group_kl, scaled
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.sites.marks import GPMark, marked

__all__ = ["Place", "Pseudo", "PseudoBound"]


class Pseudo(NamedTuple):
    """The pseudo-observation of one GP's `u`: `(*P, M, M)` and `(*P, M)`."""

    precision: Array
    linear: Array


class Place(NamedTuple):
    """Where the updates are: hyperparameters on the real line, pseudo-observations."""

    theta: Array
    pseudo: dict[str, Pseudo]


class PseudoBound:
    """The bound as a function of hyperparameters and pseudo-observations."""

    def __init__(self, structure: Structure):
        self.structure = structure
        self.names = structure.hyperparameters

    def unravel(self, theta: Array) -> dict[str, Array]:
        """Hyperparameters by site, on the real line."""
        return self.structure.unravel(self.names, theta)

    def gps(self, theta: Array, call: Call) -> dict[str, GPMark]:
        """The GPs at these hyperparameters."""
        sites = self.structure.latents
        zeros = {
            n: jnp.zeros(sites[n].shape, sites[n].dtype) for n in self.structure.gps
        }
        values = self.structure.constrain(self.unravel(theta))
        return marked(call.trace({**values, **zeros}, jr.key(0)), GPMark)

    def beliefs(self, theta, pseudo, call) -> dict[str, GaussianBelief]:
        """What is believed of every GP's `v`."""
        gps = self.gps(theta, call)
        return {name: _belief(gps[name], pseudo[name]) for name in pseudo}

    def __call__(self, theta, pseudo, call) -> Array:
        beliefs = self.beliefs(theta, pseudo, call)
        likelihood, prior, trace = self.terms(theta, beliefs, call)
        groups = [Group.alone(name, belief) for name, belief in beliefs.items()]
        divergence = sum((group_kl(g, trace) for g in groups), start=jnp.zeros(()))
        return likelihood + prior - divergence

    def terms(self, theta, beliefs, call):
        """Expected log likelihood, log prior on the real line, and the trace."""
        z = self.unravel(theta)
        values = self.structure.constrain(z)
        trace = call.trace({**values, **beliefs}, jr.key(0))
        likelihood, prior = jnp.zeros(()), jnp.zeros(())
        for name, site in trace.items():
            if site["type"] != "sample" or name in beliefs:
                continue
            term = scaled(site, jnp.sum(site_log_prob(site)))
            if site["is_observed"]:
                likelihood = likelihood + term
            else:
                change = self.structure.latents[name].transform.log_abs_det_jacobian
                prior = prior + term + jnp.sum(change(z[name], values[name]))
        return likelihood, prior, trace

    def updated(self, place: Place, call: Call) -> dict[str, Pseudo]:
        """The pseudo-observations that the natural gradient asks for."""
        if not place.pseudo:
            return {}
        gps = self.gps(place.theta, call)
        beliefs = self.beliefs(*place, call)

        def likelihood(beliefs):
            return self.terms(place.theta, beliefs, call)[0]

        slopes = jax.grad(likelihood)(beliefs)
        return {name: _natural(gps[name], beliefs[name], slopes[name]) for name in gps}


def _belief(gp: GPMark, pseudo: Pseudo) -> GaussianBelief:
    def one(factor, mean, precision, linear):
        half = factor.multiply_t(precision)  # R^T Lambda
        whole = factor.multiply_t(half.T)
        eye = jnp.eye(whole.shape[0], dtype=whole.dtype)
        linear = factor.multiply_t((linear - precision @ mean)[:, None])[:, 0]
        return from_precision(eye + 0.5 * (whole + whole.T), linear)

    return gp.each_output(one, *pseudo)


def _natural(gp: GPMark, belief: GaussianBelief, slope: GaussianBelief) -> Pseudo:
    """Pseudo-observations from the gradients in mean and root of a belief."""

    def one(factor, mean, m, root, of_mean, of_root):
        # With S = L L^T, dL as a whole matrix is 2 (dS) L.
        inverse = solve_triangular(
            root, jnp.eye(root.shape[0], dtype=root.dtype), lower=True
        )
        precision = -of_root @ inverse
        values, vectors = jnp.linalg.eigh(0.5 * (precision + precision.T))
        precision = (vectors * jnp.maximum(values, 0.0)) @ vectors.T
        linear = of_mean + precision @ m
        half = factor.solve_t(precision)
        in_u = factor.solve_t(half.T)
        in_u = 0.5 * (in_u + in_u.T)
        return Pseudo(in_u, factor.solve_t(linear[:, None])[:, 0] + in_u @ mean)

    arrays = belief.mean, belief.scale_tril, slope.mean, slope.scale_tril
    return gp.each_output(one, *arrays)
