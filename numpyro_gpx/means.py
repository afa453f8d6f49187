"""Mean functions: `m(X)` is `(N,)`, or `(N, P)` for several outputs."""

__all__ = [
    "Constant",
    "Convolution",
    "Identity",
    "Linear",
    "Mean",
    "Projection",
    "Zero",
    "skip",
]

import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from numpyro_gpx.checked_fields import as_inputs, real
from numpyro_gpx.kernels.base import check_rank


class Mean(eqx.Module):
    """A mean function."""

    @abc.abstractmethod
    def __call__(self, X: ArrayLike) -> Float[Array, " N"] | Float[Array, "N P"]:
        """Mean at each row of `X`.

        Args:
            X: Inputs, `(N, D)`.

        Returns:
            `(N,)` for one output, `(N, P)` for `P` outputs.
        """


class Zero(Mean):
    """The mean 0, `(N,)`."""

    def __call__(self, X):
        X = as_inputs("X", X)
        return jnp.zeros(X.shape[0], X.dtype)


class Constant(Mean):
    """The same mean everywhere.

    Args:
        value: The mean: a scalar, or `(P,)` for `P` outputs.
    """

    value: Float[Array, "..."] = real()

    def __check_init__(self):
        check_rank("value", self.value, 0, 1)

    def __call__(self, X):
        X = as_inputs("X", X)
        dtype = jnp.result_type(self.value, X)
        shape = (X.shape[0], *self.value.shape)
        return jnp.broadcast_to(self.value.astype(dtype), shape)


class Linear(Mean):
    r"""Linear mean, :math:`X W + b`.

    Args:
        weights: :math:`W`, `(D,)` for one output or `(D, P)`.
        bias: :math:`b`, a scalar or `(P,)`.
    """

    weights: Float[Array, "..."] = real()
    bias: Float[Array, "..."] = real(0.0)

    def __check_init__(self):
        check_rank("weights", self.weights, 1, 2)
        check_rank("bias", self.bias, 0, 1)
        if self.bias.ndim == 1 and self.bias.shape != self.weights.shape[1:]:
            raise ValueError(
                "`bias` must be a scalar or hold one entry for each column of "
                f"`weights`; got shapes {self.bias.shape} and {self.weights.shape}."
            )

    def __call__(self, X):
        product = _project("weights", self.weights, X)  # (N,) or (N, P)
        return product + jnp.broadcast_to(self.bias, product.shape)


class Identity(Mean):
    """The inputs themselves, `(N, D)`: one output for each column of `X`."""

    def __call__(self, X):
        return as_inputs("X", X)


class Projection(Mean):
    r"""Fixed linear projection, :math:`X W`, the skip connection of a deep GP.

    Layers with mean 0 make a deep GP's functions degenerate as layers are added;
    letting the inputs through prevents it. Where a layer changes the number of columns,
    the inputs pass through a projection onto their principal components. It is no
    parameter: if it were trained, the layer's GP and its mean would explain the same
    thing. So gradients do not flow into `matrix`.

    Args:
        matrix: :math:`W`, `(D, P)`.

    References:
        Salimbeni & Deisenroth (2017), section 3; Duvenaud et al. (2014).
    """

    matrix: Float[Array, "..."] = real()

    def __check_init__(self):
        check_rank("matrix", self.matrix, 2)

    def __call__(self, X):
        return _project("matrix", jax.lax.stop_gradient(self.matrix), X)


class Convolution(Mean):
    r"""Images through a small convolution, the skip connection of image layers.

    Rows are images `(C, H, W)` in one vector, and so are the outputs, at each
    `stride`-th pixel: `(C', ceil(H / stride), ceil(W / stride))`. Beyond the border
    there are zeros. Its weights are meant to be learnt
    (`gpx.models.priors.convolution`).

    Args:
        image_shape: `(C, H, W)`.
        weights: `(C', C, 3, 3)`, or another odd size.
        stride: Pixels from one output to the next.

    References:
        Thesis C.4.2 ("convolutional skip-layer connection").
    """

    image_shape: tuple[int, int, int] = eqx.field(static=True)
    weights: Float[Array, "..."] = real()
    stride: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        check_rank("weights", self.weights, 4)
        if self.weights.shape[1] != self.image_shape[0]:
            raise ValueError(
                "`weights` must have one entry along its second axis for each channel "
                f"of the images; got shape {self.weights.shape} for images "
                f"{self.image_shape}."
            )
        if any(size % 2 == 0 for size in self.weights.shape[2:]):
            raise ValueError(
                "`weights` must have windows of odd height and width; got shape "
                f"{self.weights.shape}."
            )

    def __call__(self, X):
        X = as_inputs("X", X)
        if X.shape[1] != math.prod(self.image_shape):
            raise ValueError(
                f"`X` must have the {math.prod(self.image_shape)} columns of images "
                f"{self.image_shape}; got shape {X.shape}."
            )
        images = X.reshape(-1, *self.image_shape)
        around = [(size // 2, size // 2) for size in self.weights.shape[2:]]
        out = jax.lax.conv_general_dilated(
            images, self.weights.astype(X.dtype), (self.stride, self.stride), around
        )  # (N, C', H', W')
        return out.reshape(X.shape[0], -1)


def skip(X: ArrayLike, width: int) -> Mean:
    """How inputs pass by a layer of `width` outputs.

    The inputs themselves if the layer has as many outputs as inputs; their projections
    on the leading right singular vectors of `X`, which is not centred, if it has fewer;
    inputs and zeros if it has more.

    Args:
        X: Inputs of the layer, `(N, D)`, to find the components of.
        width: Number of outputs of the layer.

    References:
        Salimbeni & Deisenroth (2017), section 3.
    """
    X = np.asarray(as_inputs("X", X))
    if width == X.shape[1]:
        return Identity()
    if width > X.shape[1]:
        return Projection(jnp.eye(X.shape[1], width))
    directions = np.linalg.svd(X, full_matrices=False)[2][:width]  # (width, D)
    return Projection(jnp.asarray(directions.T))


def _project(name, weights, X):
    X = as_inputs("X", X)
    if X.shape[1] != weights.shape[0]:
        raise ValueError(
            f"`{name}` must have one row for each column of `X`; got shapes "
            f"{weights.shape} and {X.shape}."
        )
    return X @ weights
