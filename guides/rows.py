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
from numpyro_gpx.kernels.distances import safe_sqrt
from numpyro_gpx.means import Zero
from numpyro_gpx.uncertain import InputBelief

__all__ = ["Rows", "entry_belief", "row_sums", "rows_at"]


class Rows(NamedTuple):
    """The training rows at one point set.

    Attributes:
        X: Inputs of the GP, `(N, D)`; `None` where they are a belief.
        shift: Mean function and offset, `(N,)` or `(N, P)`; `None` for 0.
        counts: Weights of the rows, `(N,)`, or of their entries, `(N, P)`.
        precision: Noise precision, of the shape of `counts`; `None` where one number
            serves all rows, which then does not depend on their latent inputs.
    """

    X: Float[Array, "N D"] | None
    shift: Array | None
    counts: Float[Array, " N *P"]
    precision: Float[Array, " N *P"] | None


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
    counts = jnp.ones(y.shape[:1], fn.latent.mean.dtype)
    if gp_scale is not None:
        counts = counts / gp_scale
    for factor in (site["scale"], fn.weights, fn.keep):
        if factor is not None:
            counts = _times(counts, jnp.asarray(factor))
    known = None if isinstance(X, InputBelief) else X
    precision = _row_precision(fn.likelihood.scale, y)
    if precision is None:
        return Rows(known, shift, counts, None)
    both = _times(counts, precision)
    counts = _times(counts, jnp.ones_like(both))
    return Rows(known, shift, counts, _times(jnp.ones_like(both), precision))


def _row_precision(scale, y):
    """Noise precision by row or entry; `None` if it is one number."""
    scale = jnp.asarray(scale)
    if scale.ndim == 0:
        return None
    if scale.ndim == 2 and scale.shape[1] == 1:
        return scale[:, 0] ** -2.0
    return jnp.broadcast_to(scale, y.shape) ** -2.0


def row_sums(prior, belief, rows: Rows, weights, y, *, scale, signed: bool) -> RowSums:
    """The sums of the collapsed bound, where all entries of a row weigh alike.

    Args:
        prior: The GP.
        belief: Its inputs, if they are a belief.
        rows: The rows at S point sets.
        weights: Weights of the point sets, `(S,)`.
        y: Targets `(N,)` or `(N, P)`.
        scale: Standard deviation of the noise, used where it is one number.
        signed: Whether some weights may be negative.
    """
    y = y[:, None] if y.ndim == 1 else y
    # One number is multiplied last, so that its gradient costs nothing.
    common = scale**-2.0 if rows.precision is None else jnp.ones((), y.dtype)
    own = jnp.ones((), y.dtype) if rows.precision is None else rows.precision
    lam = weights[:, None] * rows.counts * own  # (S, N)
    log_rate = rows.counts * jnp.log(common * own / (2.0 * jnp.pi))
    log_precision = jnp.sum(weights[:, None] * log_rate)
    y = jnp.where(rows.counts[0][:, None] > 0.0, y, 0.0)  # masked targets may be NaN
    if rows.shift is None:
        residual = y[None]  # (1, N, P): the same at all point sets
    else:
        shift = rows.shift if rows.shift.ndim == 3 else rows.shift[..., None]
        residual = y - shift
    squares = jnp.sum(lam * jnp.sum(residual**2, axis=-1))
    gram, linear, variance = _products(prior, belief, rows.X, lam, residual, signed)
    return RowSums(
        common * gram, common * linear, common * squares, common * variance,
        log_precision,
    )  # fmt: skip


def _products(prior, belief, X, lam, residual, signed):
    """The sums that involve the kernel, for rows of weight `lam` `(S, N)`."""
    if X is None:
        psi = prior.psi(belief, lam[0])
        linear = (psi.psi1 * lam[0][:, None]).T @ residual[0]
        return psi.psi2, linear, jnp.sum(lam[0] * psi.psi0)
    # All points as rows of one matrix: a product of large matrices is faster than
    # many products of small ones.
    X = X.reshape(-1, X.shape[-1])  # (S N, D)
    variance = jnp.sum(lam.reshape(-1) * prior.kernels[0].diag(X))
    if signed:
        A = prior.project(X)  # (M, S N)
        weighted = A * lam.reshape(-1)
        return weighted @ A.T, _linear(weighted, residual, lam.shape), variance
    roots = safe_sqrt(lam.reshape(-1))
    gram, K = prior.gram(X, roots)
    linear = prior.factor.W @ _linear(K * roots, residual, lam.shape)
    return gram, linear, variance


def _linear(weighted, residual, shape):
    """Weighted sum of the residuals, `(M, P)`, over S point sets of N rows."""
    if residual.shape[0] == 1:  # average the points first: M x N x P instead of S times
        return jnp.sum(weighted.reshape(-1, *shape), axis=1) @ residual[0]
    return weighted @ residual.reshape(-1, residual.shape[-1])


def entry_belief(prior, belief, rows: Rows, weights, y, *, scale) -> GaussianBelief:
    """The optimal belief where the entries of a row differ, output by output."""
    entries = (rows.counts.shape[0], *y.shape)
    own = scale**-2.0 if rows.precision is None else rows.precision
    lam = rows.counts * own
    lam = lam if lam.ndim == 3 else lam[..., None]
    lam = jnp.broadcast_to(weights[:, None, None] * lam, entries)  # (S, N, P)
    shift = jnp.zeros(()) if rows.shift is None else rows.shift
    shift = shift[..., None] if shift.ndim == 2 else shift
    residual = jnp.where(lam != 0.0, y - shift, 0.0)  # masked targets may be NaN
    if rows.X is not None:
        A = prior.project(rows.X.reshape(-1, rows.X.shape[-1]))
        flat = (-1, y.shape[1])
        return optimal_belief(A, residual.reshape(flat), lam.reshape(flat))

    def one_output(lam, residual):
        psi = prior.psi(belief, lam)
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
