"""Triangular maps over the inducing points of each layer.

1x1 convolutions leave different inducing points independent if they were so before;
these maps make them dependent.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from numpyro_gpx.numerics.bijections.base import Bijection
from numpyro_gpx.numerics.bijections.layout import Layout

__all__ = ["PointMixing", "TriangularAffine"]


class PointMixing(Bijection):
    r"""A unit triangular matrix over the points of each layer, for all its outputs.

    :math:`y_p = (I + N) x_p`, `N` strictly lower triangular: :math:`\log|\det| = 0`.

    Args:
        layout: How the layers lie in the vector.
        lower: Holds `N` below its diagonal, `(M, M)` for each layer; `None` leaves a
            layer as it is.
        reverse: Whether to count the points from the last one, so that a sequence of
            such maps lets every point depend on every other.
    """

    layout: Layout = eqx.field(static=True)
    lower: tuple[Float[Array, "... _ _"] | None, ...]
    reverse: Bool[Array, "*B"]

    def forward(self, x):
        return self._each(x, lambda L, layer: layer @ L.T), jnp.zeros((), x.dtype)

    def inverse(self, y):
        def solve(L, layer):
            return solve_triangular(L, layer.T, lower=True, unit_diagonal=True).T

        return self._each(y, solve), jnp.zeros((), y.dtype)

    def _each(self, x, fn):
        layers = []
        for lower, layer in zip(self.lower, self.layout.split(x), strict=True):
            if lower is not None:
                L = jnp.tril(lower, -1) + jnp.eye(lower.shape[0], dtype=lower.dtype)
                layer = self._turned(fn(L, self._turned(layer)))
            layers.append(layer)
        return self.layout.join(layers)

    def _turned(self, layer):
        return jnp.where(self.reverse, layer[:, ::-1], layer)


class TriangularAffine(Bijection):
    r"""Shift and lower triangular factor, :math:`y_p = b_p + L_p x_p` for each output.

    Of standard normal noise it makes every Gaussian without dependence between outputs.

    Args:
        loc: `b`, `(P, M)`.
        scale_tril: `L` with a positive diagonal, `(P, M, M)`.
    """

    loc: Float[Array, "*B P M"]
    scale_tril: Float[Array, "*B P M M"]

    def forward(self, x):
        product = jnp.einsum("pij,pj->pi", self.scale_tril, x.reshape(self.loc.shape))
        return (self.loc + product).reshape(-1), self._log_det

    def inverse(self, y):
        centred = y.reshape(self.loc.shape) - self.loc
        x = solve_triangular(self.scale_tril, centred[..., None], lower=True)
        return x.reshape(-1), -self._log_det

    @property
    def _log_det(self):
        return jnp.sum(jnp.log(jnp.diagonal(self.scale_tril, axis1=-2, axis2=-1)))
