r"""Monotone rational-quadratic splines.

On a bin of width `w` and height `h`, slope :math:`s = h/w`, with derivatives
:math:`d, d'` at its ends and :math:`\xi` the position within it,

.. math:: g = y_0 + h\,\frac{s\xi^2 + d\,\xi(1-\xi)}{s + (d + d' - 2s)\,\xi(1-\xi)},
    \quad g' = \frac{s^2 (d'\xi^2 + 2s\,\xi(1-\xi) + d(1-\xi)^2)}
    {(s + (d + d' - 2s)\,\xi(1-\xi))^2}

(Durkan, Bekasov, Murray & Papamakarios 2019, eq. 4-5, 6-8). Outside the box the map is
the identity. flowjax has this spline for one number, as an object with its own
parameters; here a network gives the parameters of many at once, and nothing heavy is
imported.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.numerics.bijections.base import Bijection

__all__ = ["ElementwiseSplines", "num_spline_parameters", "spline", "spline_inverse"]

# Smallest bin (a share of the box) and derivative: the inverse stays finite.
_MIN_BIN = 1e-3
_MIN_DERIVATIVE = 1e-3


def num_spline_parameters(num_bins: int) -> int:
    """Widths, heights and the derivatives between bins."""
    return 3 * num_bins - 1


def spline(
    x: Float[Array, " K"], raw: Float[Array, "K R"], bound: float
) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
    """Splines of each entry.

    Args:
        x: Where.
        raw: Free parameters, `R = 3 * num_bins - 1` for each entry; the identity at 0.
        bound: Half the side of the box.

    Returns:
        Values and log derivatives, both `(K,)`.
    """
    knots = _knots(raw, bound)
    inside = jnp.abs(x) < bound
    # Derivatives of both branches are taken, so that both must be finite.
    bin_ = _find(knots, knots.x, jnp.where(inside, x, jnp.zeros_like(x)))
    xi = (jnp.where(inside, x, jnp.zeros_like(x)) - bin_.x) / bin_.width
    both = xi * (1.0 - xi)
    s = bin_.height / bin_.width
    below = s + (bin_.left + bin_.right - 2.0 * s) * both
    y = bin_.y + bin_.height * (s * xi**2 + bin_.left * both) / below
    log_slope = _log_slope(bin_, xi)
    return jnp.where(inside, y, x), jnp.where(inside, log_slope, jnp.zeros_like(x))


def spline_inverse(
    y: Float[Array, " K"], raw: Float[Array, "K R"], bound: float
) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
    """The inverse of `spline`: values and log derivatives of the inverse."""
    knots = _knots(raw, bound)
    inside = jnp.abs(y) < bound
    inner = jnp.where(inside, y, jnp.zeros_like(y))
    bin_ = _find(knots, knots.y, inner)
    s = bin_.height / bin_.width
    rise = inner - bin_.y
    bend = rise * (bin_.left + bin_.right - 2.0 * s)
    # The root in [0, 1] of a xi^2 + b xi + c, in the form that does not cancel.
    a = bin_.height * (s - bin_.left) + bend
    b = bin_.height * bin_.left - bend
    c = -s * rise
    root = jnp.sqrt(jnp.maximum(b**2 - 4.0 * a * c, jnp.zeros_like(b)))
    xi = jnp.clip(2.0 * c / (-b - root), 0.0, 1.0)
    x = bin_.x + xi * bin_.width
    log_slope = -_log_slope(bin_, xi)
    return jnp.where(inside, x, y), jnp.where(inside, log_slope, jnp.zeros_like(y))


class ElementwiseSplines(Bijection):
    """A spline of its own for each entry.

    Args:
        raw: Free parameters `(K, 3 * num_bins - 1)`; the identity at 0.
        bound: Half the side of the box.
    """

    raw: Float[Array, "*B K R"]
    bound: float = eqx.field(static=True)

    def forward(self, x):
        y, log_slope = spline(x, self.raw, self.bound)
        return y, jnp.sum(log_slope)

    def inverse(self, y):
        x, log_slope = spline_inverse(y, self.raw, self.bound)
        return x, jnp.sum(log_slope)


class _Knots(NamedTuple):
    """Left ends `(K, B)` of the bins, their sizes, and derivatives at both ends."""

    x: Array
    y: Array
    width: Array
    height: Array
    left: Array
    right: Array


def _knots(raw, bound) -> _Knots:
    num_bins = (raw.shape[-1] + 1) // 3
    width = _bins(raw[:, :num_bins], bound)
    height = _bins(raw[:, num_bins : 2 * num_bins], bound)
    # Shifted so that 0 stands for a derivative of 1, as at the ends of the box.
    shift = jnp.log(jnp.expm1(jnp.asarray(1.0 - _MIN_DERIVATIVE, raw.dtype)))
    inner = _MIN_DERIVATIVE + jax.nn.softplus(raw[:, 2 * num_bins :] + shift)
    ones = jnp.ones_like(raw[:, :1])
    left = jnp.concatenate([ones, inner], axis=1)
    right = jnp.concatenate([inner, ones], axis=1)
    return _Knots(_left_ends(width, bound), _left_ends(height, bound), width, height,
                  left, right)  # fmt: skip


def _bins(raw, bound):
    share = _MIN_BIN + (1.0 - _MIN_BIN * raw.shape[-1]) * jax.nn.softmax(raw, axis=-1)
    return 2.0 * bound * share


def _left_ends(sizes, bound):
    return jnp.cumsum(sizes, axis=-1) - sizes - bound


def _find(knots: _Knots, ends, x) -> _Knots:
    """The bin `(K,)` that each entry falls into, by its left `ends`."""
    above = (x[:, None] >= ends[:, 1:]).astype(x.dtype)
    ones = jnp.ones_like(x)[:, None]
    # One for the last bin that starts at or before x; a gather would be slower.
    hit = jnp.concatenate([ones, above], axis=1) - jnp.concatenate(
        [above, 0.0 * ones], axis=1
    )
    return _Knots(*(jnp.sum(hit * part, axis=1) for part in knots))


def _log_slope(bin_: _Knots, xi):
    s = bin_.height / bin_.width
    both = xi * (1.0 - xi)
    above = bin_.right * xi**2 + 2.0 * s * both + bin_.left * (1.0 - xi) ** 2
    below = s + (bin_.left + bin_.right - 2.0 * s) * both
    return 2.0 * jnp.log(s) + jnp.log(above) - 2.0 * jnp.log(below)
