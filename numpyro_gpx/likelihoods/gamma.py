"""Positive observations."""

__all__ = ["Exponential", "Gamma"]

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx.checked_fields import positive
from numpyro_gpx.likelihoods.base import (
    Likelihood,
    Moments,
    check_positive_link,
)
from numpyro_gpx.links import Exp, Link, get_link


class Gamma(Likelihood):
    r"""Positive observations with mean :math:`\mu = \text{link}(f)` and variance
    :math:`\mu^2 / a`: :math:`y \sim \text{Gamma}(a, a / \mu)`.

    With the exponential link expectations and moments are in closed form.

    Args:
        concentration: Shape :math:`a`, a scalar or broadcast to `y`.
        link: `"exp"`, `"softplus"`, or a `numpyro_gpx.links.Link` to positive values.
        num_nodes: Number of Gauss-Hermite nodes.
    """

    concentration: Float[Array, "..."] = positive("concentration")
    link: Link = eqx.field(default="exp", converter=get_link)
    num_nodes: int = eqx.field(default=64, static=True)
    log_concave = True

    def __check_init__(self):
        check_positive_link(self.link)

    @property
    def support(self):
        return constraints.positive

    def distribution(self, f):
        a = self.concentration.astype(f.dtype)
        return dist.Gamma(a, a / self.link(f))

    def log_prob(self, y, f):
        return _log_gamma(y, self.concentration, self.link.log(f))

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density; for the exponential link
        :math:`a\log a - a m - a y\,e^{-m + v/2} + (a - 1)\log y - \log\Gamma(a)`."""
        if isinstance(self.link, Exp):
            return _expected_log_gamma(y, self.concentration, f_mean, f_var)
        return super().expected_log_prob(y, f_mean, f_var)

    def predictive_moments(self, f_mean, f_var):
        r"""Mean and variance of `y`; for the exponential link
        :math:`\mu = e^{m + v/2}` and :math:`\mu^2 (e^v (1 + 1/a) - 1)`."""
        if isinstance(self.link, Exp):
            return _gamma_moments(self.concentration, f_mean, f_var)
        return super().predictive_moments(f_mean, f_var)

    def expected(self):
        return "positive numbers"

    def advice(self, y):
        return _positive_advice(y)


class Exponential(Likelihood):
    r"""Waiting times with mean :math:`\text{link}(f)`; a `Gamma` of concentration 1.

    Args:
        link: `"exp"`, `"softplus"`, or a `numpyro_gpx.links.Link` to positive values.
        num_nodes: Number of Gauss-Hermite nodes.
    """

    link: Link = eqx.field(default="exp", converter=get_link)
    num_nodes: int = eqx.field(default=64, static=True)
    log_concave = True

    def __check_init__(self):
        check_positive_link(self.link)

    @property
    def support(self):
        return constraints.positive

    def distribution(self, f):
        return dist.Exponential(1.0 / self.link(f))

    def log_prob(self, y, f):
        return _log_gamma(y, 1.0, self.link.log(f))

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density; for the exponential link
        :math:`-m - y\,e^{-m + v/2}`."""
        if isinstance(self.link, Exp):
            return _expected_log_gamma(y, 1.0, f_mean, f_var)
        return super().expected_log_prob(y, f_mean, f_var)

    def predictive_moments(self, f_mean, f_var):
        r"""Mean and variance of `y`; for the exponential link
        :math:`\mu = e^{m + v/2}` and :math:`\mu^2 (2 e^v - 1)`."""
        if isinstance(self.link, Exp):
            return _gamma_moments(1.0, f_mean, f_var)
        return super().predictive_moments(f_mean, f_var)

    def expected(self):
        return "positive numbers"

    def advice(self, y):
        return _positive_advice(y)


def _log_gamma(y, a, log_mean):
    one = jnp.ones((), log_mean.dtype)
    normaliser = a * jnp.log(a * one) - gammaln(a * one)
    # The ratio as one exponential: 1 / mean may overflow where y / mean does not.
    ratio = jnp.exp(jnp.log(y) - log_mean)
    return normaliser + (a - 1.0) * jnp.log(y) - a * (log_mean + ratio)


def _expected_log_gamma(y, a, f_mean, f_var):
    # log p(y | f) is linear in f but for e^-f, whose mean is e^(-m + v/2).
    return _log_gamma(y, a, f_mean - 0.5 * f_var) - 0.5 * a * f_var


def _gamma_moments(a, f_mean, f_var):
    mean = jnp.exp(f_mean + 0.5 * f_var)
    return Moments(mean, mean**2 * (jnp.expm1(f_var) + jnp.exp(f_var) / a))


def _positive_advice(y):
    return "Drop or shift them, or choose a likelihood on the reals."
