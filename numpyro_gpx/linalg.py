"""Factorisations with one jitter, and the derivative rule that makes them fast.

Everything of size M x N in a sparse GP is then a matrix product: `W = L^-1` is formed
once (M x M), and its derivative needs three more M x M products and no solve.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

__all__ = [
    "Factor",
    "current_jitter",
    "explicit_jitter",
    "factorise",
    "jitter",
    "positive",
    "projected_gram",
    "safe_cholesky",
]


@contextlib.contextmanager
def jitter(relative: float | None) -> Iterator[None]:
    """Set the jitter for everything traced inside the `with` block.

    Args:
        relative: Added to the diagonal in units of its mean; `None` for the default
            of the dtype (1e-8 in float64, 1e-5 in float32).
    """
    if relative is not None and not relative >= 0.0:
        raise ValueError(f"`relative` jitter must be at least 0; got {relative}.")
    token = _JITTER.set(relative)
    try:
        yield
    finally:
        _JITTER.reset(token)


def explicit_jitter() -> float | None:
    """The jitter set by the user, or `None` where the default holds."""
    return _JITTER.get()


def current_jitter(dtype) -> float:
    """The jitter in force for `dtype`, relative to the mean of the diagonal."""
    chosen = _JITTER.get()
    if chosen is not None:
        return chosen
    return 1e-8 if jnp.dtype(dtype) == jnp.float64 else 1e-5


# A context variable, not a global: two threads may fit with different jitters.
_JITTER: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    "jitter", default=None
)


class Factor(NamedTuple):
    """A lower factor `L` of `K + jitter` and its inverse `W`, both `(..., M, M)`."""

    L: Array
    W: Array


def safe_cholesky(
    K: Float[Array, "*B M M"], scale: Float[Array, ""] | None = None
) -> Float[Array, "*B M M"]:
    """Lower Cholesky factor of `K` plus the jitter.

    Args:
        K: Symmetric matrices.
        scale: What the jitter is relative to; the mean of the diagonal if left out. A
            difference of covariances needs the scale of what was subtracted, since it
            has that one's rounding errors.
    """
    return jnp.linalg.cholesky(_with_jitter(K, scale))


def factorise(K: Float[Array, "*B M M"]) -> Factor:
    """Lower Cholesky factor of `K` plus the jitter, with its inverse."""
    return _factorise(_with_jitter(K))


def positive(variance: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Clamp variances, which rounding may leave below 0, at a floor of the dtype.

    The floor is the square of the machine precision: far below any jitter, and its
    square root still has a finite derivative.
    """
    return jnp.maximum(variance, jnp.finfo(variance.dtype).eps ** 2)


def projected_gram(
    factor: Factor, K: Float[Array, "M N"], stable: Array
) -> Float[Array, "M M"]:
    r""":math:`A A^\top` for :math:`A = W K`.

    Its derivative is stated for reverse mode alone (that of a branch would copy M x N
    arrays): second derivatives are `jax.jacrev` of `jax.grad`, not `jax.hessian`.

    Args:
        factor: A factor `L` with its inverse `W`.
        K: Cross-covariance.
        stable: A boolean scalar: whether :math:`W (K K^\top) W^\top`, a single product
            of size M x M x N, is accurate enough. Otherwise `A` is formed.
    """
    return _projected_gram(*factor, K, stable)


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
    return K + current_jitter(K.dtype) * scale * _eye_like(K)


def _eye_like(K):
    return jnp.broadcast_to(jnp.eye(K.shape[-1], dtype=K.dtype), K.shape)


@jax.custom_jvp
def _factorise(K):
    L = jnp.linalg.cholesky(K)
    return Factor(L, solve_triangular(L, _eye_like(K), lower=True))


@_factorise.defjvp
def _factorise_jvp(primals, tangents):
    r"""With :math:`\Phi` the lower triangle with halved diagonal and
    :math:`G = \Phi(W\,dK\,W^\top)`: :math:`dL = L G` and :math:`dW = -G W`."""
    (K,), (dK,) = primals, tangents
    L, W = _factorise(K)
    dK = 0.5 * (dK + jnp.swapaxes(dK, -1, -2))
    G = jnp.tril(W @ dK @ jnp.swapaxes(W, -1, -2))
    G = G - 0.5 * G * _eye_like(K)
    return Factor(L, W), Factor(L @ G, -G @ W)
