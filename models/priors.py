"""Default priors of the ready-made families, for standardised data."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist

from numpyro_gpx.kernels import RBF, Kernel
from numpyro_gpx.likelihoods import Gaussian, Likelihood
from numpyro_gpx.means import Convolution, Mean
from numpyro_gpx.starting import lengthscale

__all__ = ["convolution", "gaussian_noise", "lengthscale", "resolve", "stationary"]


def stationary(
    kind: type[Kernel] = RBF, *, num_dims: int | None = None, lengthscale=1.0
) -> Callable[[], Kernel]:
    """A stationary kernel with log-normal priors on variance and lengthscale.

    Registers `variance` and `lengthscale`.

    Args:
        kind: `gpx.kernels.RBF`, `Matern32`, ...
        num_dims: Number of columns, for one lengthscale per column; `None` for one
            shared lengthscale.
        lengthscale: Prior median of the lengthscales, e.g.
            `gpx.models.priors.lengthscale(X)`.

    Returns:
        A function without arguments, to be called inside a model.
    """

    def kernel() -> Kernel:
        loc = jnp.log(jnp.asarray(lengthscale, float))
        if num_dims is not None:
            loc = jnp.broadcast_to(loc, (num_dims,))
        prior = dist.LogNormal(loc, 1.0).to_event(loc.ndim)
        return kind(
            variance=numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
            lengthscale=numpyro.sample("lengthscale", prior),
        )

    return kernel


def gaussian_noise() -> Likelihood:
    """Gaussian noise with a half-normal prior on its standard deviation.

    Registers `noise`.
    """
    return Gaussian(scale=numpyro.sample("noise", dist.HalfNormal(1.0)))


def convolution(
    image_shape: tuple[int, int, int], *, num_channels: int, size: int = 3, stride=1
) -> Callable[[], Mean]:
    """A convolutional mean function with learnt weights, for layers of images.

    Registers the parameter `weights`, `(num_channels, C, size, size)`.

    Args:
        image_shape: `(C, H, W)` of the images.
        num_channels: Channels of the output.
        size: Height and width of the window; odd.
        stride: Pixels from one output to the next.

    Returns:
        A function without arguments, to be called inside a model.
    """

    def mean() -> Mean:
        shape = (num_channels, image_shape[0], size, size)
        # Outputs of the inputs' size, if neighbouring pixels are alike.
        scale = 1.0 / (image_shape[0] * size**2) ** 0.5
        start = numpyro.param(
            "weights", lambda key: scale * jr.normal(key, shape, jnp.result_type(float))
        )
        return Convolution(image_shape, start, stride)

    return mean


def resolve(part):
    """`part` itself, or what it returns if it is a function that draws from priors."""
    return part if isinstance(part, Kernel | Likelihood | Mean) else part()
