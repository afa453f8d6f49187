"""Densities of rows whose outputs depend on each other, against brute force."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.processes.joint_density import row_log_prob
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.sites.predictive import FromLatent, FromLikelihood

N, P = 5, 3
RNG = np.random.default_rng(11)
NOISE = np.array([0.1, 0.3, 0.2])
NORMAL = gpx.likelihoods.Gaussian(np.tile(NOISE, (N, 1)))
KEEP = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1]], bool)
A = RNG.normal(size=(P, 2))


def part(name, *shape):
    mean, var = RNG.normal(size=(N, *shape)), RNG.uniform(0.1, 0.6, (N, *shape))
    return Gaussian(jnp.asarray(mean), jnp.asarray(var), sites=frozenset([name]))


def targets(latent):
    """Draws of the model, but for one row that is far out."""
    f = np.asarray(latent.sample(jr.key(1)))
    y = f + NOISE * RNG.normal(size=f.shape)
    y[3] += 2.0
    return jnp.asarray(y)


def test_mixed_rows_have_the_normal_density_of_the_entries_that_are_kept():
    g = part("g", 2)
    latent = A @ g
    y = targets(latent)
    found = row_log_prob(NORMAL, latent, jnp.where(KEEP, y, jnp.nan), jnp.asarray(KEEP))
    for n in range(N):
        k = KEEP[n]
        cov = A @ np.diag(g.var[n]) @ A.T + np.diag(NOISE**2)
        law = scipy.stats.multivariate_normal(latent.mean[n][k], cov[np.ix_(k, k)])
        assert_allclose(found[n], law.logpdf(np.asarray(y[n])[k]), rtol=1e-9)


def on_a_grid(W, f, r, y, keep, points):
    """The integral over `f` of row after row, as a sum over a fine grid."""
    found = []
    W, f, r = (jax.tree.map(np.asarray, x) for x in (W, f, r))
    for n in range(N):
        mean, sd = f.mean[n], np.sqrt(f.var[n])
        axes = mean[:, None] + sd[:, None] * np.linspace(-8.0, 8.0, points)  # (Q, K)
        F = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        log_p = scipy.stats.norm.logpdf(F, f.mean[n], sd).sum(axis=1)
        centre = F @ W.mean[n].T + r.mean[n]
        spread = np.sqrt(F**2 @ W.var[n].T + r.var[n] + NOISE**2)
        each = scipy.stats.norm.logpdf(y[n], centre, spread)
        log_p = log_p + np.where(keep[n], each, 0.0).sum(axis=1)
        width = np.prod([a[1] - a[0] for a in axes])
        top = log_p.max()
        found.append(top + np.log(np.sum(np.exp(log_p - top)) * width))
    return np.array(found)


@pytest.mark.parametrize("num_factors, points", [(1, 3001), (2, 601), (3, 121)])
@pytest.mark.parametrize("rest", [False, True])
def test_products_of_matrices_agree_with_a_grid(num_factors, points, rest):
    """To 0.01 nats a row, targets that the model did not draw among them."""
    W, f, r = part("W", P, num_factors), part("f", num_factors), part("r", P)
    if not rest:
        r = Gaussian.known(np.zeros((N, P)))
    latent = W @ f + r if rest else W @ f
    y = targets(latent)
    found = row_log_prob(NORMAL, latent, y, jnp.asarray(KEEP))
    expected = on_a_grid(W, f, r, np.asarray(y), KEEP, points)
    assert_allclose(found, expected, atol=0.01)
    # The normal density with the same mean and covariance is another one.
    cov = latent.output_cov() + np.diag(NOISE**2)[None]
    normal = [
        scipy.stats.multivariate_normal(m[k], c[np.ix_(k, k)]).logpdf(v[k])
        for m, c, v, k in zip(
            *map(np.asarray, (latent.mean, cov, y)), KEEP, strict=True
        )
    ]
    assert np.abs(normal - expected).max() > 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: (A @ part("a", 2)) * part("b", P),
        lambda: A @ (part("a", 2) * part("b", 2)),
        lambda: part("W", P, 2) @ part("f", 2) + part("V", P, 2) @ part("h", 2),
        lambda: part("W", P, 2) @ part("f", 2) + A @ part("g", 2),
    ],
)
def test_products_whose_density_is_not_known_say_so(make):
    """Rather than that of a normal with their moments."""
    latent = make()
    y = jnp.zeros((N, P))
    with pytest.raises(ValueError, match="this product the mean, variance, covariance"):
        FromLikelihood(latent, NORMAL).log_prob(y)
    with pytest.raises(ValueError, match="no density in closed form"):
        FromLatent(latent).log_prob(y)


def test_distribution_functions_of_products_agree_with_draws():
    """Entry by entry, within 5 standard errors of 40000 draws (false alarm 1e-5)."""
    latent = part("W", P, 2) @ part("f", 2) + part("r", P)
    law = FromLikelihood(latent, NORMAL)
    y = latent.mean + 0.4
    drawn = np.asarray(law.sample(jr.key(3), (40_000,)))
    share = (drawn <= np.asarray(y)).mean(axis=0)
    assert_allclose(law.cdf(y), share, atol=5.0 * 0.5 / np.sqrt(40_000))


def test_the_covariance_of_targets_is_that_of_draws_or_refused():
    """A normal's within 6 standard errors of 40000 draws (false alarm below 1e-6)."""
    latent = A @ part("g", 2)
    law = FromLikelihood(latent, NORMAL)
    drawn = np.asarray(law.sample(jr.key(3), (40_000,)))
    for n in range(N):
        cov = np.asarray(law.cov[n])
        error = np.sqrt((np.outer(np.diag(cov), np.diag(cov)) + cov**2) / 40_000)
        assert np.all(np.abs(np.cov(drawn[:, n].T) - cov) < 6.0 * error)
    counts = gpx.likelihoods.Poisson()
    with pytest.raises(ValueError, match="known for a Gaussian.*got Poisson"):
        _ = FromLikelihood(latent, counts).cov
    apart = FromLikelihood(part("g", P), counts)
    assert_allclose(apart.cov, [np.diag(v) for v in np.asarray(apart.variance)])
    noisy = gpx.likelihoods.HeteroscedasticGaussian()
    with pytest.raises(ValueError, match="each row has one target here; use `var`"):
        _ = FromLikelihood(part("g", 2), noisy).cov


@pytest.mark.parametrize("num_factors", [2, 3])
def test_single_precision_stays_single(num_factors):
    parts = part("W", P, num_factors), part("f", num_factors)
    W, f = (jax.tree.map(lambda x: x.astype(jnp.float32), latent) for latent in parts)
    law = FromLikelihood(W @ f, gpx.likelihoods.Gaussian(jnp.float32(0.3)))
    y = jnp.zeros((N, P), jnp.float32)
    assert law.log_prob(y).dtype == law.cdf(y).dtype == jnp.float32
