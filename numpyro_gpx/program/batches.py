"""Minibatches: which rows of a plate, and whether a model can be called on some."""

from __future__ import annotations

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from numpyro_gpx.program.call import Call, Trace, signature
from numpyro_gpx.program.structure import Structure

__all__ = ["check_batch_size", "check_batched", "draw_batch", "refuse_batches"]


def draw_batch(key, structure: Structure) -> dict[str, Array]:
    """Fresh indices for every subsampled plate.

    Drawn with replacement: the estimate stays unbiased, and the cost does not grow
    with the number of rows as NumPyro's own subsampling does. Remainders of 32 random
    bits: a row's chance is off by a factor of at most `1 + size / 2**32`, and
    compiling them takes half as long as `jax.random.randint`.
    """
    batch = {}
    for i, (name, plate) in enumerate(structure.plates.items()):
        # Most models have one plate, and need no further key.
        key_plate = key if len(structure.plates) == 1 else jr.fold_in(key, i)
        bits = jr.bits(key_plate, (plate.subsample_size,), jnp.uint32)
        batch[name] = (bits % np.uint32(plate.size)).astype(jnp.int32)
    return batch


def check_batch_size(call: Call, batch_size) -> None:
    """Raise if the model cannot be called on minibatches of so many rows."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise TypeError(
            f"`batch_size` must be a whole number of rows; got {batch_size!r}."
        )
    if batch_size < 1:
        raise ValueError(
            f"`batch_size` must be at least 1; got {batch_size}. Leave it out to use "
            "all rows."
        )
    accepted = signature(call.model).parameters
    if "batch_size" not in accepted and not any(
        p.kind is p.VAR_KEYWORD for p in accepted.values()
    ):
        raise ValueError(
            "`batch_size` was given, but the model does not take it. Write "
            "`def model(X, y=None, *, batch_size=None)` and pass it to the plate as "
            "`subsample_size=batch_size`."
        )
    num_rows = _num_rows(call)
    if num_rows is not None and batch_size > num_rows:
        raise ValueError(
            f"`batch_size` must not exceed the {num_rows} rows of the data; got "
            f"{batch_size}. Leave it out to use all rows."
        )


def refuse_batches(call: Call, function: str, other: str) -> None:
    """Raise if a fit that needs all rows is asked for minibatches.

    Args:
        call: The model with its arguments.
        function: The fit.
        other: One that takes them.
    """
    if call.batch_size is not None:
        raise ValueError(
            f"`{function}` needs all rows at each step; got "
            f"`batch_size={call.batch_size}`. Leave it out, or use `{other}`."
        )


def check_batched(call: Call, trace: Trace, structure: Structure) -> None:
    """Raise if the plates of a call on minibatches, or its sites, take no part."""
    if not structure.plates and call.batch_size != _num_rows(call):
        raise ValueError(
            f"`batch_size={call.batch_size}` was given, but no plate of the model "
            "subsamples. Write `with numpyro.plate('data', X.shape[0], "
            "subsample_size=batch_size) as i:` and use `X[i]`."
        )
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        for frame in site["cond_indep_stack"]:
            rows = site["fn"].batch_shape[frame.dim]
            if frame.name in structure.plates and rows != frame.size:
                raise ValueError(
                    f"Site `{name}` has {rows} rows in a plate that subsamples "
                    f"{frame.size}: write `f(X[i])`, and `obs=y, rows=i`."
                )


def _num_rows(call: Call) -> int | None:
    has_rows = call.args and np.ndim(call.args[0]) > 0
    return len(call.args[0]) if has_rows else None
