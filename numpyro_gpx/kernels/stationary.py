r"""Kernels of the scaled distance `r`.

:math:`r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2`, where `lengthscale` is a scalar, or
`(D,)` for one lengthscale per column (ARD).

References:
    Rasmussen & Williams (2006), section 4.2.1.
"""

__all__ = ["RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic"]

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import as_inputs, positive
from numpyro_gpx.kernels.base import Kernel, check_rank, fit_columns
from numpyro_gpx.kernels.distances import (
    safe_sqrt,
    squared_distance,
    squared_distances,
)


class Smooth(Kernel):
    """A stationary kernel that is a differentiable function of the squared distance."""

    variance: eqx.AbstractVar[Float[Array, "..."]]
    lengthscale: eqx.AbstractVar[Float[Array, "..."]]

    @abc.abstractmethod
    def profile(self, s: Float[Array, "..."]) -> Float[Array, "..."]:
        """Correlation at the squared scaled distance `s`, elementwise."""

    def __check_init__(self):
        check_rank("variance", self.variance, 0)
        check_rank("lengthscale", self.lengthscale, 0, 1)

    def evaluate(self, x, x2):
        return self.variance * self.profile(squared_distance(x, x2, self.lengthscale))

    def matrix(self, X, X2=None):
        s = squared_distances(X, X2, self.lengthscale)  # (N, N2)
        return self.variance * self.profile(s)

    def diag(self, X):
        X = as_inputs("X", X)
        fit_columns("lengthscale", self.lengthscale, X[0])
        dtype = jnp.result_type(self.variance, self.lengthscale, X)
        return jnp.broadcast_to(self.variance.astype(dtype), X.shape[:1])


class RBF(Smooth):
    r"""Squared exponential, :math:`\sigma^2 e^{-r^2/2}`.

    Args:
        variance: :math:`\sigma^2`, a scalar.
        lengthscale: :math:`\ell`, a scalar or `(D,)`.

    References:
        Rasmussen & Williams (2006), eq. 4.9.
    """

    variance: Float[Array, "..."] = positive("variance", 1.0)
    lengthscale: Float[Array, "..."] = positive("lengthscale", 1.0)

    def profile(self, s):
        return jnp.exp(-0.5 * s)


class RationalQuadratic(Smooth):
    r"""Rational quadratic, :math:`\sigma^2 (1 + r^2 / 2\alpha)^{-\alpha}`.

    A mixture of RBF kernels whose inverse squared lengthscales are Gamma distributed.

    Args:
        variance: :math:`\sigma^2`, a scalar.
        lengthscale: :math:`\ell`, a scalar or `(D,)`.
        alpha: Shape of the mixture, a scalar; the RBF kernel is its limit at infinity.

    References:
        Rasmussen & Williams (2006), eq. 4.19.
    """

    variance: Float[Array, "..."] = positive("variance", 1.0)
    lengthscale: Float[Array, "..."] = positive("lengthscale", 1.0)
    alpha: Float[Array, "..."] = positive("alpha", 1.0)

    def __check_init__(self):
        check_rank("alpha", self.alpha, 0)

    def profile(self, s):
        return jnp.exp(-self.alpha * jnp.log1p(0.5 * s / self.alpha))


class Matern52(Smooth):
    r"""Matérn-5/2, :math:`\sigma^2 (1 + \sqrt5 r + 5 r^2/3) e^{-\sqrt5 r}`.

    Args:
        variance: :math:`\sigma^2`, a scalar.
        lengthscale: :math:`\ell`, a scalar or `(D,)`.

    References:
        Rasmussen & Williams (2006), eq. 4.17.
    """

    variance: Float[Array, "..."] = positive("variance", 1.0)
    lengthscale: Float[Array, "..."] = positive("lengthscale", 1.0)

    def profile(self, s):
        return _matern52(5.0 * s)


class Matern32(Smooth):
    r"""Matérn-3/2, :math:`\sigma^2 (1 + \sqrt3 r) e^{-\sqrt3 r}`.

    Args:
        variance: :math:`\sigma^2`, a scalar.
        lengthscale: :math:`\ell`, a scalar or `(D,)`.

    References:
        Rasmussen & Williams (2006), eq. 4.17.
    """

    variance: Float[Array, "..."] = positive("variance", 1.0)
    lengthscale: Float[Array, "..."] = positive("lengthscale", 1.0)

    def profile(self, s):
        return _matern32(3.0 * s)


class Matern12(Kernel):
    r"""Matérn-1/2, :math:`\sigma^2 e^{-r}`, the Ornstein-Uhlenbeck kernel.

    It has a kink at :math:`r = 0`, where its gradient is taken to be 0. A rounding
    error in :math:`r^2` would become its square root in :math:`r`, so distances are
    always computed by differences.

    Args:
        variance: :math:`\sigma^2`, a scalar.
        lengthscale: :math:`\ell`, a scalar or `(D,)`.

    References:
        Rasmussen & Williams (2006), eq. 4.18.
    """

    variance: Float[Array, "..."] = positive("variance", 1.0)
    lengthscale: Float[Array, "..."] = positive("lengthscale", 1.0)

    def __check_init__(self):
        check_rank("variance", self.variance, 0)
        check_rank("lengthscale", self.lengthscale, 0, 1)

    def evaluate(self, x, x2):
        return self.variance * _matern12(squared_distance(x, x2, self.lengthscale))


# Matérn correlations as functions of t = 2 nu r^2, where each one's derivative is a
# multiple of the next rougher one. Stating so keeps second derivatives right, and not
# just finite, where two inputs coincide: d sqrt(t) / dt is infinite there.


def _matern12(t):
    return jnp.exp(-safe_sqrt(t))


@jax.custom_jvp
def _matern32(t):
    a = safe_sqrt(t)
    return (1.0 + a) * jnp.exp(-a)


@jax.custom_jvp
def _matern52(t):
    a = safe_sqrt(t)
    return (1.0 + a + t / 3.0) * jnp.exp(-a)


_matern32.defjvps(lambda t_dot, _, t: -_matern12(t) / 2.0 * t_dot)
_matern52.defjvps(lambda t_dot, _, t: -_matern32(t) / 6.0 * t_dot)
