"""The data door of `fit_*`: concrete arrays, checked before anything is compiled."""

from __future__ import annotations

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from numpyro.distributions import MaskedDistribution
from numpyro.infer.autoguide import AutoGuide

from numpyro_gpx import checks
from numpyro_gpx.distributions import ExactRegression, ExpectedLikelihood
from numpyro_gpx.inducing import Data
from numpyro_gpx.infer.structure import (
    Structure,
    abstract_trace,
    arrays_and_rest,
    inspect_model,
    structure_of,
)
from numpyro_gpx.infer.target import trace_model

__all__ = [
    "as_arrays",
    "check_batched",
    "check_data",
    "check_slopes",
    "inputs_first",
    "observed_values",
    "takes_inputs",
]


def takes_inputs(model) -> bool:
    """Whether the model's first argument is the inputs, as it is by convention.

    A first argument that may be left out, as in `model(y=None)`, is the targets: such a
    model has latent inputs only.
    """
    first = next(iter(inspect.signature(model).parameters.values()), None)
    return first is not None and first.default is first.empty


def inputs_first(model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The inputs as first positional argument, also if they were passed by name."""
    first = next(iter(inspect.signature(model).parameters), None)
    if args or first not in kwargs:
        return args, kwargs
    rest = {name: x for name, x in kwargs.items() if name != first}
    second = list(inspect.signature(model).parameters)[1:2]
    if second and second[0] in rest and eqx.is_array_like(rest[second[0]]):
        return (kwargs[first], rest.pop(second[0])), rest
    return (kwargs[first],), rest


def as_arrays(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments with arrays, tables and lists of numbers turned into JAX arrays."""

    def convert(name, x):
        if isinstance(x, AutoGuide):
            raise TypeError(
                f"Argument {name} of the model is a guide. Only variational fits take "
                "one: `fit_svi(model, guide, X, y, key=key)`."
            )
        if isinstance(x, list) or type(x).__module__.split(".")[0] == "pandas":
            x = np.asarray(x)
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
    if args and eqx.is_array(args[0]) and takes_inputs(model):
        checks.finite("X", args[0])  # unlike targets, inputs have no mask
    _check_rows(model, args, kwargs)
    trace, values = _observed(model, args, kwargs)
    if not values:
        raise ValueError(
            "The model observes nothing. Pass the targets, as in "
            "`fit_svi(model, guide, X, y, ...)`, and hand them to `gpx.observe(obs=y)`."
        )
    for name, (value, mask, weights, likelihood) in values.items():
        fn = trace[name]["fn"]
        if isinstance(fn, ExpectedLikelihood):
            likelihood.check(value, name=name, mask=mask)
            _check_weights(name, mask, weights)
        elif isinstance(fn, ExactRegression):
            checks.finite(name, value)
        elif not _is_masked(fn) and np.isnan(value).any():
            number = np.isnan(value).sum()
            raise ValueError(
                f"Targets of site `{name}` must not be NaN; got {number} of "
                f"{value.size}. Leave these rows out, or mask them with "
                "`numpyro.handlers.mask`."
            )
    return structure_of(trace)


def check_slopes(model, args: tuple, kwargs: dict, engine: str) -> None:
    """Raise if an engine that follows gradients meets a density that has none.

    A likelihood that jumps in `f` is constant between its jumps. Where `f` is known
    given the inducing variables, as on the full GP, so is the whole density.
    """
    trace = abstract_trace(model, args, kwargs)
    latents = structure_of(trace).latents
    for name, site in trace.items():
        fn = site.get("fn")
        if not isinstance(fn, ExpectedLikelihood) or not fn.likelihood.discontinuous:
            continue
        if all(latents[gp].inducing is Data for gp in fn.latent.sites if gp in latents):
            raise ValueError(
                f"{type(fn.likelihood).__name__} at site `{name}` jumps, so that on "
                f"the full GP its gradient is zero and {engine} would not move. Use "
                "elliptical slice sampling, `gpx.fit_mcmc(gpx.infer.Blackjax(model, "
                "blackjax.elliptical_slice), ...)`; or `gpx.inducing.Points`; or a "
                "smooth link."
            )


def _check_weights(name, mask, weights):
    if mask is not None and not np.any(mask):
        raise ValueError(
            f"`mask` of site `{name}` leaves out every target (NaN is masked where "
            "`missing=True`)."
        )
    if weights is not None and not np.all(weights >= 0.0):
        raise ValueError(
            f"`weights` of site `{name}` must be at least 0; got "
            f"{weights[~(weights >= 0.0)][0]}."
        )


def _is_masked(fn) -> bool:
    while not isinstance(fn, MaskedDistribution):
        if not hasattr(fn, "base_dist"):
            return False
        fn = fn.base_dist
    return True


def _check_rows(model, args, kwargs):
    """Raise if inputs and targets differ in length: the first two arguments, and `y`.

    Inside the model it would go unseen: `y[i]` past the end is the last row in JAX.
    """
    names = list(inspect.signature(model).parameters)
    y: Any = {**dict(zip(names, args, strict=False)), **kwargs}.get("y")
    if takes_inputs(model) and args and eqx.is_array(args[0]) and eqx.is_array(y):
        if args[0].ndim and y.ndim and len(args[0]) != len(y):
            raise ValueError(
                f"`{names[0]}` and `y` must have the same number of rows; got "
                f"{len(args[0])} and {len(y)}."
            )
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
    _, values = _observed(model, args, kwargs)
    return {name: y for name, (y, *_) in values.items()}


def _observed(model, args, kwargs):
    """The abstract trace, and concrete targets, masks, ... of the observed sites.

    Compiled, so that XLA drops everything but the targets.
    """
    dynamic, static = arrays_and_rest(args, kwargs)
    trace: dict[str, Any] = {}

    @jax.jit
    def run(dynamic):
        args, kwargs = eqx.combine(dynamic, static)
        trace.update(trace_model(model, args, kwargs, {}, jr.key(0)))
        return {
            name: (site["value"], *_checked_parts(site["fn"]))
            for name, site in trace.items()
            if site["type"] == "sample" and site["is_observed"]
        }

    values = jax.tree.map(np.asarray, run(dynamic))
    return trace, values


def _checked_parts(fn):
    """Mask, weights and likelihood, whose support may depend on the model's values."""
    if not isinstance(fn, ExpectedLikelihood):
        return None, None, None
    return fn.keep, fn.weights, fn.likelihood
