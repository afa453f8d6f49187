"""Beliefs against the textbook, with dense covariances in NumPy."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose

from numpyro_gpx.beliefs import DiagonalBelief, GaussianBelief, kl_to_prior

M = 3


def kl(m, S, mu, K):
    """KL(N(m, S) || N(mu, K)): Rasmussen & Williams (2006), eq. A.23."""
    K_inv = np.linalg.inv(K)
    d = m - mu
    log_dets = np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1]
    return 0.5 * (log_dets + np.trace(K_inv @ S) + d @ K_inv @ d - len(m))


def triangular(rng, *batch):
    L = np.tril(rng.normal(size=(*batch, M, M)))
    return L + (1.7 - 2.0 * (np.diagonal(L, axis1=-2, axis2=-1) < 0)[..., None]) * (
        np.eye(M)
    )


@pytest.fixture(scope="module")
def numbers():
    rng = np.random.default_rng(8)
    L = triangular(rng, 2)
    L = np.tril(L, -1) + np.abs(L) * np.eye(M)
    S = triangular(rng, 2)
    S = np.tril(S, -1) + np.abs(S) * np.eye(M)
    return {
        "mean": rng.normal(size=(2, M)),
        "scale_tril": S,
        "scale": rng.uniform(0.4, 2.2, size=(2, M)),
        "loc": rng.normal(size=(2, M)),
        "prior_scale": rng.uniform(0.4, 2.2, size=(2, M)),
        "prior_tril": L,
    }


def belief_and_covariance(kind, numbers, index):
    mean = numbers["mean"][index]
    if kind == "full":
        S = numbers["scale_tril"][index]
        belief = GaussianBelief(jnp.asarray(mean), jnp.asarray(S))
        return belief, S @ np.swapaxes(S, -1, -2)
    scale = numbers["scale"][index]
    belief = DiagonalBelief(jnp.asarray(mean), jnp.asarray(scale))
    return belief, scale[..., :, None] ** 2 * np.eye(M)


def prior_and_covariance(kind, numbers, index):
    loc = jnp.asarray(numbers["loc"][index])
    if kind == "normal":
        scale = numbers["prior_scale"][index]
        prior = dist.Normal(loc, jnp.asarray(scale)).to_event(loc.ndim)
        return prior, scale[..., :, None] ** 2 * np.eye(M)
    L = numbers["prior_tril"][index]
    prior = dist.MultivariateNormal(loc, scale_tril=jnp.asarray(L))
    return prior.to_event(loc.ndim - 1), L @ np.swapaxes(L, -1, -2)


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("prior_kind", ["normal", "multivariate"])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_kl_is_the_textbook_one(kind, prior_kind, outputs, numbers):
    index = 0 if outputs is None else slice(None)
    belief, S = belief_and_covariance(kind, numbers, index)
    prior, K = prior_and_covariance(prior_kind, numbers, index)
    terms = zip(
        np.reshape(belief.mean, (-1, M)), S.reshape(-1, M, M),
        numbers["loc"].reshape(-1, M), K.reshape(-1, M, M), strict=False,
    )  # fmt: skip
    expected = sum(kl(*term) for term in terms)
    assert_allclose(kl_to_prior(belief, prior), expected, rtol=1e-12)


def test_kl_with_one_prior_factor_for_all_outputs(numbers):
    belief, S = belief_and_covariance("full", numbers, slice(None))
    L = numbers["prior_tril"][0]
    loc = numbers["loc"]
    prior = dist.MultivariateNormal(jnp.asarray(loc), scale_tril=jnp.asarray(L))
    expected = sum(kl(belief.mean[p], S[p], loc[p], L @ L.T) for p in range(2))
    assert_allclose(kl_to_prior(belief, prior.to_event(1)), expected, rtol=1e-12)


def test_kl_to_a_normal_whose_scale_broadcasts(numbers):
    belief, S = belief_and_covariance("full", numbers, 0)
    prior = dist.Normal(jnp.asarray(numbers["loc"][0]), 0.6).to_event(1)
    expected = kl(belief.mean, S, numbers["loc"][0], 0.36 * np.eye(M))
    assert_allclose(kl_to_prior(belief, prior), expected, rtol=1e-12)


def test_kl_to_another_kind_of_prior_is_refused(numbers):
    belief, _ = belief_and_covariance("full", numbers, 0)
    prior = dist.Laplace(jnp.full(M, 0.3), jnp.full(M, 0.7)).to_event(1)
    with pytest.raises(TypeError, match="Normal or MultivariateNormal prior; got Lap"):
        kl_to_prior(belief, prior)


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_spread_is_a_root_of_the_covariance(kind, outputs, numbers):
    index = 0 if outputs is None else slice(None)
    belief, S = belief_and_covariance(kind, numbers, index)
    A = np.random.default_rng(2).normal(size=(M, 4))
    spread = np.asarray(belief.spread(jnp.asarray(A)))
    assert spread.shape == S.shape[:-2] + (M, 4)
    assert_allclose(np.swapaxes(spread, -1, -2) @ spread, A.T @ S @ A, rtol=1e-12)


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_affine_map_of_a_belief(kind, outputs, numbers):
    index = 0 if outputs is None else slice(None)
    belief, S = belief_and_covariance(kind, numbers, index)
    rng = np.random.default_rng(4)
    B, shift = rng.normal(size=(M, M)), rng.normal(size=belief.mean.shape)
    mapped = belief.affine(jnp.asarray(shift), jnp.asarray(B))
    root = np.asarray(mapped.scale_tril)
    cov = root @ np.swapaxes(root, -1, -2)
    mean = shift + np.reshape(belief.mean, (-1, M)).dot(B.T).reshape(shift.shape)
    assert_allclose(mapped.mean, mean, rtol=1e-12)
    assert_allclose(cov, B @ S @ B.T, rtol=1e-12, atol=1e-14)
    # |B S B^T| = |B|^2 |S|, even if the new factor is not triangular with positive
    # diagonal; only triangular B occur in the package.
    B = np.tril(B)
    log_det = np.linalg.slogdet(B @ S @ B.T)[1]
    mapped = belief.affine(jnp.asarray(shift), jnp.asarray(B))
    assert_allclose(mapped.log_determinant(), log_det, rtol=1e-12)


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_distribution_of_a_belief_is_its_density(kind, outputs, numbers):
    index = 0 if outputs is None else slice(None)
    belief, S = belief_and_covariance(kind, numbers, index)
    q = belief.distribution()
    assert q.batch_shape == () and q.event_shape == belief.mean.shape
    v = np.asarray(q.sample(jr.key(1)))
    expected = sum(
        scipy.stats.multivariate_normal(m, C).logpdf(x)
        for m, C, x in zip(
            np.reshape(belief.mean, (-1, M)),
            S.reshape(-1, M, M),
            v.reshape(-1, M),
            strict=True,
        )  # fmt: skip
    )
    assert_allclose(q.log_prob(v), expected, rtol=1e-12)


def test_kl_falls_to_zero_at_the_prior_and_has_zero_gradient_there(numbers):
    L, loc = jnp.asarray(numbers["prior_tril"][0]), jnp.asarray(numbers["loc"][0])
    prior = dist.MultivariateNormal(loc, scale_tril=L)

    def divergence(mean, S):
        return kl_to_prior(GaussianBelief(mean, jnp.tril(S)), prior)

    value, grads = jax.jit(jax.value_and_grad(divergence, (0, 1)))(loc, L)
    assert_allclose(value, 0.0, atol=1e-13)
    for grad in grads:
        assert_allclose(grad, 0.0, atol=1e-12)
