r"""Expectations of likelihoods over latents, registered on the types of both.

`expected_log_prob(likelihood, latent, y)` is :math:`\mathbb E[\log p(y_n \mid f_n)]`,
`predictive_log_prob` is :math:`\log\mathbb E[p(y_n \mid f_n)]`, entry by entry where
the outputs of a row are independent given the latent; `joint_density` has the density
of a row whose outputs are not. A new pair is a new function registered here or
elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from multipledispatch import Dispatcher

from numpyro_gpx.likelihoods import Gaussian as GaussianLikelihood
from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.numerics.factor import positive
from numpyro_gpx.processes.latent import Gaussian, Latent

__all__ = [
    "check_latent",
    "expected_log_prob",
    "is_conjugate",
    "predictive_cdf",
    "predictive_log_prob",
    "predictive_moments",
    "predictive_probabilities",
]

expected_log_prob = Dispatcher("expected_log_prob")
predictive_log_prob = Dispatcher("predictive_log_prob")


def check_latent(name: str, likelihood: Likelihood, latent: Latent) -> None:
    """Raise if a likelihood needs more than is known of a latent."""
    moments_only = isinstance(latent, Gaussian) and latent.moments_only
    if moments_only and not is_conjugate(likelihood):
        raise ValueError(
            f"At uncertain inputs only the mean and variance of the latent function at "
            f"site `{name}` are known, which suffice for a Gaussian likelihood with "
            f"the identity as link; got {type(likelihood).__name__}. Use a rule with "
            "points, such as `gpx.cubature.Unscented()`."
        )


@expected_log_prob.register(Likelihood, Latent, object)
def _(likelihood, latent, y):
    if likelihood.latent_ndim:
        raise ValueError(_needs_independent(likelihood))
    log_w, means, variances = latent.components()
    each = jax.vmap(likelihood.expected_log_prob, (None, 0, 0))
    return jnp.tensordot(jnp.exp(log_w), each(y, means, variances), axes=1)


@expected_log_prob.register(Likelihood, Gaussian, object)
def _(likelihood, latent, y):
    if latent.is_known:
        return likelihood.log_prob(y, latent.mean)
    # Marginals suffice: outputs that depend on each other have terms of their own.
    if latent.between is not None and likelihood.latent_ndim:
        raise ValueError(_needs_independent(likelihood))
    return likelihood.expected_log_prob(y, latent.mean, positive(latent.var))


@expected_log_prob.register(GaussianLikelihood, Latent, object)
def _(likelihood, latent, y):
    if likelihood.is_conjugate:  # mean and variance say it all
        return likelihood.expected_log_prob(y, latent.mean, positive(latent.var))
    return expected_log_prob.dispatch(Likelihood, Latent, object)(likelihood, latent, y)


@expected_log_prob.register(GaussianLikelihood, Gaussian, object)
def _(likelihood, latent, y):
    return expected_log_prob.dispatch(Likelihood, Gaussian, object)(
        likelihood, latent, y
    )


@predictive_log_prob.register(Likelihood, Latent, object)
def _(likelihood, latent, y):
    if likelihood.latent_ndim:
        raise ValueError(_needs_independent(likelihood))
    log_w, means, variances = latent.components()
    each = jax.vmap(likelihood.predictive_log_prob, (None, 0, 0))
    terms = each(y, means, variances)
    return jax.nn.logsumexp(
        terms + log_w.reshape((-1,) + (1,) * (terms.ndim - 1)), axis=0
    )


@predictive_log_prob.register(Likelihood, Gaussian, object)
def _(likelihood, latent, y):
    if latent.is_known:
        return likelihood.log_prob(y, latent.mean)
    if latent.between is not None and likelihood.latent_ndim:
        raise ValueError(_needs_independent(likelihood))
    return likelihood.predictive_log_prob(y, latent.mean, positive(latent.var))


def predictive_moments(likelihood: Likelihood, latent: Latent):
    """Mean and variance of the targets, entry by entry."""
    if is_conjugate(likelihood) or isinstance(latent, Gaussian):
        return likelihood.predictive_moments(latent.mean, positive(latent.var))
    log_w, means, variances = latent.components()
    means, variances = jax.vmap(likelihood.predictive_moments)(means, variances)
    mean = jnp.tensordot(jnp.exp(log_w), means, axes=1)
    spread = variances + (means - mean[None]) ** 2
    return mean, jnp.tensordot(jnp.exp(log_w), spread, axes=1)


def predictive_cdf(likelihood: Likelihood, latent: Latent, y):
    """Predictive probability of targets at most `y`, entry by entry."""
    if isinstance(latent, Gaussian):
        return likelihood.predictive_cdf(y, latent.mean, positive(latent.var))
    log_w, means, variances = latent.entry_components()
    each = jax.vmap(likelihood.predictive_cdf, (None, 0, 0))
    return jnp.tensordot(jnp.exp(log_w), each(y, means, variances), axes=1)


def predictive_probabilities(likelihood: Likelihood, latent: Latent):
    """Predictive probabilities of the labels, `(N, C)`."""
    if isinstance(latent, Gaussian):
        return likelihood.predictive_probabilities(latent.mean, positive(latent.var))
    log_w, means, variances = latent.components()
    each = jax.vmap(likelihood.predictive_probabilities)(means, variances)
    return jnp.tensordot(jnp.exp(log_w), each, axes=1)


def is_conjugate(likelihood: Likelihood) -> bool:
    """Whether mean and variance of the latent are all that it needs."""
    return isinstance(likelihood, GaussianLikelihood) and likelihood.is_conjugate


def _needs_independent(likelihood):
    return (
        f"{type(likelihood).__name__} needs independent Gaussian latent functions; "
        "those of products, and of `A @ g(X)`, are not. Stack GPs instead."
    )
