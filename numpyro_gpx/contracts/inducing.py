"""What inducing variables must satisfy."""

from __future__ import annotations

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
from numpyro_gpx.inducing import Inducing, Kuf, Kuu, root
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.means import Constant
from numpyro_gpx.numerics.factor import Factor
from numpyro_gpx.numerics.jitter import current_jitter

__all__ = ["check_inducing"]


def check_inducing(inducing: Inducing, kernel: Kernel, X=None) -> None:
    r"""Raise unless inducing variables and their root belong together.

    The root: :math:`R R^\top = K_{uu}` up to the jitter, solves undo products, sums
    and determinants are those of `R` written out. The variables: :math:`K_{ff} -
    K_{fu} K_{uu}^{-1} K_{uf}` is positive semidefinite, as the covariance of what they
    leave open must be. Finite gradients, `jit`, pytrees, float32 as for kernels.

    Args:
        inducing: The inducing variables.
        kernel: A kernel that they are registered for.
        X: Inputs `(N, D)`; 5 rows of 2 columns if left out.
    """
    needs_float64("check_inducing")
    name = f"{type(inducing).__name__} with {type(kernel).__name__}"
    X = inputs(X, INPUTS)
    M = inducing.size
    mean = inducing.mean(Constant(jnp.asarray(1.3)))
    assert mean.shape == (M,), f"{name}: `mean` has shape {mean.shape}, not ({M},)"
    Z = inducing.coordinates()
    assert Z is None or Z.shape[0] == M, f"{name}: {M} variables at {Z.shape[0]} places"
    K = Kuf(inducing, kernel, X)
    assert K.shape == (M, len(X)), f"{name}: `Kuf` has shape {K.shape}"
    factor = root(inducing, kernel)
    _check_factor(factor, K, name)
    R = np.asarray(factor.multiply(jnp.eye(M)))
    dense = _dense_covariance(inducing, kernel)
    if dense is not None:
        scale = 10.0 * current_jitter(dense.dtype) * float(np.mean(np.diag(dense)))
        assert_allclose(
            R @ R.T, dense, rtol=1e-9, atol=scale,
            err_msg=f"{name}: the root is not that of `Kuu`",
        )  # fmt: skip
    A = np.linalg.solve(R, np.asarray(K))
    Kff = np.asarray(inducing.prior(kernel)(X))
    smallest = np.linalg.eigvalsh(Kff - A.T @ A).min()
    assert smallest > -1e-6 * np.trace(Kff), (
        f"{name}: `Kff - Kfu Kuu^-1 Kuf` has the eigenvalue {smallest:.2e}: `Kuf` and "
        "the root do not belong to one process"
    )
    value, gradients = eqx.filter_jit(_projected_and_gradients)(inducing, kernel, X)
    assert_allclose(value, np.sum(A**2), rtol=1e-6, err_msg=f"{name} inside `jit`")
    finite(gradients, f"gradients of {name}")
    round_trip(inducing)
    single = eqx.filter_jit(_projected_and_gradients)(
        as_float32(inducing), as_float32(kernel), X.astype(jnp.float32)
    )
    is_float32(single, name)


def _check_factor(factor: Factor, K, name: str) -> None:
    M = len(K)
    eye = jnp.eye(M)
    R = np.asarray(factor.multiply(eye))
    wanted = {
        "multiply_t": (factor.multiply_t(eye), R.T),
        "solve": (factor.solve(K), np.linalg.solve(R, K)),
        "solve(accurate=True)": (
            factor.solve(K, accurate=True), np.linalg.solve(R, K)
        ),
        "solve_t": (factor.solve_t(K), np.linalg.solve(R.T, K)),
        "log_det": (factor.log_det(), np.linalg.slogdet(R)[1]),
        "lower": (factor.lower() @ factor.lower().T, R @ R.T),
    }  # fmt: skip
    A = np.linalg.solve(R, K)
    total = jnp.asarray(np.sum(A**2))
    wanted["gram"] = factor.gram(K, total), A @ A.T
    wanted["congruence"] = factor.congruence(K @ K.T), A @ A.T
    for method, (found, value) in wanted.items():
        assert_allclose(
            found, value, rtol=1e-5, atol=1e-6 * np.max(np.abs(value)),
            err_msg=f"{name}: `{method}` is not that of the root written out",
        )  # fmt: skip
    assert np.allclose(np.triu(factor.lower(), 1), 0.0), f"{name}: `lower` is not lower"
    assert np.isfinite(factor.condition()), f"{name}: `condition` is not finite"


def _dense_covariance(inducing, kernel):
    """`Kuu`, or `None` for features that register a root alone."""
    try:
        return np.asarray(Kuu(inducing, inducing.prior(kernel)))
    except TypeError:
        return None


def _projected_and_gradients(inducing, kernel, X):
    leaves, rest = eqx.partition((inducing, kernel), eqx.is_inexact_array)

    def total(leaves, X):
        inducing, kernel = eqx.combine(leaves, rest)
        return jnp.sum(root(inducing, kernel).solve(Kuf(inducing, kernel, X)) ** 2)

    return jax.value_and_grad(total, (0, 1))(leaves, X)
