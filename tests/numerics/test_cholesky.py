"""The Cholesky factor whose derivative is taken by halves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from numpy.testing import assert_allclose

from numpyro_gpx.numerics import cholesky
from numpyro_gpx.numerics.cholesky import lower_cholesky


def positive_definite(size, seed=3):
    root = np.random.default_rng(seed).normal(size=(size, size)) / np.sqrt(size)
    return jnp.asarray(root @ root.T + 0.7 * np.eye(size))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
def test_gradient_is_that_of_perturbed_factors(size):
    """Of `sum(C * L)`: by central differences along a direction, and by JAX's rule."""
    K, rng = positive_definite(size), np.random.default_rng(5)
    C = jnp.asarray(rng.normal(size=(size, size)))

    def value(factor, K):
        return jnp.sum(C * jnp.sin(factor(K)))

    @jax.jit
    def both(K):
        ours = jax.grad(lambda K: value(lower_cholesky, K))(K)
        return ours, jax.grad(lambda K: value(jnp.linalg.cholesky, K))(K)

    ours, theirs = both(K)
    assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9 * float(jnp.abs(theirs).max()))
    D = rng.normal(size=(size, size))
    D = (D + D.T) / size
    up, down = (np.linalg.cholesky(np.asarray(K) + h * D) for h in (1e-5, -1e-5))
    slope = np.sum(np.asarray(C) * (np.sin(up) - np.sin(down))) / 2e-5
    assert_allclose(np.sum(np.asarray(ours) * D), slope, rtol=1e-6)


def test_both_modes_and_second_derivatives(monkeypatch):
    monkeypatch.setattr(cholesky, "_SMALL", 2)  # two halvings of five rows
    check_grads(jax.jit(lower_cholesky), (positive_definite(5),), order=2)


def test_stacks_and_batches_are_one_matrix_each(monkeypatch):
    monkeypatch.setattr(cholesky, "_SMALL", 2)
    K = jnp.stack([positive_definite(5, seed) for seed in (1, 2)])

    def total(K):
        return jnp.sum(jnp.cos(lower_cholesky(K)))

    stacked, mapped, each = jax.jit(
        lambda K: (
            jax.grad(total)(K),
            jax.vmap(jax.grad(total))(K),
            jnp.stack([jax.grad(total)(K[0]), jax.grad(total)(K[1])]),
        )
    )(K)
    assert_allclose(stacked, each, rtol=1e-12, atol=1e-14)
    assert_allclose(mapped, each, rtol=1e-12, atol=1e-14)


def test_small_matrices_of_float32_stay_so():
    L = lower_cholesky(positive_definite(3).astype(jnp.float32))
    assert L.dtype == jnp.float32
