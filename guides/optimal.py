r"""The optimal Gaussian guide: :math:`q^*(v \mid \theta)` in closed form."""

from __future__ import annotations

import jax

from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.conditionals import collapse
from numpyro_gpx.distributions import ExpectedLikelihood
from numpyro_gpx.guides.gaussian import GaussianGuide
from numpyro_gpx.guides.rows import Rows, entry_belief, row_sums, rows_at
from numpyro_gpx.infer.elbo import CollapsedBound
from numpyro_gpx.infer.latent_site import integration
from numpyro_gpx.infer.starts import init_to_prior_median
from numpyro_gpx.latents import GaussianLatent
from numpyro_gpx.likelihoods import Gaussian

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

    def adopt(self, structure, args, kwargs):
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
        super().adopt(structure, args, kwargs)

    def belief(self, name, theta, args, kwargs):
        return self.marks(name, theta, args, kwargs, {})["belief"]

    def marks(self, name, theta, args, kwargs, latents):
        """The belief; and the bound, if one covariance serves all outputs."""
        (observed,) = self.structure.observed

        def sites(values):
            trace = self.trace_given({**theta, **values}, args, kwargs)
            fn = _expected_likelihood(observed, trace[observed]["fn"])
            ((gp, X),) = fn.latent.sources
            return gp, X, trace[observed], trace[name]["scale"]

        def rows(values):
            gp, X, site, scale = sites(values)
            return rows_at(gp, X, site, scale)

        points, weights, beliefs = integration(latents)
        signed = any(latent.signed for latent in latents.values())
        # Shapes and what does not depend on the points; the rest is not computed.
        gp, X, site, scale = sites(jax.tree.map(lambda x: x[0], points) | beliefs)
        if points:
            every = jax.vmap(rows)(points)
        else:
            every = jax.tree.map(lambda x: x[None], rows(beliefs))
        belief, bound = _solve(gp.prior, X, every, weights, site, signed)
        if not gp.whiten:
            y = site["value"]
            shift = gp.prior.inducing_mean(None if y.ndim == 1 else y.shape[1])
            belief = belief.affine(shift, gp.prior.factor.L)
        if bound is None:
            return {"belief": belief}
        bound = bound if scale is None else scale * bound
        collapsed = CollapsedBound(self.model, observed, bound)
        return {"belief": belief, "collapsed": collapsed}


def _solve(prior, X, rows: Rows, weights, site, signed):
    """The optimal belief, and the bound with it if outputs share a covariance."""
    y, scale = site["value"], site["fn"].likelihood.scale
    if rows.counts.ndim > 2 or len(prior.kernels) > 1:
        return entry_belief(prior, X, rows, weights, y, scale=scale), None
    sums = row_sums(prior, X, rows, weights, y, scale=scale, signed=signed)
    shared, bound = collapse(sums)
    if y.ndim == 1:
        return GaussianBelief(shared.mean[0], shared.scale_tril), bound
    return shared, bound


def _expected_likelihood(name, fn):
    likelihood = fn.likelihood if isinstance(fn, ExpectedLikelihood) else fn
    if not isinstance(likelihood, Gaussian):
        raise ValueError(
            f"OptimalGaussian needs `gpx.observe` with a Gaussian likelihood at site "
            f"`{name}`; got {type(likelihood).__name__}. Use WhitenedGaussian or "
            "ConditionalGaussian."
        )
    if not likelihood.is_conjugate:
        raise ValueError(
            f"OptimalGaussian needs a Gaussian likelihood with the identity as link at "
            f"site `{name}`; got {type(likelihood.link).__name__}. Use "
            "WhitenedGaussian or ConditionalGaussian."
        )
    if not isinstance(fn.latent, GaussianLatent) or len(fn.latent.sources) != 1:
        raise ValueError(
            f"OptimalGaussian needs the plain `f(X)` of one GP at site `{name}`; got "
            "sums, products or a known function. Use WhitenedGaussian."
        )
    return fn
