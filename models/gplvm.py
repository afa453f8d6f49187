"""GP latent variable models: the inputs are latent, or have latent columns."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_gpx import checks
from numpyro_gpx.inducing import Points
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.means import Mean
from numpyro_gpx.models.priors import gaussian_noise, resolve, stationary
from numpyro_gpx.sites import gp, observe
from numpyro_gpx.uncertain import join

__all__ = ["gplvm", "latent_gp"]


def gplvm(
    inducing: Points,
    *,
    num_outputs: int,
    kernel: Kernel | Callable[[], Kernel] | None = None,
    likelihood: Likelihood | Callable[[], Likelihood] | None = None,
    prior: dist.Distribution | None = None,
    mean: Mean | None = None,
    missing: bool = False,
) -> Callable:
    r"""The Bayesian GPLVM: :math:`h_n \sim p(h)`, :math:`y_n \sim p(y \mid f(h_n))`.

    Sites: `h` (latent inputs, in the plate `data`), `f` (inducing variables), `y`, and
    those of the priors; parameter `f/Z` if the inducing inputs are learnt.

    Args:
        inducing: `gpx.inducing.Points(Z, learn=True)`, where `Z` `(M, Q)` are, for
            example, some rows of `gpx.latent_space.pca(Y, Q)`; Q is the number of
            latent dimensions. Without `learn=True` they are fixed.
        num_outputs: Number of columns P of the data.
        kernel: A kernel, or a function that draws one from its priors; RBF with one
            lengthscale a dimension if left out.
        likelihood: A likelihood, or a function that draws one; Gaussian noise with a
            half-normal prior if left out.
        prior: Prior of one row's latent input, event shape `(Q,)`; standard normal if
            left out.
        mean: Mean function; zero if left out.
        missing: Whether NaN in the data stands for a missing entry; a call of the model
            may say otherwise. Whole data are faster without: all outputs then share
            one covariance.

    Returns:
        A model `(y=None, *, num_rows=None, batch_size=None, missing=missing)`; without
        data it draws `num_rows` rows.

    References:
        Lawrence (2004); Titsias & Lawrence (2010); dissertation 2.4.
    """
    _check_points(inducing)
    joined = latent_gp(
        inducing, num_latents=inducing.Z.shape[1], num_outputs=num_outputs,
        kernel=kernel, likelihood=likelihood, prior=prior, mean=mean, missing=missing,
    )  # fmt: skip

    def model(y=None, *, num_rows=None, batch_size=None, missing=missing):
        if y is None:
            checks.at_least("num_rows", num_rows, 1)
        rows = num_rows if y is None else y.shape[0]
        joined(jnp.zeros((rows, 0)), y, batch_size=batch_size, missing=missing)

    return model


def latent_gp(
    inducing: Points,
    *,
    num_latents: int = 1,
    num_outputs: int | None = None,
    kernel: Kernel | Callable[[], Kernel] | None = None,
    likelihood: Likelihood | Callable[[], Likelihood] | None = None,
    prior: dist.Distribution | None = None,
    mean: Mean | None = None,
    missing: bool = False,
) -> Callable:
    r"""A GP on inputs and a latent input, :math:`y_n \sim p(y \mid f(x_n, h_n))`.

    Given :math:`x_n` the targets may have any distribution: several modes, skewness, a
    spread that changes with :math:`x_n`. Sites as in `gplvm`.

    Args:
        inducing: `gpx.inducing.Points(Z, learn=True)`, with `Z` `(M, D + Q)`: columns
            of `X`, then of `h`. Without `learn=True` they are fixed.
        num_latents: Number of latent columns Q.
        num_outputs: Number of outputs; left out, targets are `(N,)`.
        kernel: A kernel, or a function that draws one from its priors; RBF with one
            lengthscale per column if left out.
        likelihood: A likelihood, or a function that draws one; Gaussian noise with a
            half-normal prior if left out.
        prior: Prior of one row's latent input, event shape `(Q,)`; standard normal if
            left out.
        mean: Mean function; zero if left out.
        missing: Whether NaN in the targets stands for a missing entry; a call of the
            model may say otherwise.

    Returns:
        A model `(X, y=None, *, batch_size=None, missing=missing)`.

    References:
        Tutorial 4.2-4.3; Dutordoir et al. (2018); Salimbeni et al. (2019).
    """
    _check_points(inducing)
    num_columns = inducing.Z.shape[1]
    if not 1 <= num_latents <= num_columns:
        raise ValueError(
            f"`num_latents` must lie between 1 and the {num_columns} columns of "
            f"`inducing`; got {num_latents}."
        )
    if prior is None:
        prior = dist.Normal(jnp.zeros(num_latents), 1.0).to_event(1)
    if prior.shape() != (num_latents,) or prior.event_dim != 1:
        raise ValueError(
            f"`prior` must have event shape ({num_latents},) and no batch; got batch "
            f"{prior.batch_shape} and event {prior.event_shape}. Use `.to_event(1)`."
        )
    kernel = stationary(num_dims=num_columns) if kernel is None else kernel
    likelihood = gaussian_noise if likelihood is None else likelihood

    def model(X, y=None, *, batch_size=None, missing=missing):
        checks.matrix("X", X, "(N, D)")
        if X.shape[1] + num_latents != num_columns:
            raise ValueError(
                f"`inducing` must have the {X.shape[1]} columns of `X` and "
                f"{num_latents} of the latent input; got shape {inducing.Z.shape}."
            )
        f = gp(
            "f", resolve(kernel), inducing=inducing, mean=mean, num_outputs=num_outputs
        )
        noise = resolve(likelihood)
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            h = numpyro.sample("h", prior)
            observe(
                "y",
                f(join(X[i], h)),
                noise,
                obs=y,
                rows=i,
                missing=missing,
            )

    return model


def _check_points(inducing):
    usual = "such as gpx.inducing.Points(Z, learn=True)"
    checks.instance("inducing", inducing, Points, usual)
