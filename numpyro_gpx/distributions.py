"""The two distributions of observed sites."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro.distributions as dist
from jax.scipy.linalg import cho_solve, solve_triangular
from numpyro.distributions import constraints

from numpyro_gpx.latents import GaussianLatent
from numpyro_gpx.likelihoods import Gaussian
from numpyro_gpx.linalg import positive

__all__ = ["ExactRegression", "ExpectedLikelihood"]


class ExpectedLikelihood(dist.Distribution):
    r"""`log_prob(y)` is :math:`\mathbb E_{q(f_n)}[\log p(y_n \mid f_n)]` of each row.

    It is not the log density of what `sample` draws (`f`, then `y`); that one is
    `predictive_log_prob`. Batch shape `(N,)`, event shape `()` or `(P,)`.

    Args:
        latent: Marginals of the latent function, `(N,)` or `(N, P)`.
        likelihood: The likelihood.
        weights: Multiplies each row's terms, `(N,)`.
        keep: Entries that count, of the shape of the targets; `mask` is NumPyro's own.
    """

    pytree_data_fields = ("latent", "likelihood", "weights", "keep")

    def __init__(
        self, latent, likelihood, *, weights=None, keep=None, validate_args=None
    ):
        self.latent = latent
        self.likelihood = likelihood
        self.weights = weights
        self.keep = keep
        target_shape = likelihood.target_shape(latent.shape)
        batch, event = target_shape[:1], target_shape[1:]
        # Targets are checked at the door (`checks.targets`), with better words.
        super().__init__(batch, event, validate_args=False)

    @property
    def support(self):
        return constraints.independent(self.likelihood.support, len(self.event_shape))

    def log_prob(self, value):
        """Expected log likelihood of each row, weighted, `(N,)`."""
        rows = self._rows(value, self._expected)
        return rows if self.weights is None else self.weights * rows

    def predictive_log_prob(self, value):
        r""":math:`\log\int p(y_n \mid f_n)\,q(f_n)\,df_n` of each row, `(N,)`.

        Without the weights: they say how much a row counts in the posterior, not what
        its density is.
        """
        return self._rows(value, self._predictive)

    def predictive_cdf(self, value):
        """Predictive probability of targets at most `value`, entry by entry."""
        log_w, means, variances = self.latent.components()
        each = jax.vmap(self.likelihood.predictive_cdf, (None, 0, 0))
        return jnp.tensordot(jnp.exp(log_w), each(value, means, variances), axes=1)

    def probabilities(self):
        """Predictive probabilities of the labels, `(N, C)`."""
        log_w, means, variances = self.latent.components()
        each = jax.vmap(self.likelihood.predictive_probabilities)(means, variances)
        return jnp.tensordot(jnp.exp(log_w), each, axes=1)

    def sample(self, key, sample_shape=()):
        key_latent, key_target = jr.split(key)
        f = self.latent.sample(key_latent, sample_shape)
        return self.likelihood.distribution(f).sample(key_target)

    @property
    def mean(self):
        return self._moments()[0]

    @property
    def variance(self):
        return self._moments()[1]

    def _rows(self, value, log_density):
        """Sum `log_density` over the outputs of each row, masked."""
        if self.keep is None:
            rows = log_density(value)
        else:
            keep = jnp.broadcast_to(self.keep, value.shape)
            # Masked entries may be NaN: put a legal value there before they spread.
            filled = jnp.where(keep, value, _legal_value(self.support, value))
            rows = jnp.where(keep, log_density(filled), 0.0)
        if rows.shape != value.shape:
            raise ValueError(
                f"Parameters of {type(self.likelihood).__name__} must be scalars, or "
                f"have one entry for each of the targets {value.shape}; with them the "
                f"densities have shape {rows.shape}."
            )
        return rows.sum(-1) if rows.ndim > len(self.batch_shape) else rows

    def _expected(self, value):
        log_w, means, variances = self.latent.components()
        each = jax.vmap(self.likelihood.expected_log_prob, (None, 0, 0))
        terms = each(value, means, variances)
        return jnp.tensordot(jnp.exp(log_w), terms, axes=1)

    def _predictive(self, value):
        log_w, means, variances = self.latent.components()
        each = jax.vmap(self.likelihood.predictive_log_prob, (None, 0, 0))
        terms = each(value, means, variances)
        return jax.nn.logsumexp(
            terms + log_w.reshape((-1,) + (1,) * (terms.ndim - 1)), axis=0
        )

    def _moments(self):
        log_w, means, variances = self.latent.components()
        means, variances = jax.vmap(self.likelihood.predictive_moments)(
            means, variances
        )
        mean = jnp.tensordot(jnp.exp(log_w), means, axes=1)
        spread = variances + (means - mean) ** 2
        return mean, jnp.tensordot(jnp.exp(log_w), spread, axes=1)


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

    def latent_given(self, train, y, *, full_cov=False, part=None) -> GaussianLatent:
        r"""Posterior of `f` at this site's inputs, given the training site and its `y`.

        Mean :math:`m_* + K_{*f}(K_{ff} + \sigma^2 I)^{-1}(y - m)`, covariance
        :math:`K_{**} - K_{*f}(K_{ff} + \sigma^2 I)^{-1}K_{f*}`.

        Args:
            train: The site at the training inputs, with the same hyperparameters.
            y: Training targets `(N,)`.
            full_cov: Also the covariance between rows.
            part: Index of a summand of the kernel, for that part of the function.
        """
        kernel = self.kernel if part is None else self.kernel.parts[part]
        L = train._noisy_factor()
        Ksf = kernel(self.X, train.X)  # (N*, N)
        V = solve_triangular(L, Ksf.T, lower=True)  # (N, N*)
        alpha = cho_solve((L, True), y - train.mean)
        f_mean = Ksf @ alpha + (self.mean if part is None else 0.0)
        cov = kernel(self.X) - V.T @ V if full_cov else None
        cov_scale = jnp.mean(kernel.diag(self.X)) if full_cov else None
        f_var = positive(kernel.diag(self.X) - jnp.sum(V**2, axis=0))
        return GaussianLatent(f_mean, f_var, cov, cov_scale=cov_scale)

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

    def predictive(self, latent: GaussianLatent) -> ExpectedLikelihood:
        """New targets, given what is known of `f`."""
        return ExpectedLikelihood(latent, Gaussian(self.scale))

    def _noisy_factor(self):
        # The noise variance is jitter enough; none is added.
        noise = jnp.diag(self.scale**2)
        return jnp.linalg.cholesky(self.kernel(self.X) + noise)

    def _joint(self):
        return dist.MultivariateNormal(self.mean, scale_tril=self._noisy_factor())


def _legal_value(support, value):
    """A number inside the support, in the dtype of `value`."""
    return jnp.asarray(support.feasible_like(jnp.zeros(())), value.dtype)
