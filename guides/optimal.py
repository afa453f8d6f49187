r"""The optimal Gaussian guide: :math:`q^*(v \mid \theta)` in closed form."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.processes.collapse import (
    GaussianRows,
    Rows,
    collapse,
    entry_belief,
    row_sums,
    rows_at,
)
from numpyro_gpx.program.latent_inputs import integration
from numpyro_gpx.program.starts import init_to_prior_median
from numpyro_gpx.sites.marks import Collapsed, Held
from numpyro_gpx.sites.observation import observation

__all__ = ["OptimalGaussian"]


class OptimalGaussian(GaussianGuide):
    r"""The best :math:`q(v \mid \theta)` under a Gaussian likelihood, parameter-free.

    Reads kernel, inducing variables, inputs, noise and targets by tracing the model at
    θ. With it the ELBO equals the collapsed bound of Titsias (2009), and with
    `theta="point"` it is deterministic: use `gpx.fit_lbfgs`. Over latent inputs
    (`UnscentedLatent(OptimalGaussian(model))`) it is :math:`q^*(v \mid \theta, q(H))`,
    and the ELBO the bound of the Bayesian GPLVM.

    Needs exactly one GP site and one `gpx.observe` with a Gaussian likelihood, on all
    rows: a minibatch does not determine :math:`q^*`.

    Args:
        model: The model.
        theta: `"point"`, `"mean_field"` or `"full"`.
        prefix: Names parameters.
        init_loc_fn: Where the hyperparameters start.

    References:
        Thesis eq. 2.36-2.37; Titsias (2009); Titsias & Lawrence (2010).
    """

    def __init__(
        self, model, *, theta="point", prefix="auto", init_loc_fn=init_to_prior_median
    ):
        super().__init__(model, theta=theta, prefix=prefix, init_loc_fn=init_loc_fn)

    def learn(self, structure, call):
        if structure.plates:
            raise ValueError(
                "OptimalGaussian needs all rows; the model subsamples "
                f"{sorted(structure.plates)}. Leave `batch_size` out, or use "
                "WhitenedGaussian."
            )
        if len(structure.gps) != 1 or len(structure.observed) != 1:
            raise ValueError(
                "OptimalGaussian needs one GP site and one observed site; the model "
                f"has GP sites {list(structure.gps)} and observed sites "
                f"{list(structure.observed)}. Use WhitenedGaussian or "
                "ConditionalGaussian."
            )
        super().learn(structure, call)

    def beliefs(self, theta, call):
        return tuple(held.group for held in self.held(theta, call, {}))

    def held(self, theta, call, latents):
        """The belief; and the bound, if one covariance serves all outputs."""
        (name,), (observed,) = self.structure.gps, self.structure.observed

        def sites(values):
            trace = self.trace_given({**theta, **values}, call)
            seen = observation(trace[observed]).gaussian_rows("OptimalGaussian")
            return seen, trace[observed]["value"], trace[name]["scale"]

        def rows(values):
            return rows_at(*sites(values))

        axis, beliefs = integration(latents)
        signed = any(latent.signed for latent in latents.values())
        # Shapes and what does not depend on the points; the rest is not computed.
        seen, y, scale = sites(beliefs if axis is None else axis.first())
        gp = seen.gp
        if axis is None:
            every = jax.tree.map(lambda x: x[None], rows(beliefs))
            weights = jnp.ones(1)
        else:
            every, weights = jax.vmap(rows)(axis.values), axis.weights
        belief, bound = _solve(seen, every, weights, y, signed)
        if not gp.whiten:
            shift = gp.prior.inducing_mean(None if y.ndim == 1 else y.shape[1])
            belief = belief.affine(shift, gp.prior.lower())
        if bound is None:
            return (Held(Group.alone(name, belief)),)
        bound = bound if scale is None else scale * bound
        collapsed = Collapsed(self.model, observed, bound)
        return (Held(Group.alone(name, belief), collapsed),)


def _solve(seen: GaussianRows, rows: Rows, weights, y, signed):
    """The optimal belief, and the bound with it if outputs share a covariance."""
    prior, X, scale = seen.gp.prior, seen.X, seen.scale
    if rows.counts.ndim > 2 or prior.has_own_kernels:
        return entry_belief(prior, X, rows, weights, y, scale=scale), None
    sums = row_sums(prior, X, rows, weights, y, scale=scale, signed=signed)
    shared, bound = collapse(sums)
    if y.ndim == 1:
        return GaussianBelief(shared.mean[0], shared.scale_tril), bound
    return shared, bound
