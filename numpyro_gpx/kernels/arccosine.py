"""The kernel of an infinitely wide layer of threshold or rectified units."""

__all__ = ["ArcCosine"]

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import nonnegative
from numpyro_gpx.kernels.base import Kernel, check_rank, fit_columns
from numpyro_gpx.kernels.distances import safe_sqrt


class ArcCosine(Kernel):
    r"""Arc-cosine kernel of order :math:`n`.

    With :math:`\langle x, x'\rangle = \sum_d w_d x_d x'_d + b`, its norm
    :math:`|x|` and the angle :math:`\theta` between two inputs,

    .. math::
        k(x, x') = \tfrac{\sigma^2}{\pi} |x|^n |x'|^n J_n(\theta)
                 = 2\sigma^2\, \mathrm E[\phi_n(g(x))\, \phi_n(g(x'))]

    where :math:`g(x) \sim \mathcal N(0, \langle\cdot,\cdot\rangle)` is a random linear
    function, :math:`\phi_n(g) = g^n` for :math:`g > 0`, else 0, and

    .. math::
        J_0 = \pi - \theta, \quad
        J_1 = \sin\theta + (\pi - \theta)\cos\theta, \quad
        J_2 = 3 \sin\theta\cos\theta + (\pi - \theta)(1 + 2\cos^2\theta).

    Order 0 has a kink where two inputs coincide; its gradient is taken to be 0 there.

    Args:
        order: :math:`n`: 0 (step), 1 (rectified linear) or 2 (rectified quadratic).
        variance: :math:`\sigma^2`, a scalar.
        weight_variances: :math:`w`, a scalar or `(D,)`.
        bias_variance: :math:`b`, a scalar. At 0 the origin has no direction.

    References:
        Cho & Saul (2009), eq. 1-6.
    """

    order: int = eqx.field(static=True)
    variance: Float[Array, "..."] = nonnegative("variance", 1.0)
    weight_variances: Float[Array, "..."] = nonnegative("weight_variances", 1.0)
    bias_variance: Float[Array, "..."] = nonnegative("bias_variance", 1.0)

    def __check_init__(self):
        if self.order not in (0, 1, 2):
            raise ValueError(f"`order` must be 0, 1 or 2; got {self.order!r}.")
        check_rank("variance", self.variance, 0)
        check_rank("weight_variances", self.weight_variances, 0, 1)
        check_rank("bias_variance", self.bias_variance, 0)

    def evaluate(self, x, x2):
        weights = fit_columns("weight_variances", self.weight_variances, x)

        def squared_norm(x, bias):
            return jnp.sum(weights * x**2) + self.bias_variance * bias**2

        norm = safe_sqrt(squared_norm(x, 1.0))
        norm2 = safe_sqrt(squared_norm(x2, 1.0))
        i = 1.0 / jnp.where(norm > 0, norm, 1.0)
        i2 = 1.0 / jnp.where(norm2 > 0, norm2, 1.0)
        # sin^2(theta/2) from the unit vectors' difference: exactly 0 if x == x2, where
        # an inverse cosine would lose half of the digits.
        h = squared_norm(i * x - i2 * x2, i - i2) / 4.0
        angular = (_j0, _j1, _j2)[self.order](h)
        return self.variance / math.pi * (norm * norm2) ** self.order * angular


# J_n as functions of h = sin^2(theta/2), where dJ_1/dh = -2 J_0 and dJ_2/dh = -8 J_1.
# Stating so keeps them right at theta = 0 and pi, where d theta / dh is infinite.


def _sine_cosine_rest(h):
    """Sine and cosine of theta, and pi - theta."""
    h = jnp.clip(h, 0.0, 1.0)
    sine_half, cosine_half = safe_sqrt(h), safe_sqrt(1.0 - h)
    rest = 2.0 * jnp.arctan2(cosine_half, sine_half)
    return 2.0 * sine_half * cosine_half, 1.0 - 2.0 * h, rest


def _j0(h):
    return _sine_cosine_rest(h)[2]


@jax.custom_jvp
def _j1(h):
    sine, cosine, rest = _sine_cosine_rest(h)
    return sine + rest * cosine


@jax.custom_jvp
def _j2(h):
    sine, cosine, rest = _sine_cosine_rest(h)
    return 3.0 * sine * cosine + rest * (1.0 + 2.0 * cosine**2)


_j1.defjvps(lambda h_dot, _, h: -2.0 * _j0(h) * h_dot)
_j2.defjvps(lambda h_dot, _, h: -8.0 * _j1(h) * h_dot)
