r"""What a bijection is, and how bijections follow each other.

With :math:`y = g(x)` and :math:`x \sim \pi`, the density of `y` is

.. math:: \log q(y) = \log \pi(x) - \log \left|\det \partial g / \partial x\right|

(thesis eq. 5.5, 5.8). `forward` is all that training needs; `inverse` gives the density
of values that were not drawn here.
"""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["Affine", "Beside", "Bijection", "Chain", "Stack"]

Vector = Float[Array, " K"]
Scalar = Float[Array, ""]


class Bijection(eqx.Module):
    """An invertible map of vectors."""

    @abc.abstractmethod
    def forward(self, x: Vector) -> tuple[Vector, Scalar]:
        """The image `y` of `x`, and `log |det dy/dx|`."""

    @abc.abstractmethod
    def inverse(self, y: Vector) -> tuple[Vector, Scalar]:
        """The `x` behind `y`, and `log |det dx/dy|`."""


class Affine(Bijection):
    r"""Shift and scale of each entry, :math:`y = b + e^s x`.

    Args:
        loc: `b`, `(K,)`.
        log_scale: `s`, `(K,)`.
    """

    loc: Vector
    log_scale: Vector

    def forward(self, x):
        return self.loc + jnp.exp(self.log_scale) * x, jnp.sum(self.log_scale)

    def inverse(self, y):
        x = (y - self.loc) * jnp.exp(-self.log_scale)
        return x, -jnp.sum(self.log_scale)


class Chain(Bijection):
    """Bijections one after the other, the first one first.

    Args:
        steps: The bijections.
    """

    steps: tuple[Bijection, ...]

    def forward(self, x):
        log_det = jnp.zeros((), x.dtype)
        for step in self.steps:
            x, more = step.forward(x)
            log_det = log_det + more
        return x, log_det

    def inverse(self, y):
        log_det = jnp.zeros((), y.dtype)
        for step in reversed(self.steps):
            y, more = step.inverse(y)
            log_det = log_det + more
        return y, log_det


class Stack(Bijection):
    """Bijections of one kind, one after the other; compiled once for all of them.

    Args:
        blocks: A bijection whose arrays have a leading axis over blocks.
    """

    blocks: Bijection

    def forward(self, x):
        def step(carry, block):
            x, log_det = carry
            x, more = block.forward(x)
            return (x, log_det + more), None

        return jax.lax.scan(step, (x, jnp.zeros((), x.dtype)), self.blocks)[0]

    def inverse(self, y):
        def step(carry, block):
            y, log_det = carry
            y, more = block.inverse(y)
            return (y, log_det + more), None

        start = (y, jnp.zeros((), y.dtype))
        return jax.lax.scan(step, start, self.blocks, reverse=True)[0]


class Beside(Bijection):
    """Bijections of consecutive parts of a vector, each by itself.

    Args:
        parts: The bijections.
        sizes: Sizes of their vectors.
    """

    parts: tuple[Bijection, ...]
    sizes: tuple[int, ...] = eqx.field(static=True)

    def forward(self, x):
        return self._each(x, lambda part, x: part.forward(x))

    def inverse(self, y):
        return self._each(y, lambda part, y: part.inverse(y))

    def _each(self, x, fn):
        found, log_det, start = [], jnp.zeros((), x.dtype), 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            y, more = fn(part, x[start : start + size])
            found.append(y)
            log_det, start = log_det + more, start + size
        return jnp.concatenate(found), log_det
