"""Gaussian noise."""

__all__ = ["Gaussian"]

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.checked_fields import positive
from numpyro_gpx.likelihoods.base import Likelihood, Moments
from numpyro_gpx.links import Identity, Link, PiecewiseConstant, get_link


class Gaussian(Likelihood):
    r"""Gaussian noise, :math:`y \sim \mathcal N(\text{link}(f), \sigma^2)`.

    All in closed form for the identity (the default) and for piecewise-constant links,
    also where the values of the pieces are a Gaussian belief.

    Args:
        scale: Standard deviation :math:`\sigma`, a scalar or broadcast to `y`.
        link: The mean as a function of `f`; a `numpyro_gpx.links.Link`.
    """

    scale: Float[Array, "..."] = positive("scale")
    link: Link = eqx.field(default_factory=Identity, converter=get_link)

    @property
    def support(self):
        return constraints.real

    @property
    def is_conjugate(self) -> bool:
        """Whether `f` enters the log density as a quadratic."""
        return isinstance(self.link, Identity)

    @property
    def normal_mixture(self):
        return isinstance(self.link, Identity | PiecewiseConstant)

    def distribution(self, f):
        if isinstance(self.link, PiecewiseConstant) and _believes(self.link):
            k, (mean, var) = self.link.piece_of(f), _value_moments(self.link)
            return self._marginal(mean[k], var[k])
        return dist.Normal(self.link(f), self.scale)

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density.

        Identity: :math:`\log\mathcal N(y; m, \sigma^2) - v / 2\sigma^2`. Pieces with
        values :math:`g_k \sim \mathcal N(\tilde\mu_k, \tilde\sigma_k^2)`:
        :math:`\sum_k P_k\,[\log\mathcal N(y; \tilde\mu_k, \sigma^2)
        - \tilde\sigma_k^2 / 2\sigma^2]` (Seitz, eq. 24, where :math:`\tilde\sigma_k^2`
        is also added to the variance, and so counted twice).
        """
        if isinstance(self.link, Identity):
            return self.log_prob(y, f_mean) - 0.5 * f_var / self.scale**2
        if isinstance(self.link, PiecewiseConstant) and _believes(self.link):
            _, weights = self.link.pieces(f_mean, f_var)
            mean, var = _values(self.link, f_mean)
            log_p = dist.Normal(mean, self.scale).log_prob(y[None])
            return jnp.sum(weights * (log_p - 0.5 * var / self.scale**2), axis=0)
        return super().expected_log_prob(y, f_mean, f_var)

    def predictive_log_prob(self, y, f_mean, f_var):
        r"""Log predictive density; identity:
        :math:`\log\mathcal N(y; m, v + \sigma^2)`, pieces:
        :math:`\log\sum_k P_k\,\mathcal N(y; \tilde\mu_k,
        \sigma^2 + \tilde\sigma_k^2)`."""
        if isinstance(self.link, Identity):
            return self._marginal(f_mean, f_var).log_prob(y)
        if isinstance(self.link, PiecewiseConstant) and _believes(self.link):
            _, log_weights = self.link.log_pieces(f_mean, f_var)
            parts = self._marginal(*_values(self.link, f_mean))
            return logsumexp(log_weights + parts.log_prob(y[None]), axis=0)
        return super().predictive_log_prob(y, f_mean, f_var)

    def predictive_cdf(self, y, f_mean, f_var):
        if isinstance(self.link, Identity):
            return self._marginal(f_mean, f_var).cdf(y)
        if isinstance(self.link, PiecewiseConstant) and _believes(self.link):
            _, weights = self.link.pieces(f_mean, f_var)
            parts = self._marginal(*_values(self.link, f_mean))
            return jnp.sum(weights * parts.cdf(y[None]), axis=0)
        return super().predictive_cdf(y, f_mean, f_var)

    def predictive_moments(self, f_mean, f_var):
        r"""Mean and variance; for the identity :math:`m` and :math:`v + \sigma^2`."""
        if isinstance(self.link, Identity):
            return Moments(f_mean, f_var + self.scale**2)
        if isinstance(self.link, PiecewiseConstant) and _believes(self.link):
            _, weights = self.link.pieces(f_mean, f_var)
            means, variances = _values(self.link, f_mean)
            mean = jnp.sum(weights * means, axis=0)
            spread = variances + (means - mean[None]) ** 2
            return Moments(mean, self.scale**2 + jnp.sum(weights * spread, axis=0))
        return super().predictive_moments(f_mean, f_var)

    def expected(self):
        return "real numbers"

    def _marginal(self, mean, var):
        return dist.Normal(mean, jnp.sqrt(var + self.scale**2))


def _believes(link: PiecewiseConstant) -> bool:
    return isinstance(link.points, Belief)


def _values(link, like):
    """Means and variances of the values of the pieces, `(K, 1, ...)`."""
    shape = (-1, *(1,) * like.ndim)
    return tuple(moment.reshape(shape) for moment in _value_moments(link))


def _value_moments(link):
    """Means and variances of the values of the pieces, `(K,)`."""
    if not isinstance(link.base, Identity):
        raise TypeError(
            "A Gaussian belief about the values of a piecewise-constant link needs the "
            f"identity as `base`; got {type(link.base).__name__}. Draw the points "
            "instead: leave out `integrate=True`."
        )
    return link.points.mean, link.points.variances()
