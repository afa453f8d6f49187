"""Counts."""

__all__ = ["Poisson"]

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from numpyro.distributions import constraints

from numpyro_gpx.cubature import log_expectation_exp
from numpyro_gpx.likelihoods.base import Likelihood, Moments
from numpyro_gpx.links import Exp, Link, get_link


class Poisson(Likelihood):
    r"""Counts, :math:`y \sim \text{Poisson}(\text{link}(f))`.

    With the exponential link expectations and moments are in closed form, and the
    predictive density (Poisson-lognormal) uses Gauss-Hermite nodes moved to the peak
    of its integrand; see `predictive_log_prob`. Other links use plain nodes.

    Args:
        link: `"exp"`, `"softplus"`, or a `numpyro_gpx.links.Link` to positive values.
        num_nodes: Number of Gauss-Hermite nodes.
    """

    link: Link = eqx.field(default="exp", converter=get_link)
    num_nodes: int = eqx.field(default=32, static=True)

    @property
    def support(self):
        return constraints.nonnegative_integer

    def distribution(self, f):
        return dist.Poisson(self.link(f))

    def log_prob(self, y, f):
        return y * self.link.log(f) - self.link(f) - gammaln(y + jnp.ones((), f.dtype))

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density; for the exponential link
        :math:`y m - e^{m + v/2} - \log y!`."""
        if isinstance(self.link, Exp):
            # log p(y | f) is linear in f but for e^f, whose mean is e^(m + v/2).
            return self.log_prob(y, f_mean + 0.5 * f_var) - 0.5 * f_var * y
        return super().expected_log_prob(y, f_mean, f_var)

    def predictive_log_prob(self, y, f_mean, f_var):
        r"""Log predictive density.

        For the exponential link the integrand, log-concave in `f`, peaks where
        :math:`f = m + v (y - e^f)`, with variance :math:`v / (1 + v e^f)`.
        """
        if not isinstance(self.link, Exp):
            return super().predictive_log_prob(y, f_mean, f_var)
        rate = _peak_rate(y, *jax.lax.stop_gradient((f_mean, f_var)))
        return log_expectation_exp(
            lambda f: self.log_prob(y, f),
            f_mean,
            f_var,
            self.num_nodes,
            shift=jnp.sqrt(f_var) * (y - rate),
            shrink=1.0 / jnp.sqrt(1.0 + f_var * rate),
        )

    def predictive_moments(self, f_mean, f_var):
        r"""Mean and variance of `y`; for the exponential link
        :math:`\mu = e^{m + v/2}` and :math:`\mu + \mu^2 (e^v - 1)`."""
        if isinstance(self.link, Exp):
            mean = jnp.exp(f_mean + 0.5 * f_var)
            return Moments(mean, mean + mean**2 * jnp.expm1(f_var))
        return super().predictive_moments(f_mean, f_var)

    def expected(self):
        return "counts 0, 1, 2, ..."

    def advice(self, y):
        if np.any(y < 0):
            return "Counts are not negative: undo any centring or scaling of them."
        return (
            "Counts are whole numbers: undo any scaling of them (rates belong in "
            "`offset=`, as the log of the exposure)."
        )


def _peak_rate(y, f_mean, f_var):
    """Rate `e^f` at the root `f` of `f = m + v (y - e^f)`.

    With `u = f + log v` the root solves `u + e^u = k`, `k = log v + m + v y`.
    """
    # At v = 0 any positive value will do: the nodes are then all at `m`.
    v = jnp.maximum(f_var, jnp.finfo(f_var.dtype).tiny)
    k = jnp.log(v) + f_mean + v * y

    def newton(_, u):
        return u - (u + jnp.exp(u) - k) / (1.0 + jnp.exp(u))

    # A convex, rising function: Newton descends to its root from these upper bounds,
    # which are so near that 6 steps reach float64 for every k.
    start = jnp.where(k > 1.0, jnp.log(jnp.maximum(k, 1.0)), k)
    return jnp.exp(jax.lax.fori_loop(0, 6, newton, start) - jnp.log(v))
