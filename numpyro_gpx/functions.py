"""Function draws: inside this context every GP call draws its function.

Marginals of a row are not a function. With `drawing_functions(key)`, `f(X)` is one
joint draw over the rows of `X`, so that whatever the model computes from it (sums,
products, further layers) is one coherent function.
"""

from __future__ import annotations

import contextlib
import contextvars
import zlib
from collections.abc import Iterator

import jax.random as jr

__all__ = ["current_function_key", "drawing_functions"]

_KEY: contextvars.ContextVar = contextvars.ContextVar("function_key", default=None)


@contextlib.contextmanager
def drawing_functions(key) -> Iterator[None]:
    """Let GPs called inside the `with` block draw functions from `key`."""
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)


def current_function_key(name: str):
    """A key for GP site `name`, or `None` outside the context."""
    key = _KEY.get()
    # A checksum, not `hash`: Python salts the hash of strings.
    return None if key is None else jr.fold_in(key, zlib.crc32(name.encode()))
