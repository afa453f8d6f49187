"""What every kernel must satisfy."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from numpyro_gpx.contracts.shared import (
    INPUTS,
    as_float32,
    finite,
    inputs,
    is_float32,
    needs_float64,
    round_trip,
)
from numpyro_gpx.kernels import Kernel

__all__ = ["check_kernel"]

_X2 = np.array([[0.5, 0.7], [0.3, -1.1], [-1.2, 0.1]])


def check_kernel(kernel: Kernel, X=None, X2=None) -> None:
    """Raise unless a kernel is one, and its matrix form is that of `evaluate`.

    Symmetric and positive semidefinite; `diag` the diagonal; finite gradients where
    inputs coincide; the same compiled, under `vmap` over its numbers, and after a round
    trip as a pytree; float32 in, float32 out.

    Args:
        kernel: The kernel, of numbers that are neither 0 nor 1, where wrong formulas
            agree.
        X: Inputs `(N, D)`, best with a row that is there twice; 5 rows of 2 columns if
            left out.
        X2: Others, `(N2, D)`.
    """
    needs_float64("check_kernel")
    X, X2 = inputs(X, INPUTS), inputs(X2, _X2 if X is None else X[:3])
    name = type(kernel).__name__
    single = eqx.filter_jit(_matrices_and_gradients)
    K, K12, gradients, diag, swapped, stacked = _measured(kernel, X, X2)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
    assert K.shape == (len(X), len(X)), f"{name}(X) has shape {K.shape}"
    assert K12.shape == (len(X), len(X2)), f"{name}(X, X2) has shape {K12.shape}"
    assert_allclose(K, K.T, **close, err_msg=f"{name}(X) is not symmetric")
    assert_allclose(
        diag, np.diag(K), **close, err_msg=f"{name}.diag(X) is not that of {name}(X)"
    )
    smallest = np.linalg.eigvalsh(K).min()
    assert smallest > -1e-10 * np.trace(K), (
        f"{name}(X) is not positive semidefinite: it has the eigenvalue {smallest:.2e}"
    )
    assert_allclose(
        K12, swapped, **close, err_msg=f"{name}(X, X2) is not `evaluate` of the pairs"
    )
    finite(gradients, f"gradients of {name} where inputs coincide")
    assert_allclose(kernel(X, X2), K12, **close, err_msg=f"{name} differs inside `jit`")
    assert_allclose(
        stacked, K, **close, err_msg=f"{name} differs under `vmap` over its numbers"
    )
    round_trip(kernel)
    lower = as_float32(kernel)
    found = single(lower, X.astype(jnp.float32), X2.astype(jnp.float32))
    is_float32(found, name)
    finite(found, f"{name} in float32")
    assert_allclose(found[1], K12, rtol=1e-3, atol=1e-4, err_msg=f"{name} in float32")


def _measured(kernel, X, X2):
    @eqx.filter_jit
    def measure(kernel, X, X2):
        leaves, rest = eqx.partition(kernel, eqx.is_array)
        pair = jax.tree.map(lambda leaf: jnp.stack([1.1 * leaf, leaf]), leaves)
        swapped = jax.vmap(lambda x: jax.vmap(lambda x2: kernel.evaluate(x2, x))(X2))(X)
        stacked = jax.vmap(lambda leaves: eqx.combine(leaves, rest)(X), axis_size=2)
        found = _matrices_and_gradients(kernel, X, X2)
        return *found, kernel.diag(X), swapped, stacked(pair)[1]

    return jax.tree.map(np.asarray, measure(kernel, X, X2))


def _matrices_and_gradients(kernel, X, X2):
    leaves, rest = eqx.partition(kernel, eqx.is_array)

    def total(leaves, X, X2):
        kernel = eqx.combine(leaves, rest)
        values = kernel(X), kernel(X, X2)
        return sum(jnp.sum(value) for value in values), values

    gradients, values = jax.grad(total, (0, 1, 2), has_aux=True)(leaves, X, X2)
    return *values, gradients
