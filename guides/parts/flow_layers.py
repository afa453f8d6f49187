"""The layers of a flow's vector, and the Gaussian part of each."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["FlowLayer", "GaussianPart"]


class FlowLayer(NamedTuple):
    """A part of the vector.

    Attributes:
        name: A site, or `"theta"` for all hyperparameters.
        shape: Channels and points.
        natural: Shape of its location as a parameter.
    """

    name: str
    shape: tuple[int, int]
    natural: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


class GaussianPart(NamedTuple):
    """The Gaussian part of a layer; without `scale_tril`, the scale is all."""

    loc: Any
    log_scale: Any
    scale_tril: Any
