"""Moments of every operator on latents against 200000 draws of its parts.

Means, variances and covariances within 6 standard errors, estimated from the draws
themselves: about 60 numbers a case, false alarms below 1e-6.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_gpx.processes.combining import stack
from numpyro_gpx.processes.latent import Gaussian

RNG = np.random.default_rng(5)
N, P, Q, S = 3, 2, 3, 200_000
A = RNG.normal(size=(P, Q))
GROUP = np.array([1, 0, 2])


def part(name, shape):
    """A latent of independent entries, and draws of it."""
    mean, var = RNG.normal(size=shape), RNG.uniform(0.2, 1.5, shape)
    latent = Gaussian(jnp.asarray(mean), jnp.asarray(var), sites=frozenset([name]))
    return latent, mean + np.sqrt(var) * RNG.normal(size=(S, *shape))


F, f = part("f", (N, Q))
G, g = part("g", (N, Q))
H, h = part("h", (N, P))
W, w = part("w", (N, P, Q))

CASES = {
    "A @ f": (A @ F, f @ A.T),
    "f * g": (F * G, f * g),
    "A @ (f * g)": (A @ (F * G), (f * g) @ A.T),
    "(A @ f) * h": ((A @ F) * H, (f @ A.T) * h),
    "W @ f": (W @ F, np.einsum("snpq,snq->snp", w, f)),
    "W @ f + h": (W @ F + H, np.einsum("snpq,snq->snp", w, f) + h),
    "A @ f + 2 h": (A @ F + 2.0 * H, f @ A.T + 2.0 * h),
    "f * g + 0.5": (F * G + 0.5, f * g + 0.5),
    "(f * g)[:, 1:]": ((F * G)[:, 1:], (f * g)[:, :, 1:]),
    "f.take": (F.take(GROUP), f[:, np.arange(N), GROUP]),
    "(f * g).take": ((F * G).take(GROUP), (f * g)[:, np.arange(N), GROUP]),
}


def close(found, draws):
    """Whether numbers are the mean of draws, `(S, ...)`."""
    error = draws.std(axis=0) / np.sqrt(S)
    return np.all(np.abs(np.asarray(found) - draws.mean(axis=0)) < 6.0 * error + 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_moments_are_those_of_draws(name):
    latent, draws = CASES[name]
    assert latent.shape == draws.shape[1:]
    assert close(latent.mean, draws)
    apart = draws - np.asarray(latent.mean)
    assert close(latent.var, apart**2)
    if draws.ndim == 3:
        assert close(latent.output_cov(), np.einsum("snp,snq->snpq", apart, apart))


def test_the_check_above_sees_a_wrong_covariance():
    latent, draws = CASES["W @ f"]
    apart = draws - np.asarray(latent.mean)
    both = np.einsum("snp,snq->snpq", apart, apart)
    assert not close(jnp.asarray(latent.output_cov()) * 1.1, both)


def test_rows_that_depend_are_scaled_and_taken_row_by_row():
    root = RNG.normal(size=(Q, N, N))
    cov = root @ np.swapaxes(root, 1, 2)
    var = np.einsum("qnn->nq", cov)
    latent = Gaussian(jnp.zeros((N, Q)), jnp.asarray(var), jnp.asarray(cov))
    scale = RNG.normal(size=(N, Q))
    expected = scale.T[:, :, None] * cov * scale.T[:, None, :]
    np.testing.assert_allclose((scale * latent).row_cov, expected)
    group = np.array([1, 0, 1])
    taken = np.asarray(latent.take(group).row_cov)
    np.testing.assert_allclose(taken[0, 2], cov[1, 0, 2])
    np.testing.assert_allclose(taken[0, 1], 0.0)
    with pytest.raises(ValueError, match="keeps no covariance between rows"):
        A @ latent


def test_what_is_held_together_is_refused_inside_products_and_sums():
    roots = {"group": jnp.ones((N, Q, 1))}
    first = Gaussian(F.mean, F.var + 1.0, sites=F.sites, roots=roots)
    second = Gaussian(G.mean, G.var + 1.0, sites=G.sites, roots=roots)
    third = Gaussian(H.mean[:, :1], H.var[:, :1], sites=H.sites)
    for combine in (
        lambda: first * second,
        lambda: first * third + second,
        lambda: (first * third) * second,
    ):
        with pytest.raises(ValueError, match="holds .* together"):
            combine()
    with pytest.raises(ValueError, match="factors with independent outputs"):
        W @ (RNG.normal(size=(Q, Q)) @ F)


def test_columns_that_are_not_there_are_nan_and_not_the_last():
    taken = F.take(np.array([0, -1, Q]))
    assert np.isfinite(taken.mean[0]) and np.all(np.isnan(taken.mean[1:]))
    with pytest.raises(ValueError, match="whole numbers, the columns 0 to 2"):
        F.take(np.array([0.0, 1.0, 2.0]))


@pytest.mark.parametrize("index", [3, np.int64(3), -4, [0, 5], np.array([0, 5])])
def test_columns_that_are_not_there_are_refused(index):
    """JAX would take the last one."""
    with pytest.raises(IndexError, match="of a latent of shape"):
        F[:, index]
    with pytest.raises(IndexError, match="must be whole numbers"):
        F[:, 0.5]


def test_columns_by_numbers_masks_and_arrays():
    mixed = A @ F
    np.testing.assert_allclose(mixed[:, np.int64(1)].var, mixed[:, 1].var)
    np.testing.assert_allclose(F[:, [True, False, True]].mean, F.mean[:, [0, 2]])
    table = F[:, np.array([[0, 1], [2, 0]])]
    assert table.shape == (N, 2, 2)
    np.testing.assert_allclose(table.mean[:, 1, 0], F.mean[:, 2])
    with pytest.raises(IndexError, match="cannot be arranged"):
        mixed[:, np.array([[0, 1]])]


def test_the_jitter_of_scaled_rows_is_scaled_like_their_covariance():
    """It is relative to the prior's variance, a number of the same unit."""
    cov = jnp.broadcast_to(2.0 * jnp.eye(N), (Q, N, N))
    latent = Gaussian(F.mean, 2.0 + 0.0 * F.mean, cov, cov_scale=jnp.asarray(2.0))
    np.testing.assert_allclose((-3.0 * latent).cov_scale, 18.0)


def test_stacks_keep_no_covariance_between_rows_and_say_so():
    cov = jnp.eye(N)
    one = Gaussian(jnp.zeros(N), jnp.ones(N), cov, sites=frozenset("a"))
    two = Gaussian(jnp.zeros(N), jnp.ones(N), sites=frozenset("b"))
    with pytest.raises(ValueError, match="leave `full_cov` out"):
        stack(one, two)
