r"""Rules for expectations over uncertain inputs, :math:`x_n \sim \mathcal N(m_n, S_n)`.

All have one interface: `rule.nodes(belief)` gives S point sets, each with one point of
every row, and their weights,

.. math:: \mathbb E[g(x_n)] \approx \sum_s w_s\, g(x_n^{(s)}).

A rule of low order is an approximation, not a bound: what is maximised with it is an
*objective*, and only `Analytic` and rules that have converged give a lower bound.
"""

from __future__ import annotations

import abc
import functools
import itertools
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from numpyro_gpx import checks
from numpyro_gpx.cubature.gauss_hermite import gauss_hermite
from numpyro_gpx.uncertain import InputBelief

__all__ = [
    "Analytic",
    "GaussHermite",
    "MonteCarlo",
    "Nodes",
    "Rule",
    "SphericalRadial",
    "Unscented",
    "default_rule",
]


class Nodes(NamedTuple):
    """S point sets of N rows: points `(S, N, Q)` and weights `(S,)`, with sum 1."""

    points: Float[Array, "S N Q"]
    weights: Float[Array, " S"]


class Rule(eqx.Module):
    """How to integrate over uncertain inputs."""

    random: ClassVar[bool] = False

    @abc.abstractmethod
    def num_points(self, num_dims: int) -> int:
        """Number of points S in `num_dims` dimensions."""

    @abc.abstractmethod
    def standard(self, num_dims: int) -> tuple[np.ndarray, np.ndarray]:
        """Points `(S, Q)` and weights `(S,)` for a standard normal."""

    def has_negative_weights(self, num_dims: int) -> bool:
        """Whether averages of positive functions may be negative."""
        return False

    def nodes(self, belief: InputBelief, key=None) -> Nodes:
        """Point sets for every row of `belief`.

        Args:
            belief: Gaussian rows `(N, Q)`.
            key: Random key; only rules that draw need it.
        """
        points, weights = (
            jnp.asarray(x, belief.mean.dtype) for x in self.standard(belief.shape[1])
        )
        return Nodes(placed(belief, points[:, None, :]), weights)


def default_rule(num_dims: int) -> Rule:
    """What guides use if they are told nothing: `Unscented()`.

    In one dimension that would be two points, which a fit can suit itself to; there
    five Gauss-Hermite nodes cost as little.
    """
    return GaussHermite(5) if num_dims == 1 else Unscented()


def placed(belief: InputBelief, points: Float[Array, "S N Q"]) -> Array:
    r"""Standard normal points moved to the rows, :math:`m_n + S_n\,\xi`."""
    if belief.is_diagonal:
        return belief.mean + belief.scale * points
    points = jnp.broadcast_to(points, (points.shape[0], *belief.shape))
    return belief.mean + jnp.einsum("nij,snj->sni", belief.scale, points)


class Unscented(Rule):
    r"""The unscented transformation: :math:`2Q` points, or one more in the centre.

    Points :math:`m \pm \sqrt{Q/(1 - w_0)}\,S_{:i}` with equal weights
    :math:`(1 - w_0)/(2Q)`, and the centre with weight :math:`w_0`. Exact for
    polynomials of degree 3.

    Args:
        centre: Weight :math:`w_0` of the centre, at least 0 and below 1; with 0 there
            is no centre point. :math:`w_0 = 1 - Q/3` also gets the fourth moment of
            each axis right, up to three dimensions.

    References:
        Uhlmann (1995); dissertation 3.2. Julier & Uhlmann (2004) for the centre.
    """

    centre: float = eqx.field(static=True, default=0.0)

    def __check_init__(self):
        if not 0.0 <= self.centre < 1.0:
            raise ValueError(
                f"`centre` must be at least 0 and below 1; got {self.centre}."
            )

    def num_points(self, num_dims):
        return 2 * num_dims + (self.centre > 0.0)

    def standard(self, num_dims):
        eye = np.eye(num_dims) * np.sqrt(num_dims / (1.0 - self.centre))
        points = np.concatenate([eye, -eye])
        weights = np.full(2 * num_dims, (1.0 - self.centre) / (2 * num_dims))
        if self.centre > 0.0:
            points = np.concatenate([np.zeros((1, num_dims)), points])
            weights = np.concatenate([[self.centre], weights])
        return points, weights


class GaussHermite(Rule):
    """The tensor product of one-dimensional Gauss-Hermite rules: `num_nodes**Q` points.

    Exact for polynomials of degree `2 num_nodes - 1` in each column.

    Args:
        num_nodes: Nodes in each dimension.
    """

    num_nodes: int = eqx.field(static=True)

    def __check_init__(self):
        checks.at_least("num_nodes", self.num_nodes, 1)

    def num_points(self, num_dims):
        return self.num_nodes**num_dims

    def standard(self, num_dims):
        return _tensor(self.num_nodes, num_dims)


@functools.cache
def _tensor(num_nodes, num_dims):
    if num_nodes**num_dims > _MOST_POINTS:
        raise ValueError(
            f"GaussHermite({num_nodes}) needs {num_nodes}**{num_dims} points in "
            f"{num_dims} dimensions; use fewer nodes, or Unscented()."
        )
    x, w = gauss_hermite(num_nodes)
    points = np.array(list(itertools.product(x, repeat=num_dims)))
    weights = np.prod(np.array(list(itertools.product(w, repeat=num_dims))), axis=1)
    return points, weights


_MOST_POINTS = 100_000


class SphericalRadial(Rule):
    r"""Spherical-radial cubature of degree 3 or 5.

    Degree 3 is `Unscented()`. Degree 5 has :math:`2Q^2 + 1` points: the centre,
    :math:`\pm\sqrt{Q+2}\,e_i` and :math:`\sqrt{(Q+2)/2}\,(\pm e_i \pm e_j)`, with
    weights :math:`2/(Q+2)`, :math:`(4-Q)/(2(Q+2)^2)` and :math:`1/(Q+2)^2`. Beyond four
    dimensions the second weight is negative, and averages of positive functions need
    not be positive.

    Args:
        degree: 3 or 5.

    References:
        Arasaratnam & Haykin (2009) for degree 3, Jia, Xin & Cheng (2013) for degree 5.
    """

    degree: int = eqx.field(static=True, default=3)

    def __check_init__(self):
        if self.degree not in (3, 5):
            raise ValueError(f"`degree` must be 3 or 5; got {self.degree}.")

    def num_points(self, num_dims):
        return 2 * num_dims if self.degree == 3 else 2 * num_dims**2 + 1

    def has_negative_weights(self, num_dims):
        return self.degree == 5 and num_dims > 4

    def standard(self, num_dims):
        if self.degree == 3:
            return Unscented().standard(num_dims)
        eye = np.eye(num_dims)
        pairs = [
            (a * eye[i] + b * eye[j]) / np.sqrt(2.0)
            for i, j in itertools.combinations(range(num_dims), 2)
            for a, b in itertools.product((1.0, -1.0), repeat=2)
        ]
        radius = np.sqrt(num_dims + 2.0)
        points = [np.zeros((1, num_dims)), radius * eye, -radius * eye]
        axis = (4.0 - num_dims) / (2.0 * (num_dims + 2.0) ** 2)
        weights = [np.array([2.0 / (num_dims + 2.0)]), np.full(2 * num_dims, axis)]
        if pairs:
            points.append(radius * np.array(pairs))
            weights.append(np.full(len(pairs), 1.0 / (num_dims + 2.0) ** 2))
        return np.concatenate(points), np.concatenate(weights)


class MonteCarlo(Rule):
    """Independent draws, new ones for every row and every evaluation.

    Noisy, so that it needs `fit_svi`. Its average is the bound, save under
    `OptimalGaussian`, whose belief is the best for the very draws that it is scored on.

    Args:
        num_draws: Draws S of each row.
    """

    num_draws: int = eqx.field(static=True, default=1)

    random: ClassVar[bool] = True

    def __check_init__(self):
        checks.at_least("num_draws", self.num_draws, 1)

    def num_points(self, num_dims):
        return self.num_draws

    def standard(self, num_dims):
        raise NotImplementedError("MonteCarlo has no fixed points; call `nodes`.")

    def nodes(self, belief, key=None):
        checks.key(key)
        shape = (self.num_draws, *belief.shape)
        draws = jr.normal(key, shape, belief.mean.dtype)
        weights = jnp.full(self.num_draws, 1.0 / self.num_draws, belief.mean.dtype)
        return Nodes(placed(belief, draws), weights)


class Analytic(Rule):
    """Closed-form psi statistics, for kernels that have them (`processes/psi.py`).

    The model gets a belief instead of points; its likelihood must be Gaussian. The
    result is a lower bound.
    """

    def num_points(self, num_dims):
        return 0

    def standard(self, num_dims):
        raise NotImplementedError("The analytic rule has no points.")
