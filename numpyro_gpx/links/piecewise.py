r"""The piecewise-constant inverse link: expectations of any likelihood in closed form.

.. math:: \hat g(f) = \sum_k g_k\,\mathbb 1[l_k \le f < u_k], \qquad
    \mathbb E[h(\hat g(f))] = \sum_k h(g_k)\,P(l_k \le f < u_k)

References:
    Seitz, "A piece-wise constant approximation for non-conjugate GP models", eq. 8, 12.
"""

__all__ = ["PiecewiseConstant", "even_edges", "places", "step"]

import math
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erfc
from jaxtyping import Array, Float, Int

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.checked_fields import as_float
from numpyro_gpx.links.normal import interval_probabilities, log_interval
from numpyro_gpx.links.smooth import Identity, Link, Proportion
from numpyro_gpx.numerics.factor import positive


class Pieces(NamedTuple):
    """One latent value inside each piece `(K, 1, ...)`, and weights `(K, ...)`."""

    points: Float[Array, "..."]
    weights: Float[Array, "..."]


class PiecewiseConstant(Link):
    r"""A step function with K values, as an inverse link.

    The values are :math:`g_k = \text{base}(\text{points}_k)`: with the identity as
    base they are free numbers, with `Logit` free probabilities, and with `points` at
    the places of `PiecewiseConstant.of` the approximation of `base` itself. Points may
    be a `numpyro.param`, a draw, or (Gaussian likelihood, identity) a Gaussian belief.

    It jumps: given a *known* latent function its gradient is zero. Expectations under
    Gaussian marginals with some variance are smooth, so that SVI, and NUTS or SGHMC on
    a sparse GP, work; on the full GP use elliptical slice sampling.

    Args:
        points: Latent values that `base` turns into the values of the pieces, `(K,)`.
        edges: Inner edges, rising, `(K - 1,)`; the outer pieces reach to infinity.
        base: The link that turns points into values; the identity if left out.

    References:
        Seitz, eq. 8.
    """

    points: Float[Array, " K"] | Belief
    edges: Float[Array, " E"] = eqx.field(converter=as_float)
    base: Link = eqx.field(default_factory=Identity)
    discontinuous: ClassVar[bool] = True

    def __check_init__(self):
        shape = self._mean_points().shape
        if self.edges.ndim != 1 or shape != (self.edges.shape[0] + 1,):
            raise ValueError(
                "`points` must have shape (K,) and `edges` (K - 1,); got "
                f"{shape} and {self.edges.shape}. Points that are sampled or learnt "
                "belong outside the data plate."
            )

    @classmethod
    def of(
        cls, link: Link | str, *, num_pieces: int = 50, lower: float = -3.0,
        upper: float = 3.0, at: str = "upper",
    ) -> "PiecewiseConstant":  # fmt: skip
        """The approximation of another link.

        Args:
            link: The link, or its name.
            num_pieces: Number of pieces K, at least 3.
            lower: Upper edge of the first piece; below it the link is constant.
            upper: Lower edge of the last piece; above it the link is constant.
            at: Where in a piece the link is evaluated: `"upper"`, its upper edge, as in
                the paper, or `"middle"`. The outer pieces use their finite edge.
        """
        from numpyro_gpx.links.named import get_link  # which names `step` of this file

        edges = even_edges(num_pieces, lower, upper)
        return cls(places(edges, at), edges, get_link(link))

    @property
    def num_pieces(self) -> int:
        return self.edges.shape[0] + 1

    @property
    def is_probability(self) -> bool:
        return self.base.is_probability

    @property
    def values(self) -> Float[Array, " K"]:
        """The values :math:`g_k`; their means, if the points are a belief."""
        return self.base(self._mean_points())

    def __call__(self, f):
        return self.base(self._point_of(f))

    def log(self, f):
        return self.base.log(self._point_of(f))

    def log_complement(self, f):
        return self.base.log_complement(self._point_of(f))

    def piece_of(self, f: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Number of the piece that each latent value falls into, from 0."""
        return jnp.searchsorted(self.edges, f, side="right")

    def pieces(
        self, f_mean: Float[Array, "*shape"], f_var: Float[Array, "*shape"]
    ) -> Pieces:
        """A latent value in each piece, with the probability of the piece."""
        t = (_column(self.edges, f_mean) - f_mean[None]) / _sd(f_var)[None]
        return Pieces(self.inside(f_mean), interval_probabilities(t))

    def mean(
        self,
        values: Float[Array, "K ..."],
        f_mean: Float[Array, "*shape"],
        f_var: Float[Array, "*shape"],
    ) -> Float[Array, "*shape"]:
        r"""Expectation of what has `values` on the pieces, `(K, ...)`.

        Summed by parts, :math:`h_K + \sum_k (h_k - h_{k+1})\,\Phi(t_k)`, which needs
        one distribution function an edge and no array of probabilities.
        """
        # Pieces on the last axis: on a CPU sums over it are twice as fast.
        h = jnp.moveaxis(values, 0, -1)
        edges = jnp.moveaxis(_column(self.edges, f_mean), 0, -1)
        t = (edges - f_mean[..., None]) / _sd(f_var)[..., None]
        cdf = 0.5 * erfc(-math.sqrt(0.5) * t)
        return h[..., -1] + jnp.sum((h[..., :-1] - h[..., 1:]) * cdf, axis=-1)

    def log_pieces(
        self, f_mean: Float[Array, "*shape"], f_var: Float[Array, "*shape"]
    ) -> Pieces:
        """The same with log probabilities, which do not underflow in the tails."""
        t = (_column(self.edges, f_mean) - f_mean[None]) / _sd(f_var)[None]
        end = jnp.full_like(t[:1], jnp.inf)
        lower, upper = jnp.concatenate([-end, t]), jnp.concatenate([t, end])
        return Pieces(self.inside(f_mean), log_interval(lower, upper))

    def inside(self, like: Float[Array, "*shape"]) -> Float[Array, "K ..."]:
        """A latent value inside each piece, away from its edges, `(K, 1, ...)`."""
        inner = 0.5 * (self.edges[1:] + self.edges[:-1])
        ends = self.edges[:1] - 1.0, self.edges[-1:] + 1.0
        return _column(jnp.concatenate([ends[0], inner, ends[1]]), like)

    def _point_of(self, f):
        if isinstance(self.points, Belief):
            raise TypeError(
                "`points` is a Gaussian belief, which only a Gaussian likelihood can "
                "integrate. Draw the points instead: leave out `integrate=True`."
            )
        return self.points[self.piece_of(f)].astype(f.dtype)

    def _mean_points(self):
        return self.points.mean if isinstance(self.points, Belief) else self.points


def step(epsilon=1e-3) -> PiecewiseConstant:
    r"""A step with errors: probability :math:`1 - \epsilon` where `f > 0`, else
    :math:`\epsilon`.

    The two-class form of robust-max: only the sign of the latent counts, and a share of
    the labels is wrong whatever it is.

    Args:
        epsilon: Share of wrong labels, between 0 and 1/2.

    References:
        Hernández-Lobato, Hernández-Lobato & Dupont (2011).
    """
    epsilon = as_float(epsilon)
    points = jnp.stack([epsilon, 1.0 - epsilon])
    return PiecewiseConstant(points, jnp.zeros(1), Proportion())


def even_edges(num_pieces: int, lower: float, upper: float) -> Float[Array, " E"]:
    """Inner edges of K pieces, evenly spaced from `lower` to `upper`, `(K - 1,)`."""
    if num_pieces < 3:
        raise ValueError(f"`num_pieces` must be at least 3; got {num_pieces}.")
    if not lower < upper:
        raise ValueError(f"`lower` must be below `upper`; got {lower} and {upper}.")
    return jnp.asarray(np.linspace(lower, upper, num_pieces - 1))


def places(edges: Float[Array, " E"], at: str = "upper") -> Float[Array, " K"]:
    """Where in each piece a link is evaluated, the :math:`x_k` of the paper, `(K,)`."""
    if at == "upper":
        return jnp.concatenate([edges, edges[-1:]])
    if at == "middle":
        inner = 0.5 * (edges[1:] + edges[:-1])
        return jnp.concatenate([edges[:1], inner, edges[-1:]])
    raise ValueError(f"`at` must be 'upper' or 'middle'; got {at!r}.")


def _column(values, like):
    """`values` `(K,)` on an axis before those of `like`, in its dtype."""
    return values.astype(like.dtype).reshape((-1, *(1,) * like.ndim))


def _sd(f_var):
    return jnp.sqrt(positive(f_var))
