r"""The optimal belief under a Gaussian likelihood, and the collapsed bound.

Latent inputs are integrated by a rule: rows have a leading axis over its S node sets (1
where inputs are known, or uncertain with closed-form expectations).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from numpyro_gpx.beliefs import GaussianBelief, SharedBelief
from numpyro_gpx.inducing import Inducing, Kuf, root
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.kernels.distances import safe_sqrt
from numpyro_gpx.means import Zero
from numpyro_gpx.uncertain import InputBelief

__all__ = [
    "Collapsed",
    "GaussianRows",
    "RowSums",
    "Rows",
    "collapse",
    "collapsed_bound",
    "entry_belief",
    "from_precision",
    "optimal_belief",
    "row_sums",
    "rows_at",
]


class RowSums(NamedTuple):
    r"""Sums over the rows that the collapsed bound needs, in terms of `v`.

    :math:`\lambda_n` is the noise precision of a row times its weight, and
    :math:`\psi` are expectations over its input where that is uncertain.

    Attributes:
        gram: :math:`\sum_n \lambda_n\,\mathbb E[a_n a_n^\top]`, `(M, M)`, with
            :math:`a_n = L_{uu}^{-1} k(Z, x_n)`.
        linear: :math:`\sum_n \lambda_n\,\mathbb E[a_n]\,y_n^\top`, `(M, P)`.
        squares: :math:`\sum_n \lambda_n |y_n|^2`.
        variance: :math:`\sum_n \lambda_n\,\mathbb E[k(x_n, x_n)]`.
        log_precision: :math:`\sum_n w_n \log(\lambda_n / (2\pi w_n))`.
    """

    gram: Float[Array, "M M"]
    linear: Float[Array, "M P"]
    squares: Float[Array, ""]
    variance: Float[Array, ""]
    log_precision: Float[Array, ""]


class Collapsed(NamedTuple):
    """The optimal belief, and the bound with it.

    Attributes:
        belief: :math:`q^*(v)`, one covariance for all outputs.
        bound: Expected log likelihood of all rows less the KL of `belief`, a scalar.
    """

    belief: SharedBelief
    bound: Float[Array, ""]


def collapse(sums: RowSums) -> Collapsed:
    r"""The collapsed bound of P outputs with one kernel and one noise.

    With :math:`B = I + G`, `G` the `gram`, and :math:`l` the `linear` sums

    .. math:: \tfrac P2 \sum_n w_n\log\tfrac{\lambda_n}{2\pi w_n}
        - \tfrac P2 \log|B|
        - \tfrac12 \Big(\sum_n \lambda_n |y_n|^2 - \mathrm{tr}\,l^\top B^{-1} l\Big)
        - \tfrac P2 \Big(\sum_n \lambda_n\,\mathbb E[k_{nn}] - \mathrm{tr}\,G\Big).

    At known inputs it is the bound of Titsias (2009), at uncertain ones that of the
    Bayesian GPLVM less the divergence of the inputs.

    References:
        Titsias & Lawrence (2010); dissertation 2.4, its slips mended.
    """
    size, num_outputs = sums.linear.shape
    B = jnp.eye(size, dtype=sums.linear.dtype) + sums.gram
    mean, scale_tril = _from_natural(B, sums.linear)
    belief = SharedBelief(mean.T, scale_tril)
    log_det = -belief.log_determinant()[0]
    quadratic = sums.squares - jnp.sum(sums.linear * mean)
    trace = sums.variance - jnp.trace(sums.gram)
    per_output = sums.log_precision - log_det - trace
    return Collapsed(belief, 0.5 * (num_outputs * per_output - quadratic))


def optimal_belief(
    A: Float[Array, "*Q M N"],
    residual: Float[Array, " N *P"],
    precision: Float[Array, " N *P"],
) -> GaussianBelief:
    r"""The best Gaussian :math:`q(v)` under a Gaussian likelihood.

    Precision :math:`I + A \Lambda A^\top` and mean
    :math:`(I + A \Lambda A^\top)^{-1} A \Lambda r`, with :math:`\Lambda` the diagonal
    noise precision (thesis eq. 2.36, whitened).

    Args:
        A: Projection of the training inputs, `(M, N)`, or `(P, M, N)` if the outputs
            have their own kernels.
        residual: Targets less the mean function, `(N,)` or `(N, P)`.
        precision: Inverse noise variances, of the same shape.
    """

    def one_output(A, r, lam):
        B = jnp.eye(A.shape[0], dtype=A.dtype) + (A * lam[None, :]) @ A.T
        return from_precision(B, A @ (lam * r))

    if residual.ndim == 1:
        return one_output(A, residual, precision)
    axes = (None if A.ndim == 2 else 0, 1, 1)
    return jax.vmap(one_output, in_axes=axes)(A, residual, precision)


def from_precision(precision: Float[Array, "M M"], linear: Float[Array, " M"]):
    r"""The Gaussian with natural parameters: :math:`\Lambda` and :math:`\Lambda\mu`."""
    return GaussianBelief(*_from_natural(precision, linear))


def _from_natural(precision, linear):
    r"""Mean and lower factor of the covariance; `linear` is `(M,)`, or `(M, P)`.

    The precision must be at least the identity, so no jitter is needed. Factorising it
    in reverse order gives :math:`\Lambda = U U^\top` with `U` upper triangular, hence a
    *lower* factor :math:`U^{-\top}` of the covariance.
    """
    U = jnp.linalg.cholesky(precision[::-1, ::-1])[::-1, ::-1]
    eye = jnp.eye(precision.shape[0], dtype=precision.dtype)
    scale_tril = solve_triangular(U, eye, lower=False).T
    return scale_tril @ (scale_tril.T @ linear), scale_tril


def collapsed_bound(
    kernel: Kernel,
    inducing: Inducing,
    X: Float[Array, "N D"],
    y: Float[Array, " N"],
    *,
    noise_var,
) -> Array:
    r"""The collapsed bound of sparse GP regression (thesis eq. 2.37, Titsias 2009).

    .. math:: \log\mathcal N(y; 0, Q + \sigma^2 I)
        - \tfrac{1}{2\sigma^2}\mathrm{tr}(K_{ff} - Q),
        \qquad Q = A^\top A = K_{fu} K_{uu}^{-1} K_{uf}.

    `Kuf Kfu` is the only product of size M x M x N where that is accurate. It squares
    the condition of the problem: where its estimated error exceeds a millionth of a
    nat, as in float32 it nearly always does, `A` is formed instead.

    Second derivatives are by reverse mode (`jax.jacrev` of `jax.grad`); see
    `numerics.factor.Dense.gram`.

    Args:
        kernel: Covariance function.
        inducing: Inducing variables.
        X: Inputs `(N, D)`.
        y: Targets less the mean function, `(N,)`.
        noise_var: Noise variance, a scalar.

    Returns:
        The bound, a scalar.
    """
    factor = root(inducing, kernel)
    K = Kuf(inducing, kernel, X)  # (M, N)
    variances = kernel.diag(X)  # (N,)
    AAt = factor.gram(K, jnp.sum(variances) / noise_var)  # (M, M)
    eye = jnp.eye(inducing.size, dtype=AAt.dtype)
    LB = jnp.linalg.cholesky(eye + AAt / noise_var)
    linear = factor.solve((K @ y)[:, None])[:, 0]
    c = solve_triangular(LB, linear, lower=True) / noise_var  # (M,)
    log_det = jnp.sum(jnp.log(jnp.diagonal(LB)))
    quadratic = 0.5 * (jnp.sum(y**2) / noise_var - jnp.sum(c**2))
    trace = 0.5 * (jnp.sum(variances) - jnp.trace(AAt)) / noise_var
    constant = 0.5 * y.shape[0] * jnp.log(2.0 * jnp.pi * noise_var)
    return -constant - log_det - quadratic - trace


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


class GaussianRows(NamedTuple):
    """What an observed site with Gaussian noise says of its rows.

    Attributes:
        gp: The GP that was called.
        X: Where: inputs `(N, D)`, or a belief about them.
        shift: Known shift of the function, `(N,)` or `(N, P)`; `None` for 0.
        factors: Weights, masks and scales of the rows' terms, to be multiplied.
        scale: Standard deviation of the noise.
    """

    gp: Any
    X: Any
    shift: Array | None
    factors: tuple
    scale: Array


def rows_at(seen: GaussianRows, y, gp_scale) -> Rows:
    """The rows at one node set.

    Args:
        seen: What the observed site says of them.
        y: Their targets, `(N,)` or `(N, P)`.
        gp_scale: Factor of the GP site's own term, or `None`: weights are relative.
    """
    gp, X, shift = seen.gp, seen.X, seen.shift
    if not isinstance(gp.prior.mean, Zero):
        mean = gp.prior.mean(X.mean if isinstance(X, InputBelief) else X)
        mean = mean[:, None] if mean.ndim < y.ndim else mean
        shift = mean if shift is None else mean + shift
    known = None if isinstance(X, InputBelief) else X
    dtype = jnp.result_type(X.mean if known is None else X)
    counts = jnp.ones(y.shape[:1], dtype)
    if gp_scale is not None:
        counts = counts / gp_scale
    for factor in seen.factors:
        counts = _times(counts, jnp.asarray(factor))
    precision = _row_precision(seen.scale, y)
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
    linear = prior.factor.solve(_linear(K * roots, residual, lam.shape))
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
