"""Contracts: what every kernel, likelihood and inducing variable must satisfy.

For those who write their own: `gpx.testing.check_kernel(MyKernel())` raises an
`AssertionError` that names what does not hold. They run in float64, which
`jax.config.update("jax_enable_x64", True)` switches on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from numpyro_gpx.inducing import Inducing, Kuf, Kuu, root
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.means import Constant
from numpyro_gpx.numerics.factor import Factor
from numpyro_gpx.numerics.jitter import current_jitter

__all__ = ["check_inducing", "check_kernel", "check_likelihood"]

# Rows 0 and 3 coincide: there distances have no derivative.
_X = np.array([[0.3, -1.1], [1.4, 0.2], [-0.6, 0.9], [0.3, -1.1], [2.1, -0.4]])
_X2 = np.array([[0.5, 0.7], [0.3, -1.1], [-1.2, 0.1]])

_MEANS = (-2.9, -0.4, 0.2, 1.7)
_VARIANCES = (0.013, 0.3, 1.7)


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
    _needs_float64("check_kernel")
    X, X2 = _inputs(X, _X), _inputs(X2, _X2 if X is None else X[:3])
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
    _finite(gradients, f"gradients of {name} where inputs coincide")
    assert_allclose(kernel(X, X2), K12, **close, err_msg=f"{name} differs inside `jit`")
    assert_allclose(
        stacked, K, **close, err_msg=f"{name} differs under `vmap` over its numbers"
    )
    _round_trip(kernel)
    lower = _as_float32(kernel)
    found = single(lower, X.astype(jnp.float32), X2.astype(jnp.float32))
    _is_float32(found, name)
    _finite(found, f"{name} in float32")
    assert_allclose(found[1], K12, rtol=1e-3, atol=1e-4, err_msg=f"{name} in float32")


def check_likelihood(
    likelihood: Likelihood,
    y: Sequence[float],
    *,
    means: Sequence[float] = _MEANS,
    variances: Sequence[float] = _VARIANCES,
    atol: float = 1e-4,
) -> None:
    r"""Raise unless a likelihood's expectations are those of its own density.

    :math:`\mathbb E[\log p(y \mid f)]`, :math:`\log\mathbb E[p(y \mid f)]`, their
    gradients and the predictive moments are compared with integrals of `log_prob` and
    `distribution` on a fine grid; shapes, `vmap`, pytrees and float32 as for kernels.
    It does not know what `log_prob` ought to be: compare that with SciPy yourself.

    Args:
        likelihood: A likelihood of one latent function.
        y: Targets to try.
        means: Means of the latent function to try.
        variances: Its variances.
        atol: Allowed error of expectations; their gradients may have ten times that.
    """
    _needs_float64("check_likelihood")
    name = type(likelihood).__name__
    if likelihood.latent_ndim:
        raise ValueError(
            f"`check_likelihood` integrates over one latent function; {name} has "
            f"{likelihood.num_latent}."
        )
    grid = np.meshgrid(np.asarray(y, float), means, variances, indexing="ij")
    ys, m, v = (jnp.asarray(x.ravel()) for x in grid)
    f, w = _gaussian_grid(np.asarray(m), np.asarray(v))
    log_p = np.asarray(jax.vmap(likelihood.log_prob, (None, 1), 1)(ys, jnp.asarray(f)))
    expected = np.sum(w * log_p, axis=1)
    density = np.sum(w * np.exp(log_p), axis=1)
    seen = density > 1e-25  # below, the mass may lie outside the grid
    both = eqx.filter_jit(_expectations_and_gradients)
    ell, predictive, ell_slopes, slopes, moments = map(
        np.asarray, both(likelihood, ys, m, v)
    )
    assert_allclose(
        ell, expected, rtol=1e-6, atol=atol, err_msg=f"{name}.expected_log_prob"
    )
    assert_allclose(
        predictive[seen], np.log(density[seen]), atol=atol,
        err_msg=f"{name}.predictive_log_prob",
    )  # fmt: skip
    x = (f - np.asarray(m)[:, None]) / np.asarray(v)[:, None]
    slope = np.sum(w * log_p * x, axis=1)
    assert_allclose(
        ell_slopes, slope, rtol=1e-4, atol=10 * atol,
        err_msg=f"the slope of {name}.expected_log_prob in the mean",
    )  # fmt: skip
    slope = np.sum(w * np.exp(log_p) * x, axis=1)[seen] / density[seen]
    assert_allclose(
        slopes[seen], slope, rtol=1e-3, atol=10 * atol,
        err_msg=f"the slope of {name}.predictive_log_prob in the mean",
    )  # fmt: skip
    for found, value, part in zip(
        moments, _integrated_moments(likelihood, f, w), ("mean", "variance"),
        strict=True,
    ):  # fmt: skip
        assert_allclose(
            found, value, rtol=1e-3, atol=10 * atol,
            err_msg=f"the {part} of {name}.predictive_moments",
        )  # fmt: skip
    _same_in_other_shapes(likelihood, ys, m, v)
    _round_trip(likelihood)
    found = both(_as_float32(likelihood), *(z.astype(jnp.float32) for z in (ys, m, v)))
    _is_float32(found, name)
    _finite(found, f"{name} in float32")


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
    _needs_float64("check_inducing")
    name = f"{type(inducing).__name__} with {type(kernel).__name__}"
    X = _inputs(X, _X)
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
    _finite(gradients, f"gradients of {name}")
    _round_trip(inducing)
    single = eqx.filter_jit(_projected_and_gradients)(
        _as_float32(inducing), _as_float32(kernel), X.astype(jnp.float32)
    )
    _is_float32(single, name)


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


def _expectations_and_gradients(likelihood, y, m, v):
    def slope(fn):
        return jax.grad(lambda m: jnp.sum(fn(y, m, v)))(m)

    return (
        likelihood.expected_log_prob(y, m, v),
        likelihood.predictive_log_prob(y, m, v),
        slope(likelihood.expected_log_prob),
        slope(likelihood.predictive_log_prob),
        jnp.stack(likelihood.predictive_moments(m, v)),
    )


def _gaussian_grid(m, v):
    """Gauss-Legendre points and weights of `N(m, v)` on 10 sds, each `(K, F)`."""
    x, w = np.polynomial.legendre.leggauss(8)
    edges = np.linspace(-10.0, 10.0, 401)
    half = 0.5 * np.diff(edges)[:, None]
    z = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * x).ravel()
    w = (half * w).ravel() * np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    f = m[:, None] + np.sqrt(v)[:, None] * z
    return f, np.broadcast_to(w, f.shape)


def _integrated_moments(likelihood, f, w):
    """Mean and variance of the targets, from those given `f`; labels are numbers."""
    f = jnp.asarray(f)
    if likelihood.num_classes is None:
        law = likelihood.distribution(f)
        mean, square = law.mean, law.variance + law.mean**2
    else:
        labels = jnp.arange(likelihood.num_classes, dtype=f.dtype)
        shares = jnp.exp(jax.vmap(lambda c: likelihood.log_prob(c, f))(labels))
        mean, square = (jnp.tensordot(x, shares, 1) for x in (labels, labels**2))
    mean, square = np.sum(w * mean, axis=1), np.sum(w * square, axis=1)
    return mean, square - mean**2


def _same_in_other_shapes(likelihood, y, m, v):
    name = type(likelihood).__name__
    plain = likelihood.expected_log_prob(y, m, v)
    mapped = jax.vmap(likelihood.expected_log_prob)(y, m, v)
    assert_allclose(mapped, plain, rtol=1e-9, err_msg=f"{name} under `vmap`")
    column = likelihood.expected_log_prob(y[:, None], m[:, None], v[:, None])
    assert_allclose(
        column[:, 0], plain, rtol=1e-9, err_msg=f"{name} of an (N, 1) latent"
    )


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


def _inputs(given, default):
    return jnp.asarray(default if given is None else given, jnp.float64)


def _needs_float64(function: str) -> None:
    if not jax.config.values["jax_enable_x64"]:
        raise ValueError(
            f"`{function}` compares to many digits and needs float64: "
            "`jax.config.update('jax_enable_x64', True)`."
        )


def _as_float32(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, tree
    )


def _is_float32(tree, name: str) -> None:
    kinds = {str(x.dtype) for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)}
    assert kinds == {"float32"}, f"{name}: float32 in, {sorted(kinds)} out"


def _finite(tree, what: str) -> None:
    for leaf in jax.tree.leaves(tree):
        assert np.all(np.isfinite(leaf)), f"{what} are not finite"


def _round_trip(value) -> None:
    leaves, tree = jax.tree.flatten(value)
    again = jax.tree.unflatten(tree, leaves)
    assert eqx.tree_equal(again, value), (
        f"{type(value).__name__} is not the same after a round trip as a pytree"
    )
