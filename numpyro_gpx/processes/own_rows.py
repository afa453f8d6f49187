r"""The full GP at its own rows: :math:`f = m + R v`, and nothing is solved."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.numerics.factor import positive
from numpyro_gpx.processes.conditional import shared_spread
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.processes.prior import SparsePrior

__all__ = ["own_rows"]


def own_rows(prior: SparsePrior, X: Float[Array, "N D"], value: Array | Belief):
    r"""`f` at the very inputs of `gpx.inducing.Data`: :math:`f = m + R v`.

    Nothing is left of the conditional variance, so that `f` is known where `v` is.

    Args:
        prior: The GP.
        X: Its own rows, `(N, D)`, for the mean function.
        value: Whitened inducing variables: a draw `(M,)` or `(P, M)`, or a belief.
    """
    offset = prior.mean(X)  # (N,) or (N, P)

    def joined(f_mean):
        return f_mean + (offset if offset.ndim == f_mean.ndim else offset[:, None])

    if not isinstance(value, Belief):
        return Gaussian.known(joined(_multiplied(prior, value[..., None])[..., 0].T))
    eye = jnp.eye(value.mean.shape[-1], dtype=value.mean.dtype)
    R = _multiplied(prior, eye)  # (M, N), or (P, M, N), seen as A^T
    f_mean = jnp.einsum("...nm,...m->...n", R, value.mean)
    A = jnp.swapaxes(R, -1, -2)
    f_var = positive(jnp.sum(value.spread(A) ** 2, axis=-2)).T
    roots, between = shared_spread(value, A, f_var)
    return Gaussian(joined(f_mean.T), f_var, between=between, roots=roots)


def _multiplied(prior, columns):
    """`R` times columns `(M, K)`, or `(P, M, K)`, output by output."""
    if prior.has_own_kernels:
        columns = jnp.broadcast_to(columns, (len(prior.kernels), *columns.shape[-2:]))
        return jax.vmap(lambda factor, x: factor.multiply(x))(prior.factor, columns)
    if columns.ndim == 2:
        return prior.factor.multiply(columns)
    return jax.vmap(prior.factor.multiply)(columns)
