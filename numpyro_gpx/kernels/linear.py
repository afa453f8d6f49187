"""Kernels of linear and polynomial functions."""

__all__ = ["Linear", "Polynomial"]

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import nonnegative
from numpyro_gpx.kernels.base import Kernel, check_rank, fit_columns


class Linear(Kernel):
    r"""Linear functions through the origin, :math:`\sum_d \sigma_d^2 x_d x'_d`.

    Add a `Constant` for an intercept.

    Args:
        variance: :math:`\sigma_d^2`, the weights' variance, a scalar or `(D,)`.

    References:
        Rasmussen & Williams (2006), section 4.2.2.
    """

    variance: Float[Array, "..."] = nonnegative("variance", 1.0)

    def __check_init__(self):
        check_rank("variance", self.variance, 0, 1)

    def evaluate(self, x, x2):
        return jnp.dot(fit_columns("variance", self.variance, x) * x, x2)


class Polynomial(Kernel):
    r"""Polynomials, :math:`(\sum_d \sigma_d^2 x_d x'_d + c)^p`.

    Args:
        degree: :math:`p`, a positive integer.
        variance: :math:`\sigma_d^2`, a scalar or `(D,)`.
        offset: :math:`c`, a scalar, not negative; at 0 only terms of degree `p` remain.

    References:
        Rasmussen & Williams (2006), section 4.2.2.
    """

    degree: int = eqx.field(static=True)
    variance: Float[Array, "..."] = nonnegative("variance", 1.0)
    offset: Float[Array, "..."] = nonnegative("offset", 1.0)

    def __check_init__(self):
        if not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(f"`degree` must be a positive int; got {self.degree!r}.")
        check_rank("variance", self.variance, 0, 1)
        check_rank("offset", self.offset, 0)

    def evaluate(self, x, x2):
        product = jnp.dot(fit_columns("variance", self.variance, x) * x, x2)
        return (product + self.offset) ** self.degree
