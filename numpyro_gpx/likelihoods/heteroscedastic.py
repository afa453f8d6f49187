"""Gaussian noise whose scale is a function too."""

__all__ = ["HeteroscedasticGaussian"]

import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from numpyro_gpx.cubature import log_expectation_exp, peak
from numpyro_gpx.likelihoods.base import (
    Likelihood,
    Moments,
    check_positive_link,
)
from numpyro_gpx.links import Exp, Link, PiecewiseConstant, get_link


class HeteroscedasticGaussian(Likelihood):
    r"""Two latent functions, the mean and the noise:
    :math:`y \sim \mathcal N(f_1, \text{link}(f_2)^2)`.

    The expectation over :math:`f_1` is always in closed form; that over :math:`f_2` is
    for the exponential link and, piece by piece, for piecewise-constant ones (Seitz,
    eq. 21, corrected); otherwise a one-dimensional rule.

    Args:
        link: The standard deviation as a function of the second latent: `"exp"`,
            `"softplus"`, or a `numpyro_gpx.links.Link` to positive values.
        num_nodes: Number of Gauss-Hermite nodes.

    References:
        Saul, Hensman, Vehtari & Lawrence (2016), "Chained Gaussian processes".
    """

    latent_ndim: ClassVar[int] = 1
    link: Link = eqx.field(default="exp", converter=get_link)
    num_nodes: int = eqx.field(default=64, static=True)

    def __check_init__(self):
        check_positive_link(self.link)

    @property
    def support(self):
        return constraints.real

    @property
    def normal_mixture(self):
        return True

    @property
    def num_latent(self):
        return 2

    def distribution(self, f):
        return dist.Normal(f[..., 0], self.link(f[..., 1]))

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density,
        :math:`-\tfrac12\log 2\pi - \mathbb E\log\sigma
        - \tfrac12\,[(y - m_1)^2 + v_1]\;\mathbb E\,\sigma^{-2}`."""
        square = (y - f_mean[..., 0]) ** 2 + f_var[..., 0]
        if isinstance(self.link, Exp):
            log_scale = f_mean[..., 1]
            precision = jnp.exp(-2.0 * f_mean[..., 1] + 2.0 * f_var[..., 1])
        else:
            log_scale = self._over_scale(self.link.log, f_mean, f_var)
            precision = self._over_scale(
                lambda f: jnp.exp(-2.0 * self.link.log(f)), f_mean, f_var
            )
        return -0.5 * math.log(2.0 * math.pi) - log_scale - 0.5 * square * precision

    def predictive_log_prob(self, y, f_mean, f_var):
        r"""Log predictive density,
        :math:`\log\mathbb E_{f_2}\,\mathcal N(y; m_1, v_1 + \sigma^2(f_2))`."""
        mean, var = f_mean[..., 0], f_var[..., 0]
        if isinstance(self.link, PiecewiseConstant):
            points, log_weights = self.link.log_pieces(f_mean[..., 1], f_var[..., 1])
            parts = dist.Normal(
                mean[None], jnp.sqrt(var[None] + self.link(points) ** 2)
            )
            return logsumexp(log_weights + parts.log_prob(y[None]), axis=0)

        def log_density(f):
            return dist.Normal(mean, jnp.sqrt(var + self.link(f) ** 2)).log_prob(y)

        marginal = f_mean[..., 1], f_var[..., 1]
        # Nearly concave in f: its highest peak is wherever an outlier puts it.
        where = peak(log_density, *marginal)
        return log_expectation_exp(log_density, *marginal, self.num_nodes, **where)

    def predictive_cdf(self, y, f_mean, f_var):
        mean, var = f_mean[..., 0], f_var[..., 0]

        def cdf(y, mean, var, f):
            return dist.Normal(mean, jnp.sqrt(var + self.link(f) ** 2)).cdf(y)

        return self._mean(cdf, f_mean[..., 1], f_var[..., 1], y, mean, var)

    def predictive_moments(self, f_mean, f_var):
        r"""Mean :math:`m_1`, variance :math:`v_1 + \mathbb E\,\sigma^2`."""
        if isinstance(self.link, Exp):
            noise_var = jnp.exp(2.0 * f_mean[..., 1] + 2.0 * f_var[..., 1])
        else:
            noise_var = self._over_scale(lambda f: self.link(f) ** 2, f_mean, f_var)
        return Moments(f_mean[..., 0], f_var[..., 0] + noise_var)

    def expected(self):
        return "real numbers"

    def _over_scale(self, fn, f_mean, f_var):
        return self._mean(fn, f_mean[..., 1], f_var[..., 1])
