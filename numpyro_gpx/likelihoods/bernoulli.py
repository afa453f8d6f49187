"""Binary observations, and numbers of successes."""

__all__ = ["Bernoulli", "Binomial"]

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import betainc, gammaln
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx.checked_fields import positive
from numpyro_gpx.likelihoods.base import (
    Likelihood,
    Moments,
    check_probability_link,
)
from numpyro_gpx.links import Link, Probit, get_link


class Bernoulli(Likelihood):
    r"""Binary observations, :math:`p(y = 1 \mid f) = \text{link}(f)`.

    With 32 nodes, means in [-3, 3] and variances up to 4, expectations are within
    3e-8 (logit) and 1.4e-7 (probit) of the exact ones. With the probit link
    predictions are in closed form; otherwise they are within 1e-5 in the log.

    Args:
        link: `"logit"`, `"probit"`, `"robust"` (a step with errors, `links.step`), or a
            link to a probability, such as `links.WithFlips` or
            `links.PiecewiseConstant.of("logit")`.
        num_nodes: Number of Gauss-Hermite nodes.
    """

    link: Link = eqx.field(default="logit", converter=get_link)
    num_nodes: int = eqx.field(default=32, static=True)

    def __check_init__(self):
        check_probability_link(self.link)

    @property
    def support(self):
        return constraints.boolean

    def distribution(self, f):
        # The log odds do not saturate where the probability rounds to 0 or 1.
        return dist.Bernoulli(logits=_log_odds(self.link, f))

    def log_prob(self, y, f):
        if self.link.symmetric:  # half the work
            return self.link.log(jnp.where(y == 1, f, -f))
        return jnp.where(y == 1, self.link.log(f), self.link.log_complement(f))

    def cdf(self, y, f):
        below_one = jnp.exp(self.link.log_complement(f))
        return jnp.where(y < 0, 0.0, jnp.where(y < 1, below_one, 1.0))

    def predictive_log_prob(self, y, f_mean, f_var):
        r"""Log predictive density; for the probit link
        :math:`\log\Phi(\pm m / \sqrt{1 + v})`.

        References:
            Rasmussen and Williams (2006), equation 3.82.
        """
        if isinstance(self.link, Probit):
            return self.log_prob(y, f_mean / jnp.sqrt(1.0 + f_var))
        return super().predictive_log_prob(y, f_mean, f_var)

    def predictive_moments(self, f_mean, f_var):
        """Predictive probability `p` of `y = 1`, and the variance `p (1 - p)`."""
        one = jnp.ones(jnp.broadcast_shapes(jnp.shape(f_mean), jnp.shape(f_var)), bool)
        p = jnp.exp(self.predictive_log_prob(one, f_mean, f_var))
        not_p = jnp.exp(self.predictive_log_prob(~one, f_mean, f_var))
        return Moments(p, p * not_p)

    def expected(self):
        return "the labels 0 and 1"

    def advice(self, y):
        values = set(np.unique(y).tolist())
        if values <= {-1, 1}:
            return "These are labels -1 and 1: map them with `(y + 1) / 2`."
        if len(values) == 2:
            return f"Two values: map them with `y == {max(values)}`."
        return "For counts or real values choose another likelihood."


class Binomial(Likelihood):
    r"""Numbers of successes, :math:`y \sim \text{Binomial}(n, \text{link}(f))`.

    Args:
        total_count: Number of trials `n`, a scalar or broadcast to `y`.
        link: `"logit"`, `"probit"`, or another link to a probability.
        num_nodes: Number of Gauss-Hermite nodes.
    """

    total_count: Float[Array, "..."] = positive("total_count")
    link: Link = eqx.field(default="logit", converter=get_link)
    num_nodes: int = eqx.field(default=48, static=True)
    log_concave = True

    def __check_init__(self):
        check_probability_link(self.link)

    @property
    def support(self):
        return constraints.integer_interval(0, self.total_count)

    def distribution(self, f):
        counts = self.total_count.astype(int)  # NumPyro's sampler counts with it
        return dist.Binomial(counts, logits=_log_odds(self.link, f))

    def log_prob(self, y, f):
        n = self.total_count
        one = jnp.ones((), f.dtype)
        ways = gammaln(n + one) - gammaln(y + one) - gammaln(n - y + one)
        return ways + y * self.link.log(f) + (n - y) * self.link.log_complement(f)

    def cdf(self, y, f):
        k, n = jnp.floor(y), self.total_count
        inside = jnp.clip(k, 0.0, n - 1.0)
        p = jnp.exp(self.link.log_complement(f))
        below = betainc(n - inside, inside + 1.0, p)
        return jnp.where(k < 0.0, 0.0, jnp.where(k >= n, 1.0, below))

    def expected(self):
        return "whole numbers from 0 to `total_count`"

    def advice(self, y):
        if np.any(y < 0):
            return "Numbers of successes are not negative: undo any centring."
        if np.any(y != np.round(y)):
            return "For shares pass the numbers of successes, and the trials."
        return "Check that `total_count` follows the rows of the targets."


def _log_odds(link, f):
    return link.log(f) - link.log_complement(f)
