"""Kernels that do not look at the inputs' values."""

__all__ = ["Constant", "White"]

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import as_inputs, nonnegative
from numpyro_gpx.kernels.base import Kernel, check_rank


class Constant(Kernel):
    r"""Constant functions of unknown height, :math:`\sigma^2`.

    Args:
        variance: :math:`\sigma^2`, a scalar.
    """

    variance: Float[Array, "..."] = nonnegative("variance", 1.0)

    def __check_init__(self):
        check_rank("variance", self.variance, 0)

    def evaluate(self, x, x2):
        return self.variance * jnp.ones((), x.dtype)


class White(Kernel):
    r"""White noise, :math:`\sigma^2 I` for `k(X)` and 0 for `k(X, X2)`.

    Rows count as the same point if they are the same row of one `X`, not if their
    values agree: two measurements at one input carry two independent errors. So
    `evaluate`, which is handed two rows, is 0 even if they are equal.

    Args:
        variance: :math:`\sigma^2`, a scalar.
    """

    variance: Float[Array, "..."] = nonnegative("variance", 1.0)

    def __check_init__(self):
        check_rank("variance", self.variance, 0)

    def evaluate(self, x, x2):
        return self.variance * jnp.zeros((), x.dtype)

    def matrix(self, X, X2=None):
        if X2 is None:
            return self.variance * jnp.eye(X.shape[0], dtype=X.dtype)
        return self.variance * jnp.zeros((X.shape[0], X2.shape[0]), X.dtype)

    def diag(self, X):
        X = as_inputs("X", X)
        return self.variance * jnp.ones(X.shape[0], X.dtype)
