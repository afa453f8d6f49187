"""Distributions of new targets, or of a function, row by row."""

from __future__ import annotations

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.numerics.factor import positive
from numpyro_gpx.numerics.jitter import current_jitter
from numpyro_gpx.processes.expectations import (
    is_conjugate,
    predictive_cdf,
    predictive_log_prob,
    predictive_moments,
    predictive_probabilities,
)
from numpyro_gpx.processes.joint_density import joint_log_prob, row_log_prob
from numpyro_gpx.processes.latent import Gaussian, Latent

__all__ = ["FromDistribution", "FromLatent", "FromLikelihood", "Predictive"]


class Predictive(eqx.Module):
    """What is predicted for N rows, `(N,)` or `(N, P)`."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """`(N,)` or `(N, P)`."""

    @property
    @abc.abstractmethod
    def mean(self) -> Float[Array, " N *P"]:
        """Mean of each entry."""

    @property
    @abc.abstractmethod
    def variance(self) -> Float[Array, " N *P"]:
        """Variance of each entry."""

    @abc.abstractmethod
    def log_prob(self, y) -> Float[Array, " N"]:
        """Log density of each row, joint over its outputs."""

    @abc.abstractmethod
    def sample(self, key, sample_shape=()) -> Array:
        """Draws `sample_shape + (N, *P)`."""

    @property
    @abc.abstractmethod
    def support(self) -> constraints.Constraint:
        """Where one entry lives."""

    # Whether entries are mixtures of normals, and `cdf` exact.
    is_normal_mixture: ClassVar[bool] = False

    # Whether entries are labels without an order: they have no mean.
    nominal: ClassVar[bool] = False

    def cdf(self, y) -> Float[Array, " N *P"]:
        """Probability of at most `y`, entry by entry."""
        raise NotImplementedError(f"{type(self).__name__} has no `cdf`.")

    @property
    def cov(self) -> Float[Array, "N P P"]:
        """Covariance between the outputs of each row."""
        raise ValueError("Outputs of these predictions have no covariance on record.")

    def probabilities(self) -> Float[Array, "N C"]:
        """Probabilities of the labels."""
        raise ValueError("Targets are not labels.")

    def check(self, y) -> None:
        """Raise if `y` cannot be a target."""


class FromLikelihood(Predictive):
    """Targets of a likelihood, given what is known of the latent function."""

    latent: Latent
    likelihood: Likelihood

    @property
    def shape(self):
        return self.likelihood.target_shape(self.latent.shape)

    @property
    def mean(self):
        return self._moments()[0]

    @property
    def variance(self):
        return self._moments()[1]

    def _moments(self):
        try:
            return predictive_moments(self.likelihood, self.latent)
        except NotImplementedError:
            of = self.likelihood.distribution(self.latent.mean)
            raise ValueError(_no_moments(of)) from None

    @property
    def cov(self):
        variance = self.variance
        if variance.ndim != 2:
            raise ValueError(
                "`cov` is that of a row's outputs, and each row has one target here; "
                "use `var`."
            )
        if not self.latent.outputs_depend:
            return jax.vmap(jnp.diag)(variance)
        if not is_conjugate(self.likelihood):
            raise ValueError(
                "The covariance of outputs that depend on each other is known for a "
                "Gaussian likelihood with the identity as link; got "
                f"{type(self.likelihood).__name__}. Use that of `draws`."
            )
        own = jax.vmap(jnp.diag)(variance - self.latent.var)
        return self.latent.output_cov() + own

    @property
    def is_normal_mixture(self):  # type: ignore[override]
        return self.likelihood.normal_mixture

    @property
    def nominal(self):  # type: ignore[override]
        return self.likelihood.nominal

    @property
    def support(self):
        return self.likelihood.support

    def log_prob(self, y):
        joint = None
        if jnp.ndim(y) == 2:
            joint = row_log_prob(self.likelihood, self.latent, y)
        if joint is not None:
            return joint
        rows = predictive_log_prob(self.likelihood, self.latent, y)
        if rows.shape != jnp.shape(y):
            raise ValueError(
                f"Parameters of {type(self.likelihood).__name__} must be scalars, or "
                f"have one entry for each of the targets {jnp.shape(y)}; with them the "
                f"densities have shape {rows.shape}."
            )
        return rows.sum(-1) if rows.ndim > 1 else rows

    def cdf(self, y):
        return predictive_cdf(self.likelihood, self.latent, y)

    def probabilities(self):
        return predictive_probabilities(self.likelihood, self.latent)

    def sample(self, key, sample_shape=()):
        key_latent, key_target = jax.random.split(key)
        f = self.latent.sample(key_latent, sample_shape)
        return self.likelihood.distribution(f).sample(key_target)

    def check(self, y):
        self.likelihood.check(y, name="y")


class FromLatent(Predictive):
    """The latent function itself."""

    latent: Latent
    is_normal_mixture: ClassVar[bool] = True

    @property
    def shape(self):
        return self.latent.shape

    @property
    def mean(self):
        return self.latent.mean

    @property
    def variance(self):
        return self.latent.var

    @property
    def cov(self):
        return self.latent.output_cov()

    @property
    def support(self):
        return constraints.real

    def log_prob(self, y):
        if self.latent.outputs_depend:
            if not isinstance(self.latent, Gaussian) or self.latent.moments_only:
                raise ValueError(
                    "Products of latents whose outputs depend on each other have no "
                    "density in closed form; use `mean`, `cov` and `draws`."
                )
            # A mixing of fewer functions than outputs has no density of its own.
            cov = self.latent.output_cov()
            jitter = current_jitter(cov.dtype) * jnp.mean(self.latent.var)
            cov = cov + jitter * jnp.eye(cov.shape[-1], dtype=cov.dtype)[None]
            return joint_log_prob(cov, y - self.latent.mean, jnp.ones(y.shape, bool))
        rows = self._marginals().log_prob(y)
        return rows.sum(-1) if rows.ndim > 1 else rows

    def cdf(self, y):
        return self._marginals().cdf(y)

    def sample(self, key, sample_shape=()):
        return self.latent.sample(key, sample_shape)

    def _marginals(self) -> dist.Distribution:
        if isinstance(self.latent, Gaussian):
            return dist.Normal(self.latent.mean, jnp.sqrt(positive(self.latent.var)))
        log_weights, means, variances = self.latent.components()
        mixing = dist.Categorical(logits=log_weights)
        sds = jnp.sqrt(positive(jnp.moveaxis(variances, 0, -1)))
        normal = dist.Normal(jnp.moveaxis(means, 0, -1), sds)
        return dist.MixtureSameFamily(mixing, normal)


class FromDistribution(Predictive):
    """A plain NumPyro distribution."""

    fn: dist.Distribution

    @property
    def shape(self):
        return self.fn.shape()

    @property
    def mean(self):
        return self._moment("mean")

    @property
    def variance(self):
        return self._moment("variance")

    def _moment(self, which):
        try:
            return getattr(self.fn, which)
        except NotImplementedError:
            raise ValueError(_no_moments(self.fn)) from None

    @property
    def is_normal_mixture(self):  # type: ignore[override]
        return isinstance(self.fn, dist.Normal)

    @property
    def support(self):
        support = self.fn.support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        return support

    def log_prob(self, y):
        log_prob = self.fn.log_prob(y)
        return log_prob.sum(-1) if log_prob.ndim > 1 else log_prob

    def cdf(self, y):
        return self.fn.cdf(y)

    def sample(self, key, sample_shape=()):
        return self.fn.sample(key, sample_shape)


def _no_moments(fn: dist.Distribution) -> str:
    lacks = " and no ".join(f"`{n}`" for n in ("mean", "variance") if not _has(fn, n))
    return (
        f"The distribution {type(fn).__name__} of the targets has no {lacks} in "
        "NumPyro; use `quantile` and `draws` of the prediction."
    )


def _has(fn: dist.Distribution, moment: str) -> bool:
    try:
        getattr(fn, moment)
    except NotImplementedError:
        return False
    return True
