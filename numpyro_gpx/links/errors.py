r"""How far a piecewise-constant link is from the link it approximates.

Mean squared errors :math:`\mathbb E[(g(f) - \hat g(f))^2]` under a Gaussian, and how
many pieces keep them below a wanted size.

References:
    Seitz, theorems 1 and 2, with :math:`\int_a^b x\,\mathcal N(x; \mu, \sigma^2)\,dx
    = \mu\,\Delta F - \sigma^2\,\Delta p`, `p` the density of
    :math:`\mathcal N(\mu, \sigma^2)` (the paper has :math:`+\sigma\,\Delta p`).
"""

__all__ = ["exp_error", "lipschitz_error", "pieces_for_error"]

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_gpx.links.named import get_link
from numpyro_gpx.links.normal import interval_probabilities
from numpyro_gpx.links.piecewise import PiecewiseConstant, even_edges, places
from numpyro_gpx.links.smooth import Exp, Link
from numpyro_gpx.numerics.factor import positive


def lipschitz_error(
    edges: Float[Array, " E"],
    points: Float[Array, " K"],
    f_mean: Float[Array, "*shape"],
    f_var: Float[Array, "*shape"],
    *,
    lipschitz: float = 1.0,
) -> Float[Array, "*shape"]:
    r"""Bound on the mean squared error for a Lipschitz-continuous link (theorem 1).

    .. math:: \Lambda^2 \sum_k \int_{l_k}^{u_k} (x - x_k)^2\,
        \mathcal N(x; \mu, \sigma^2)\,dx

    Args:
        edges: Inner edges of the pieces.
        points: Where in each piece the link is evaluated, :math:`x_k`.
        f_mean: Means of the latent.
        f_var: Variances of the latent.
        lipschitz: Lipschitz constant of the link: 1/4 for the logistic,
            :math:`1/\sqrt{2\pi}` for the probit, 1 for softplus and the identity.
    """
    sd = jnp.sqrt(positive(f_var))
    t = (_column(edges, f_mean) - f_mean[None]) / sd[None]
    x = (_column(points, f_mean) - f_mean[None]) / sd[None]
    P = interval_probabilities(t)  # moments of N(0, 1) on the intervals: 0th,
    density = jnp.exp(-0.5 * t**2) / math.sqrt(2.0 * math.pi)
    first = -_increments(density)  # 1st,
    second = P - _increments(t * density)  # and 2nd
    terms = second - 2.0 * x * first + x**2 * P
    return lipschitz**2 * f_var * jnp.sum(terms, axis=0)


def exp_error(
    edges: Float[Array, " E"],
    points: Float[Array, " K"],
    f_mean: Float[Array, "*shape"],
    f_var: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    r"""The mean squared error of the approximated exponential link (theorem 2).

    .. math:: \sum_k \Big[e^{2\mu + 2\sigma^2} P_k(2\sigma)
        - 2 e^{x_k} e^{\mu + \sigma^2/2} P_k(\sigma) + e^{2 x_k} P_k(0)\Big],

    with :math:`P_k(c)` the probability of piece `k`, its edges moved down by
    :math:`c` standard deviations.

    Args and returns as in `lipschitz_error`.
    """
    sd = jnp.sqrt(positive(f_var))
    t = (_column(edges, f_mean) - f_mean[None]) / sd[None]
    x = _column(points, f_mean)
    square = jnp.exp(2.0 * f_mean + 2.0 * f_var)[None] * interval_probabilities(
        t - 2.0 * sd[None]
    )
    cross = jnp.exp(x + (f_mean + 0.5 * f_var)[None]) * interval_probabilities(
        t - sd[None]
    )
    terms = square - 2.0 * cross + jnp.exp(2.0 * x) * interval_probabilities(t)
    return jnp.sum(terms, axis=0)


def pieces_for_error(
    link: Link | str,
    error: float,
    *,
    f_mean: float = 0.0,
    f_var: float = 1.0,
    lipschitz: float | None = None,
    at: str = "middle",
) -> PiecewiseConstant:
    """The fewest pieces that keep the root mean squared error below `error`.

    Args:
        link: The link to approximate, or its name.
        error: Wanted root mean squared error of the link's value.
        f_mean: Mean of the latent that the error is averaged over.
        f_var: Its variance.
        lipschitz: Lipschitz constant of the link; known for the usual ones.
        at: `"middle"` or `"upper"`, see `PiecewiseConstant.of`.

    Returns:
        The approximation, its range and number of pieces chosen.
    """
    link = get_link(link)
    if not error > 0.0:
        raise ValueError(f"`error` must be positive; got {error}.")
    mean, var = jnp.asarray(f_mean, float), jnp.asarray(f_var, float)
    lower, upper = _range(link, error, f_mean, math.sqrt(f_var), lipschitz)

    def squared_error(num_pieces, padded):
        edges = even_edges(num_pieces, lower, upper)
        points = places(edges, at)
        # Empty pieces at the end change nothing, and keep shapes for the compiler.
        extra = padded - num_pieces
        edges, points = (
            jnp.asarray(np.pad(x, (0, extra), mode="edge")) for x in (edges, points)
        )
        if isinstance(link, Exp):
            return float(jax.jit(exp_error)(edges, points, mean, var))
        constant = _lipschitz_constant(link, lipschitz)
        return float(constant**2 * jax.jit(lipschitz_error)(edges, points, mean, var))

    most = 64
    while squared_error(most, most) > error**2:
        most *= 2
        if most > _MOST_PIECES:
            raise ValueError(
                f"`error` = {error} needs more than {_MOST_PIECES} pieces. Use a "
                "smooth link: its quadrature has no such error."
            )
    least, padded = 3, most
    while least < most:  # the error falls with the number of pieces
        middle = (least + most) // 2
        if squared_error(middle, padded) > error**2:
            least = middle + 1
        else:
            most = middle
    return PiecewiseConstant.of(link, num_pieces=most, lower=lower, upper=upper, at=at)


_MOST_PIECES = 100_000


def _range(link, error, mean, sd, lipschitz):
    """Ends such that what lies beyond adds at most half of the squared error.

    For a Lipschitz link a tail beyond `c` sds adds at most the squared distance to the
    end, averaged over the tail; for the exponential one the tail that its square
    weighs, which is that of a Gaussian moved up by two variances.
    """
    scale = 1.0 if isinstance(link, Exp) else _lipschitz_constant(link, lipschitz)
    if isinstance(link, Exp):
        scale = math.exp(mean + sd**2)
    allowed = 0.25 * (error / scale) ** 2
    c = 0.5
    while _tail_square(c) * (1.0 if isinstance(link, Exp) else sd**2) > allowed:
        c += 0.1
    up = mean + c * sd + (2.0 * sd**2 if isinstance(link, Exp) else 0.0)
    return mean - c * sd, up


def _tail_square(c):
    r""":math:`\int_c^\infty (z - c)^2\,\mathcal N(z; 0, 1)\,dz`."""
    density = math.exp(-0.5 * c**2) / math.sqrt(2.0 * math.pi)
    return (1.0 + c**2) * 0.5 * math.erfc(c / math.sqrt(2.0)) - c * density


def _lipschitz_constant(link, given):
    if given is not None:
        return given
    name = type(link).__name__
    if name not in _LIPSCHITZ:
        raise ValueError(
            f"`lipschitz` must be given for {name}: the largest slope of the link."
        )
    return _LIPSCHITZ[name]


_LIPSCHITZ = {
    "Identity": 1.0,
    "Logit": 0.25,
    "Probit": 1.0 / math.sqrt(2.0 * math.pi),
    "Softplus": 1.0,
}


def _column(values, like) -> Array:
    return values.astype(like.dtype).reshape((-1, *(1,) * like.ndim))


def _increments(values):
    """Differences along the first axis, with 0 at both infinite ends."""
    zero = jnp.zeros_like(values[:1])
    return jnp.concatenate([values, zero]) - jnp.concatenate([zero, values])
