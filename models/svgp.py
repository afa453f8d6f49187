"""Sparse variational GP models: one GP site, one likelihood."""

from __future__ import annotations

from collections.abc import Callable

import numpyro

from numpyro_gpx import checks
from numpyro_gpx.inducing import Inducing
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.means import Mean
from numpyro_gpx.models.priors import gaussian_noise, resolve, stationary
from numpyro_gpx.sites import gp, observe

__all__ = ["svgp"]


def svgp(
    inducing: Inducing,
    *,
    kernel: Kernel | Callable[[], Kernel] | None = None,
    likelihood: Likelihood | Callable[[], Likelihood] | None = None,
    mean: Mean | None = None,
    num_outputs: int | None = None,
    whiten: bool = True,
) -> Callable:
    r"""A sparse GP: :math:`f \sim \mathcal{GP}(m, k)`, :math:`y_n \sim p(y \mid f_n)`.

    Sites: `f` (inducing variables), `y` (targets), and those of the priors; plate
    `data`. Give `inducing=gpx.inducing.Data(X_train)` for the full GP.

    Args:
        inducing: `gpx.inducing.Points(Z)`, with `learn=True` to learn the inducing
            inputs (parameter `f/Z`), or `Data(X_train)`.
        kernel: A kernel, or a function that draws one from its priors; an RBF kernel
            with log-normal priors if left out (`models.priors.stationary`).
        likelihood: A likelihood, or a function that draws one; Gaussian noise with a
            half-normal prior if left out.
        mean: Mean function; zero if left out.
        num_outputs: Number of outputs; left out, targets are `(N,)`.
        whiten: Whether the site holds `v` or `u`.

    Returns:
        A model `(X, y=None, *, offset=None, batch_size=None)`.

    References:
        Titsias (2009); Hensman, Fusi & Lawrence (2013); tutorial 4.1.
    """
    checks.instance("inducing", inducing, Inducing, "such as gpx.inducing.Points(Z)")
    kernel = stationary() if kernel is None else kernel
    likelihood = gaussian_noise if likelihood is None else likelihood

    def model(X, y=None, *, offset=None, batch_size=None):
        f = gp(
            "f",
            resolve(kernel),
            inducing=inducing,
            mean=mean,
            num_outputs=num_outputs,
            whiten=whiten,
        )
        noise = resolve(likelihood)
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            observe(
                "y",
                f(X[i]),
                noise,
                obs=y,
                rows=i,
                offset=None if offset is None else offset[i],
            )

    return model
