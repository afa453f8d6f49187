"""A kernel given by its spectral density."""

__all__ = ["SpectralMixture"]

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import nonnegative, real
from numpyro_gpx.kernels.base import Kernel, check_rank, fit_columns


class SpectralMixture(Kernel):
    r"""Mixture of `Q` Gaussians as spectral density.

    With :math:`\tau = x - x'`,

    .. math::
        k(\tau) = \sum_q w_q \prod_d \exp(-2\pi^2 \tau_d^2 s_{qd}^2)
                  \cos(2\pi \tau_d \mu_{qd}),

    the Fourier transform of :math:`\sum_q w_q \prod_d \tfrac12 [\mathcal N(\mu_{qd},
    s_{qd}^2) + \mathcal N(-\mu_{qd}, s_{qd}^2)]`; frequencies are in cycles a unit.

    Args:
        weights: :math:`w`, the components' variances, `(Q,)`.
        means: :math:`\mu`, their frequencies, `(Q, D)`.
        scales: :math:`s`, their standard deviations, `(Q, D)`.

    References:
        Wilson & Adams (2013), eq. 12, which writes :math:`v = s^2`.
    """

    weights: Float[Array, "..."] = nonnegative("weights")
    means: Float[Array, "..."] = real()
    scales: Float[Array, "..."] = nonnegative("scales")

    def __check_init__(self):
        check_rank("weights", self.weights, 1)
        check_rank("means", self.means, 2)
        check_rank("scales", self.scales, 2)
        if self.means.shape != self.scales.shape:
            raise ValueError(
                "`means` and `scales` must have the same shape (Q, D); got "
                f"{self.means.shape} and {self.scales.shape}."
            )
        if self.weights.shape[0] != self.means.shape[0]:
            raise ValueError(
                "`weights` must hold one entry for each row of `means`; got shapes "
                f"{self.weights.shape} and {self.means.shape}."
            )

    def evaluate(self, x, x2):
        turns = 2.0 * math.pi * (x - x2)[None, :]  # (1, D)
        scales = turns * fit_columns("scales", self.scales, x)  # (Q, D)
        waves = jnp.cos(turns * fit_columns("means", self.means, x))  # (Q, D)
        envelope = jnp.exp(-0.5 * jnp.sum(scales**2, axis=1))  # (Q,)
        return jnp.sum(self.weights * envelope * jnp.prod(waves, axis=1))
