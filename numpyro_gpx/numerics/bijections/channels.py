"""Invertible 1x1 convolutions: linear maps over the outputs of all layers."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from numpyro_gpx.numerics.bijections.base import Bijection
from numpyro_gpx.numerics.bijections.layout import Layout

__all__ = ["ChannelMixing"]


class ChannelMixing(Bijection):
    r"""The same matrix :math:`W = LU` over the channels, at each inducing point.

    `L` is unit lower triangular and `U` upper triangular with diagonal :math:`e^s`, so
    that with as many points in every layer
    :math:`\log|\det| = M \sum_c s_c` (thesis eq. 5.10).

    Layers may have different numbers of points. The channels present at a point are the
    first `c` of the stack, and there the leading block
    :math:`W_{cc} = L_{cc} U_{cc}` acts, whose factors are the leading blocks of `L` and
    `U`: one kernel for all points, and
    :math:`\log|\det| = \sum_c M_c s_c`.

    Args:
        layout: How the layers lie in the vector.
        lower: Holds `L` below its diagonal, `(C, C)`.
        upper: Holds `U` above its diagonal, `(C, C)`.
        log_scale: `s`, `(C,)`.

    References:
        Kingma & Dhariwal (2018), section 3.2 (LU); thesis 5.5.
    """

    layout: Layout = eqx.field(static=True)
    lower: Float[Array, "*B C C"]
    upper: Float[Array, "*B C C"]
    log_scale: Float[Array, "*B C"]

    def forward(self, x):
        L, U = self._factors
        grid = L @ (U @ self.layout.stack(x))  # (C, M)
        # Rows of channels that are not present hold what `L` made of the others.
        return self.layout.unstack(grid), self._log_det

    def inverse(self, y):
        L, U = self._factors
        grid = self.layout.stack(y)
        grid = solve_triangular(L, grid, lower=True, unit_diagonal=True)
        # They would come back through `U`, from below.
        grid = jnp.where(self.layout.present, grid, jnp.zeros_like(grid))
        return self.layout.unstack(solve_triangular(U, grid)), -self._log_det

    @property
    def _factors(self):
        C = self.lower.shape[0]
        L = jnp.tril(self.lower, -1) + jnp.eye(C, dtype=self.lower.dtype)
        return L, jnp.triu(self.upper, 1) + jnp.diag(jnp.exp(self.log_scale))

    @property
    def _log_det(self):
        counts = jnp.asarray(self.layout.counts, self.log_scale.dtype)
        return counts @ self.log_scale
