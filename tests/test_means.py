"""Mean functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_gpx import means

X = np.array([[0.3, -1.1], [1.4, 0.2], [-0.6, 0.9]])
MATRIX = np.array([[0.4, -0.2, 1.3], [0.7, 0.5, -0.9]])

MEANS = {
    "zero": (means.Zero(), np.zeros(3)),
    "constant": (means.Constant(0.7), np.full(3, 0.7)),
    "constant-outputs": (
        means.Constant(np.array([0.7, -0.3])),
        np.array([[0.7, -0.3]] * 3),
    ),
    "linear": (
        means.Linear(np.array([0.4, 0.7]), 0.3),
        0.4 * X[:, 0] + 0.7 * X[:, 1] + 0.3,
    ),
    "linear-outputs": (
        means.Linear(MATRIX, np.array([0.1, 0.2, 0.3])),
        np.einsum("nd,dp->np", X, MATRIX) + np.array([0.1, 0.2, 0.3]),
    ),
    "identity": (means.Identity(), X),
    "projection": (means.Projection(MATRIX), np.einsum("nd,dp->np", X, MATRIX)),
}


@pytest.fixture(params=MEANS)
def case(request):
    return MEANS[request.param]


def test_values_and_shapes(case):
    mean, expected = case
    with jax.numpy_rank_promotion("raise"):
        got = jax.jit(lambda mean, X: mean(X))(mean, X)
    assert got.shape == expected.shape
    assert_allclose(got, expected, rtol=1e-12)


def test_float32_stays_float32(case):
    mean, _ = case
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mean)
    assert single(jnp.array(X, jnp.float32)).dtype == jnp.float32


def test_python_numbers_leave_the_dtype_to_the_inputs():
    X32 = jnp.array(X, jnp.float32)
    assert means.Constant(2)(X32).dtype == jnp.float32
    assert means.Constant(0.7)(jnp.array(X)).dtype == jnp.float64


def test_inputs_must_be_a_matrix(case):
    mean, _ = case
    with pytest.raises(ValueError, match=r"`X` must have shape \(N, D\); got \(3,\)"):
        mean(jnp.ones(3))


def test_projection_is_fixed_while_linear_learns():
    def slope(mean):
        return jax.jit(jax.grad(lambda mean: jnp.sum(mean(X) ** 2)))(mean)

    assert np.all(slope(means.Projection(MATRIX)).matrix == 0.0)
    assert np.all(slope(means.Linear(MATRIX)).weights != 0.0)
    into_inputs = jax.grad(lambda X: jnp.sum(means.Projection(MATRIX)(X)))(X)
    assert_allclose(into_inputs, np.tile(MATRIX.sum(axis=1), (3, 1)))


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="`value` must be a scalar or a vector"):
        means.Constant(np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"`bias` must be a scalar or .*\(2,\)"):
        means.Linear(MATRIX, np.ones(2))
    with pytest.raises(ValueError, match="`matrix` must be a matrix"):
        means.Projection(np.ones(2))
    with pytest.raises(ValueError, match=r"`weights` must have one row .*\(3,\)"):
        means.Linear(np.ones(3))(X)
