"""The data door of `fit_*`: concrete arrays, checked before anything is compiled."""

from __future__ import annotations

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.distributions import ExactRegression, ExpectedLikelihood
from numpyro_gpx.infer.structure import (
    Structure,
    arrays_and_rest,
    inspect_model,
    structure_of,
)
from numpyro_gpx.infer.target import trace_model

__all__ = ["as_arrays", "check_batched", "check_data", "observed_values"]


def as_arrays(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments with NumPy arrays and lists of numbers turned into JAX arrays."""

    def convert(name, x):
        x = np.asarray(x) if isinstance(x, list) else x
        if isinstance(x, np.ndarray | jax.Array):
            if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
                raise ValueError(
                    f"Argument {name} must be numeric; got dtype {x.dtype}."
                )
            return jax.numpy.asarray(x)
        return x

    return (
        tuple(convert(f"number {i}", x) for i, x in enumerate(args)),
        {name: convert(f"`{name}`", x) for name, x in kwargs.items()},
    )


def check_data(model, args: tuple, kwargs: dict) -> Structure:
    """Check every array and every observed site; return the model's structure.

    Args:
        model: The model.
        args: Its arguments, targets included; `batch_size` left out of `kwargs`.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: With the argument or site, what came and what was expected.
    """
    if args and eqx.is_array(args[0]):
        # The first argument is the inputs by convention; they have no mask.
        checks.finite("X", args[0])
    _check_rows(args)
    trace, values = _observed(model, args, kwargs)
    if not values:
        raise ValueError(
            "The model observes nothing. Pass the targets, as in "
            "`fit_svi(model, guide, X, y, ...)`, and hand them to `gpx.observe(obs=y)`."
        )
    for name, (value, mask) in values.items():
        fn = trace[name]["fn"]
        if isinstance(fn, ExpectedLikelihood):
            fn.likelihood.check(value, name=name, mask=mask)
        elif isinstance(fn, ExactRegression):
            checks.finite(name, value)
    return structure_of(trace)


def _check_rows(args):
    """Raise if the first two arguments, inputs and targets, differ in length.

    Inside the model it would go unseen: `y[i]` past the end is the last row in JAX.
    """
    rows = [len(x) for x in args[:2] if eqx.is_array(x) and x.ndim]
    if len(rows) == 2 and rows[0] != rows[1]:
        raise ValueError(
            "The first two arguments of the model, inputs and targets, must have the "
            f"same number of rows; got {rows[0]} and {rows[1]}."
        )


def check_batched(model, args, kwargs, structure, batch_size):
    """The structure under minibatches; an error if the model does not take them."""
    if batch_size is None:
        return structure
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise TypeError(
            f"`batch_size` must be a whole number of rows; got {batch_size!r}."
        )
    if batch_size < 1:
        raise ValueError(
            f"`batch_size` must be at least 1; got {batch_size}. Leave it out to use "
            "all rows."
        )
    accepted = inspect.signature(model).parameters
    if "batch_size" not in accepted and not any(
        p.kind is p.VAR_KEYWORD for p in accepted.values()
    ):
        raise ValueError(
            "`batch_size` was given, but the model does not take it. Write "
            "`def model(X, y=None, *, batch_size=None)` and pass it to the plate as "
            "`subsample_size=batch_size`."
        )
    num_rows = len(args[0]) if args and eqx.is_array(args[0]) else None
    if num_rows is not None and batch_size > num_rows:
        raise ValueError(
            f"`batch_size` must not exceed the {num_rows} rows of the data; got "
            f"{batch_size}. Leave it out to use all rows."
        )
    batched = inspect_model(model, args, kwargs)
    if not batched.plates and batch_size != num_rows:
        raise ValueError(
            f"`batch_size={batch_size}` was given, but no plate of the model "
            "subsamples. Write `with numpyro.plate('data', X.shape[0], "
            "subsample_size=batch_size) as i:` and use `X[i]`."
        )
    return batched


def observed_values(model, args, kwargs) -> dict[str, np.ndarray]:
    """Targets of the observed sites, as the model hands them over."""
    return {name: y for name, (y, _) in _observed(model, args, kwargs)[1].items()}


def _observed(model, args, kwargs):
    """The abstract trace, and concrete targets and masks of the observed sites.

    Compiled, so that XLA drops everything but the targets.
    """
    dynamic, static = arrays_and_rest(args, kwargs)
    trace: dict[str, Any] = {}

    @jax.jit
    def run(dynamic):
        args, kwargs = eqx.combine(dynamic, static)
        trace.update(trace_model(model, args, kwargs, {}, jr.key(0)))
        return {
            name: (site["value"], _mask(site["fn"]))
            for name, site in trace.items()
            if site["type"] == "sample" and site["is_observed"]
        }

    values = jax.tree.map(np.asarray, run(dynamic))
    return trace, values


def _mask(fn):
    return fn.keep if isinstance(fn, ExpectedLikelihood) else None
