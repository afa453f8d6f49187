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
    "Softplus",
    "get_link",
    "log_normal_cdf",
]

import abc
import math
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import log_ndtr, ndtr
from jaxtyping import Array, Float


class Link(eqx.Module):
    """A map from a latent function to a parameter, elementwise."""

    @abc.abstractmethod
    def __call__(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Parameter at the latent value `f`."""

    def log(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Logarithm of the parameter."""
        return jnp.log(self(f))


class ProbabilityLink(Link):
    """A link whose parameter is a probability.

    With `symmetric = True` one minus the probability at `f` is that at `-f`.
    """

    symmetric: ClassVar[bool] = False

    def log_complement(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Logarithm of one minus the probability."""
        return jnp.log1p(-self(f))


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


_NAMED: dict[str, Callable[[], Link]] = {
    "exp": Exp,
    "logit": Logit,
    "probit": Probit,
    "softplus": Softplus,
}


def get_link(link: str | Link) -> Link:
    """The link of that name; a link object is returned as it is.

    Args:
        link: One of `"exp"`, `"logit"`, `"probit"`, `"softplus"`, or a `Link`.
    """
    if isinstance(link, Link):
        return link
    if isinstance(link, str) and link in _NAMED:
        return _NAMED[link]()
    names = ", ".join(f'"{name}"' for name in sorted(_NAMED))
    raise ValueError(
        f"`link` must be one of {names}, or a `numpyro_gpx.links.Link`; got {link!r}."
    )


@jax.custom_jvp
def log_normal_cdf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""Logarithm of the normal distribution function, with accurate derivatives.

    Its derivative is the hazard :math:`r = \varphi / \Phi`, and
    :math:`r' = -r\,(r + x)`. Below `x = -5`, with `z = -x`, Laplace's continued
    fraction of the Mills ratio gives the hazard and, without cancellation, the excess
    :math:`r + x`:

    .. math::
        r(-z) = z + \frac{1}{z + \frac{2}{z + \cdots}}, \qquad
        \log \Phi(-z) = -\tfrac12 z^2 - \tfrac12 \log 2\pi - \log r(-z).

    `jax.scipy.special.log_ndtr` subtracts :math:`z^2 / 2` from itself in derivatives:
    near `x = -40` in float32 its second one is wrong by up to 0.08, this by 5e-5.

    References:
        Abramowitz and Stegun (1964), equation 26.2.14.
    """
    far = x < _FAR
    hazard, _ = _hazard_and_excess(x)
    log_far = -0.5 * x**2 - _HALF_LOG_2PI - jnp.log(jnp.where(far, hazard, 1.0))
    return jnp.where(far, log_far, log_ndtr(jnp.where(far, 0.0, x)))


@log_normal_cdf.defjvp
def _log_normal_cdf_jvp(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return log_normal_cdf(x), _hazard_and_excess(x)[0] * x_dot


@jax.custom_jvp
def _hazard_and_excess(x):
    """The hazard `r` at `x`, and `r + x`."""
    far = x < _FAR
    z = jnp.where(far, -x, -_FAR)
    excess = jnp.zeros_like(z)
    for k in range(30, 0, -1):  # leaves a relative error below 1e-14 at z = 5
        excess = k / (z + excess)
    near = jnp.where(far, 0.0, x)
    hazard = jnp.exp(-0.5 * near**2 - _HALF_LOG_2PI - log_ndtr(near))
    return jnp.where(far, z + excess, hazard), jnp.where(far, excess, hazard + x)


@_hazard_and_excess.defjvp
def _hazard_and_excess_jvp(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    hazard, excess = _hazard_and_excess(x)
    slope = -hazard * excess
    return (hazard, excess), (slope * x_dot, (1.0 + slope) * x_dot)


_FAR = -5.0
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
