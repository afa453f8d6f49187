r"""What the optimal belief needs to know of the training rows.

Latent inputs are integrated by a rule: everything here has a leading axis over its S
point sets (1 where inputs are known, or uncertain with closed-form expectations).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.conditionals import RowSums, from_precision, optimal_belief
from numpyro_gpx.means import Zero
from numpyro_gpx.uncertain import InputBelief

__all__ = ["Rows", "entry_belief", "row_sums", "rows_at"]


class Rows(NamedTuple):
    """The training rows at one point set.

    Attributes:
        A: Projection of the inputs, `(M, N)` or `(P, M, N)`; `None` where the inputs
            are beliefs.
        variances: Prior variances, `(N,)`; `None` likewise.
        shift: Mean function and offset, `(N,)` or `(N, P)`; `None` for 0.
        precision: Noise precision times weight, `(N,)`, or `(N, P)` if the entries of
            a row differ.
        counts: The weights alone, of the same shape.
    """

    A: Array | None
    variances: Array | None
    shift: Array | None
    precision: Float[Array, " N *P"]
    counts: Float[Array, " N *P"]


def rows_at(gp, X, site, gp_scale) -> Rows:
    """Read the rows off the observed site.

    Args:
        gp: The GP.
        X: Its inputs, known or uncertain.
        site: The observed site of a trace.
        gp_scale: Factor of the GP site's own term, or `None`: weights are relative.
    """
    fn, y = site["fn"], site["value"]
    shift = fn.latent.shift
    if not isinstance(gp.prior.mean, Zero):
        mean = gp.prior.mean(X.mean if isinstance(X, InputBelief) else X)
        mean = mean[:, None] if mean.ndim < y.ndim else mean
        shift = mean if shift is None else mean + shift
    dtype = fn.latent.mean.dtype
    counts = jnp.ones(y.shape[:1], dtype)
    if gp_scale is not None:
        counts = counts / gp_scale
    for factor in (site["scale"], fn.weights, fn.keep):
        if factor is not None:
            counts = _times(counts, jnp.asarray(factor))
    scale = jnp.asarray(fn.likelihood.scale)
    if scale.ndim == 2 and scale.shape[1] == 1:
        scale = scale[:, 0]
    elif scale.ndim > 0 and y.ndim == 2:  # a noise for each output
        scale = jnp.broadcast_to(scale, y.shape)
    precision = _times(counts, scale**-2.0)
    counts = _times(counts, jnp.ones_like(precision))
    if isinstance(X, InputBelief):
        return Rows(None, None, shift, precision, counts)
    variances = jnp.stack([kernel.diag(X) for kernel in gp.prior.kernels])
    variances = variances[0] if len(gp.prior.kernels) == 1 else variances
    return Rows(gp.prior.project(X), variances, shift, precision, counts)


def row_sums(gp, X, rows: Rows, weights, y) -> RowSums:
    """The sums of the collapsed bound, where all entries of a row weigh alike."""
    y = y[:, None] if y.ndim == 1 else y
    lam = weights[:, None] * rows.precision  # (S, N)
    present = rows.counts > 0.0
    rate = jnp.where(
        present, rows.precision / jnp.where(present, rows.counts, 1.0), 1.0
    )
    log_rate = rows.counts * jnp.log(rate / (2.0 * jnp.pi))
    log_precision = jnp.sum(weights[:, None] * log_rate)
    y = jnp.where(present[0][:, None], y, 0.0)  # masked targets may be NaN
    if rows.shift is None:
        residual = y[None]  # (1, N, P): the same at all point sets
    else:
        shift = rows.shift if rows.shift.ndim == 3 else rows.shift[..., None]
        residual = y - shift
    squares = jnp.sum(lam[..., None] * residual**2)
    if rows.A is None:
        psi = gp.prior.psi(X, lam[0])
        linear = (psi.psi1 * lam[0][:, None]).T @ residual[0]
        variance = jnp.sum(lam[0] * psi.psi0)
        return RowSums(psi.psi2, linear, squares, variance, log_precision)
    weighted = rows.A * lam[:, None, :]  # (S, M, N)
    gram = jnp.einsum("smn,skn->mk", weighted, rows.A)
    if residual.shape[0] == 1:  # average the points first: M x N x P instead of S times
        linear = jnp.sum(weighted, axis=0) @ residual[0]
    else:
        linear = jnp.einsum("smn,snp->mp", weighted, residual)
    variance = jnp.sum(lam * rows.variances)
    return RowSums(gram, linear, squares, variance, log_precision)


def entry_belief(gp, X, rows: Rows, weights, y) -> GaussianBelief:
    """The optimal belief where the entries of a row differ, output by output."""
    entries = (rows.precision.shape[0], *y.shape)
    lam = rows.precision if rows.precision.ndim == 3 else rows.precision[..., None]
    lam = jnp.broadcast_to(weights[:, None, None] * lam, entries)  # (S, N, P)
    shift = jnp.zeros(()) if rows.shift is None else rows.shift
    shift = shift[..., None] if shift.ndim == 2 else shift
    residual = jnp.where(lam > 0.0, y - shift, 0.0)  # masked targets may be NaN
    if rows.A is not None:
        A = jnp.moveaxis(rows.A, 0, -2)  # (M, S, N) or (P, M, S, N)
        flat = (-1, y.shape[1])
        return optimal_belief(
            A.reshape(*A.shape[:-2], -1), residual.reshape(flat), lam.reshape(flat)
        )

    def one_output(lam, residual):
        psi = gp.prior.psi(X, lam)
        B = jnp.eye(psi.psi2.shape[0], dtype=lam.dtype) + psi.psi2
        return from_precision(B, psi.psi1.T @ (lam * residual))

    return jax.vmap(one_output, in_axes=1)(lam[0], residual[0])


def _times(factor, other):
    """Product of weights of rows `(N,)`, of entries `(N, P)`, or scalars."""
    if other.ndim > factor.ndim:
        factor = factor[:, None]
    elif 0 < other.ndim < factor.ndim:
        other = other[:, None]
    return factor * other
