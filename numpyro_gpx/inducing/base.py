"""What a GP may be summarised by."""

from __future__ import annotations

import abc
from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.kernels import Kernel
from numpyro_gpx.means import Mean

__all__ = ["Inducing"]


class Inducing(eqx.Module):
    """Inducing variables `u`, M numbers that a GP is summarised by.

    A new kind says its `size` and registers `Kuf` with `Kuu` or a `root` of its own.
    """

    # Whether the model is then the full one, an approximation, or a basis expansion.
    target: ClassVar[Literal["exact", "sparse", "basis"]] = "sparse"

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of inducing variables M."""

    def mean(self, mean: Mean) -> Float[Array, " M *P"]:
        """Prior mean of `u`, `(M,)` or `(M, P)`; 0 unless they are values of `f`."""
        return jnp.zeros(self.size)

    def coordinates(self) -> Float[Array, "M C"] | None:
        """Where they are, for networks that want to know; `None` if nowhere."""
        return None

    def prior(self, kernel: Kernel) -> Kernel:
        """The kernel of the process that they stand for: the kernel itself."""
        return kernel
