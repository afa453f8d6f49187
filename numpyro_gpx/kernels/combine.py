"""Kernels made of kernels.

All of them hand `X2=None` on as it came, so that `White` inside a sum still knows
`k(X)` from `k(X, X2)`.
"""

__all__ = ["ActiveDims", "Product", "Scaled", "Sum"]

import functools
import operator

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import as_inputs, nonnegative
from numpyro_gpx.kernels.base import Kernel, check_rank


class Sum(Kernel):
    r"""Sum of kernels, :math:`\sum_i k_i(x, x')`.

    Args:
        kernels: The summands, at least one.
    """

    kernels: tuple[Kernel, ...] = eqx.field(converter=tuple)

    def __check_init__(self):
        _check_kernels(self.kernels)

    def evaluate(self, x, x2):
        return _add(k.evaluate(x, x2) for k in self.kernels)

    def matrix(self, X, X2=None):
        return _add(k(X, X2) for k in self.kernels)

    def diag(self, X):
        return _add(k.diag(X) for k in self.kernels)

    @property
    def parts(self):
        return tuple(part for k in self.kernels for part in k.parts)


class Product(Kernel):
    r"""Product of kernels, :math:`\prod_i k_i(x, x')`.

    Args:
        kernels: The factors, at least one.
    """

    kernels: tuple[Kernel, ...] = eqx.field(converter=tuple)

    def __check_init__(self):
        _check_kernels(self.kernels)

    def evaluate(self, x, x2):
        return _multiply(k.evaluate(x, x2) for k in self.kernels)

    def matrix(self, X, X2=None):
        return _multiply(k(X, X2) for k in self.kernels)

    def diag(self, X):
        return _multiply(k.diag(X) for k in self.kernels)


class Scaled(Kernel):
    r"""A kernel times a variance, :math:`\sigma^2 k(x, x')`.

    Args:
        kernel: The kernel to scale.
        variance: The factor, a scalar.
    """

    kernel: Kernel
    variance: Float[Array, "..."] = nonnegative("variance")

    def __check_init__(self):
        check_rank("variance", self.variance, 0)

    def evaluate(self, x, x2):
        return self.variance * self.kernel.evaluate(x, x2)

    def matrix(self, X, X2=None):
        return self.variance * self.kernel(X, X2)

    def diag(self, X):
        return self.variance * self.kernel.diag(X)


class ActiveDims(Kernel):
    r"""A kernel on some columns of the inputs, :math:`k(x_S, x'_S)`.

    Args:
        kernel: A kernel on `len(dims)` columns.
        dims: The columns :math:`S` that it sees, counted from 0.
    """

    kernel: Kernel
    dims: tuple[int, ...] = eqx.field(static=True, converter=tuple)

    def __check_init__(self):
        if len(self.dims) == 0 or not all(isinstance(d, int) for d in self.dims):
            raise ValueError(
                f"`dims` must name one column or more by integers; got {self.dims}."
            )

    def select(self, x: Float[Array, "... D"]) -> Float[Array, "... S"]:
        """The active columns of one row, or of many."""
        # Checked by hand: JAX clamps an index that is out of range.
        if not all(0 <= d < x.shape[-1] for d in self.dims):
            raise ValueError(
                f"`dims` must lie between 0 and {x.shape[-1] - 1} for inputs with "
                f"{x.shape[-1]} columns; got {self.dims}."
            )
        return x[..., np.array(self.dims)]

    def evaluate(self, x, x2):
        return self.kernel.evaluate(self.select(x), self.select(x2))

    def matrix(self, X, X2=None):
        return self.kernel(self.select(X), None if X2 is None else self.select(X2))

    def diag(self, X):
        return self.kernel.diag(self.select(as_inputs("X", X)))


_add = functools.partial(functools.reduce, operator.add)
_multiply = functools.partial(functools.reduce, operator.mul)


def _check_kernels(kernels: tuple) -> None:
    if len(kernels) == 0:
        raise ValueError("`kernels` must hold at least one kernel; got none.")
    for kernel in kernels:
        if not isinstance(kernel, Kernel):
            raise TypeError(
                f"`kernels` must hold kernels only; got {type(kernel).__name__}. "
                "Wrap a function of two rows as `Custom(fn)`."
            )
