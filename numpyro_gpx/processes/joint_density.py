r"""Densities of a row of targets whose outputs depend on each other.

Under Gaussian noise. A Gaussian latent has a normal density. For products
:math:`W f + r` the outputs of a row are independent given `f`, so that

.. math:: p(y_n) = \int \mathcal N(f; m, S) \prod_p \mathcal N\big(y_p;\;
    \bar W_p f + \bar r_p,\; \textstyle\sum_q t_{pq} f_q^2 + v_p + \sigma_p^2\big)\, df

is an integral over the few numbers `f` of the row, taken by nodes at where `y` puts
them (own derivation).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float

from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.processes.expectations import is_conjugate
from numpyro_gpx.processes.latent import Gaussian, Latent
from numpyro_gpx.processes.products import Product, Total, factor_nodes

__all__ = ["joint_log_prob", "row_log_prob"]

# Quasi-random nodes are spread wider than what they integrate, or its tails are lost.
_WIDER = 1.5
# Steps to where `y` puts the factors.
_STEPS = 3
# Rows at once: each has hundreds of nodes.
_ROWS = 128


def row_log_prob(likelihood: Likelihood, latent: Latent, y, keep=None):
    """Log density of the outputs of a row given each other's dependence, `(N,)`.

    `None` where outputs are independent, and the sum of `predictive_log_prob` is right.
    Entries that `keep`, of the shape of `y`, leaves out do not count.
    """
    if not latent.outputs_depend:
        return None
    if not is_conjugate(likelihood):
        raise ValueError(
            f"The density of a row with outputs that depend on each other is known for "
            f"a Gaussian likelihood only; got {type(likelihood).__name__}."
        )
    noise = jnp.broadcast_to(likelihood.scale, y.shape) ** 2  # type: ignore[attr-defined]
    keep = jnp.ones(y.shape, bool) if keep is None else jnp.broadcast_to(keep, y.shape)
    if isinstance(latent, Gaussian) and not latent.moments_only:
        cov = latent.output_cov() + jax.vmap(jnp.diag)(noise)
        return joint_log_prob(cov, y - latent.mean, keep)
    rows = _rows_of(latent, noise)
    if rows is None:
        raise ValueError(
            "The density of a row is known for Gaussian latents and for `W(X) @ f(X)`, "
            "plus independent ones; of this product the mean, variance, covariance and "
            "draws are, and `to_arviz(log_likelihood=False)`."
        )
    num_factors = rows.f_mean.shape[1]
    nodes, log_weights = factor_nodes(num_factors, rows.f_mean.dtype)
    width = 1.0 if num_factors <= 2 else _WIDER

    def one(found):
        row, y, keep = found
        return _row_density(row, y, keep, nodes, log_weights, width)

    y = jnp.where(keep, y, 0.0)
    return jax.lax.map(one, (rows, y, keep), batch_size=_ROWS)


class _Rows(NamedTuple):
    """`W f + r` at N rows: means and variances, noise included in those of `r`."""

    W_mean: Float[Array, "*N P Q"]
    W_var: Float[Array, "*N P Q"]
    f_mean: Float[Array, "*N Q"]
    f_var: Float[Array, "*N Q"]
    r_mean: Float[Array, "*N P"]
    r_var: Float[Array, "*N P"]


def _rows_of(latent: Latent, noise) -> _Rows | None:
    """A matrix product, plus Gaussians with independent outputs; else `None`."""
    parts = latent.parts if isinstance(latent, Total) else (latent,)
    products = [p for p in parts if isinstance(p, Product) and p.is_matrix]
    others = [p for p in parts if isinstance(p, Gaussian) and not p.outputs_depend]
    if len(products) != 1 or len(others) != len(parts) - 1:
        return None
    (product,) = products
    W, f = product.left, product.right
    if not (isinstance(W, Gaussian) and isinstance(f, Gaussian)):
        return None
    r_mean = sum((part.mean for part in others), start=jnp.zeros_like(noise))
    r_var = sum((part.var for part in others), start=noise)
    return _Rows(W.mean, W.var, f.mean, f.var, r_mean, r_var)


def _row_density(row: _Rows, y, keep: Bool[Array, " P"], nodes, log_weights, width):
    """Log density of one row, `f = m + sqrt(s) e` with standard normal `e`."""
    scale = jnp.sqrt(row.f_var)  # (Q,)
    B = row.W_mean * scale[None]  # (P, Q)
    residual = y - row.r_mean - row.W_mean @ row.f_mean
    eye = jnp.eye(scale.shape[0], dtype=scale.dtype)
    mean, cov = jnp.zeros_like(scale), eye
    for _ in range(_STEPS):
        f = row.f_mean + scale * mean
        squares = f**2 + row.f_var * jnp.diagonal(cov)
        precision = keep / (row.r_var + row.W_var @ squares)  # (P,)
        L = jnp.linalg.cholesky(eye + (B.T * precision[None]) @ B)
        cov = cho_solve((L, True), eye)
        mean = cov @ (B.T @ (precision * residual))
    moved = solve_triangular(L, nodes.T, lower=True, trans=1)  # (Q, S)
    e = mean[None] + width * moved.T  # (S, Q)
    log_q = jnp.sum(norm.logpdf(nodes), axis=1) - scale.shape[0] * jnp.log(width)
    log_q = log_q + jnp.sum(jnp.log(jnp.diagonal(L)))
    f = row.f_mean[None] + scale[None] * e
    spread = jnp.sqrt(row.r_var[None] + f**2 @ row.W_var.T)  # (S, P)
    centre = f @ row.W_mean.T + row.r_mean[None]
    given_f = jnp.sum(
        jnp.where(keep[None], norm.logpdf(y[None], centre, spread), 0.0), axis=1
    )
    prior = jnp.sum(norm.logpdf(e), axis=1)
    return jax.nn.logsumexp(log_weights + prior + given_f - log_q)


def joint_log_prob(cov, residual, keep):
    """Normal log density of each row's kept entries, `(N,)`.

    Args:
        cov: Covariances, `(N, P, P)`.
        residual: `(N, P)`; may be NaN where it is not kept.
        keep: Which entries count, `(N, P)`.
    """
    # An entry that is left out is one of its own, of variance 1 and at its mean.
    both = keep[:, :, None] & keep[:, None, :]
    cov = jnp.where(both, cov, jnp.eye(cov.shape[-1], dtype=cov.dtype)[None])
    residual = jnp.where(keep, residual, 0.0)
    L = jnp.linalg.cholesky(cov)
    apart = jax.vmap(lambda L, r: solve_triangular(L, r, lower=True))(L, residual)
    log_det = jnp.sum(jnp.log(jnp.diagonal(L, axis1=1, axis2=2)), axis=1)
    constant = 0.5 * jnp.sum(keep, axis=1) * jnp.log(2.0 * jnp.pi)
    return -constant - log_det - 0.5 * jnp.sum(apart**2, axis=1)
