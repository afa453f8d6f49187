"""Gaussian regression with the function marginalised."""

from __future__ import annotations

from collections.abc import Callable

import numpyro
import numpyro.distributions as dist

from numpyro_gpx.kernels import Kernel
from numpyro_gpx.means import Mean
from numpyro_gpx.models.priors import resolve, stationary
from numpyro_gpx.sites import exact

__all__ = ["exact_gp"]


def exact_gp(
    *,
    kernel: Kernel | Callable[[], Kernel] | None = None,
    mean: Mean | None = None,
) -> Callable:
    r"""Exact GP regression, :math:`y \sim \mathcal N(m(X), K + \sigma^2 I)`.

    Only hyperparameters are left to infer, so this is the place to start with NUTS and
    a few hundred rows, and the reference for everything sparse. Sites: `noise`, `y`,
    and those of the kernel's priors.

    Args:
        kernel: A kernel, or a function that draws one from its priors.
        mean: Mean function; zero if left out.

    Returns:
        A model `(X, y=None)`.

    References:
        Rasmussen & Williams (2006), chapter 2.
    """
    kernel = stationary() if kernel is None else kernel

    def model(X, y=None):
        scale = numpyro.sample("noise", dist.HalfNormal(1.0))
        exact("y", resolve(kernel), X, scale, obs=y, mean=mean)

    return model
