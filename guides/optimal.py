r"""The optimal Gaussian guide: :math:`q^*(v \mid \theta)` in closed form."""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_gpx.conditionals import optimal_belief
from numpyro_gpx.distributions import ExpectedLikelihood
from numpyro_gpx.guides.base import GaussianGuide
from numpyro_gpx.infer.starts import init_to_prior_median
from numpyro_gpx.latents import GaussianLatent
from numpyro_gpx.likelihoods import Gaussian
from numpyro_gpx.links import Identity

__all__ = ["OptimalGaussian"]


class OptimalGaussian(GaussianGuide):
    r"""The best :math:`q(v \mid \theta)` under a Gaussian likelihood, parameter-free.

    Reads kernel, inducing variables, inputs, noise and targets by tracing the model at
    θ. With it the ELBO equals the collapsed bound of Titsias (2009), and with
    `theta="point"` it is deterministic: use `gpx.fit_lbfgs`.

    Needs exactly one GP site and one `gpx.observe` with a Gaussian likelihood, on all
    rows: a minibatch does not determine :math:`q^*`.

    Args:
        model: The model.
        theta: `"point"`, `"mean_field"` or `"full"`.
        prefix: Names parameters.
        init_loc_fn: Where the hyperparameters start.

    References:
        Thesis eq. 2.36-2.37; Titsias (2009).
    """

    def __init__(
        self, model, *, theta="point", prefix="auto", init_loc_fn=init_to_prior_median
    ):
        super().__init__(model, theta=theta, prefix=prefix, init_loc_fn=init_loc_fn)

    def setup(self, *args, **kwargs):
        super().setup(*args, **kwargs)
        if self.structure.plates:
            raise ValueError(
                "OptimalGaussian needs all rows; the model subsamples "
                f"{sorted(self.structure.plates)}. Leave `batch_size` out, or use "
                "WhitenedGaussian."
            )
        if len(self.structure.gps) != 1 or len(self.structure.observed) != 1:
            raise ValueError(
                "OptimalGaussian needs one GP site and one observed site; the model "
                f"has GP sites {list(self.structure.gps)} and observed sites "
                f"{list(self.structure.observed)}. Use WhitenedGaussian or "
                "ConditionalGaussian."
            )

    def belief(self, name, theta, args, kwargs):
        trace = self.trace_given(theta, args, kwargs)
        (observed,) = self.structure.observed
        site = trace[observed]
        fn = _expected_likelihood(observed, site["fn"])
        ((gp, X),) = fn.latent.sources
        y = site["value"]
        A = gp.prior.project(X)  # (M, N) or (P, M, N)
        known = jnp.einsum("...mn,...m->...n", A, gp.whitened).T
        prior_mean = fn.latent.mean - known  # mean function and offset
        precision = _weights(site, trace[name], fn) * fn.likelihood.scale**-2.0
        precision = jnp.broadcast_to(precision, y.shape)
        y = jnp.where(precision > 0.0, y, prior_mean)  # masked targets may be NaN
        belief = optimal_belief(A, y - prior_mean, precision)
        if gp.whiten:
            return belief
        num_outputs = None if y.ndim == 1 else y.shape[1]
        return belief.affine(gp.prior.inducing_mean(num_outputs), gp.prior.factor.L)


def _expected_likelihood(name, fn):
    if not isinstance(fn, ExpectedLikelihood) or not isinstance(
        fn.likelihood, Gaussian
    ):
        kind = fn.likelihood if isinstance(fn, ExpectedLikelihood) else fn
        raise ValueError(
            f"OptimalGaussian needs `gpx.observe` with a Gaussian likelihood at site "
            f"`{name}`; got {type(kind).__name__}. Use WhitenedGaussian or "
            "ConditionalGaussian."
        )
    if not isinstance(fn.likelihood.link, Identity):
        raise ValueError(
            f"OptimalGaussian needs a Gaussian likelihood with the identity as link at "
            f"site `{name}`; got {type(fn.likelihood.link).__name__}. Use "
            "WhitenedGaussian or ConditionalGaussian."
        )
    if not isinstance(fn.latent, GaussianLatent) or len(fn.latent.sources) != 1:
        raise ValueError(
            f"OptimalGaussian needs the plain `f(X)` of one GP at site `{name}`; got "
            "sums, products or a known function. Use WhitenedGaussian."
        )
    return fn


def _weights(site, gp_site, fn):
    """What multiplies each row's term, relative to the KL, `(N,)` or `(N, P)`."""
    y = site["value"]
    weights = jnp.ones(y.shape, fn.latent.mean.dtype)
    if gp_site["scale"] is not None:
        weights = weights / gp_site["scale"]
    for factor in (site["scale"], fn.weights, fn.keep):
        if factor is not None:
            factor = jnp.asarray(factor)
            rowwise = factor.ndim == 1 and y.ndim == 2
            weights = weights * (factor[:, None] if rowwise else factor)
    return weights
