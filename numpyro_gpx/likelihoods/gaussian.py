"""Gaussian noise."""

__all__ = ["Gaussian"]

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx.fields import positive
from numpyro_gpx.likelihoods.base import Likelihood, Moments


class Gaussian(Likelihood):
    r"""Gaussian noise, :math:`y \sim \mathcal N(f, \sigma^2)`. All in closed form.

    Args:
        scale: Standard deviation :math:`\sigma`, a scalar or broadcast to `y`.
    """

    scale: Float[Array, "..."] = positive("scale")

    @property
    def support(self):
        return constraints.real

    def distribution(self, f):
        return dist.Normal(f, self.scale)

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density,
        :math:`\log\mathcal N(y; m, \sigma^2) - v / 2\sigma^2`."""
        return self.log_prob(y, f_mean) - 0.5 * f_var / self.scale**2

    def predictive_log_prob(self, y, f_mean, f_var):
        r"""Log predictive density, :math:`\log\mathcal N(y; m, v + \sigma^2)`."""
        return dist.Normal(f_mean, jnp.sqrt(f_var + self.scale**2)).log_prob(y)

    def predictive_moments(self, f_mean, f_var):
        r"""Mean :math:`m`, variance :math:`v + \sigma^2`."""
        return Moments(f_mean, f_var + self.scale**2)

    def expected(self):
        return "real numbers"
