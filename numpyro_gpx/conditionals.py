r"""The sparse GP prior, its conditionals, and the collapsed bound. No NumPyro here.

With whitened inducing variables `v`, :math:`u = m(Z) + L_{uu} v`, and
:math:`A = L_{uu}^{-1} K_{uf}`, the prior conditional is

.. math:: f \mid v \sim \mathcal N(m(X) + A^\top v,\; K_{ff} - A^\top A).
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from numpyro_gpx.beliefs import Belief, GaussianBelief, SharedBelief
from numpyro_gpx.inducing import Data, Inducing, Kuf, Kuu, Points
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.latents import GaussianLatent
from numpyro_gpx.linalg import Factor, factorise, positive, projected_gram
from numpyro_gpx.means import Constant, Mean, Zero
from numpyro_gpx.psi import Psi, psi2_rows, psi_statistics
from numpyro_gpx.uncertain import InputBelief

__all__ = [
    "Collapsed",
    "RowSums",
    "SparsePrior",
    "collapse",
    "collapsed_bound",
    "conditional",
    "expected_conditional",
    "from_precision",
    "optimal_belief",
    "replicate_covariances",
]


class SparsePrior(eqx.Module):
    """A GP seen through its inducing variables.

    Attributes:
        kernels: One kernel shared by all outputs, or one for each of P outputs.
        inducing: What the GP is summarised by.
        mean: Mean function.
        factor: Factor of `Kuu` and its inverse, `(M, M)`, or `(P, M, M)` if the
            outputs have their own kernels.
    """

    kernels: tuple[Kernel, ...]
    inducing: Inducing
    mean: Mean
    factor: Factor

    @classmethod
    def create(cls, kernels, inducing: Inducing, mean: Mean) -> SparsePrior:
        """Factorise `Kuu` once for everything that follows."""
        Ks = [Kuu(inducing, kernel) for kernel in kernels]
        K = Ks[0] if len(kernels) == 1 else jnp.stack(Ks)
        return cls(tuple(kernels), inducing, mean, factorise(K))

    def project(self, X, kernels=None, *, accurate=False) -> Float[Array, "*P M N"]:
        r""":math:`A = L_{uu}^{-1} K_{uf}`, `(M, N)`, or `(P, M, N)`.

        Args:
            X: Inputs `(N, D)`.
            kernels: Take the cross-covariance from these instead: a summand of the
                kernel gives the projection of that part of the function.
            accurate: Solve instead of multiplying with the inverse factor. Slower, and
                needed where :math:`K_{ff} - A^\top A` must stay positive definite.
        """
        kernels = self.kernels if kernels is None else kernels
        Ks = [Kuf(self.inducing, kernel, X) for kernel in kernels]
        K = Ks[0] if len(kernels) == 1 else jnp.stack(Ks)
        if accurate:
            return solve_triangular(self.factor.L, K, lower=True)
        return self.factor.W @ K

    def gram(
        self, X: Float[Array, "N D"], roots: Float[Array, " N"]
    ) -> tuple[Float[Array, "M M"], Float[Array, "M N"]]:
        r"""Sums :math:`\sum_n r_n^2 a_n a_n^\top` over known rows, and `r_n k(Z, x_n)`.

        Of the one kernel, with :math:`a_n = L_{uu}^{-1} k(Z, x_n)`; `roots` are the
        square roots :math:`r_n` of the rows' weights.
        """
        L, W = self.factor
        K = roots * Kuf(self.inducing, self.kernels[0], X)  # (M, N)
        total = jnp.sum(roots**2 * self.kernels[0].diag(X))
        return projected_gram(self.factor, K, _is_stable(L, W, total)), K

    def psi(self, inputs: InputBelief, weights: Float[Array, " N"]) -> Psi:
        """Psi statistics of the one kernel, in terms of `v`: `psi1` is `(N, M)`."""
        if len(self.kernels) > 1:
            raise ValueError(
                "Closed-form expectations of outputs with kernels of their own are not "
                "there; use a rule with points, such as `gpx.cubature.Unscented()`."
            )
        W = self.factor.W
        psi = psi_statistics(self.kernels[0], inputs, self.inducing.Z, weights)
        return Psi(psi.psi0, psi.psi1 @ W.T, W @ psi.psi2 @ W.T)

    def inducing_mean(self, num_outputs: int | None) -> Array:
        """Prior mean of `u`, `(M,)`, or `(P, M)`."""
        mean = self.mean(self.inducing.Z)
        if num_outputs is None:
            return mean
        shape = (mean.shape[0], num_outputs)
        mean = mean[:, None] if mean.ndim == 1 else mean
        return jnp.broadcast_to(mean, shape).T

    def whiten(self, value):
        """The value of an unwhitened site, `u`, as one of `v`: a draw or a belief."""
        W = self.factor.W
        draw = value.mean if isinstance(value, Belief) else value
        num_outputs = None if draw.ndim == 1 else draw.shape[0]
        shift = -jnp.einsum("...ij,...j->...i", W, self.inducing_mean(num_outputs))
        if isinstance(value, Belief):
            return value.affine(shift, W)
        return shift + jnp.einsum("...ij,...j->...i", W, value)


def conditional(
    prior: SparsePrior,
    X: Float[Array, "N D"],
    value: Array | Belief,
    *,
    full_cov: bool = False,
    kernels: tuple[Kernel, ...] | None = None,
) -> GaussianLatent:
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
    prior_var = _prior_variance(parts, X)  # (N,) or (P, N)
    f_mean = jnp.einsum("...mn,...m->...n", A, mean)  # (N,) or (P, N)
    outputs = mean.shape[:-1]
    cov = cov_scale = None
    if full_cov:
        cov = _prior_covariance(parts, X) - jnp.swapaxes(A, -1, -2) @ A
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
    return GaussianLatent(f_mean, f_var, cov, cov_scale=cov_scale)


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
    variance = _prior_variance(prior.kernels, rows.reshape(N * S, D))
    return cov, jnp.mean(variance)


def _row_grams(A, num_rows):
    """Products `A_n^T A_n`, `(..., N, S, S)`, of blocks of columns `(..., M, N S)`."""
    blocks = A.reshape(*A.shape[:-1], num_rows, -1)  # (..., M, N, S)
    return jnp.einsum("...mns,...mnt->...nst", blocks, blocks)


def expected_conditional(
    prior: SparsePrior, inputs: InputBelief, value: Array | Belief
) -> GaussianLatent:
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
    if not isinstance(prior.inducing, Points | Data):
        raise ValueError(
            "At uncertain inputs the inducing variables must be `gpx.inducing.Points`; "
            f"got {type(prior.inducing).__name__}."
        )
    mean = value.mean if isinstance(value, Belief) else value  # (M,) or (P, M)
    second = jnp.einsum("...i,...j->...ij", mean, mean)
    if isinstance(value, Belief):
        eye = jnp.eye(mean.shape[-1], dtype=mean.dtype)
        root = value.spread(eye)  # (M, M) or (P, M, M)
        second = second + jnp.swapaxes(root, -1, -2) @ root

    def moments(kernel, W, mean, second):
        psi = psi_statistics(kernel, inputs, prior.inducing.Z)
        psi2 = W @ psi2_rows(kernel, inputs, prior.inducing.Z) @ W.T  # (N, M, M)
        rest = psi.psi0 - jnp.trace(psi2, axis1=-2, axis2=-1)  # (N,)
        f_mean = jnp.einsum("nm,...m->...n", psi.psi1 @ W.T, mean)
        square = rest + jnp.einsum("nij,...ij->...n", psi2, second)
        return f_mean, square - f_mean**2

    W = prior.factor.W
    if len(prior.kernels) == 1:
        f_mean, f_var = moments(prior.kernels[0], W, mean, second)
    else:
        each = zip(prior.kernels, W, mean, second, strict=True)
        pairs = [moments(*one) for one in each]
        f_mean, f_var = map(jnp.stack, zip(*pairs, strict=True))
    f_mean, f_var = f_mean.T, positive(f_var).T  # (N,) or (N, P)
    offset = prior.mean(inputs.mean)
    f_mean = f_mean + (offset if offset.ndim == f_mean.ndim else offset[:, None])
    return GaussianLatent(f_mean, f_var, matched=True)


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
    `gpx.linalg.projected_gram`.

    Args:
        kernel: Covariance function.
        inducing: Inducing variables.
        X: Inputs `(N, D)`.
        y: Targets less the mean function, `(N,)`.
        noise_var: Noise variance, a scalar.

    Returns:
        The bound, a scalar.
    """
    factor = factorise(Kuu(inducing, kernel))
    L, W = factor
    K = Kuf(inducing, kernel, X)  # (M, N)
    variances = kernel.diag(X)  # (N,)
    stable = _is_stable(L, W, jnp.sum(variances) / noise_var)
    AAt = projected_gram(factor, K, stable)  # (M, M)
    LB = jnp.linalg.cholesky(jnp.eye(L.shape[0], dtype=L.dtype) + AAt / noise_var)
    c = solve_triangular(LB, W @ (K @ y), lower=True) / noise_var  # (M,)
    log_det = jnp.sum(jnp.log(jnp.diagonal(LB)))
    quadratic = 0.5 * (jnp.sum(y**2) / noise_var - jnp.sum(c**2))
    trace = 0.5 * (jnp.sum(variances) - jnp.trace(AAt)) / noise_var
    constant = 0.5 * y.shape[0] * jnp.log(2.0 * jnp.pi * noise_var)
    return -constant - log_det - quadratic - trace


def _is_stable(L, W, total_variance):
    r"""Whether :math:`W (K K^\top) W^\top` has an error below a millionth.

    By Cauchy-Schwarz no entry of :math:`K K^\top` exceeds the sum of the rows'
    (weighted) variances times the largest variance of `u`.
    """
    most = total_variance * jnp.max(jnp.sum(L**2, axis=-1))
    rounding = jnp.finfo(L.dtype).eps * jnp.sum(W**2) * most
    return jax.lax.stop_gradient(rounding < 1e-6)


def _prior_variance(kernels, X):
    variances = [kernel.diag(X) for kernel in kernels]
    return variances[0] if len(kernels) == 1 else jnp.stack(variances)


def _prior_covariance(kernels, X):
    covariances = [kernel(X) for kernel in kernels]
    return covariances[0] if len(kernels) == 1 else jnp.stack(covariances)
