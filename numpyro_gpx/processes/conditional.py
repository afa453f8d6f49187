r"""What is known of `f` at some rows, given its inducing variables.

A draw of `v` is conditioned on, a belief about it is integrated (tutorial eq. 67).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.inducing import psi
from numpyro_gpx.joint_beliefs import JointBelief
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.means import Constant, Zero
from numpyro_gpx.numerics.factor import positive
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.processes.prior import SparsePrior
from numpyro_gpx.uncertain import InputBelief

__all__ = [
    "conditional",
    "expected_conditional",
    "replicate_covariances",
    "shared_spread",
]


def conditional(
    prior: SparsePrior,
    X: Float[Array, "N D"],
    value: Array | Belief,
    *,
    full_cov: bool = False,
    kernels: tuple[Kernel, ...] | None = None,
) -> Gaussian:
    r"""Marginals of :math:`q(f) = \int p(f \mid v)\,\mathcal N(v; m, SS^\top)\,dv`.

    Mean :math:`m(X) + A^\top m`, covariance
    :math:`K_{ff} - A^\top A + A^\top SS^\top A` (tutorial eq. 67). A draw of `v` is a
    belief without spread.

    Args:
        prior: The GP.
        X: Inputs `(N, D)`.
        value: Whitened inducing variables: a draw `(M,)` or `(P, M)`, or a belief.
        full_cov: Also return the covariance between rows, `(N, N)` or `(P, N, N)`.
        kernels: Summands of the prior's kernels, one each, for the part of the function
            they stand for; the mean function is then left out.

    Returns:
        Mean and variance at each row of `X`, both `(N,)`, or `(N, P)`.
    """
    parts = prior.kernels if kernels is None else kernels
    mean = value.mean if isinstance(value, Belief) else value  # (M,) or (P, M)
    A = prior.project(X, parts, accurate=full_cov)  # (M, N) or (P, M, N)
    prior_var = prior.variance(X, parts)  # (N,) or (P, N)
    f_mean = jnp.einsum("...mn,...m->...n", A, mean)  # (N,) or (P, N)
    outputs = mean.shape[:-1]
    cov = cov_scale = None
    if full_cov:
        cov = prior.covariance(X, parts) - jnp.swapaxes(A, -1, -2) @ A
        cov = jnp.broadcast_to(cov, outputs + cov.shape[-2:])
        if isinstance(value, Belief):
            spread = value.spread(A)
            cov = cov + jnp.swapaxes(spread, -1, -2) @ spread
        cov_scale = jnp.mean(prior_var)
        f_var = jnp.diagonal(cov, axis1=-2, axis2=-1)
    else:
        f_var = jnp.broadcast_to(prior_var - jnp.sum(A**2, axis=-2), f_mean.shape)
        if isinstance(value, Belief):
            f_var = f_var + jnp.sum(value.spread(A) ** 2, axis=-2)
    f_mean, f_var = f_mean.T, positive(f_var).T  # (N,) or (N, P)
    if kernels is None:
        offset = prior.mean(X)  # (N,) or (N, P)
        f_mean = f_mean + (offset if offset.ndim == f_mean.ndim else offset[:, None])
    roots, between = shared_spread(value, A, f_var)
    return Gaussian(f_mean, f_var, cov, between, cov_scale=cov_scale, roots=roots)


def shared_spread(value, A, f_var):
    """What a jointly held site shares with others, and its outputs with each other."""
    if not isinstance(value, JointBelief):
        return {}, None
    root = jnp.moveaxis(value.spread(A), -1, 0)  # (N, R), or (N, P, R)
    between = None
    if f_var.ndim == 2:
        own = f_var - jnp.sum(root**2, axis=-1)
        between = root @ jnp.swapaxes(root, -1, -2) + jax.vmap(jnp.diag)(own)
    return {value.group: root}, between


def replicate_covariances(
    prior: SparsePrior, X: Float[Array, "S N D"], value: Array | Belief
) -> tuple[Float[Array, "*P N S S"], Float[Array, ""]]:
    """Covariances of `f` among the S replicates of each row.

    Args:
        prior: The GP.
        X: Replicates of the inputs.
        value: Whitened inducing variables: a draw `(M,)` or `(P, M)`, or a belief.

    Returns:
        Covariances `(N, S, S)` or `(P, N, S, S)`, and the prior variance that they were
        subtracted from, on average.
    """
    S, N, D = X.shape
    rows = jnp.swapaxes(X, 0, 1)  # (N, S, D)
    A = prior.project(rows.reshape(N * S, D), accurate=True)  # (*K, M, N S)
    covs = [jax.vmap(kernel)(rows) for kernel in prior.kernels]  # (N, S, S) each
    cov = covs[0] if len(covs) == 1 else jnp.stack(covs)
    cov = cov - _row_grams(A, N)
    mean = value.mean if isinstance(value, Belief) else value
    cov = jnp.broadcast_to(cov, mean.shape[:-1] + cov.shape[-3:])
    if isinstance(value, Belief):
        cov = cov + _row_grams(value.spread(A), N)
    variance = prior.variance(rows.reshape(N * S, D))
    return cov, jnp.mean(variance)


def _row_grams(A, num_rows):
    """Products `A_n^T A_n`, `(..., N, S, S)`, of blocks of columns `(..., M, N S)`."""
    blocks = A.reshape(*A.shape[:-1], num_rows, -1)  # (..., M, N, S)
    return jnp.einsum("...mns,...mnt->...nst", blocks, blocks)


def expected_conditional(
    prior: SparsePrior, inputs: InputBelief, value: Array | Belief
) -> Gaussian:
    r"""Mean and variance of :math:`f(x_n)` at Gaussian inputs :math:`x_n`.

    With :math:`\psi_1 = \mathbb E[k(x_n, Z)]\,L_{uu}^{-\top}` and
    :math:`\Psi_2 = L_{uu}^{-1}\,\mathbb E[k(Z, x_n)\,k(x_n, Z)]\,L_{uu}^{-\top}`

    .. math:: \mathbb E[f] = \psi_1 m, \qquad \mathbb E[f^2] = \psi_0
        - \mathrm{tr}\,\Psi_2 + \mathrm{tr}\,\Psi_2\,(SS^\top + m m^\top).

    The rows are not Gaussian: only a Gaussian likelihood can use this.

    Args:
        prior: The GP; its mean function must be constant.
        inputs: Gaussian rows `(N, D)`.
        value: Whitened inducing variables: a draw `(M,)` or `(P, M)`, or a belief.

    References:
        Titsias & Lawrence (2010); Girard et al. (2003).
    """
    if not isinstance(prior.mean, Zero | Constant):
        raise ValueError(
            "At uncertain inputs the mean function must be constant; got "
            f"{type(prior.mean).__name__}. Use a rule with points, such as "
            "`gpx.cubature.Unscented()`."
        )
    mean = value.mean if isinstance(value, Belief) else value  # (M,) or (P, M)
    second = jnp.einsum("...i,...j->...ij", mean, mean)
    if isinstance(value, Belief):
        eye = jnp.eye(mean.shape[-1], dtype=mean.dtype)
        root = value.spread(eye)  # (M, M) or (P, M, M)
        second = second + jnp.swapaxes(root, -1, -2) @ root

    def moments(kernel, factor, mean, second):
        found = psi(prior.inducing, kernel, inputs, None)
        psi1 = factor.solve(found.psi1.T).T  # (N, M)
        psi2 = jax.vmap(factor.congruence)(found.psi2)  # (N, M, M)
        rest = found.psi0 - jnp.trace(psi2, axis1=-2, axis2=-1)  # (N,)
        f_mean = jnp.einsum("nm,...m->...n", psi1, mean)
        square = rest + jnp.einsum("nij,...ij->...n", psi2, second)
        return f_mean, square - f_mean**2

    if not prior.has_own_kernels:
        f_mean, f_var = moments(prior.kernels[0], prior.factor, mean, second)
    else:
        factors = [
            jax.tree.map(lambda x, p=p: x[p], prior.factor) for p in range(len(mean))
        ]
        each = zip(prior.kernels, factors, mean, second, strict=True)
        pairs = [moments(*one) for one in each]
        f_mean, f_var = map(jnp.stack, zip(*pairs, strict=True))
    f_mean, f_var = f_mean.T, positive(f_var).T  # (N,) or (N, P)
    offset = prior.mean(inputs.mean)
    f_mean = f_mean + (offset if offset.ndim == f_mean.ndim else offset[:, None])
    return Gaussian(f_mean, f_var, moments_only=True)
