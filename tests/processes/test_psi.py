"""Closed-form expectations of kernels, against quadrature, draws and differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.kernels import (
    RBF,
    Constant,
    Linear,
    Matern32,
    Periodic,
    Polynomial,
    Warped,
    White,
)
from numpyro_gpx.processes.psi import psi2_rows, psi_statistics
from numpyro_gpx.uncertain import InputBelief

MEAN = np.array([[0.3, -0.8], [1.4, 0.2], [-0.6, 0.9]])
SD = np.array([[0.5, 0.0], [0.6, 0.4], [0.3, 0.7]])  # one entry is known
BELIEF = InputBelief(jnp.asarray(MEAN), jnp.asarray(SD))
Z = jnp.array([[0.1, 0.4], [-1.2, 0.7], [0.9, -0.5], [1.6, 1.1]])
WEIGHTS = jnp.array([0.7, 1.9, 1.2])

ARD = RBF(1.3, jnp.array([0.8, 1.4]))
SHORT = RBF(0.6, 0.9)
LINEAR = Linear(jnp.array([0.4, 1.7]))
KERNELS = {
    "RBF": SHORT,
    "RBF, ARD": ARD,
    "Linear": Linear(0.7),
    "Linear, ARD": LINEAR,
    "Constant": Constant(1.6),
    "2 RBF": 2.0 * ARD,
    "RBF + Linear": ARD + LINEAR,
    "RBF + RBF + Linear + Constant": ARD + SHORT + LINEAR + 0.8,
    "RBF on 0 * RBF on 1": SHORT.on(0) * RBF(1.2, 1.3).on(1),
    "RBF on 0 * Linear on 1": SHORT.on(0) * Linear(0.7).on(1),
    "RBF * RBF": ARD * SHORT,
    "RBF on 0 + Linear on 1": SHORT.on(0) + Linear(0.7).on(1),
    "White + RBF": White(0.3) + ARD,
    # Closed as well, since terms are closed under products.
    "RBF * (Linear + Constant)": ARD * (LINEAR + 0.8),
    "Linear * Linear + RBF on 1": LINEAR * Linear(0.6) + SHORT.on(1),
    "White * (RBF + Linear) + RBF": White(0.3) * (SHORT + LINEAR) + ARD,
    "columns in another order, and twice": (
        ARD.on(1, 0) * SHORT.on(0, 0) * LINEAR.on(1, 0).on(1, 0)
    ),
}


@pytest.fixture(autouse=True)
def explicit_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def nodes():
    """Points `(S, N, D)` and weights `(S,)`."""
    points, weights = gpx.cubature.GaussHermite(40).nodes(BELIEF)
    return np.asarray(points), np.asarray(weights)


@jax.jit
def statistics(kernel, belief, Z, weights):
    return psi_statistics(kernel, belief, Z, weights), psi2_rows(kernel, belief, Z)


@jax.jit
def evaluated(kernel, X, Z):
    return kernel(X, Z), kernel.diag(X)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_statistics_agree_with_quadrature(kernel, nodes):
    psi, rows = statistics(kernel, BELIEF, Z, WEIGHTS)
    points, weights = nodes
    k, k_diag = map(np.asarray, evaluated(kernel, points.reshape(-1, 2), Z))
    k, k_diag = k.reshape(*points.shape[:2], -1), k_diag.reshape(points.shape[:2])
    assert_allclose(psi.psi0, np.einsum("s,sn->n", weights, k_diag), rtol=1e-10)
    assert_allclose(psi.psi1, np.einsum("s,snm->nm", weights, k), rtol=1e-9, atol=1e-12)
    expected = np.einsum("s,snm,snj->nmj", weights, k, k)
    assert_allclose(rows, expected, rtol=1e-9, atol=1e-12)
    summed = np.einsum("n,nmj->mj", WEIGHTS, rows)
    assert_allclose(psi.psi2, summed, rtol=1e-12, atol=1e-14)


def test_statistics_agree_with_draws():
    """45 entries within 5 standard errors: by chance not so in 3 of 100 000 tests."""
    psi, rows = statistics(KERNELS["RBF + Linear"], BELIEF, Z, WEIGHTS)
    rng = np.random.default_rng(20240229)
    variance, lengthscale, slopes = 1.3, np.array([0.8, 1.4]), np.array([0.4, 1.7])

    def check(value, draws):
        error = draws.std() / np.sqrt(len(draws))
        assert abs(value - draws.mean()) < 5.0 * error

    for n in range(3):
        x = MEAN[n] + SD[n] * rng.normal(size=(1_000_000, 2))
        k = []
        for z in np.asarray(Z):
            r2 = (((x - z) / lengthscale) ** 2).sum(1)
            k.append(variance * np.exp(-0.5 * r2) + x @ (slopes * z))
        check(psi.psi0[n], variance + x**2 @ slopes)
        for m in range(4):
            check(psi.psi1[n, m], k[m])
            for j in range(m + 1):
                check(rows[n, m, j], k[m] * k[j])


def test_weights_are_one_by_default():
    ones, _ = statistics(ARD, BELIEF, Z, jnp.ones(3))
    default, _ = statistics(ARD, BELIEF, Z, None)
    assert_allclose(default.psi2, ones.psi2, rtol=1e-15)


@pytest.mark.parametrize("name", ["RBF + RBF + Linear + Constant", "White + RBF"])
def test_known_inputs_give_the_kernel_itself(name):
    kernel = KERNELS[name]
    known = InputBelief(BELIEF.mean, jnp.zeros_like(BELIEF.mean))
    psi, rows = statistics(kernel, known, Z, WEIGHTS)
    Kfu, k_diag = map(np.asarray, evaluated(kernel, BELIEF.mean, Z))
    assert_allclose(psi.psi0, k_diag, rtol=1e-14)
    assert_allclose(psi.psi1, Kfu, rtol=1e-13, atol=1e-14)
    assert_allclose(rows, Kfu[:, :, None] * Kfu[:, None, :], rtol=1e-13, atol=1e-14)


def weighted(kernel, belief, Z, weights):
    """A scalar in which every entry counts differently, and the statistics."""
    psi = psi_statistics(kernel, belief, Z, weights)
    factors = [jnp.sin(1.0 + jnp.arange(x.size, dtype=x.dtype)) for x in psi]
    total = sum(jnp.vdot(c, x.ravel()) for c, x in zip(factors, psi, strict=True))
    return total, psi


_, unravel = ravel_pytree((KERNELS["RBF + Linear"], BELIEF, Z, WEIGHTS))


@jax.jit
def gradient_and_differences(vector):
    def value(v):
        return weighted(*unravel(v))[0]

    steps = 1e-5 * jnp.eye(vector.size)
    moved = jnp.concatenate([steps, -steps]) + vector[None, :]
    upper, lower = jnp.split(jax.vmap(value)(moved), 2)
    return jax.grad(value)(vector), (upper - lower) / 2e-5


@pytest.mark.parametrize("known", [0.0, 1.0])
def test_gradients_agree_with_differences_also_where_the_sd_is_0(known):
    """In the kernel, means, standard deviations, `Z` and weights at once."""
    belief = InputBelief(BELIEF.mean, (1.0 - known) * BELIEF.scale)
    vector, _ = ravel_pytree((KERNELS["RBF + Linear"], belief, Z, WEIGHTS))
    gradient, differences = gradient_and_differences(vector)
    # The error of a difference is about 1e-16 / 1e-5 from rounding and (1e-5)^2 from
    # curvature, times numbers of the size of the sum: tens.
    assert_allclose(gradient, differences, rtol=1e-8, atol=2e-9)


def test_digits_survive_far_from_the_origin():
    """RBF knows no origin. Without centring 1e-16 (1e5)^2 of an exponent is lost."""
    psi, rows = statistics(ARD, BELIEF, Z, WEIGHTS)
    moved = InputBelief(BELIEF.mean + 1e5, BELIEF.scale)
    moved_psi, moved_rows = statistics(ARD, moved, Z + 1e5, WEIGHTS)
    assert_allclose(moved_psi.psi1, psi.psi1, rtol=1e-9)
    assert_allclose(moved_rows, rows, rtol=1e-9)


def test_float32_stays_float32_and_finite():
    kernel = KERNELS["RBF on 0 + Linear on 1"]
    exact, _ = statistics(kernel, BELIEF, Z, WEIGHTS)
    arguments = (kernel, BELIEF, Z, WEIGHTS)
    small = jax.tree.map(lambda x: x.astype(jnp.float32), arguments)
    gradient = jax.jit(jax.grad(weighted, (0, 1, 2, 3), has_aux=True))
    gradients, psi = gradient(*small)
    for value, expected in zip(psi, exact, strict=True):
        assert value.dtype == jnp.float32
        assert_allclose(value, expected, rtol=3e-6, atol=1e-6)
    for leaf in jax.tree.leaves(gradients):
        assert leaf.dtype == jnp.float32
        assert np.isfinite(leaf).all()


def test_float32_keeps_short_distances():
    """At 100 lengthscales from the centre, squares that cancel would lose 1e-3."""
    Z32 = Z.astype(jnp.float32)
    known = InputBelief(Z32, jnp.zeros_like(Z32))
    psi, _ = statistics(RBF(1.3, 0.01), known, Z32, None)
    assert_allclose(np.diag(psi.psi1), 1.3, rtol=1e-6)


def test_python_numbers_in_a_kernel_leave_float32_alone():
    belief, Z32 = jax.tree.map(lambda x: x.astype(jnp.float32), (BELIEF, Z))
    kernel = 2.0 * RBF(1.3, 0.8).on(0) + Linear(0.7) + White(0.1)
    psi = jax.eval_shape(lambda b: psi_statistics(kernel, b, Z32), belief)
    assert {x.dtype for x in psi} == {jnp.dtype("float32")}


def test_no_array_has_an_entry_for_each_row_pair_and_column():
    """Also not for the gradient: with N rows, the pairs m <= j are the most."""
    N, M, Q = 23, 6, 4
    belief = InputBelief(jnp.ones((N, Q)), jnp.ones((N, Q)))
    kernel = RBF(1.3, jnp.ones(Q))
    trace = jax.make_jaxpr(jax.grad(weighted, (0, 1, 2), has_aux=True))
    traced = trace(kernel, belief, jnp.ones((M, Q)), jnp.ones(N))

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in equation.params.values():
                if hasattr(inner, "jaxpr"):
                    yield from sizes(inner.jaxpr)

    assert max(sizes(traced.jaxpr)) == N * M * (M + 1) // 2


@pytest.mark.parametrize(
    "kernel, name",
    [
        (Matern32(1.3, 0.8), "Matern32"),
        (ARD + Matern32(1.3, 0.8).on(0), "Matern32"),
        (ARD * Periodic(1.3, 0.8, 2.0), "Periodic"),
        (2.0 * Warped(ARD, jnp.tanh), "Warped"),
        (Polynomial(2), "Polynomial"),
    ],
)
def test_other_kernels_are_refused_by_name(kernel, name):
    words = rf"kernel {name}\. .*Unscented\(\)` or .*GaussHermite\(10\)"
    for function in (psi_statistics, psi2_rows):
        with pytest.raises(ValueError, match=words):
            function(kernel, BELIEF, Z)


def test_full_factors_are_refused():
    full = InputBelief(BELIEF.mean, jax.vmap(jnp.diag)(BELIEF.scale))
    words = r"independent columns.*\(3, 2, 2\).*gpx\.cubature\.Unscented\(\)"
    for function in (psi_statistics, psi2_rows):
        with pytest.raises(ValueError, match=words):
            function(ARD, full, Z)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((ARD, BELIEF, Z[:, :1]), r"`Z` must have as many columns as `belief`; got"),
        ((ARD, BELIEF, Z[:, 0]), r"`Z` must have shape \(N, D\); got \(4,\)"),
        ((ARD, BELIEF, Z, jnp.ones(4)), r"`weights` must have shape \(3,\)"),
        ((RBF(1.3, jnp.ones(3)), BELIEF, Z), r"`lengthscale` has shape \(3,\)"),
        ((Linear(jnp.ones(3)), BELIEF, Z), r"`variance` has shape \(3,\)"),
        ((RBF().on(2), BELIEF, Z), r"`dims` must lie between 0 and 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        psi_statistics(*arguments)
