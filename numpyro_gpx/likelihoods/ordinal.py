"""Ordered categories."""

__all__ = ["Ordinal"]

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.util import not_jax_tracer

from numpyro_gpx.checked_fields import as_float
from numpyro_gpx.likelihoods.base import Likelihood, label_moments
from numpyro_gpx.links import Logit, ProbabilityLink, Probit, get_link, log_interval


def _rising(cutpoints) -> Array:
    # Before the conversion: inside `jit` a constant becomes a tracer.
    leaves = jax.tree.leaves(cutpoints)
    if all(not_jax_tracer(leaf) for leaf in leaves):
        if np.ndim(cutpoints) == 1 and not np.all(np.diff(cutpoints) > 0.0):
            raise ValueError(f"`cutpoints` must rise; got {np.asarray(cutpoints)}.")
    return as_float(cutpoints)


class Ordinal(Likelihood):
    r"""Ordered categories 0, ..., C-1: which of C intervals a noisy `f` falls into.

    .. math:: p(y = c \mid f) = F(b_{c+1} - f) - F(b_c - f),
        \qquad b_0 = -\infty,\; b_C = \infty,

    with `F` the normal or the logistic distribution function. The noise has unit scale;
    the kernel's variance is relative to it.

    Args:
        cutpoints: The inner bounds :math:`b_1 < \dots < b_{C-1}`, `(C - 1,)`.
        link: `"probit"` or `"logit"`.
        num_nodes: Number of Gauss-Hermite nodes.

    References:
        Chu & Ghahramani (2005), "Gaussian processes for ordinal regression".
    """

    cutpoints: Float[Array, " B"] = eqx.field(converter=_rising)
    link: ProbabilityLink = eqx.field(default="probit", converter=get_link)
    num_nodes: int = eqx.field(default=48, static=True)
    log_concave = True

    def __check_init__(self):
        if not isinstance(self.link, Logit | Probit):
            raise ValueError(
                f"`link` must be 'probit' or 'logit'; got {type(self.link).__name__}."
            )
        if self.cutpoints.ndim != 1 or self.cutpoints.shape[0] == 0:
            raise ValueError(
                "`cutpoints` must be a vector, one shorter than the number of "
                f"categories; got shape {self.cutpoints.shape}."
            )

    @property
    def support(self):
        return constraints.integer_interval(0, self.num_classes - 1)

    @property
    def num_classes(self) -> int:
        return self.cutpoints.shape[0] + 1

    def distribution(self, f):
        labels = jnp.arange(self.num_classes)
        logits = jax.vmap(lambda c: self.log_prob(jnp.full(f.shape, c), f), out_axes=-1)
        return dist.Categorical(logits=logits(labels))

    def log_prob(self, y, f):
        lower, upper = self._bounds(y, f, 1.0)
        if isinstance(self.link, Probit):
            return log_interval(lower, upper)
        # F(b) - F(a) = F(b) F(-a) (1 - e^(a - b)), all of it in logarithms.
        inside = jnp.log1p(-jnp.exp(lower - upper))
        return jax.nn.log_sigmoid(upper) + jax.nn.log_sigmoid(-lower) + inside

    def cdf(self, y, f):
        _, upper = self._bounds(jnp.clip(y, 0, self.num_classes - 1), f, 1.0)
        return jnp.where(y < 0, 0.0, self.link(upper))

    def predictive_log_prob(self, y, f_mean, f_var):
        r"""Log predictive density; for the probit link that of
        :math:`\mathcal N(m, 1 + v)`."""
        if isinstance(self.link, Probit):
            return log_interval(*self._bounds(y, f_mean, jnp.sqrt(1.0 + f_var)))
        return super().predictive_log_prob(y, f_mean, f_var)

    def predictive_moments(self, f_mean, f_var):
        """Mean and variance of the category, as a number."""
        return label_moments(self.predictive_probabilities(f_mean, f_var))

    def expected(self):
        return f"categories 0, ..., {self.num_classes - 1}"

    def advice(self, y):
        if y.size and y.min() == 1 and y.max() == self.num_classes:
            return "Categories are counted from 0: pass `y - 1`."
        return "There is one category more than cutpoints; number them from 0."

    def _bounds(self, y, mean, sd):
        """Ends of each category's interval, in units of `sd` from `mean`."""
        c = jnp.asarray(y).astype(int)
        cutpoints = self.cutpoints.astype(mean.dtype)

        def end(index, infinite, infinity):
            inside = cutpoints[jnp.clip(index, 0, cutpoints.shape[0] - 1)]
            # Infinity enters last: its derivative in `sd` would be NaN.
            return jnp.where(infinite, infinity, (inside - mean) / sd)

        lower = end(c - 1, c == 0, -jnp.inf)
        return lower, end(c, c == self.num_classes - 1, jnp.inf)
