"""Columns of latents: which are meant, and one for each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["columns_of", "leading", "taken", "taken_roots"]


def columns_of(index, shape) -> tuple:
    """The columns that `latent[index]` asks for; rows are never cut here."""
    if not isinstance(index, tuple) or index[:1] != (slice(None),) or len(index) < 2:
        raise IndexError(
            f"A latent is indexed by columns, as in `f(X)[:, 0]`; got {index!r}. For "
            "some rows call the GP there: `f(X[rows])`."
        )
    columns = index[1:]
    if len(shape) != 1 + len(columns):
        raise IndexError(
            f"A latent of shape {shape} has {len(shape) - 1} axes of columns; got "
            f"{len(columns)} indices."
        )
    return tuple(_numbers(c, n, shape) for c, n in zip(columns, shape[1:], strict=True))


def _numbers(place, size: int, shape):
    """A column's number, or an array of such, all of which are there."""
    if isinstance(place, slice):
        return np.arange(size)[place]
    if isinstance(place, jax.core.Tracer):
        raise IndexError(
            "Columns of a latent must be known numbers, as in `f(X)[:, 0]`; for one "
            "column a row use `f(X).take(group)`."
        )
    found = np.asarray(place)
    if found.dtype == bool and found.shape == (size,):
        found = np.flatnonzero(found)
    if not np.issubdtype(found.dtype, np.integer):
        raise IndexError(f"Columns of a latent must be whole numbers; got {place!r}.")
    if np.any((found < -size) | (found >= size)):
        raise IndexError(f"Column {place} of a latent of shape {shape}.")
    return int(found) if found.ndim == 0 else found


def leading(x, ndim: int):
    """`x` with axes in front, to go with arrays of `ndim` axes."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def taken_roots(x, group):
    each = jax.vmap(lambda root: taken(root, group), in_axes=-1, out_axes=-1)
    return each(x)


def taken(x, group):
    """In each row `n` of `(N, P)` the column `group[n]`."""
    group = jnp.asarray(group)
    if x.ndim != 2 or group.shape != x.shape[:1]:
        raise ValueError(
            "`take` needs a latent (N, P) and a column for each row, (N,); got "
            f"{x.shape} and {group.shape}."
        )
    if not jnp.issubdtype(group.dtype, jnp.integer):
        raise ValueError(
            f"`take` needs whole numbers, the columns 0 to {x.shape[1] - 1}; got "
            f"{group.dtype}."
        )
    # NaN where there is no such column: from the end is not counted.
    place = jnp.where(group < 0, x.shape[1], group)
    return jnp.take_along_axis(x, place[:, None], axis=1)[:, 0]
