"""Fields of kernels and likelihoods that refuse a wrong number when they get one.

Numbers are looked at before they are converted: inside `jit` a constant becomes a
tracer, which has no value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from numpyro.util import not_jax_tracer

__all__ = ["as_float", "as_inputs", "nonnegative", "positive", "real"]


def positive(name: str, default=dataclasses.MISSING):
    """An `eqx.field` for a number above 0, such as a scale or a lengthscale."""
    return _number(name, default, lambda x: x > 0.0, "positive")


def nonnegative(name: str, default=dataclasses.MISSING):
    """An `eqx.field` for a number not below 0, such as the variance of a weight."""
    return _number(name, default, lambda x: x >= 0.0, "at least 0")


def real(default=dataclasses.MISSING):
    """An `eqx.field` for any number."""
    return _field(default, as_float)


def as_float(value) -> Array:
    """`value` as an array of floats.

    Python numbers stay weakly typed, so that the dtype of the data decides.
    """
    _refuse_distribution(value)
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.integer):
        return value * 1.0
    return value


def _refuse_distribution(value) -> None:
    """Raise if a distribution stands where a draw of it was meant."""
    if isinstance(value, dist.Distribution):
        name = type(value).__name__
        raise TypeError(
            f"A hyperparameter must be a number or an array; got the distribution "
            f"{name}. Draw it: `numpyro.sample('name', dist.{name}(...))`."
        )


def as_inputs(name: str, X: ArrayLike) -> Float[Array, "N D"]:
    """`X` as an array of floats, once it is known to have shape `(N, D)`."""
    X = as_float(X)
    if X.ndim == 1:
        raise ValueError(
            f"`{name}` must have shape (N, D); got {X.shape}. "
            f"For one-dimensional inputs pass `{name}[:, None]`."
        )
    if X.ndim != 2:
        raise ValueError(f"`{name}` must have shape (N, D); got {X.shape}.")
    return X


def _number(name, default, holds: Callable, words: str):
    def convert(value) -> Array:
        _refuse_distribution(value)
        if all(not_jax_tracer(leaf) for leaf in jax.tree.leaves(value)):
            values = np.asarray(value)
            wrong = ~np.asarray(holds(values))
            if wrong.any():
                raise ValueError(f"`{name}` must be {words}; got {values[wrong][0]}.")
        return as_float(value)

    return _field(default, convert)


def _field(default, converter):
    if default is dataclasses.MISSING:
        return eqx.field(converter=converter)
    return eqx.field(default=default, converter=converter)
