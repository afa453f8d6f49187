"""The data door of `fit_*`: concrete arrays, checked before anything is compiled."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.distributions import ExactRegression, ExpectedLikelihood
from numpyro_gpx.infer.structure import abstract_trace, arrays_and_rest
from numpyro_gpx.infer.target import trace_model

__all__ = ["as_arrays", "check_data", "observed_values"]


def as_arrays(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments with NumPy arrays and lists of numbers turned into JAX arrays."""

    def convert(name, x):
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


def check_data(model, args: tuple, kwargs: dict) -> dict[str, np.ndarray]:
    """Check every array and every observed site; return the observed values.

    Args:
        model: The model.
        args: Its arguments, targets included; `batch_size` left out of `kwargs`.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: With the argument or site, what came and what was expected.
    """
    for i, x in enumerate(args[:1]):
        # The first argument is the inputs by convention; they have no mask.
        if eqx.is_array(x):
            checks.finite("X" if i == 0 else f"argument {i}", x)
    trace = abstract_trace(model, args, kwargs)
    observed = {
        name: site["fn"]
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }
    if not observed:
        raise ValueError(
            "The model observes nothing. Pass the targets, as in "
            "`fit_svi(model, guide, X, y, ...)`, and hand them to `gpx.observe(obs=y)`."
        )
    values = observed_values(model, args, kwargs, tuple(observed))
    for name, fn in observed.items():
        value, mask = values[name]
        if isinstance(fn, ExpectedLikelihood):
            fn.likelihood.check(value, name=name, mask=mask)
        elif isinstance(fn, ExactRegression):
            checks.finite(name, value)
    return {name: value for name, (value, _) in values.items()}


def observed_values(model, args, kwargs, names: tuple[str, ...]) -> dict[str, Any]:
    """Targets and masks of the observed sites, as the model hands them over.

    Compiled, so that XLA drops everything but the targets.
    """
    dynamic, static = arrays_and_rest(args, kwargs)

    @jax.jit
    def run(dynamic):
        args, kwargs = eqx.combine(dynamic, static)
        trace = trace_model(model, args, kwargs, {}, jr.key(0))
        return {
            name: (trace[name]["value"], _mask(trace[name]["fn"])) for name in names
        }

    return jax.tree.map(np.asarray, run(dynamic))


def _mask(fn):
    return fn.mask if isinstance(fn, ExpectedLikelihood) else None
