"""Gaussian regression with the function marginalised: `exact`."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from numpyro_gpx import checks
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.means import Mean, Zero
from numpyro_gpx.numerics.factor import positive
from numpyro_gpx.processes.latent import Gaussian

__all__ = ["Conditioned", "ExactRegression", "exact"]


def exact(
    name: str,
    kernel: Kernel,
    X: Float[Array, "N D"],
    scale,
    *,
    obs: Array | None = None,
    mean: Mean | None = None,
) -> Array:
    r"""Gaussian regression with the function marginalised.

    Registers `name` :math:`\sim \mathcal N(m(X), K_{ff} + \sigma^2 I)`, so that NUTS
    sees the evidence of the hyperparameters alone. Predictions condition on the
    training rows (`Fit.predict` does it).

    Args:
        name: Name of the site.
        kernel: Covariance function.
        X: Inputs `(N, D)`.
        scale: Noise standard deviation, a scalar or `(N,)`.
        obs: Targets `(N,)`; `None` to draw them.
        mean: Mean function; zero if left out.
    """
    X = checks.inputs("X", X)
    scale = checks.noise_scale(name, scale, X.shape[0])
    fn = ExactRegression(kernel, X, scale, Zero() if mean is None else mean)
    if obs is not None:
        obs = checks.exact_targets(name, obs, fn)
    return numpyro.sample(name, fn, obs=obs)


class Conditioned(NamedTuple):
    r"""Training rows of an `exact` site at fixed hyperparameters.

    Attributes:
        X: Their inputs, `(N, D)`.
        L: Lower factor of :math:`K_{ff} + \sigma^2 I`.
        alpha: :math:`(K_{ff} + \sigma^2 I)^{-1}(y - m)`.
    """

    X: Float[Array, "N D"]
    L: Float[Array, "N N"]
    alpha: Float[Array, " N"]


class ExactRegression(dist.Distribution):
    r""":math:`y \sim \mathcal N(m(X), K_{ff} + \sigma^2 I)`, one event `(N,)`."""

    support = constraints.real_vector
    pytree_data_fields = ("kernel", "X", "scale", "mean_function")

    def __init__(self, kernel, X, scale, mean, *, validate_args=None):
        self.kernel = kernel
        self.X = X
        self.scale = jnp.broadcast_to(jnp.asarray(scale), X.shape[:1])
        self.mean_function = mean
        super().__init__((), X.shape[:1], validate_args=False)

    @property
    def mean(self):
        return self.mean_function(self.X)

    @property
    def variance(self):
        return self.kernel.diag(self.X) + self.scale**2

    def log_prob(self, value):
        return self._joint().log_prob(value)

    def sample(self, key, sample_shape=()):
        return self._joint().sample(key, sample_shape)

    def conditioned(self, y) -> Conditioned:
        """What predictions need of the training rows and their `y`, once."""
        L = self._noisy_factor()
        alpha = cho_solve((L, True), y - self.mean)
        return Conditioned(self.X, L, alpha)

    def no_rows(self) -> Conditioned:
        """What predictions from the prior need: nothing."""
        X = self.X
        return Conditioned(X[:0], jnp.zeros((0, 0), X.dtype), jnp.zeros(0, X.dtype))

    def latent_given(
        self, state: Conditioned, *, full_cov=False, part: int | None = None
    ) -> Gaussian:
        r"""Posterior of `f` at this site's inputs, given the training rows.

        Mean :math:`m_* + K_{*f}(K_{ff} + \sigma^2 I)^{-1}(y - m)`, covariance
        :math:`K_{**} - K_{*f}(K_{ff} + \sigma^2 I)^{-1}K_{f*}`.

        Args:
            state: The training rows, conditioned with the same hyperparameters.
            full_cov: Also the covariance between rows.
            part: Index of a summand of the kernel, for that part of the function.
        """
        kernel = self.kernel if part is None else self.kernel.parts[part]
        Ksf = kernel(self.X, state.X)  # (N*, N)
        V = solve_triangular(state.L, Ksf.T, lower=True)  # (N, N*)
        f_mean = Ksf @ state.alpha + (self.mean if part is None else 0.0)
        cov = kernel(self.X) - V.T @ V if full_cov else None
        cov_scale = jnp.mean(kernel.diag(self.X)) if full_cov else None
        f_var = positive(kernel.diag(self.X) - jnp.sum(V**2, axis=0))
        return Gaussian(f_mean, f_var, cov, cov_scale=cov_scale)

    def leave_one_out_log_prob(self, y):
        r""":math:`\log p(y_n \mid y_{-n}, \theta)` of each row, `(N,)`.

        With :math:`C = K_{ff} + \sigma^2 I`: mean :math:`y_n - [C^{-1}(y - m)]_n /
        [C^{-1}]_{nn}` and variance :math:`1 / [C^{-1}]_{nn}` (Rasmussen & Williams
        2006, eq. 5.12).
        """
        L = self._noisy_factor()
        precision = jnp.sum(
            solve_triangular(L, jnp.eye(L.shape[0], dtype=L.dtype), lower=True) ** 2,
            axis=0,
        )
        shift = cho_solve((L, True), y - self.mean) / precision
        return dist.Normal(0.0, precision**-0.5).log_prob(shift)

    def _noisy_factor(self):
        # The noise variance is jitter enough; none is added.
        noise = jnp.diag(self.scale**2)
        return jnp.linalg.cholesky(self.kernel(self.X) + noise)

    def _joint(self):
        return dist.MultivariateNormal(self.mean, scale_tril=self._noisy_factor())
