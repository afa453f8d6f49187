r"""Roots :math:`K = R R^\top` of covariances, and what is done with them.

Nothing outside asks for the numbers of a root, only for products and solves with it: a
structured covariance brings a root of its own. The dense one keeps `W = L^-1` (M x M),
so that everything of size M x N in a sparse GP is a matrix product; its derivative
needs three more M x M products and no solve.
"""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from numpyro_gpx.numerics.cholesky import lower_cholesky
from numpyro_gpx.numerics.jitter import current_jitter

__all__ = ["Dense", "Factor", "Triangular", "cholesky", "factorise", "positive"]


class Factor(eqx.Module):
    r"""A root `R` of a covariance of M variables, unbatched; `vmap` for several."""

    @abc.abstractmethod
    def solve(
        self, K: Float[Array, "M N"], *, accurate: bool = False
    ) -> Float[Array, "M N"]:
        """`R^-1 K`.

        Args:
            K: Columns to solve for.
            accurate: Whether a difference of large numbers follows, which must stay
                positive definite: slower where there is a choice.
        """

    @abc.abstractmethod
    def solve_t(self, K: Float[Array, "M N"]) -> Float[Array, "M N"]:
        """`R^-T K`."""

    @abc.abstractmethod
    def multiply(self, v: Float[Array, "M N"]) -> Float[Array, "M N"]:
        """`R v`."""

    @abc.abstractmethod
    def multiply_t(self, v: Float[Array, "M N"]) -> Float[Array, "M N"]:
        """`R^T v`."""

    @abc.abstractmethod
    def log_det(self) -> Float[Array, ""]:
        """Log determinant of `R`."""

    @abc.abstractmethod
    def lower(self) -> Float[Array, "M M"]:
        """A lower triangular root of the same covariance."""

    @abc.abstractmethod
    def condition(self) -> Float[Array, ""]:
        """An estimate of the covariance's condition; NaN if it has no root."""

    def congruence(self, G: Float[Array, "M M"]) -> Float[Array, "M M"]:
        """`R^-1 G R^-T` of a symmetric `G`."""
        half = self.solve(G)
        return self.solve(half.T).T

    def gram(
        self, K: Float[Array, "M N"], total: Float[Array, ""]
    ) -> Float[Array, "M M"]:
        """`A A^T` for `A = R^-1 K`.

        Args:
            K: Cross-covariance, rows weighted.
            total: Sum of the rows' weighted variances, for those who estimate errors.
        """
        A = self.solve(K)
        return A @ A.T


class Dense(Factor):
    """A lower factor `L` with its inverse `W`, both `(M, M)`."""

    L: Float[Array, "M M"]
    W: Float[Array, "M M"]

    def solve(self, K, *, accurate=False):
        return solve_triangular(self.L, K, lower=True) if accurate else self.W @ K

    def solve_t(self, K):
        return self.W.T @ K

    def multiply(self, v):
        return self.L @ v

    def multiply_t(self, v):
        return self.L.T @ v

    def log_det(self):
        return jnp.sum(jnp.log(jnp.diagonal(self.L)))

    def lower(self):
        return self.L

    def condition(self):
        return jnp.sum(self.L**2) * jnp.sum(self.W**2)

    def congruence(self, G):
        return self.W @ G @ self.W.T

    def gram(self, K, total):
        r""":math:`A A^\top`, by a single product of size M x M x N where it can be.

        :math:`W (K K^\top) W^\top` squares the condition: where its estimated error
        exceeds a millionth, as in float32 it nearly always does, `A` is formed.

        Its derivative is stated for reverse mode alone (that of a branch would copy
        M x N arrays): second derivatives are `jax.jacrev` of `jax.grad`, not
        `jax.hessian`.
        """
        return _projected_gram(self.L, self.W, K, _is_stable(self.L, self.W, total))


class Triangular(Factor):
    """A lower factor `L` alone, for those who multiply with it and hardly solve."""

    L: Float[Array, "M M"]

    def solve(self, K, *, accurate=False):
        return solve_triangular(self.L, K, lower=True)

    def solve_t(self, K):
        return solve_triangular(self.L, K, lower=True, trans=1)

    def multiply(self, v):
        return self.L @ v

    def multiply_t(self, v):
        return self.L.T @ v

    def log_det(self):
        return jnp.sum(jnp.log(jnp.diagonal(self.L)))

    def lower(self):
        return self.L

    def condition(self):
        diagonal = jnp.diagonal(self.L)
        return (jnp.max(diagonal) / jnp.min(diagonal)) ** 2


def cholesky(
    K: Float[Array, "*B M M"], scale: Float[Array, ""] | None = None
) -> Float[Array, "*B M M"]:
    """Lower Cholesky factor of `K` plus the jitter.

    Args:
        K: Symmetric matrices.
        scale: What the jitter is relative to; the mean of the diagonal if left out. A
            difference of covariances needs the scale of what was subtracted, since it
            has that one's rounding errors.
    """
    return lower_cholesky(_with_jitter(K, scale))


def factorise(K: Float[Array, "M M"]) -> Dense:
    """Lower Cholesky factor of `K` plus the jitter, with its inverse."""
    return Dense(*_factorise(_with_jitter(K)))


def positive(variance: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Clamp variances, which rounding may leave below 0, at a floor of the dtype.

    The floor is the square of the machine precision: far below any jitter, and its
    square root still has a finite derivative.
    """
    return jnp.maximum(variance, jnp.finfo(variance.dtype).eps ** 2)


def _is_stable(L, W, total):
    r"""Whether :math:`W (K K^\top) W^\top` has an error below a millionth.

    By Cauchy-Schwarz no entry of :math:`K K^\top` exceeds the sum of the rows'
    (weighted) variances times the largest variance of `u`.
    """
    most = total * jnp.max(jnp.sum(L**2, axis=-1))
    rounding = jnp.finfo(L.dtype).eps * jnp.sum(W**2) * most
    return jax.lax.stop_gradient(rounding < 1e-6)


@jax.custom_vjp
def _projected_gram(L, W, K, stable):
    def fast(W, K):
        return W @ (K @ K.T) @ W.T

    def accurate(W, K):
        A = W @ K
        return A @ A.T

    return jax.lax.cond(stable, fast, accurate, W, K)


def _projected_gram_fwd(L, W, K, stable):
    gram = _projected_gram(L, W, K, stable)
    return gram, (L, W, K, stable, gram)


def _projected_gram_bwd(kept, C):
    r"""Since :math:`W K K^\top = A A^\top L^\top`, `W` needs no product of size N."""
    L, W, K, stable, gram = kept
    C = C + C.T

    def fast(W, K, C):
        return (W.T @ C @ W) @ K

    def accurate(W, K, C):
        return W.T @ (C @ (W @ K))

    slope = jax.lax.cond(stable, fast, accurate, W, K, C)
    return jnp.zeros_like(L), C @ gram @ L.T, slope, None


_projected_gram.defvjp(_projected_gram_fwd, _projected_gram_bwd)


def _with_jitter(K, scale=None):
    if scale is None:
        scale = jnp.trace(K, axis1=-2, axis2=-1)[..., None, None] / K.shape[-1]
    eye = jnp.eye(K.shape[-1], dtype=K.dtype)
    return K + current_jitter(K.dtype) * scale * jnp.broadcast_to(eye, K.shape)


@jax.custom_jvp
def _factorise(K):
    return _factorise_one(K)


@jax.custom_batching.sequential_vmap
def _factorise_one(K):
    # One matrix after the other, also under `vmap`: jaxlib 0.10 hands a batch to the
    # threads that it runs on, and several batches at once wait for ever.
    L = jnp.linalg.cholesky(K)
    return L, solve_triangular(L, jnp.eye(K.shape[0], dtype=K.dtype), lower=True)


@_factorise.defjvp
def _factorise_jvp(primals, tangents):
    r"""With :math:`\Phi` the lower triangle with halved diagonal and
    :math:`G = \Phi(W\,dK\,W^\top)`: :math:`dL = L G` and :math:`dW = -G W`."""
    (K,), (dK,) = primals, tangents
    L, W = _factorise(K)
    dK = 0.5 * (dK + dK.T)
    G = jnp.tril(W @ dK @ W.T)
    G = G - 0.5 * jnp.diag(jnp.diagonal(G))
    return (L, W), (L @ G, -G @ W)
