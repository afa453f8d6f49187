"""Kernels of functions that repeat themselves."""

__all__ = ["Cosine", "Periodic"]

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import positive
from numpyro_gpx.kernels.base import Kernel, check_rank, fit_columns


class Periodic(Kernel):
    r"""Periodic kernel, an RBF kernel on a circle.

    .. math:: \sigma^2 \exp\Big(-2 \sum_d \sin^2(\pi (x_d - x'_d) / p_d) / \ell_d^2\Big)

    Args:
        variance: :math:`\sigma^2`, a scalar.
        lengthscale: :math:`\ell`, a scalar or `(D,)`, in units of the circle's radius.
        period: :math:`p`, a scalar or `(D,)`.

    References:
        MacKay (1998), section 4; Rasmussen & Williams (2006), eq. 4.31.
    """

    variance: Float[Array, "..."] = positive("variance", 1.0)
    lengthscale: Float[Array, "..."] = positive("lengthscale", 1.0)
    period: Float[Array, "..."] = positive("period", 1.0)

    def __check_init__(self):
        check_rank("variance", self.variance, 0)
        check_rank("lengthscale", self.lengthscale, 0, 1)
        check_rank("period", self.period, 0, 1)

    def evaluate(self, x, x2):
        lengthscale = fit_columns("lengthscale", self.lengthscale, x)
        period = fit_columns("period", self.period, x)
        chord = jnp.sin(math.pi * (x - x2) / period) / lengthscale  # (D,)
        return self.variance * jnp.exp(-2.0 * jnp.sum(chord**2))


class Cosine(Kernel):
    r"""Plane wave, :math:`\sigma^2 \cos(2\pi \sum_d (x_d - x'_d)/\ell_d)`.

    Its functions are sinusoids. The sum is signed: the cosine of a distance is not
    positive definite in more than one dimension.

    Args:
        variance: :math:`\sigma^2`, a scalar.
        lengthscale: :math:`\ell`, the wavelength along each column, a scalar or `(D,)`.

    References:
        The spectral density is one pair of point masses; Rasmussen & Williams (2006),
        eq. 4.5.
    """

    variance: Float[Array, "..."] = positive("variance", 1.0)
    lengthscale: Float[Array, "..."] = positive("lengthscale", 1.0)

    def __check_init__(self):
        check_rank("variance", self.variance, 0)
        check_rank("lengthscale", self.lengthscale, 0, 1)

    def evaluate(self, x, x2):
        lengthscale = fit_columns("lengthscale", self.lengthscale, x)
        phase = 2.0 * math.pi * jnp.sum((x - x2) / lengthscale)
        return self.variance * jnp.cos(phase)
