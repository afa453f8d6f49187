"""Couplings: half of the entries decide what happens to the other half."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from numpyro_gpx.numerics.bijections.base import Bijection
from numpyro_gpx.numerics.bijections.splines import spline, spline_inverse

__all__ = ["SplineCoupling"]

# The log scale of a coupling stays within this: a few blocks reach any scale, and no
# single draw of a narrow network output blows up.
_MAX_LOG_SCALE = 2.0


class SplineCoupling(Bijection):
    r"""Splines, shifts and scales of one half of the entries, given the other half.

    The entries, reordered, fall into `a` (the first `K - K // 2`) and `b`:

    .. math:: y_a = g(a; r), \qquad y_b = t(a) + e^{s(a)}\, g(b; r(a))

    with monotone splines `g`. The entries of `a` have free splines, so that a single
    entry (K = 1) is transformed as well. A network with two hidden layers
    :math:`h(a)` gives each entry `k` of `b` its parameters,
    :math:`c_k + R^\top (e_k \odot h)`: gains :math:`e_k` of its own and a readout `R`
    that all share, which needs far fewer weights than a readout each.

    Args:
        order: The entries of `a`, then those of `b`, `(K,)`.
        back: The inverse permutation, `(K,)`.
        free: Splines of `a`, `(Ka, R)`.
        hidden_in: `(Ka, H)`.
        hidden_bias: `(H,)`.
        hidden_mid: `(H, H)`.
        gains: `(Kb, H)`.
        readout: `(H, R + 2)`.
        offsets: `(Kb, R + 2)`.
        bound: Half the side of the splines' box.

    References:
        Durkan, Bekasov, Murray & Papamakarios (2019), section 3.
    """

    order: Int[Array, "*B K"]
    back: Int[Array, "*B K"]
    free: Float[Array, "*B Ka R"]
    hidden_in: Float[Array, "*B Ka H"]
    hidden_bias: Float[Array, "*B H"]
    hidden_mid: Float[Array, "*B H H"]
    gains: Float[Array, "*B Kb H"]
    readout: Float[Array, "*B H R2"]
    offsets: Float[Array, "*B Kb R2"]
    bound: float = eqx.field(static=True)

    def forward(self, x):
        a, b = self._halves(x)
        shift, log_scale, raw = self._given(a)
        y_a, slope_a = spline(a, self.free, self.bound)
        y_b, slope_b = spline(b, raw, self.bound)
        y_b = shift + jnp.exp(log_scale) * y_b
        log_det = jnp.sum(slope_a) + jnp.sum(slope_b + log_scale)
        return jnp.concatenate([y_a, y_b])[self.back], log_det

    def inverse(self, y):
        y_a, y_b = self._halves(y)
        a, slope_a = spline_inverse(y_a, self.free, self.bound)
        shift, log_scale, raw = self._given(a)
        b, slope_b = spline_inverse(
            (y_b - shift) * jnp.exp(-log_scale), raw, self.bound
        )
        log_det = jnp.sum(slope_a) + jnp.sum(slope_b - log_scale)
        return jnp.concatenate([a, b])[self.back], log_det

    def _halves(self, x):
        x = x[self.order]
        size = self.free.shape[0]
        return x[:size], x[size:]

    def _given(self, a):
        """Shift, log scale and spline parameters of `b`."""
        h = jnp.tanh(a @ self.hidden_in + self.hidden_bias)
        h = h + jnp.tanh(h @ self.hidden_mid)
        out = self.offsets + (self.gains * h[None, :]) @ self.readout  # (Kb, R + 2)
        log_scale = _MAX_LOG_SCALE * jnp.tanh(out[:, 1] / _MAX_LOG_SCALE)
        return out[:, 0], log_scale, out[:, 2:]
