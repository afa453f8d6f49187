"""Lower triangular factors of covariances, as parameters of guides.

NumPyro's own constraints pack a factor into a vector, and unpacking it is a scatter,
which on a CPU costs as much as a matrix product. Here the unconstrained parameter is
the whole matrix, whose upper triangle is ignored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ParameterFreeTransform

__all__ = ["dense_factor"]


class _DenseFactor(type(constraints.lower_cholesky)):  # type: ignore[misc]
    """Lower triangular with a positive diagonal."""


dense_factor = _DenseFactor()


class DenseFactorTransform(ParameterFreeTransform):
    r"""From a square matrix `R` to :math:`L = D(I + N)`.

    `N` is the part of `R` below the diagonal, `D` the softplus of its diagonal: as in
    NumPyro's `scaled_unit_lower_cholesky`, but without packing.
    """

    domain = constraints.independent(constraints.real, 2)
    codomain = dense_factor

    def __call__(self, x):
        scale = jax.nn.softplus(jnp.diagonal(x, axis1=-2, axis2=-1))[..., None]
        return scale * (jnp.tril(x, -1) + jnp.eye(x.shape[-1], dtype=x.dtype))

    def _inverse(self, y):
        scale = jnp.diagonal(y, axis1=-2, axis2=-1)[..., None]
        inverse_softplus = jnp.log(-jnp.expm1(-scale)) + scale
        return jnp.tril(y / scale, -1) + inverse_softplus * jnp.eye(
            y.shape[-1], dtype=y.dtype
        )

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        size = x.shape[-1]
        raw = jnp.diagonal(x, axis1=-2, axis2=-1)
        scale = jnp.diagonal(y, axis1=-2, axis2=-1)
        # Row i holds i entries below the diagonal, each multiplied by its scale.
        below = jnp.arange(size, dtype=x.dtype) * jnp.log(scale)
        return jnp.sum(jax.nn.log_sigmoid(raw) + below, axis=-1)

    def forward_shape(self, shape):
        return shape

    def inverse_shape(self, shape):
        return shape


@biject_to.register(_DenseFactor)
def _(constraint):
    return DenseFactorTransform()
