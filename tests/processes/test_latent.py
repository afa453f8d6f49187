"""Sums and products of latent functions, against brute-force integrals in NumPy."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.special
import scipy.stats
from numpy.testing import assert_allclose

from numpyro_gpx.likelihoods import Bernoulli, Gaussian, Poisson
from numpyro_gpx.processes.latent import Gaussian as GaussianLatent
from numpyro_gpx.processes.latent import as_latent
from numpyro_gpx.processes.products import Product
from numpyro_gpx.sites.expected_likelihood import ExpectedLikelihood

F_MEAN, F_VAR = np.array([0.4, -0.8, 1.3]), np.array([0.25, 0.6, 0.09])
G_MEAN, G_VAR = np.array([-0.7, 0.35, 0.5]), np.array([0.4, 0.15, 0.3])


def latent(mean, var, *sites, cov=None):
    return GaussianLatent(
        jnp.asarray(mean), jnp.asarray(var), cov, sites=frozenset(sites)
    )


@pytest.fixture(scope="module")
def f():
    return latent(F_MEAN, F_VAR, "f")


@pytest.fixture(scope="module")
def g():
    return latent(G_MEAN, G_VAR, "g")


def normal_grid(mean, var, number=601, width=9.0):
    """Points `(number, N)` and weights of the trapezoidal rule under N(mean, var)."""
    t = np.linspace(-width, width, number)
    weights = scipy.stats.norm.pdf(t) * (t[1] - t[0])
    return mean + np.sqrt(var) * t[:, None], weights


def product_expectation(fn):
    """E fn(f g) of each row by a grid over both factors."""
    a, w = normal_grid(F_MEAN, F_VAR)
    b, _ = normal_grid(G_MEAN, G_VAR)
    return np.einsum("i,j,ijn->n", w, w, fn(a[:, None] * b[None]))


def bernoulli_logpmf(y, f):
    return -np.logaddexp(0.0, np.where(y == 1, -f, f))


LIKELIHOODS = {
    "gaussian": (
        Gaussian(scale=0.6),
        np.array([0.7, -1.1, 0.2]),
        lambda y, f: scipy.stats.norm.logpdf(y, f, 0.6),
        1e-10,
    ),
    "poisson": (
        Poisson(),
        np.array([3, 0, 2]),
        lambda y, f: y * f - np.exp(f) - scipy.special.gammaln(y + 1.0),
        1e-8,
    ),
    "bernoulli": (Bernoulli(), np.array([1, 0, 1]), bernoulli_logpmf, 1e-7),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_expected_likelihood_of_a_product_is_the_integral_over_both(name, f, g):
    likelihood, y, logpdf, atol = LIKELIHOODS[name]
    expected = product_expectation(lambda h: logpdf(y, h))
    for product in (f * g, g * f):
        ell = ExpectedLikelihood(product, likelihood).log_prob(jnp.asarray(y))
        assert_allclose(ell, expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_predictive_density_of_a_product_is_the_integral_over_both(name, f, g):
    likelihood, y, logpdf, _ = LIKELIHOODS[name]
    expected = np.log(product_expectation(lambda h: np.exp(logpdf(y, h))))
    site = ExpectedLikelihood(f * g, likelihood)
    assert_allclose(site.predictive_log_prob(jnp.asarray(y)), expected, atol=1e-4)


def test_predictive_moments_of_a_product(f, g):
    site = ExpectedLikelihood(f * g, Gaussian(scale=0.6))
    mean = F_MEAN * G_MEAN
    var = F_VAR * G_VAR + F_MEAN**2 * G_VAR + G_MEAN**2 * F_VAR
    assert_allclose(site.mean, mean, rtol=1e-12)
    assert_allclose(site.variance, var + 0.36, rtol=1e-12)


def test_mean_and_variance_of_a_product_in_closed_form(f, g):
    product = f * g
    assert isinstance(product, Product)
    assert product.shape == (3,)
    assert product.sites == {"f", "g"}
    assert_allclose(product.mean, F_MEAN * G_MEAN, rtol=1e-12)
    var = F_VAR * G_VAR + F_MEAN**2 * G_VAR + G_MEAN**2 * F_VAR
    assert_allclose(product.var, var, rtol=1e-12)


def test_product_of_three_and_a_sum_of_products(f, g):
    third = latent([0.9, -0.2, 0.4], [0.1, 0.3, 0.2], "h")
    m, s = F_MEAN * G_MEAN, (f * g).var
    triple = (f * g) * third
    expected = (m**2 + s) * (third.mean**2 + third.var) - (m * third.mean) ** 2
    assert_allclose(triple.mean, m * third.mean, rtol=1e-11)
    assert_allclose(triple.var, expected, rtol=1e-10)
    total = f * g + third
    assert_allclose(total.mean, m + third.mean, rtol=1e-12)
    assert_allclose(total.var, s + third.var, rtol=1e-12)
    other_way = third + f * g
    assert_allclose(other_way.var, total.var, rtol=1e-12)
    assert total.sites == {"f", "g", "h"}


def test_expected_likelihood_of_mixture_plus_gaussian(f, g):
    # The third summand is integrated by a grid of its own.
    third = latent([0.9, -0.2, 0.4], [0.1, 0.3, 0.2], "h")
    y = np.array([1, 0, 1])
    points, w = normal_grid(np.asarray(third.mean), np.asarray(third.var), 81, 7.0)
    a, wa = normal_grid(F_MEAN, F_VAR, 121, 8.0)
    b, _ = normal_grid(G_MEAN, G_VAR, 121, 8.0)
    expected = sum(
        wk * np.einsum(
            "i,j,ijn->n", wa, wa, bernoulli_logpmf(y, a[:, None] * b[None] + shift)
        )
        for wk, shift in zip(w, points, strict=True)
    )  # fmt: skip
    ell = ExpectedLikelihood(f * g + third, Bernoulli()).log_prob(jnp.asarray(y))
    assert_allclose(ell, expected, atol=1e-6)


def test_sums_of_gaussians_add_means_variances_and_covariances():
    rng = np.random.default_rng(6)
    A, B = rng.normal(size=(2, 3, 3))
    A, B = A @ A.T, B @ B.T
    one = latent(F_MEAN, np.diag(A), "f", cov=jnp.asarray(A))
    two = latent(G_MEAN, np.diag(B), "g", cov=jnp.asarray(B))
    total = one + two
    assert_allclose(total.mean, F_MEAN + G_MEAN)
    assert_allclose(total.var, np.diag(A + B))
    assert_allclose(total.row_cov, A + B)
    difference = one - two
    assert_allclose(difference.mean, F_MEAN - G_MEAN)
    assert_allclose(difference.row_cov, A + B)
    # Half known is unknown: no covariance is better than a wrong one.
    with pytest.raises(ValueError, match="give `full_cov=True` to both, or to none"):
        one + latent(G_MEAN, G_VAR, "h")
    assert_allclose((one + as_latent(G_MEAN)).row_cov, A)


def test_arithmetic_with_numbers_and_arrays(f, g):
    shift = jnp.asarray([0.3, -0.4, 2.2])
    for moved in (f + shift, shift + f):
        assert_allclose(moved.mean, F_MEAN + np.asarray(shift))
        assert_allclose(moved.var, F_VAR)
    for scaled in (f * 2.5, 2.5 * f, f * jnp.full(3, 2.5)):
        assert_allclose(scaled.mean, 2.5 * F_MEAN)
        assert_allclose(scaled.var, 6.25 * F_VAR)
    assert_allclose((-f).mean, -F_MEAN)
    assert_allclose((-f).var, F_VAR)
    product = f * g
    assert_allclose((0.4 * product + 0.3).mean, 0.4 * product.mean + 0.3)
    assert_allclose((0.4 * product + 0.3).var, 0.16 * product.var)


def test_numpy_arrays_on_the_left_do_not_tear_a_latent_apart(f, g):
    shift = np.array([0.3, -0.4, 2.2])
    assert_allclose((shift + f).mean, F_MEAN + shift)
    assert_allclose((shift * f).var, F_VAR * shift**2)
    assert_allclose((shift * (f * g)).mean, F_MEAN * G_MEAN * shift)


def test_a_latent_may_be_subtracted_from_a_number(f):
    assert_allclose((1.5 - f).mean, 1.5 - F_MEAN)
    assert_allclose((1.5 - f).var, F_VAR)


@pytest.mark.parametrize("verb", ["added", "multiplied"])
def test_combining_a_site_with_itself_is_refused(verb, f, g):
    for other in (f, f * g if verb == "added" else g * f):
        with pytest.raises(ValueError, match=f"{verb} must come from different GP"):
            f + other if verb == "added" else f * other


def test_known_functions_are_latents_without_variance():
    known = as_latent(jnp.asarray([0.3, 1.4]))
    assert_allclose(known.var, 0.0, atol=1e-30)
    assert as_latent(np.array([2, 3])).mean.dtype == jnp.float64
    assert as_latent(jnp.asarray([2.0], jnp.float32)).var.dtype == jnp.float32
    ell = ExpectedLikelihood(known, Gaussian(0.7)).log_prob(jnp.asarray([0.1, 0.9]))
    assert_allclose(ell, scipy.stats.norm.logpdf([0.1, 0.9], [0.3, 1.4], 0.7))


def within_error(draws, mean, var, number):
    """Six z tests at 5 sd: false alarm about 4e-6 a test."""
    error = np.sqrt(np.asarray(var) / number)
    assert np.all(np.abs(draws.mean(0) - mean) < 5.0 * error)
    fourth = np.mean((draws - np.asarray(mean)) ** 4, axis=0)
    error = np.sqrt((fourth - np.asarray(var) ** 2) / number)
    spread = np.mean((draws - np.asarray(mean)) ** 2, axis=0)
    assert np.all(np.abs(spread - var) < 5.0 * error)


def test_draws_of_products_and_gaussians_have_their_moments(f, g):
    number = 40_000
    keys = jr.split(jr.key(11))
    products, draws = jax.jit(
        lambda: ((f * g).sample(keys[0], (number,)), f.sample(keys[1], (number,)))
    )()
    within_error(np.asarray(products), (f * g).mean, (f * g).var, number)
    within_error(np.asarray(draws), F_MEAN, F_VAR, number)
    # Entries are drawn one by one: no correlation (false alarm 6e-7 at 5 sd).
    correlation = np.corrcoef(np.asarray(products).T)[np.triu_indices(3, 1)]
    assert np.all(np.abs(correlation) < 5.0 / np.sqrt(number))


def test_draws_of_products_with_outputs_keep_entries_in_place():
    mean, var = np.arange(1.0, 7.0).reshape(3, 2), np.full((3, 2), 1e-4)
    product = latent(mean, var, "f") * latent(10.0 * mean, var, "g")
    draw, one = jax.jit(lambda k: (product.sample(k, (5, 4)), product.sample(k)))(
        jr.key(2)
    )
    assert draw.shape == (5, 4, 3, 2)
    assert one.shape == (3, 2)
    assert_allclose(draw, np.broadcast_to(10.0 * mean**2, draw.shape), rtol=0.2)


@pytest.mark.parametrize("outputs", [None, 2])
def test_joint_draws_have_the_covariance_between_rows(outputs):
    rng = np.random.default_rng(9)
    batch = () if outputs is None else (2,)
    root = rng.normal(size=(*batch, 3, 3))
    cov = root @ np.swapaxes(root, -1, -2)  # (3, 3) or (2, 3, 3)
    mean = rng.normal(size=(3, *batch))
    var = np.diagonal(cov, axis1=-2, axis2=-1).T
    joint = latent(mean, var, "f", cov=jnp.asarray(cov))
    number = 40_000
    draws = np.asarray(jax.jit(lambda: joint.sample(jr.key(3), (number,)))())
    assert draws.shape == (number, 3, *batch)
    for p in range(2 if batch else 1):
        x = draws[..., p] if batch else draws
        C = cov[p] if batch else cov
        # Var of an entry of the sample covariance: (C_ij^2 + C_ii C_jj) / n; 5 sd,
        # 12 correlated entries: false alarm below 1e-5.
        error = np.sqrt((C**2 + np.outer(np.diag(C), np.diag(C))) / number)
        assert np.all(np.abs(np.cov(x.T) - C) < 5.0 * error)
    if batch:
        cross = np.cov(draws[..., 0].T, draws[..., 1].T)[:3, 3:]
        scale = np.sqrt(np.outer(np.diag(cov[0]), np.diag(cov[1])) / number)
        assert np.all(np.abs(cross) < 5.0 * scale)


def test_noise_is_correlated_by_a_root_of_the_covariance():
    root = np.random.default_rng(9).normal(size=(3, 3))
    cov = root @ root.T
    joint = latent(F_MEAN, np.diag(cov), "f", cov=jnp.asarray(cov))
    B = np.asarray(joint.correlate(jnp.eye(3))).T
    assert_allclose(B @ B.T, cov, rtol=1e-7, atol=1e-7)
    plain = latent(F_MEAN, F_VAR, "f").correlate(jnp.asarray([0.3, -1.2, 0.8]))
    assert_allclose(plain, np.sqrt(F_VAR) * [0.3, -1.2, 0.8])
