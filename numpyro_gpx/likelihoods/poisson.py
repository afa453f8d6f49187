"""Counts."""

__all__ = ["NegativeBinomial", "Poisson"]

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import betainc, gammaincc, gammaln
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx.checked_fields import positive
from numpyro_gpx.likelihoods.base import (
    Likelihood,
    Moments,
    check_positive_link,
)
from numpyro_gpx.links import Exp, Link, get_link


class Poisson(Likelihood):
    r"""Counts, :math:`y \sim \text{Poisson}(e\,\text{link}(f))`.

    With the exponential link expectations and moments are in closed form.

    Args:
        link: `"exp"`, `"softplus"`, or a `numpyro_gpx.links.Link` to positive values.
        exposure: What the rate is multiplied with, such as the time or the population
            observed, a scalar or broadcast to `y`.
        num_nodes: Number of Gauss-Hermite nodes.
    """

    link: Link = eqx.field(default="exp", converter=get_link)
    exposure: Float[Array, "..."] = positive("exposure", 1.0)
    num_nodes: int = eqx.field(default=48, static=True)
    log_concave = True

    def __check_init__(self):
        check_positive_link(self.link)

    @property
    def support(self):
        return constraints.nonnegative_integer

    def distribution(self, f):
        return dist.Poisson(self.exposure * self.link(f))

    def log_prob(self, y, f):
        log_rate = jnp.log(self.exposure) + self.link.log(f)
        rate = self.exposure * self.link(f)
        return y * log_rate - rate - gammaln(y + jnp.ones((), f.dtype))

    def cdf(self, y, f):
        count = jnp.maximum(jnp.floor(y), 0.0)
        at_most = gammaincc(count + 1.0, self.exposure * self.link(f))
        return jnp.where(y < 0.0, 0.0, at_most)

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density; for the exponential link
        :math:`y\,(\log e + m) - e\,e^{m + v/2} - \log y!`."""
        if isinstance(self.link, Exp):
            # log p(y | f) is linear in f but for e^f, whose mean is e^(m + v/2).
            return self.log_prob(y, f_mean + 0.5 * f_var) - 0.5 * f_var * y
        return super().expected_log_prob(y, f_mean, f_var)

    def predictive_moments(self, f_mean, f_var):
        r"""Mean and variance of `y`; for the exponential link
        :math:`\mu = e\,e^{m + v/2}` and :math:`\mu + \mu^2 (e^v - 1)`."""
        if isinstance(self.link, Exp):
            mean = self.exposure * jnp.exp(f_mean + 0.5 * f_var)
            return Moments(mean, mean + mean**2 * jnp.expm1(f_var))
        return super().predictive_moments(f_mean, f_var)

    def expected(self):
        return "counts 0, 1, 2, ..."

    def advice(self, y):
        return _counts_advice(y)


class NegativeBinomial(Likelihood):
    r"""Counts with more spread than a Poisson: mean :math:`\mu = \text{link}(f)` and
    variance :math:`\mu + \mu^2 / r`.

    Args:
        concentration: :math:`r`, a scalar or broadcast to `y`; the Poisson is its limit
            at infinity.
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
        return constraints.nonnegative_integer

    def distribution(self, f):
        return dist.NegativeBinomial2(self.link(f), self.concentration)

    def log_prob(self, y, f):
        r"""With :math:`\log\mu` known, free of overflow:
        :math:`y\log\mu + r\log r - (y + r)\log(\mu + r)` and the binomial factor."""
        r, log_mean = self.concentration, self.link.log(f)
        one = jnp.ones((), f.dtype)
        ways = gammaln(y + r * one) - gammaln(y + one) - gammaln(r * one)
        log_r = jnp.log(r) * one
        return (
            ways + y * log_mean + r * log_r - (y + r) * jnp.logaddexp(log_mean, log_r)
        )

    def cdf(self, y, f):
        r, mean = self.concentration, self.link(f)
        count = jnp.maximum(jnp.floor(y), 0.0)
        return jnp.where(y < 0.0, 0.0, betainc(r, count + 1.0, r / (r + mean)))

    def predictive_moments(self, f_mean, f_var):
        r"""Mean and variance of `y`; for the exponential link
        :math:`\mu = e^{m + v/2}` and :math:`\mu + \mu^2 (e^v (1 + 1/r) - 1)`."""
        if isinstance(self.link, Exp):
            mean = jnp.exp(f_mean + 0.5 * f_var)
            extra = jnp.expm1(f_var) + jnp.exp(f_var) / self.concentration
            return Moments(mean, mean + mean**2 * extra)
        return super().predictive_moments(f_mean, f_var)

    def expected(self):
        return "counts 0, 1, 2, ..."

    def advice(self, y):
        return _counts_advice(y)


def _counts_advice(y):
    if np.any(y < 0):
        return "Counts are not negative: undo any centring or scaling of them."
    return (
        "Counts are whole numbers: undo any scaling or division of them (what they "
        "were divided by belongs in `exposure=`, or its log in `offset=`)."
    )
