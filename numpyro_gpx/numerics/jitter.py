"""One jitter, one place, one knob."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax.numpy as jnp

__all__ = ["current_jitter", "explicit_jitter", "jitter"]


@contextlib.contextmanager
def jitter(relative: float | None) -> Iterator[None]:
    """Set the jitter for everything traced inside the `with` block.

    Args:
        relative: Added to the diagonal in units of its mean; `None` for the default
            of the dtype (1e-8 in float64, 1e-5 in float32).
    """
    if relative is not None and not relative >= 0.0:
        raise ValueError(f"`relative` jitter must be at least 0; got {relative}.")
    token = _JITTER.set(relative)
    try:
        yield
    finally:
        _JITTER.reset(token)


def explicit_jitter() -> float | None:
    """The jitter set by the user, or `None` where the default holds."""
    return _JITTER.get()


def current_jitter(dtype) -> float:
    """The jitter in force for `dtype`, relative to the mean of the diagonal."""
    chosen = _JITTER.get()
    if chosen is not None:
        return chosen
    return 1e-8 if jnp.dtype(dtype) == jnp.float64 else 1e-5


# A context variable, not a global: two threads may fit with different jitters.
_JITTER: contextvars.ContextVar[float | None] = contextvars.ContextVar(
    "jitter", default=None
)
