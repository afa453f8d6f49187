"""Proportions."""

__all__ = ["Beta"]

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx.checked_fields import positive
from numpyro_gpx.likelihoods.base import Likelihood, check_probability_link
from numpyro_gpx.links import Link, get_link


class Beta(Likelihood):
    r"""Proportions with mean :math:`\mu = \text{link}(f)`:
    :math:`y \sim \text{Beta}(\mu s, (1 - \mu) s)`, variance
    :math:`\mu (1 - \mu) / (1 + s)`.

    Args:
        concentration: :math:`s`, how close proportions are to their mean, a scalar or
            broadcast to `y`.
        link: `"logit"`, `"probit"`, or another link to a probability.
        num_nodes: Number of Gauss-Hermite nodes.
    """

    concentration: Float[Array, "..."] = positive("concentration")
    link: Link = eqx.field(default="logit", converter=get_link)
    num_nodes: int = eqx.field(default=64, static=True)
    log_concave = True  # nearly: with one peak, at which `cubature.peak` arrives

    def __check_init__(self):
        check_probability_link(self.link)

    @property
    def support(self):
        return constraints.open_interval(0.0, 1.0)

    def distribution(self, f):
        return dist.Beta(*self._shapes(f))

    def log_prob(self, y, f):
        a, b = self._shapes(f)
        normaliser = gammaln(a + b) - gammaln(a) - gammaln(b)
        return normaliser + (a - 1.0) * jnp.log(y) + (b - 1.0) * jnp.log1p(-y)

    def expected(self):
        return "proportions strictly between 0 and 1"

    def advice(self, y):
        if y.size and y.min() >= 0.0 and y.max() <= 100.0 and y.max() > 1.0:
            return "For percentages divide by 100."
        return "Move zeros and ones inside, as in `(y * (n - 1) + 0.5) / n`."

    def _shapes(self, f):
        # Where the probability rounds to 0 or 1 a shape of 0 would have no density.
        tiny = jnp.finfo(f.dtype).tiny ** 0.5
        s = self.concentration
        a = jnp.maximum(s * jnp.exp(self.link.log(f)), tiny)
        b = jnp.maximum(s * jnp.exp(self.link.log_complement(f)), tiny)
        return a, b
