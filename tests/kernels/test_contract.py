"""What holds for every kernel. A new kernel costs one line in `KERNELS`."""

import io
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_gpx import kernels as K

LENGTHSCALE = np.array([0.7, 1.9])


def dot_plus(x, x2):
    """A covariance that is a plain function of two rows."""
    return 0.6 * jnp.dot(x, x2) + 0.8


KERNELS = {
    "RBF": lambda: K.RBF(1.3, 0.7),
    "RBF-ard": lambda: K.RBF(1.3, LENGTHSCALE),
    "Matern12": lambda: K.Matern12(1.3, LENGTHSCALE),
    "Matern32": lambda: K.Matern32(1.3, LENGTHSCALE),
    "Matern52": lambda: K.Matern52(1.3, LENGTHSCALE),
    "RationalQuadratic": lambda: K.RationalQuadratic(1.3, LENGTHSCALE, 2.4),
    "Periodic": lambda: K.Periodic(1.3, LENGTHSCALE, 1.7),
    "Cosine": lambda: K.Cosine(1.3, LENGTHSCALE),
    "Linear": lambda: K.Linear(LENGTHSCALE),
    "Polynomial": lambda: K.Polynomial(3, 0.6, 0.8),
    "ArcCosine-0": lambda: K.ArcCosine(0, 1.3, LENGTHSCALE, 0.4),
    "ArcCosine-1": lambda: K.ArcCosine(1, 1.3, LENGTHSCALE, 0.4),
    "ArcCosine-2": lambda: K.ArcCosine(2, 1.3, LENGTHSCALE, 0.4),
    "Constant": lambda: K.Constant(1.3),
    "White": lambda: K.White(1.3),
    "SpectralMixture": lambda: K.SpectralMixture(
        [0.6, 1.4], [[0.3, 0.2], [0.8, 0.5]], [[0.2, 0.4], [0.1, 0.3]]
    ),
    "Sum": lambda: K.RBF(1.3, 0.7) + K.White(0.4) + 0.3,
    "Product": lambda: K.RBF(1.3, 0.7) * K.Linear(0.6),
    "Scaled": lambda: 2.2 * K.Matern32(1.3, LENGTHSCALE),
    "ActiveDims": lambda: K.RBF(1.3, 0.7).on(1),
    "Warped": lambda: K.Warped(
        K.RBF(1.3, 0.7), eqx.nn.MLP(2, 3, 4, 1, activation=jnp.tanh, key=jr.key(3))
    ),
    "Warped-function": lambda: K.Warped(K.RBF(1.3, 0.7), jnp.tanh),
    "Custom": lambda: K.Custom(dot_plus),
}

# Rows 0 and 3 coincide.
X = np.array([[0.3, -1.1], [1.4, 0.2], [-0.6, 0.9], [0.3, -1.1], [2.1, -0.4]])
X2 = np.array([[0.5, 0.7], [0.3, -1.1], [-1.2, 0.1]])


class Facts(NamedTuple):
    """What the tests ask of one kernel, from one compilation: it is what costs."""

    K: np.ndarray
    K12: np.ndarray
    gradients: list
    diag: np.ndarray
    swapped: np.ndarray
    batch: np.ndarray


def matrices_and_gradients(kernel, X, X2):
    leaves, rest = eqx.partition(kernel, eqx.is_array)

    def total(leaves, X, X2):
        kernel = eqx.combine(leaves, rest)
        values = kernel(X), kernel(X, X2)
        return sum(jnp.sum(value) for value in values), values

    gradients, values = jax.grad(total, (0, 1, 2), has_aux=True)(leaves, X, X2)
    return *values, jax.tree.leaves(gradients)


@eqx.filter_jit
def measure(kernel, X, X2):
    leaves, rest = eqx.partition(kernel, eqx.is_array)
    pair = jax.tree.map(lambda leaf: jnp.stack([1.1 * leaf, leaf]), leaves)
    swapped = jax.vmap(lambda x: jax.vmap(lambda x2: kernel.evaluate(x2, x))(X2))(X)
    return Facts(
        *matrices_and_gradients(kernel, X, X2),
        diag=kernel.diag(X),
        swapped=swapped,
        batch=jax.vmap(lambda leaves: eqx.combine(leaves, rest)(X), axis_size=2)(pair),
    )


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request):
    return KERNELS[request.param]()


@pytest.fixture(scope="module")
def facts(kernel):
    # Module scope comes before the rank check of `tests/conftest.py`.
    with jax.numpy_rank_promotion("raise"):
        return measure(kernel, jnp.array(X), jnp.array(X2))


def test_matrix_is_symmetric(facts):
    assert facts.K.shape == (5, 5)
    assert facts.K12.shape == (5, 3)
    assert_allclose(facts.K, facts.K.T, rtol=1e-12, atol=1e-14)


def test_diag_is_the_diagonal_of_the_matrix(facts):
    assert_allclose(facts.diag, np.diag(facts.K), rtol=1e-12)


def test_matrix_is_positive_semidefinite(facts):
    smallest = np.linalg.eigvalsh(facts.K).min()
    assert smallest > -1e-12 * np.trace(facts.K)


def test_matrix_agrees_with_evaluate_in_either_order(facts):
    assert_allclose(facts.K12, facts.swapped, rtol=1e-12, atol=1e-14)


def test_gradients_are_finite_where_inputs_coincide(facts):
    for gradient in facts.gradients:
        assert np.all(np.isfinite(gradient))


def test_plain_calls_agree_with_compiled_ones(kernel, facts):
    assert_allclose(kernel(X, X2), facts.K12, rtol=1e-12, atol=1e-14)


def test_vmap_over_leaves_agrees_with_a_single_kernel(facts):
    assert_allclose(facts.batch[1], facts.K, rtol=1e-12, atol=1e-14)


def test_serialisation_gives_the_kernel_back(kernel):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, kernel)
    file.seek(0)
    blank = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf) if eqx.is_array(leaf) else leaf, kernel
    )
    restored = eqx.tree_deserialise_leaves(file, blank)
    assert jax.tree.structure(restored) == jax.tree.structure(kernel)
    assert eqx.tree_equal(restored, kernel)


def test_float32_stays_float32_with_finite_gradients(kernel, facts):
    single = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if eqx.is_array(leaf) else leaf, kernel
    )
    matrix, K12, gradients = eqx.filter_jit(matrices_and_gradients)(
        single, jnp.array(X, jnp.float32), jnp.array(X2, jnp.float32)
    )
    for value in (matrix, K12, *gradients):
        assert value.dtype == jnp.float32
        assert np.all(np.isfinite(value))
    assert_allclose(K12, facts.K12, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kernel",
    [
        K.RBF(),
        K.RBF(2, 3),
        K.Matern12(),
        K.Matern32(),
        K.Matern52(),
        K.RationalQuadratic(),
        K.Periodic(),
        K.Cosine(),
        K.Linear(),
        K.Polynomial(2),
        K.ArcCosine(0),
        K.ArcCosine(1),
        K.Constant(),
        K.White(),
        2 * K.RBF() + 3,
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_python_numbers_leave_the_dtype_to_the_inputs(kernel):
    for dtype in (jnp.float32, jnp.float64):
        inputs = jax.ShapeDtypeStruct((5, 2), dtype)
        results = jax.eval_shape(lambda X: (kernel(X), kernel.diag(X)), inputs)
        assert [result.dtype for result in results] == [dtype, dtype]
