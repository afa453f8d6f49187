"""Draws of the prior as a fit: coherent functions before any data."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

import numpyro_gpx as gpx

X = np.linspace(-1.0, 1.0, 9)[:, None]
Y = np.sin(3.0 * X[:, 0])
KERNEL = gpx.kernels.RBF(variance=1.7, lengthscale=0.8)


def sparse(X, y=None):
    f = gpx.gp(
        "f", KERNEL, inducing=gpx.inducing.Points(np.linspace(-1, 1, 9)[:, None])
    )
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.3), obs=y)


def exact(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    gpx.exact("y", KERNEL, X, scale, obs=y)


def plain(X, y=None):
    slope = numpyro.param("slope", 2.0)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(slope * X[:, 0], 1.0), obs=y)


@pytest.mark.parametrize("given", [(X,), (X, Y)], ids=["no targets", "targets"])
@pytest.mark.parametrize("model", [sparse, exact])
def test_functions_have_the_covariance_of_the_kernel_whatever_the_targets(model, given):
    fit = gpx.Fit.from_prior(model, *given, key=jr.key(0), num_draws=200)
    expected = np.asarray(KERNEL(jnp.asarray(X)))
    assert_allclose(fit.full_cov(X, num_components=200), expected, atol=0.35)
    drawn = fit.functions(jr.key(1), 2000)(X)
    # Errors of covariances of 2000 draws: at most 1.7 * sqrt(2 / 2000) = 0.054 each.
    assert_allclose(np.cov(drawn.T), expected, atol=6 * 0.054)


def test_rows_are_smooth_unlike_those_of_numpyros_predictive():
    fine = np.linspace(-0.1, 0.1, 40)[:, None]
    fit = gpx.Fit.from_prior(sparse, fine, key=jr.key(0), num_draws=200)
    steps = np.diff(fit.functions(jr.key(1), 200)(fine), axis=1)
    # Of the kernel: sqrt(2 (k(0) - k(h))), h = 0.2 / 39.
    assert_allclose(steps.std(), np.sqrt(1.7) * 0.2 / 39 / 0.8, rtol=0.2)


def test_targets_are_predicted_and_what_needs_data_refuses():
    fit = gpx.Fit.from_prior(exact, X, Y, key=jr.key(0), num_draws=500)
    assert fit.approximation == "exact draws of the prior" and not fit.is_mcmc
    assert_allclose(fit.predict(X, of="latent").mean, 0.0, atol=1e-12)
    scale = fit.draws()["scale"]
    assert_allclose(fit.predict(X).var, 1.7 + np.mean(scale**2), rtol=1e-6)
    with pytest.raises(ValueError, match="draws of the prior"):
        gpx.loo(fit)
    with pytest.raises(ValueError, match="draws of the prior"):
        fit.save("nowhere.npz")


def test_arviz_has_them_as_the_prior():
    idata = gpx.Fit.from_prior(exact, X, key=jr.key(0), num_draws=20).to_arviz()
    assert sorted(idata.groups()) == ["prior", "prior_predictive"]
    assert idata.prior["scale"].shape == (1, 20)
    assert idata.prior_predictive["y"].shape == (1, 20, 9)


def test_parameters_have_to_be_given():
    with pytest.raises(ValueError, match="slope"):
        gpx.Fit.from_prior(plain, X, Y, key=jr.key(0))
    fit = gpx.Fit.from_prior(plain, X, Y, key=jr.key(0), params={"slope": 3.0})
    assert_allclose(fit.predict(X).mean, 3.0 * X[:, 0], rtol=1e-6)
