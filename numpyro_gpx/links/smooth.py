r"""Inverse links: from a latent function to the parameter of a distribution.

Each link is an object that is called on the latent, `link(f)`, and knows the
logarithm of its value, so that likelihoods never take the log of a rounded 0.
"""

__all__ = [
    "Exp",
    "Identity",
    "Link",
    "Logit",
    "ProbabilityLink",
    "Probit",
    "Proportion",
    "Softplus",
    "WithFlips",
]

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import as_float
from numpyro_gpx.links.normal import log_normal_cdf


class Link(eqx.Module):
    """A map from a latent function to a parameter, elementwise."""

    # Whether the parameter jumps somewhere: it then has no useful gradient there.
    discontinuous: ClassVar[bool] = False
    # Whether one minus the parameter at `f` is the parameter at `-f`.
    symmetric: ClassVar[bool] = False

    @property
    def is_probability(self) -> bool:
        """Whether the parameter is a probability, so that `log_complement` is known."""
        return False

    @abc.abstractmethod
    def __call__(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Parameter at the latent value `f`."""

    def log(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Logarithm of the parameter."""
        return jnp.log(self(f))

    def log_complement(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Logarithm of one minus the parameter, for probabilities."""
        return jnp.log1p(-self(f))


class ProbabilityLink(Link):
    """A link whose parameter is a probability."""

    @property
    def is_probability(self) -> bool:
        return True


class Identity(Link):
    """The latent itself, `f`."""

    def __call__(self, f):
        return f


class Exp(Link):
    """Exponential, for rates and scales; the inverse of the log link."""

    def __call__(self, f):
        return jnp.exp(f)

    def log(self, f):
        return f


class Softplus(Link):
    r"""Softplus :math:`\log(1 + e^f)`: positive, and linear where `f` is large."""

    def __call__(self, f):
        return jax.nn.softplus(f)

    def log(self, f):
        # Below -20, log softplus(f) = f - e^f / 2 to 1e-18, and softplus underflows.
        far = f < -20.0
        log_near = jnp.log(jax.nn.softplus(jnp.where(far, 0.0, f)))
        return jnp.where(far, f - 0.5 * jnp.exp(jnp.where(far, f, 0.0)), log_near)


class Logit(ProbabilityLink):
    r"""Logistic sigmoid :math:`1 / (1 + e^{-f})`."""

    symmetric: ClassVar[bool] = True

    def __call__(self, f):
        return jax.nn.sigmoid(f)

    def log(self, f):
        return jax.nn.log_sigmoid(f)

    def log_complement(self, f):
        return jax.nn.log_sigmoid(-f)


class Probit(ProbabilityLink):
    r"""Normal distribution function :math:`\Phi(f)`."""

    symmetric: ClassVar[bool] = True

    def __call__(self, f):
        return ndtr(f)

    def log(self, f):
        return log_normal_cdf(f)

    def log_complement(self, f):
        return log_normal_cdf(-f)


class Proportion(ProbabilityLink):
    """The latent itself, where it is a probability already; see `links.step`."""

    def __call__(self, f):
        return f


class WithFlips(ProbabilityLink):
    r"""A link with labels flipped at random, :math:`\epsilon + (1 - 2\epsilon)\,p(f)`.

    Unlike `links.step` it is smooth, so that every engine can use it.

    Args:
        link: The link without flips.
        epsilon: Share of flipped labels, between 0 and 1/2.
    """

    link: ProbabilityLink
    epsilon: Float[Array, ""] = eqx.field(default=1e-2, converter=as_float)

    def __call__(self, f):
        return jnp.exp(self.log(f))

    def log(self, f):
        return self._mixed(self.link.log(f))

    def log_complement(self, f):
        return self._mixed(self.link.log_complement(f))

    def _mixed(self, log_p):
        return jnp.logaddexp(
            jnp.log(self.epsilon), jnp.log1p(-2.0 * self.epsilon) + log_p
        )
