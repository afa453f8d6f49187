"""Classes, by the largest latent function."""

__all__ = ["RobustMax"]


import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import ndtr
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import positive as positive_field
from numpyro_gpx.likelihoods.labels import (
    ClassLabels,
    check_num_classes,
    classes_beside,
    pick,
)
from numpyro_gpx.numerics.factor import positive


class RobustMax(ClassLabels):
    r"""The class of the largest of C latent functions, with a share of errors:
    :math:`p(y = c \mid f)` is :math:`1 - \epsilon` for :math:`c = \arg\max_j f_j`, else
    :math:`\epsilon / (C - 1)`.

    Discontinuous in a known `f`. Under Gaussian marginals the probability of being
    largest is a one-dimensional integral,

    .. math:: P_y = \int \mathcal N(x; m_y, v_y) \prod_{j \ne y}
        \Phi\Big(\frac{x - m_j}{\sqrt{v_j}}\Big)\,dx,

    here by the trapezoidal rule over 14 standard deviations, which is accurate to 1e-6
    as long as no other class has less than an eighth of the standard deviation of `y`.

    Gaussian guides are too sure of the latent functions: against elliptical slice
    sampling of the full GP their standard deviations were 0.62 to 0.69 of the right
    ones, since a row contributes :math:`\log\epsilon` times the probability of being
    wrong, and a narrow belief avoids it. Where the functions themselves matter, sample
    them (`gpx.engines.Blackjax(blackjax.elliptical_slice)`), or use `Categorical`.

    Args:
        num_classes: Number of classes C.
        epsilon: Share of errors.
        num_nodes: Number of nodes.

    References:
        Hernández-Lobato, Hernández-Lobato & Dupont (2011); Matthews (2016), 5.2.
    """

    classes: int = eqx.field(static=True)
    num_nodes: int = eqx.field(static=True)
    epsilon: Float[Array, ""] = positive_field("epsilon")

    def __init__(self, num_classes: int, *, epsilon=1e-3, num_nodes: int = 128):
        self.classes = check_num_classes(num_classes)
        self.epsilon = epsilon
        self.num_nodes = num_nodes

    @property
    def discontinuous(self):
        return True

    def distribution(self, f):
        best = jnp.argmax(f, axis=-1)
        largest = classes_beside(best, self.classes) == best[..., None]
        log_right, log_wrong = self._log_shares()
        return dist.Categorical(logits=jnp.where(largest, log_right, log_wrong))

    def log_prob(self, y, f):
        log_right, log_wrong = self._log_shares()
        return jnp.where(y == jnp.argmax(f, axis=-1), log_right, log_wrong)

    def expected_log_prob(self, y, f_mean, f_var):
        r"""Expected log density,
        :math:`P_y\log(1 - \epsilon) + (1 - P_y)\log(\epsilon / (C - 1))`."""
        P = self._probability_of_largest(y, f_mean, f_var)
        log_right, log_wrong = self._log_shares()
        return P * log_right + (1.0 - P) * log_wrong

    def predictive_log_prob(self, y, f_mean, f_var):
        P = self._probability_of_largest(y, f_mean, f_var)
        wrong = self.epsilon / (self.classes - 1)
        return jnp.log(wrong + (1.0 - self.epsilon - wrong) * P)

    def _log_shares(self):
        return jnp.log1p(-self.epsilon), jnp.log(self.epsilon / (self.classes - 1))

    def _probability_of_largest(self, y, f_mean, f_var):
        sd = jnp.sqrt(positive(f_var))
        z = np.linspace(-7.0, 7.0, self.num_nodes)
        density = np.exp(-0.5 * z**2)

        def column(values):
            shape = (-1, *(1,) * (f_mean.ndim - 1))
            return jnp.asarray(values, f_mean.dtype).reshape(shape)

        weights = column(density / density.sum())
        x = pick(f_mean, y)[None] + pick(sd, y)[None] * column(z)  # (T, ...)
        cdf = ndtr((x[..., None] - f_mean[None]) / sd[None])  # (T, ..., C)
        log_cdf = jnp.log(jnp.maximum(cdf, jnp.finfo(cdf.dtype).tiny))
        own = classes_beside(y, self.classes) == jnp.asarray(y)[..., None]
        log_below = jnp.sum(jnp.where(own[None], 0.0, log_cdf), axis=-1)
        return jnp.sum(weights * jnp.exp(log_below), axis=0)
