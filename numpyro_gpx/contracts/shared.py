"""What the contracts share: inputs, precision, round trips."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "INPUTS",
    "as_float32",
    "finite",
    "inputs",
    "is_float32",
    "needs_float64",
    "round_trip",
]

# Rows 0 and 3 coincide: there distances have no derivative.
INPUTS = np.array([[0.3, -1.1], [1.4, 0.2], [-0.6, 0.9], [0.3, -1.1], [2.1, -0.4]])


def inputs(given, default):
    """Inputs in float64, or the usual ones if none were given."""
    return jnp.asarray(default if given is None else given, jnp.float64)


def needs_float64(function: str) -> None:
    """Raise unless float64 is switched on."""
    if not jax.config.values["jax_enable_x64"]:
        raise ValueError(
            f"`{function}` compares to many digits and needs float64: "
            "`jax.config.update('jax_enable_x64', True)`."
        )


def as_float32(tree):
    """The same with all its numbers in float32."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, tree
    )


def is_float32(tree, name: str) -> None:
    """Raise unless all numbers are in float32."""
    kinds = {str(x.dtype) for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)}
    assert kinds == {"float32"}, f"{name}: float32 in, {sorted(kinds)} out"


def finite(tree, what: str) -> None:
    """Raise unless all numbers are finite."""
    for leaf in jax.tree.leaves(tree):
        assert np.all(np.isfinite(leaf)), f"{what} are not finite"


def round_trip(value) -> None:
    """Raise unless a value survives being taken apart as a pytree."""
    leaves, tree = jax.tree.flatten(value)
    again = jax.tree.unflatten(tree, leaves)
    assert eqx.tree_equal(again, value), (
        f"{type(value).__name__} is not the same after a round trip as a pytree"
    )
