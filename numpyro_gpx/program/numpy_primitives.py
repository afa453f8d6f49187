"""JAX's operations in NumPy, as far as small programs need them.

Each must mean what XLA means by it where the two libraries differ (whole numbers are
divided towards zero, `max` hands on NaN, indices are clipped), or raise `Unknown`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
from scipy.special import erfinv

__all__ = ["ELEMENTWISE", "RANDOM", "SHAPED", "Unknown", "packed", "unpacked"]


class Unknown(Exception):
    """A program is not one for NumPy."""


def _divided(x, y):
    if np.asarray(x).dtype.kind != "f":
        raise Unknown  # towards zero in XLA, down in NumPy
    return np.divide(x, y)


def _shifted(x, y):
    if np.asarray(x).dtype.kind != "u":
        raise Unknown  # NumPy keeps the sign
    return np.right_shift(x, y)


def _selected(which, *cases):
    which = np.asarray(which)
    if which.dtype != bool or len(cases) != 2:
        raise Unknown
    return np.where(which, cases[1], cases[0])


def _logistic(x):
    return 1.0 / (1.0 + np.exp(-x))


def _same(x):
    return x


ELEMENTWISE: dict[str, Any] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and,
    "atan2": np.arctan2, "ceil": np.ceil, "clamp": lambda a, x, b: np.clip(x, a, b),
    "copy": _same, "copy_p": _same, "cos": np.cos, "device_put": _same,
    "div": _divided, "eq": np.equal, "erf_inv": erfinv, "exp": np.exp,
    "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal,
    "gt": np.greater, "is_finite": np.isfinite, "le": np.less_equal, "log": np.log,
    "log1p": np.log1p, "logistic": _logistic, "lt": np.less,
    "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal,
    "neg": np.negative, "not": np.invert,
    "or": np.bitwise_or, "pow": np.power, "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "select_n": _selected, "shift_right_logical": _shifted, "sign": np.sign,
    "sin": np.sin, "sqrt": np.sqrt, "square": np.square, "stop_gradient": _same,
    "sub": np.subtract, "tanh": np.tanh, "xor": np.bitwise_xor,
}  # fmt: skip


def _broadcast(eqn, x, *dynamic):
    """Its axes at `broadcast_dimensions` of the new shape."""
    shape = eqn.params["shape"]
    if dynamic:
        raise Unknown
    wide = [1] * len(shape)
    for axis, place in enumerate(eqn.params["broadcast_dimensions"]):
        wide[place] = np.shape(x)[axis]
    return np.broadcast_to(np.reshape(x, wide), shape)


def _reshaped(eqn, x, *dynamic):
    if dynamic or eqn.params["dimensions"] is not None:
        raise Unknown
    return np.reshape(x, eqn.params["new_sizes"])


def _iota(eqn, *dynamic):
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    if dynamic:
        raise Unknown
    along = [-1 if i == axis else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(along), shape)


def _sliced(eqn, x):
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    return x[tuple(map(slice, start, limit, strides))]


def _dynamic_slice(eqn, x, *starts):
    """`slice_sizes` entries from `starts`, moved back where they would not fit."""
    sizes = eqn.params["slice_sizes"]
    first = [
        int(np.clip(s, 0, n - k))
        for s, n, k in zip(starts, np.shape(x), sizes, strict=True)
    ]
    return x[tuple(slice(s, s + k) for s, k in zip(first, sizes, strict=True))]


def _gathered(eqn, x, indices):
    """Whole slices of `x` at indices of some axes, as indexing makes them.

    The last axis of `indices` has a column for each axis of `start_index_map`.
    """
    how, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    axes = how.start_index_map
    rest = [i for i in range(x.ndim) if i not in axes]
    plain = tuple(sorted(axes)) == tuple(how.collapsed_slice_dims)
    batched = getattr(how, "operand_batching_dims", ())
    whole = all(sizes[i] == (1 if i in axes else n) for i, n in enumerate(x.shape))
    columns = [indices[..., i] for i in range(len(axes))]
    for column, axis in zip(columns, axes, strict=True):
        outside = (column < 0) | (column >= x.shape[axis])
        plain &= not outside.any()  # XLA would clip or fill
    if not plain or batched or not whole:
        raise Unknown
    found = np.transpose(x, [*axes, *rest])[tuple(columns)]
    behind = range(indices.ndim - 1, found.ndim)
    return np.moveaxis(found, list(behind), how.offset_dims)


def _split(eqn, x):
    ends = np.cumsum(eqn.params["sizes"])[:-1]
    return np.split(x, ends, axis=eqn.params["axis"])


def _bitcast(eqn, x):
    dtype = np.dtype(eqn.params["new_dtype"])
    if x.dtype.itemsize != dtype.itemsize:
        raise Unknown
    return np.ascontiguousarray(x).view(dtype).reshape(x.shape)


def _converted(eqn, x):
    """Fractions are cut off; those beyond the whole numbers are left to XLA."""
    dtype = np.dtype(eqn.params["new_dtype"])
    if np.asarray(x).dtype.kind == "f" and dtype.kind in "iu":
        info = np.iinfo(dtype)
        if not np.all((x > float(info.min)) & (x < float(info.max))):
            raise Unknown
    return np.asarray(x).astype(dtype)


def _reduced(fn):
    return lambda eqn, x: fn(x, axis=tuple(eqn.params["axes"]))


def _cumulated(eqn, x):
    axis = eqn.params["axis"]
    if eqn.params["reverse"]:
        return np.flip(np.cumsum(np.flip(x, axis), axis), axis)
    return np.cumsum(x, axis)


SHAPED: dict[str, Any] = {
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, *x: np.concatenate(x, axis=eqn.params["dimension"]),
    "convert_element_type": _converted,
    "cumsum": _cumulated,
    "dynamic_slice": _dynamic_slice,
    "gather": _gathered,
    "integer_pow": lambda eqn, x: np.power(x, eqn.params["y"]),
    "iota": _iota,
    "reduce_and": _reduced(np.all),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_or": _reduced(np.any),
    "reduce_prod": _reduced(np.prod),
    "reduce_sum": _reduced(np.sum),
    "reshape": _reshaped,
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "slice": _sliced,
    "split": _split,
    "stack": lambda eqn, *x: np.stack(x, axis=eqn.params["axis"]),
    "squeeze": lambda eqn, x: np.squeeze(x, tuple(eqn.params["dimensions"])),
    "transpose": lambda eqn, x: np.transpose(x, eqn.params["permutation"]),
}


def packed(data):
    """Keys `(..., 2)` of 32 bits as numbers `(...)` of 64 bits."""
    high, low = data[..., 0].astype(np.uint64), data[..., 1].astype(np.uint64)
    return high << np.uint64(32) | low


def unpacked(keys):
    """The inverse of `packed`."""
    halves = _halves(np.asarray(keys, np.uint64))
    return np.stack(halves, axis=-1)


def _halves(x):
    return (x >> np.uint64(32)).astype(np.uint32), x.astype(np.uint32)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(keys, counts):
    """The threefry-2x32 cipher of 64-bit counts, with 20 rounds.

    Keys and counts `(...)`, broadcast.

    References:
        Salmon, Moraes, Dror & Shaw (2011), Parallel random numbers: as easy as 1, 2, 3.
    """
    k0, k1 = _halves(keys)
    schedule = k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA)
    x0, x1 = _halves(counts)
    x0, x1 = x0 + k0, x1 + k1
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x1 << np.uint32(turn) | x1 >> np.uint32(32 - turn)
            x1 = x0 ^ x1
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def _counted(keys, shape):
    """The cipher of the counts 0, 1, ... in this shape, for every key."""
    if not jax.config.values["jax_threefry_partitionable"]:
        raise Unknown  # JAX's older way to count
    counts = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    keys = np.asarray(keys, np.uint64)
    return _threefry(keys.reshape(keys.shape + (1,) * len(shape)), counts)


def _split_keys(params, keys):
    x0, x1 = _counted(keys, params["shape"])
    return packed(np.stack([x0, x1], axis=-1))


def _folded(params, keys, data):
    data = np.asarray(data).astype(np.uint32).astype(np.uint64)
    x0, x1 = _threefry(np.asarray(keys, np.uint64), data)
    return packed(np.stack([x0, x1], axis=-1))


def _bits(params, keys):
    x0, x1 = _counted(keys, params["shape"])
    width = params["bit_width"]
    if width == 64:
        return packed(np.stack([x0, x1], axis=-1))
    return (x0 ^ x1).astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[width])


def _of_threefry(fn):
    """`fn` of an equation that names its generator, if it is threefry."""

    @functools.wraps(fn)
    def checked(params, *values):
        if getattr(params.get("impl"), "name", "threefry2x32") != "threefry2x32":
            raise Unknown
        return fn(params, *values)

    return checked


def _seeded(params, seed):
    """A key is its seed: of 64 bits, or of 32 behind zeros."""
    unsigned = {4: np.uint32, 8: np.uint64}[seed.dtype.itemsize]
    return seed.astype(unsigned).astype(np.uint64)


RANDOM: dict[str, Any] = {
    "random_bits": _bits,
    "random_fold_in": _folded,
    "random_seed": _of_threefry(_seeded),
    "random_split": _split_keys,
    "random_unwrap": lambda params, keys: unpacked(keys),
    "random_wrap": _of_threefry(lambda params, data: packed(data)),
}
