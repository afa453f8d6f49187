"""Factorisation, its derivative rule, and the one jitter."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import solve_triangular
from jax.test_util import check_grads
from numpy.testing import assert_allclose

from numpyro_gpx.numerics.factor import cholesky, factorise, positive
from numpyro_gpx.numerics.jitter import current_jitter, explicit_jitter, jitter


def batched(K):
    """Factor and inverse of matrices with leading axes."""
    fn = factorise
    for _ in K.shape[:-2]:
        fn = jax.vmap(fn)
    return fn(K).L, fn(K).W


def positive_definite(shape, size, seed=3):
    root = np.random.default_rng(seed).normal(size=(*shape, size, size))
    return root @ np.swapaxes(root, -1, -2) + 0.7 * np.eye(size)


def with_jitter(K, relative=1e-8):
    mean = np.trace(K, axis1=-2, axis2=-1) / K.shape[-1]
    return K + relative * mean[..., None, None] * np.eye(K.shape[-1])


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_factor_is_the_lower_root_and_its_inverse(batch):
    K = positive_definite(batch, 4)
    L, W = (np.asarray(x) for x in jax.jit(batched)(jnp.asarray(K)))
    assert L.shape == W.shape == K.shape
    assert_allclose(L @ np.swapaxes(L, -1, -2), with_jitter(K), rtol=1e-13, atol=1e-13)
    assert_allclose(W @ L, np.broadcast_to(np.eye(4), K.shape), atol=1e-13)
    assert_allclose(np.triu(L, 1), 0.0, atol=0.0)
    assert_allclose(np.triu(W, 1), 0.0, atol=0.0)
    assert np.all(np.diagonal(L, axis1=-2, axis2=-1) > 0.0)


def test_cholesky_is_the_same_factor():
    K = jnp.asarray(positive_definite((2,), 3))
    assert_allclose(cholesky(K), batched(K)[0], rtol=1e-14)


def test_derivatives_agree_with_finite_differences_to_second_order():
    K = jnp.asarray(positive_definite((), 2))

    @jax.jit
    def both(K):
        return batched(K)

    check_grads(both, (K,), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("stable", [True, False])
def test_gram_is_the_product_with_its_derivatives(stable):
    rng = np.random.default_rng(7)
    Kuu, K = jnp.asarray(positive_definite((), 3)), jnp.asarray(rng.normal(size=(3, 5)))

    def gram(Kuu, K):
        # The estimated error grows with the rows' total variance.
        return factorise(Kuu).gram(K, jnp.asarray(0.0 if stable else 1e300))

    W = np.linalg.inv(np.linalg.cholesky(Kuu))
    assert_allclose(gram(Kuu, K), (W @ K) @ (W @ K).T, rtol=1e-6)  # jitter
    check_grads(jax.jit(gram), (Kuu, K), order=2, modes=("rev",))


def test_derivatives_agree_with_those_of_cholesky_and_solve():
    K = jnp.asarray(positive_definite((), 4))
    rng = np.random.default_rng(5)
    C1, C2 = jnp.asarray(rng.normal(size=(2, 4, 4)))

    def plain(K):
        mean = jnp.mean(jnp.diagonal(K))
        L = jnp.linalg.cholesky(K + 1e-8 * mean * jnp.eye(4))
        return L, solve_triangular(L, jnp.eye(4), lower=True)

    def scalar(factor):
        def value(K):
            L, W = factor(K)
            return jnp.sum(C1 * jnp.sin(L)) + jnp.sum(C2 * W**2)

        return value

    @jax.jit
    def derivatives(K):
        return [
            (jax.grad(f)(K), jax.jacfwd(f)(K), jax.hessian(f)(K))
            for f in (scalar(batched), scalar(plain))
        ]

    ours, theirs = derivatives(K)
    for a, b in zip(ours, theirs, strict=True):
        assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def test_derivatives_hold_in_batches():
    K = jnp.asarray(positive_definite((3,), 3))

    def total(K):
        L, W = batched(K)
        return jnp.sum(jnp.cos(L)) + jnp.sum(W**3)

    def each(K):
        return sum(total(K[i]) for i in range(3))

    together, apart = jax.jit(lambda K: (jax.grad(total)(K), jax.grad(each)(K)))(K)
    assert_allclose(together, apart, rtol=1e-12, atol=1e-13)


def test_float32_stays_float32_and_has_its_own_jitter():
    K = positive_definite((), 3).astype(np.float32)
    L, W = batched(jnp.asarray(K))
    assert L.dtype == W.dtype == jnp.float32
    L = np.asarray(L, np.float64)
    added = np.diagonal(L @ L.T - K) / np.trace(K) * 3
    # Float32 resolves 1e-5 of the diagonal to about 2 %.
    assert_allclose(added, 1e-5, rtol=0.1)


def test_jitter_is_set_for_a_block_and_restored_after_it():
    K = positive_definite((2,), 3)
    assert explicit_jitter() is None
    with jitter(0.3):
        assert explicit_jitter() == current_jitter(jnp.float32) == 0.3
        L = np.asarray(batched(jnp.asarray(K))[0])
        with jitter(None):
            assert current_jitter(jnp.float64) == 1e-8
            assert current_jitter(jnp.float32) == 1e-5
        assert current_jitter(jnp.float64) == 0.3
    assert_allclose(L @ np.swapaxes(L, -1, -2), with_jitter(K, 0.3), rtol=1e-12)
    with pytest.raises(RuntimeError), jitter(0.2):
        raise RuntimeError
    assert explicit_jitter() is None


def test_jitter_of_one_thread_is_not_that_of_another():
    seen = []
    with jitter(0.4):
        thread = threading.Thread(target=lambda: seen.append(explicit_jitter()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("value", [-1e-3, float("nan")])
def test_negative_jitter_is_refused(value):
    with pytest.raises(ValueError, match="`relative` jitter must be at least 0; got"):
        with jitter(value):
            pass


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_positive_clamps_at_a_floor_of_the_dtype(dtype):
    x = jnp.asarray([-0.3, 0.0, 0.3, 2.5], dtype)
    clamped = positive(x)
    floor = np.finfo(dtype).eps.astype(np.float64) ** 2
    assert clamped.dtype == dtype
    expected = np.array([floor, floor, 0.3, 2.5])
    assert_allclose(np.asarray(clamped, np.float64), expected, rtol=1e-6)
    grad = jax.grad(lambda x: jnp.sum(jnp.sqrt(positive(x))))(x)
    assert np.all(np.isfinite(grad))
