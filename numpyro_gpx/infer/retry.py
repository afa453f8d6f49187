"""When a factorisation fails: once more with a larger jitter, then a diagnosis."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from numpyro_gpx.infer.starts import initial_values
from numpyro_gpx.infer.structure import inspect_model
from numpyro_gpx.infer.target import trace_model
from numpyro_gpx.linalg import current_jitter, explicit_jitter, jitter

__all__ = ["NotFinite", "with_retry"]

# A second and last attempt uses this many times the default jitter.
_LARGER = 100.0

T = TypeVar("T")


class NotFinite(Exception):
    """An engine met NaN or infinity; the message says where."""


def with_retry(run: Callable[[float | None], T], model, args, kwargs, params) -> T:
    """Call `run(jitter)`; on `NotFinite` once more, from the start, with more jitter.

    Args:
        run: The fit, given a relative jitter (`None` for the default).
        model: The model, for the diagnosis.
        args: Its arguments.
        kwargs: Its keyword arguments.
        params: Values of its parameters, if known.
    """
    try:
        return run(explicit_jitter())
    except NotFinite as first:
        larger = _LARGER * current_jitter(_data_dtype(args))
        warnings.warn(
            f"{first} Starting again with a relative jitter of {larger:.0e}.",
            RuntimeWarning,
            stacklevel=4,
        )
    try:
        with jitter(larger):
            return run(larger)
    except NotFinite as second:
        raise ValueError(
            f"{second} A relative jitter of {larger:.0e} did not help either. "
            f"{_diagnosis(model, args, kwargs, params)}"
        ) from None


def _data_dtype(args):
    """The floating dtype of the data; float32 data may live beside float64."""
    floats = [
        x.dtype
        for x in jax.tree.leaves(args)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.result_type(*floats) if floats else jnp.result_type(float)


def _diagnosis(model, args, kwargs, params) -> str:
    """What is known about the GP sites at the starting values."""
    structure = inspect_model(model, args, kwargs)

    @jax.jit
    def run():
        key = jr.key(0)
        start = initial_values(model, structure, args, kwargs, key, params=params)
        trace = trace_model(model, args, kwargs, {**(params or {}), **start}, key)
        return {name: trace[name]["infer"]["gp"].prior for name in structure.gps}

    reports = []
    for name, prior in run().items():
        kernel = type(prior.kernels[0]).__name__
        L = np.asarray(prior.factor.L)
        Z = np.asarray(prior.inducing.Z)
        repeated = Z.shape[0] - np.unique(Z, axis=0).shape[0]
        smallest = np.abs(np.diagonal(L, 0, -2, -1)).min()
        state = (
            f"has a factor with diagonal down to {smallest:.1e}"
            if np.all(np.isfinite(L))
            else "could not be factorised"
        )
        reports.append(
            f"GP site `{name}` (kernel {kernel}, {Z.shape[0]} inducing inputs, "
            f"{repeated} repeated): at the starting values Kuu {state}."
        )
    advice = (
        "Standardise the inputs, use fewer or better spread inducing points, a smaller "
        "learning rate or step size, float64, or priors that keep lengthscales and "
        "noise away from extremes."
    )
    return " ".join([*reports, advice])
