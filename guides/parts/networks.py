"""Small multilayer perceptrons whose weights are one vector, hence one parameter."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from numpyro_gpx import checks

__all__ = ["Network"]

# Standard deviation of the first layer's response to standardised inputs: functions
# as rough as a density of several modes are out of reach of slow ones.
_GAIN = 3.0


class Network(eqx.Module):
    """A perceptron with leaky rectifiers, applied row by row.

    Args:
        num_inputs: Columns it sees.
        widths: Hidden widths.
        num_outputs: Columns it returns.
        silent: Whether the last layer starts at 0, so that the output does.
    """

    num_inputs: int = eqx.field(static=True)
    widths: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    num_outputs: int = eqx.field(static=True)
    silent: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        for width in self.widths:
            checks.at_least("widths", width, 1)

    def initial(self, key, dtype) -> Float[Array, " K"]:
        """Starting weights: normal, of variance 1 / fan-in, in the first layer more."""
        return ravel_pytree(self._layers(key, dtype))[0]

    def __call__(
        self, weights: Float[Array, " K"], x: Float[Array, "N F"]
    ) -> Float[Array, "N O"]:
        """The outputs for each row of `x`."""
        shapes = jax.eval_shape(lambda key: self._layers(key, x.dtype), jr.key(0))
        template = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        layers = ravel_pytree(template)[1](weights)
        for matrix, bias in layers[:-1]:
            x = _activation(x @ matrix + bias[None])
        matrix, bias = layers[-1]
        return x @ matrix + bias[None]

    def _layers(self, key, dtype):
        sizes = (self.num_inputs, *self.widths, self.num_outputs)
        layers = []
        for i, (fan_in, fan_out) in enumerate(zip(sizes, sizes[1:], strict=False)):
            key_matrix, key_bias = jr.split(jr.fold_in(key, i))
            gain = _GAIN if i == 0 else 1.0
            matrix = (
                gain * fan_in**-0.5 * jr.normal(key_matrix, (fan_in, fan_out), dtype)
            )
            bias = jr.uniform(key_bias, (fan_out,), dtype, -gain, gain)
            if self.silent and i == len(self.widths):
                matrix, bias = jnp.zeros_like(matrix), jnp.zeros_like(bias)
            layers.append((matrix, bias))
        return layers


def _activation(x):
    return jax.nn.leaky_relu(x, 0.2)
