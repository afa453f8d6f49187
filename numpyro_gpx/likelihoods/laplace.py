"""Noise with exponential tails."""

__all__ = ["Laplace"]

import math

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import ndtr
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx.checked_fields import positive
from numpyro_gpx.likelihoods.base import Likelihood, Moments
from numpyro_gpx.links import log_normal_cdf
from numpyro_gpx.numerics.factor import positive as clamp


class Laplace(Likelihood):
    r"""Laplace noise, :math:`p(y \mid f) = e^{-|y - f|/b} / 2b`. All in closed form.

    Args:
        scale: Scale `b`, a scalar or broadcast to `y`.
    """

    scale: Float[Array, "..."] = positive("scale")

    @property
    def support(self):
        return constraints.real

    def distribution(self, f):
        return dist.Laplace(f, self.scale)

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density, with the mean of a folded normal:
        :math:`\mathbb E|y - f| = \delta\,(1 - 2\Phi(-\delta/s))
        + 2s\,\varphi(\delta/s)`, :math:`\delta = y - m`, :math:`s^2 = v`."""
        sd = jnp.sqrt(clamp(f_var))
        delta = y - f_mean
        density = jnp.exp(-0.5 * (delta / sd) ** 2) / math.sqrt(2.0 * math.pi)
        distance = delta * (1.0 - 2.0 * ndtr(-delta / sd)) + 2.0 * sd * density
        return -jnp.log(2.0 * self.scale) - distance / self.scale

    def predictive_log_prob(self, y, f_mean, f_var):
        r"""Log predictive density: with :math:`c = s/b` and :math:`d = \delta/s`,

        .. math:: p(y) = \frac{e^{c^2/2}}{2b}\big[e^{cd}\,\Phi(-d - c)
            + e^{-cd}\,\Phi(d - c)\big].
        """
        sd = jnp.sqrt(clamp(f_var))
        c, d = sd / self.scale, (y - f_mean) / sd
        above = c * d + log_normal_cdf(-d - c)
        below = -c * d + log_normal_cdf(d - c)
        return 0.5 * c**2 - jnp.log(2.0 * self.scale) + jnp.logaddexp(above, below)

    def predictive_cdf(self, y, f_mean, f_var):
        r"""Predictive probability of at most `y`:
        :math:`\Phi(d) + \tfrac12 e^{c^2/2}\,[e^{cd}\,\Phi(-d - c)
        - e^{-cd}\,\Phi(d - c)]`."""
        sd = jnp.sqrt(clamp(f_var))
        c, d = sd / self.scale, (y - f_mean) / sd
        above = jnp.exp(0.5 * c**2 + c * d + log_normal_cdf(-d - c))
        below = jnp.exp(0.5 * c**2 - c * d + log_normal_cdf(d - c))
        return ndtr(d) + 0.5 * (above - below)

    def predictive_moments(self, f_mean, f_var):
        r"""Mean :math:`m`, variance :math:`v + 2b^2`."""
        return Moments(f_mean, f_var + 2.0 * self.scale**2)

    def expected(self):
        return "real numbers"
