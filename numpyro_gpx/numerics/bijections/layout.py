"""How the layers of a deep GP lie in one vector."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

__all__ = ["Layout"]


class Layout(NamedTuple):
    r"""Layers of `P` outputs at `M` points each, one after the other in a vector.

    For what works across layers they are stacked to channels by points `(C, M_max)`
    with :math:`C = \sum_\ell P_\ell` (thesis eq. 5.9): layers with more points first,
    missing points as zeros, so that the channels present at a point are always the
    first ones.

    Attributes:
        shapes: `(P, M)` of each layer; a plain vector of size S is `(S, 1)`.
    """

    shapes: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Length K of the vector."""
        return sum(P * M for P, M in self.shapes)

    @property
    def num_channels(self) -> int:
        """Number of channels C."""
        return sum(P for P, _ in self.shapes)

    @property
    def counts(self) -> np.ndarray:
        """Number of points of each channel `(C,)`, in the order of the stack."""
        return np.array(
            [M for i in self._order for M in [self.shapes[i][1]] * self.shapes[i][0]]
        )

    @property
    def present(self) -> Bool[np.ndarray, "C M"]:
        """Which entries of the stack stand for entries of the vector."""
        return np.arange(max(M for _, M in self.shapes)) < self.counts[:, None]

    def split(self, x: Float[Array, " K"]) -> list[Array]:
        """The layers `(P, M)` of a vector."""
        ends = np.cumsum([P * M for P, M in self.shapes])[:-1]
        parts = jnp.split(x, ends)
        return [
            part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def join(self, layers: Sequence[Array]) -> Float[Array, " K"]:
        """The vector of these layers."""
        return jnp.concatenate([layer.reshape(-1) for layer in layers])

    def stack(self, x: Float[Array, " K"]) -> Float[Array, "C M"]:
        """Channels by points."""
        longest = max(M for _, M in self.shapes)
        layers = self.split(x)
        padded = [
            jnp.pad(layers[i], ((0, 0), (0, longest - layers[i].shape[1])))
            for i in self._order
        ]
        return jnp.concatenate(padded)

    def unstack(self, grid: Float[Array, "C M"]) -> Float[Array, " K"]:
        """The vector of channels by points; what is not present is left out."""
        layers: dict[int, Array] = {}
        start = 0
        for i in self._order:
            P, M = self.shapes[i]
            layers[i] = grid[start : start + P, :M]
            start += P
        return self.join([layers[i] for i in range(len(self.shapes))])

    @property
    def _order(self) -> tuple[int, ...]:
        return _longest_first(self.shapes)


@functools.cache
def _longest_first(shapes) -> tuple[int, ...]:
    return tuple(sorted(range(len(shapes)), key=lambda i: -shapes[i][1]))
