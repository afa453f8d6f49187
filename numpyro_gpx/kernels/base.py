"""What every kernel is, and the checks that all of them share."""

__all__ = [
    "Kernel",
    "as_callable",
    "check_rank",
    "fit_columns",
]

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, ArrayLike, Float

from numpyro_gpx.checked_fields import as_float, as_inputs


class Kernel(eqx.Module):
    """A covariance function. Subclasses say how one pair of inputs covaries.

    Kernels add and multiply, with each other and with scalars: `2.0 * k1 + k2.on(0)`.

    Only `evaluate` must be written. A kernel with a faster matrix form, or one that
    needs to know whether `X2` was given, also overrides `matrix` and `diag`.
    """

    # NumPy arrays leave `array * kernel` to `__rmul__`, where they would otherwise make
    # an array of kernels, one for each entry.
    __array_ufunc__ = None

    @abc.abstractmethod
    def evaluate(
        self, x: Float[Array, " D"], x2: Float[Array, " D"]
    ) -> Float[Array, ""]:
        """Covariance between `f(x)` and `f(x2)`."""

    def __call__(
        self, X: ArrayLike, X2: ArrayLike | None = None
    ) -> Float[Array, "N N2"]:
        """Covariance matrix between rows.

        Args:
            X: Inputs, `(N, D)`.
            X2: Other inputs, `(N2, D)`; `None` stands for `X` itself.

        Returns:
            The matrix `(N, N2)`.
        """
        X = as_inputs("X", X)
        if X2 is not None:
            X2 = as_inputs("X2", X2)
            if X.shape[1] != X2.shape[1]:
                raise ValueError(
                    "`X` and `X2` must have the same number of columns; got shapes "
                    f"{X.shape} and {X2.shape}."
                )
        return self.matrix(X, X2)

    def diag(self, X: ArrayLike) -> Float[Array, " N"]:
        """Diagonal of `self(X)`, `(N,)`, without forming the matrix."""
        return jax.vmap(lambda x: self.evaluate(x, x))(as_inputs("X", X))

    def matrix(
        self, X: Float[Array, "N D"], X2: Float[Array, "N2 D"] | None = None
    ) -> Float[Array, "N N2"]:
        """What `__call__` returns, for inputs that it has checked."""

        def row(x):
            return jax.vmap(lambda x2: self.evaluate(x, x2))(X if X2 is None else X2)

        return jax.vmap(row)(X)  # (N, N2)

    @property
    def parts(self) -> tuple["Kernel", ...]:
        """The kernels that this one is a sum of; `(self,)` if it is no sum."""
        return (self,)

    def on(self, *dims: int) -> "Kernel":
        """This kernel on the columns `dims` of `X` only."""
        from numpyro_gpx.kernels.combine import ActiveDims

        return ActiveDims(self, dims)

    # The operators build kernels that are themselves subclasses of `Kernel`, so their
    # files cannot be imported before this class exists.

    def __add__(self, other: "Kernel | ArrayLike") -> "Kernel":
        from numpyro_gpx.kernels.combine import Sum
        from numpyro_gpx.kernels.constant import Constant

        if isinstance(other, int) and other == 0:  # where `sum(kernels)` starts
            return self
        if not isinstance(other, Kernel):
            other = Constant(as_float(other))
        return Sum((*self.parts, *other.parts))

    def __mul__(self, other: "Kernel | ArrayLike") -> "Kernel":
        from numpyro_gpx.kernels.combine import Product, Scaled

        if isinstance(other, Kernel):
            return Product((self, other))
        return Scaled(self, as_float(other))

    def __radd__(self, other: ArrayLike) -> "Kernel":
        return self + other

    def __rmul__(self, other: ArrayLike) -> "Kernel":
        return self * other


def as_callable(fn: Any) -> Callable:
    """`fn` as a pytree: an object that JAX knows as such stays what it is.

    A plain function is no pytree, and as a leaf it would be refused by `jax.jit`; as a
    `Partial` it belongs to the structure.
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be callable; got {type(fn).__name__}.")
    return jax.tree_util.Partial(fn) if jax.tree_util.all_leaves([fn]) else fn


def check_rank(name: str, value: Array, *ranks: int) -> None:
    """Raise unless `value` has one of these numbers of dimensions."""
    if value.ndim not in ranks:
        shapes = {0: "a scalar", 1: "a vector", 2: "a matrix"}
        expected = " or ".join(shapes[rank] for rank in ranks)
        raise ValueError(
            f"`{name}` must be {expected}; got shape {value.shape}. "
            "For a batch of objects construct them under `jax.vmap`."
        )


def fit_columns(name: str, value: Array, x: Float[Array, " D"]) -> Array:
    """`value`, once it is known to be a scalar or to hold one entry for each column."""
    if value.ndim > 0 and value.shape[-1] != x.shape[0]:
        raise ValueError(
            f"`{name}` has shape {value.shape}, but the inputs have {x.shape[0]} "
            f"columns. Pass one entry per column, or select columns with `.on(...)`."
        )
    return value
