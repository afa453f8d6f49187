"""Gauss-Hermite rules, and the derivatives of their expectations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_gpx.cubature import expectation, gauss_hermite, log_expectation_exp

M, V = jnp.array([-0.7, 0.4, 2.3]), jnp.array([0.3, 1.9, 0.6])


@pytest.mark.parametrize("num_nodes", [1, 5, 20, 32])
def test_weights_sum_to_one_and_moments_are_exact(num_nodes):
    nodes, weights = gauss_hermite(num_nodes)
    assert isinstance(nodes, np.ndarray)
    assert_allclose(weights.sum(), 1.0, rtol=1e-14)
    moments = {1: 0.0, 2: 1.0, 4: 3.0, 6: 15.0}
    for power, value in moments.items():
        if power <= 2 * num_nodes - 1:
            assert_allclose(weights @ nodes**power, value, atol=1e-11)


def test_fewer_than_one_node_is_an_error():
    with pytest.raises(ValueError, match="`num_nodes` must be at least 1; got 0"):
        gauss_hermite(0)


def test_expectation_of_an_exponential_and_all_its_derivatives():
    """E exp(b f) = exp(b m + b^2 v / 2), differentiable in m, v and b."""

    def total(m, v, b):
        return jnp.sum(expectation(lambda f: jnp.exp(b * f), m, v, 24))

    def exact(m, v, b):
        return jnp.sum(jnp.exp(b * m + 0.5 * b**2 * v))

    b = jnp.array(0.8)
    for transform in (lambda f: f, lambda f: jax.grad(f, (0, 1, 2)), jax.hessian):
        result, value = (jax.jit(transform(f))(M, V, b) for f in (total, exact))
        for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(value), strict=True):
            assert_allclose(x, y, rtol=1e-9)
    mixed = [jax.jit(jax.grad(jax.grad(f, 2), 1))(M, V, b) for f in (total, exact)]
    assert_allclose(*mixed, rtol=1e-9)
    curved = [jax.jit(jax.hessian(f, 1))(M, V, b) for f in (total, exact)]
    assert_allclose(*curved, rtol=1e-9, atol=1e-12)


def test_gradient_in_the_variance_is_finite_at_zero():
    m, v = jnp.float32(0.7), jnp.float32(0.0)
    gradient = jax.grad(lambda v: expectation(jnp.sin, m, v, 20))(v)
    assert gradient.dtype == jnp.float32
    assert np.isfinite(gradient)


def test_log_expectation_does_not_overflow_and_moved_nodes_agree():
    """log E exp(b f + 900) = 900 + b m + b^2 v / 2; the integrand peaks at m + b v."""
    b = 2.5

    def both(m, v):
        plain = log_expectation_exp(lambda f: b * f + 900.0, m, v, 32)
        shift = b * jnp.sqrt(v)
        moved = log_expectation_exp(lambda f: b * f + 900.0, m, v, 3, shift=shift)
        return plain, moved

    exact = 900.0 + b * np.asarray(M) + 0.5 * b**2 * np.asarray(V)
    for value in jax.jit(both)(M, V):
        assert_allclose(value, exact, rtol=1e-9)
    for in_mean, in_var in zip(
        *(jax.jit(jax.jacobian(both, i))(M, V) for i in (0, 1)), strict=True
    ):
        assert_allclose(np.diag(in_mean), b, rtol=1e-6)
        assert_allclose(np.diag(in_var), 0.5 * b**2, rtol=1e-6)
