r"""The Cholesky factor with a derivative that is made of matrix products.

With :math:`K = L L^\top` and :math:`\Phi` the lower triangle with halved diagonal,
:math:`dL = L\,\Phi(L^{-1} dK L^{-\top})`: two triangular solves of size M x M, and two
more backwards. In blocks

.. math:: K = \begin{pmatrix} A & B^\top \\ B & C \end{pmatrix}, \quad
    L = \begin{pmatrix} L_1 & \\ H & L_2 \end{pmatrix}, \quad
    dH = (dB - H\,dL_1^\top) L_1^{-\top}, \quad
    dL_2 \text{ from } dC - dH H^\top - H\,dH^\top

and the same again for :math:`dL_1` (from `dA`) and :math:`dL_2`, nearly all is products
and a solve of half the size. It is linear in `dK`: reverse mode is its transpose, which
JAX takes, and second derivatives work.

References:
    Murray (2016), "Differentiation of the Cholesky decomposition", section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax.linalg import triangular_solve
from jaxtyping import Array, Float

__all__ = ["lower_cholesky"]

# Up to this size the two solves are as fast; and at most so many halvings, since each
# doubles what has to be compiled.
_SMALL, _HALVINGS = 64, 2


@jax.custom_jvp
def lower_cholesky(K: Float[Array, "*B M M"]) -> Float[Array, "*B M M"]:
    """Lower Cholesky factor of symmetric matrices."""
    return jnp.linalg.cholesky(K)


@lower_cholesky.defjvp
def _lower_cholesky_jvp(primals, tangents):
    (K,), (dK,) = primals, tangents
    L = lower_cholesky(K)
    return L, _tangent(L, 0.5 * (dK + _transposed(dK)), _HALVINGS)


def _tangent(L, dK, halvings: int):
    """`dL` of a symmetric `dK`."""
    size = L.shape[-1]
    if size <= _SMALL or not halvings:
        half = triangular_solve(L, dK, left_side=True, lower=True)
        whole = triangular_solve(L, half, lower=True, transpose_a=True)
        return L @ _lower_half(whole)
    k = size // 2
    L1, H, L2 = L[..., :k, :k], L[..., k:, :k], L[..., k:, k:]
    dL1 = _tangent(L1, dK[..., :k, :k], halvings - 1)
    rest = dK[..., k:, :k] - H @ _transposed(dL1)
    dH = triangular_solve(L1, rest, lower=True, transpose_a=True)
    cross = dH @ _transposed(H)
    dC = dK[..., k:, k:] - (cross + _transposed(cross))
    dL2 = _tangent(L2, dC, halvings - 1)
    above = jnp.zeros_like(_transposed(dH))
    return jnp.concatenate(
        [
            jnp.concatenate([dL1, above], axis=-1),
            jnp.concatenate([dH, dL2], axis=-1),
        ],
        axis=-2,
    )


def _lower_half(G):
    """The lower triangle with halved diagonal."""
    halved = 1.0 - 0.5 * jnp.eye(G.shape[-1], dtype=G.dtype)
    return jnp.tril(G) * jnp.broadcast_to(halved, G.shape)


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)
