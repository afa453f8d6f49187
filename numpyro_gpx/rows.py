"""The model at new rows: raw draws handed on rightly, and rows cut into chunks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import zip_longest

import jax
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.infer.data import as_arrays, inputs_first, takes_inputs
from numpyro_gpx.infer.structure import abstract_trace

__all__ = ["new_arguments", "predictive", "row_chunks"]


def predictive(model: Callable, draws: dict, *, params: dict | None = None) -> Callable:
    """Posterior predictive draws from raw draws, done right.

    NumPyro's `Predictive` passes on row-local sites with the length of the training
    data. This passes on global sites only; the others are drawn from their prior.

    Args:
        model: The model.
        draws: Draws by site, `(S, ...)`.
        params: Values of the model's `numpyro.param`s.

    Returns:
        A callable `(key, *args, **kwargs)`: a dictionary of draws `(S, N, ...)` of the
        sites of the model that `draws` does not hold.
    """
    from numpyro.infer import Predictive

    def sample(key, *args, **kwargs):
        trace = abstract_trace(model, args, kwargs)
        sites = {n: site for n, site in trace.items() if site["type"] == "sample"}
        row_plates = {
            frame.name
            for name, site in sites.items()
            if name not in draws
            for frame in site["cond_indep_stack"]
        }
        kept = {
            name: x
            for name, x in draws.items()
            if name in sites
            and not any(f.name in row_plates for f in sites[name]["cond_indep_stack"])
        }
        return Predictive(model, kept, params=params)(key, *args, **kwargs)

    return sample


def new_arguments(model: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments for a new call of the model, as arrays; the inputs come first.

    A model without inputs takes the number of rows by name.
    """
    args, kwargs = as_arrays(*inputs_first(model, args, kwargs))
    if not takes_inputs(model):
        _check_takes_rows(model)
        if args or kwargs.get("num_rows") is None:
            raise ValueError(
                "The model has no inputs: pass the number of new rows alone, as in "
                "`fit.predict(num_rows=10)`; for the latent inputs of new data use "
                "`gpx.project(fit, y)`."
            )
        checks.at_least("num_rows", kwargs["num_rows"], 1)
        return args, kwargs
    if not args or np.ndim(args[0]) == 0:
        raise ValueError(
            "Pass the model's arguments, inputs first, as in `fit.predict(X_test)`."
        )
    if np.shape(args[0])[0] == 0:
        raise ValueError(
            f"The inputs must have at least one row; got shape {np.shape(args[0])}."
        )
    checks.finite("X", args[0])
    return args, kwargs


def _check_takes_rows(model):
    accepted = inspect.signature(model).parameters
    if "num_rows" not in accepted:
        raise ValueError(
            "The model has no inputs, so that it must be told how many rows to draw: "
            "give it a keyword argument, `def model(y=None, *, num_rows=None)`."
        )


def row_chunks(
    args: tuple,
    kwargs: dict,
    chunk_rows: int | None,
    train: tuple[tuple, dict],
    given: dict,
) -> Iterator:
    """Cut arguments along rows; yield `((args, kwargs, given), number of rows)`.

    Inputs are padded to a multiple of `chunk_rows` (small ones to a power of two), so
    that calls with other numbers of rows reuse the compiled code.

    Args:
        args: New arguments, inputs first.
        kwargs: New keyword arguments.
        chunk_rows: Rows of a chunk; `None` for all of them in one piece.
        train: Training arguments: what did not follow their rows does not follow these.
        given: Values of the rows' own sites.
    """
    num_rows = np.shape(args[0])[0] if args else kwargs["num_rows"]
    if chunk_rows is None:
        yield (args, kwargs, given), num_rows
        return
    num_train = np.shape(train[0][0])[0] if train[0] else None

    def follows(x, old):
        """Which leaves of an argument have one entry a row."""
        leaves, tree = jax.tree.flatten(x)
        same = tree == jax.tree.structure(old)  # type: ignore[operator]
        pairs = zip(leaves, jax.tree.leaves(old) if same else leaves, strict=True)
        flags = [
            np.ndim(leaf) > 0
            and np.shape(leaf)[0] == num_rows
            and (not same or np.shape(before)[:1] == (num_train,))
            for leaf, before in pairs
        ]
        return jax.tree.unflatten(tree, flags)

    positions = zip_longest(args, train[0][: len(args)])
    cuts = (
        tuple(follows(x, old) for x, old in positions),
        {name: follows(x, train[1].get(name)) for name, x in kwargs.items()},
    )
    size = min(chunk_rows, 1 << (num_rows - 1).bit_length())
    for start in range(0, num_rows, size):
        index = np.minimum(np.arange(start, start + size), num_rows - 1)
        take = functools.partial(_take, index=index)
        rows, options = jax.tree.map(take, (args, kwargs), cuts)
        if not args:
            options = {**options, "num_rows": size}
        values = {name: x[index] for name, x in given.items()}
        yield (rows, options, values), min(size, num_rows - start)


def _take(x, cut, index):
    return x[index] if cut else x
