"""Networks that read a row's belief off its data: amortised latent inputs."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from numpyro_gpx import checks
from numpyro_gpx.program.call import Call

__all__ = ["Encoder"]


class Encoder(eqx.Module):
    r"""A multilayer perceptron from a row's data to the mean and scale of its latent.

    :math:`m_n = B^\top x_n + b + \text{net}_1(x_n)`, :math:`\log` scale
    :math:`= c + \text{net}_2(x_n)`. The networks start at 0 and the linear map where it
    comes nearest to the start of a free belief: exactly there for principal components
    of whole data.

    Args:
        widths: Hidden widths.
        features: What the network sees: a function of the model's arguments, `(*args,
            **kwargs)`, that returns `(N, F)`; by default all arguments with one entry a
            row, side by side, missing entries as 0.
    """

    widths: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(64,))
    features: Callable | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        for width in self.widths:
            checks.at_least("widths", width, 1)

    def inputs(self, call: Call, num_rows: int, rows) -> Float[Array, "B F"]:
        """What the network sees of the rows with these numbers."""
        if self.features is not None:
            found = jnp.asarray(call.run(self.features))
            if found.ndim != 2 or found.shape[0] != num_rows:
                raise ValueError(
                    f"`features` must return an array ({num_rows}, F); got shape "
                    f"{found.shape}."
                )
            return found[rows]
        leaves = jax.tree.leaves(call)
        columns = [
            jnp.reshape(x, (num_rows, -1))[rows]
            for x in leaves
            if eqx.is_array(x) and x.ndim > 0 and x.shape[0] == num_rows
        ]
        if not columns:
            raise ValueError(
                f"The encoder found no argument of the model with {num_rows} rows; "
                "name what it shall see with `Encoder(features=...)`."
            )
        dtype = jnp.result_type(float)
        joined = jnp.concatenate([x.astype(dtype) for x in columns], axis=1)
        return jnp.nan_to_num(joined)

    def initial(self, key, num_features: int, num_outputs: int) -> Float[Array, " K"]:
        """Starting weights as one vector; the last layer starts at 0."""
        return ravel_pytree(self._layers(key, num_features, num_outputs))[0]

    def __call__(
        self, weights: Float[Array, " K"], features: Float[Array, "N F"], num_outputs
    ) -> Float[Array, "N O"]:
        """The network's outputs."""
        num_features = features.shape[1]
        shapes = jax.eval_shape(
            lambda key: self._layers(key, num_features, num_outputs), jr.key(0)
        )
        template = jax.tree.map(lambda x: jnp.zeros(x.shape, weights.dtype), shapes)
        layers = ravel_pytree(template)[1](weights)
        x = features
        for matrix, bias in layers[:-1]:
            x = jnp.tanh(x @ matrix + bias)
        matrix, bias = layers[-1]
        return x @ matrix + bias

    def _layers(self, key, num_features, num_outputs):
        sizes = (num_features, *self.widths, num_outputs)
        layers = []
        for i, (fan_in, fan_out) in enumerate(zip(sizes, sizes[1:], strict=False)):
            scale = 0.0 if i == len(self.widths) else fan_in**-0.5
            matrix = scale * jr.normal(jr.fold_in(key, i), (fan_in, fan_out))
            layers.append((matrix, jnp.zeros(fan_out)))
        return layers
