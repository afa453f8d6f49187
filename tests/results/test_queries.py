"""Covariances, distribution functions, tables and bounds that a fit is asked for."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior

X = np.linspace(-1.0, 1.0, 8)[:, None]
Y = np.sin(3.0 * X[:, 0])
NEW = np.array([[0.13], [-0.42], [0.77]])
POINTS = gpx.inducing.Points(X[::2])
rng = np.random.default_rng(0)
SCALES = np.array([[0.4, 1.3, 0.7]])


def one(X_, y=None, *, batch_size=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    numpyro.deterministic("precision", scale**-2)
    numpyro.deterministic("rows", X_[:, 0] / scale)
    f = gpx.gp("f", gpx.kernels.RBF(1.0, scale), inducing=POINTS)
    with numpyro.plate("data", len(X_), subsample_size=batch_size) as i:
        gpx.observe("y", f(X_[i]), gpx.likelihoods.Gaussian(0.3), obs=y, rows=i)


def two(X_, y=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=POINTS, num_outputs=2)
    with numpyro.plate("data", len(X_)):
        gpx.observe("y", f(X_), gpx.likelihoods.Gaussian(0.3), obs=y)


def product(X_, y=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=POINTS)
    g = gpx.gp("g", gpx.kernels.RBF(), inducing=POINTS)
    with numpyro.plate("data", len(X_)):
        gpx.observe("y", f(X_) * g(X_), gpx.likelihoods.Gaussian(0.3), obs=y)


def layers(X_, y=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=POINTS)
    h = gpx.propagate("h", f(X_))
    numpyro.deterministic("double", 2.0)
    g = gpx.gp("g", gpx.kernels.RBF(), inducing=POINTS)
    with numpyro.plate("data", len(X_)):
        gpx.observe("y", g(h[:, None]), gpx.likelihoods.Gaussian(0.3), obs=y)


def exact(X_, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    gpx.exact("y", gpx.kernels.RBF(1.0, scale), X_, 0.3, obs=y)


def fit_of(model, y=Y, **draws):
    program = Program.of(Call(model, (jnp.asarray(X), jnp.asarray(y))))
    return gpx.Fit(program, ChainPosterior(draws), facts=gpx.engines.NUTS().facts)


def kernel(A, B, scale):
    return np.exp(-0.5 * ((A - B.T) / scale) ** 2)


def gp_by_hand(scale, v):
    """Mean and covariance at `NEW` given whitened inducing values."""
    Z = X[::2]
    R = np.linalg.cholesky(kernel(Z, Z, scale) + 1e-8 * np.eye(4))
    A = np.linalg.solve(R, kernel(Z, NEW, scale))
    return A.T @ v, kernel(NEW, NEW, scale) - A.T @ A


def exact_by_hand(scale, _):
    C = kernel(X, X, scale) + 0.09 * np.eye(8)
    A = np.linalg.solve(C, kernel(X, NEW, scale))
    return A.T @ Y, kernel(NEW, NEW, scale) - kernel(NEW, X, scale) @ A


@pytest.mark.parametrize("model, by_hand", [(one, gp_by_hand), (exact, exact_by_hand)])
def test_covariance_between_rows_is_that_of_the_mixture(model, by_hand):
    values = {"scale": SCALES}
    v = rng.normal(size=(3, 4))
    if model is one:
        values["f"] = v[None]
    means, covs = zip(*map(by_hand, SCALES[0], v), strict=True)
    expected = np.mean(covs, axis=0) + np.cov(np.transpose(means), ddof=0)
    fit = fit_of(model, **values)
    assert_allclose(fit.full_cov(NEW), expected, atol=1e-6)
    diagonal = np.sqrt(np.diag(fit.full_cov(NEW)))
    assert_allclose(diagonal, fit.predict(NEW, of="latent").sd, rtol=1e-9)


def test_each_output_has_its_own():
    fit = fit_of(two, y=np.stack([Y, Y], 1), f=rng.normal(size=(1, 3, 2, 4)))
    cov = fit.full_cov(NEW)
    assert cov.shape == (2, 3, 3)
    sd = np.sqrt(np.diagonal(cov, axis1=1, axis2=2)).T
    assert_allclose(sd, fit.predict(NEW, of="latent").sd, rtol=1e-9)


def test_products_have_that_of_draws_alone():
    draws = {name: rng.normal(size=(1, 3, 4)) for name in "fg"}
    with pytest.raises(ValueError, match=r"is a product.*fit.functions\(key, 1000\)"):
        fit_of(product, **draws).full_cov(NEW)


def test_distribution_function_of_a_mixture_of_normals():
    v = rng.normal(size=(3, 4))
    means, covs = zip(*map(gp_by_hand, SCALES[0], v), strict=True)
    y = np.array([0.3, -0.6, 0.2])
    sds = [np.sqrt(np.diag(cov) + 0.09) for cov in covs]
    each = [scipy.stats.norm.cdf(y, m, s) for m, s in zip(means, sds, strict=True)]
    prediction = fit_of(one, scale=SCALES, f=v[None]).predict(NEW)
    assert_allclose(prediction.cdf(y), np.mean(each, axis=0), rtol=1e-6)
    assert_allclose(prediction.cdf(prediction.quantile(0.3)), 0.3, rtol=1e-9)
    scaled = prediction.rescaled(5.0, 2.0)
    assert_allclose(scaled.cdf(5.0 + 2.0 * y), prediction.cdf(y), rtol=1e-9)
    with pytest.raises(ValueError, match=r"shape \(3,\) of the predictions"):
        prediction.cdf(0.3)


def test_distribution_function_of_counts_is_a_share_of_draws():
    def counts(X_, y=None):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=POINTS)
        with numpyro.plate("data", len(X_)):
            gpx.observe("y", f(X_), gpx.likelihoods.Poisson(), obs=y)

    fit = fit_of(counts, y=np.arange(8), f=rng.normal(size=(1, 3, 4)))
    prediction = fit.predict(NEW)
    share = np.mean(prediction.draws <= 1, axis=0)
    assert_allclose(prediction.cdf(np.ones(3)), share)


def test_deterministic_sites_are_among_the_draws_and_layers_are_not():
    fit = fit_of(one, scale=SCALES, f=rng.normal(size=(1, 3, 4)))
    draws = fit.draws()
    assert_allclose(draws["precision"], SCALES[0] ** -2)
    assert_allclose(draws["rows"], X[:, 0] / SCALES[0][:, None], rtol=1e-12)
    assert fit.to_arviz(log_likelihood=False).posterior["rows"].shape == (1, 3, 8)
    deep = fit_of(layers, **{n: rng.normal(size=(1, 3, 4)) for n in "fg"})
    assert sorted(deep.draws()) == ["double", "f", "g"]


def test_a_summary_has_what_is_no_gp_and_diagnostics_of_chains_alone():
    chains = np.exp(rng.normal(size=(2, 50)))
    values = {"scale": chains, "f": rng.normal(size=(2, 50, 4))}
    fit = fit_of(one, **values)
    table = fit.summary(["scale", "precision"])
    assert list(table.index) == ["scale", "precision"]
    assert_allclose(table.loc["scale", "mean"], chains.mean(), atol=5e-4)
    assert "r_hat" in table
    assert "f[0]" not in fit.summary().index and "f[0]" in fit.summary("f").index
    with pytest.raises(ValueError, match="`sites` must be"):
        fit.summary("lengthscale")
    program = Program.of(Call(one, (jnp.asarray(X), jnp.asarray(Y))))
    free = ChainPosterior(values, independent=True)
    fit = gpx.Fit(program, free, facts=gpx.engines.Facts("svi", "variational"))
    assert "r_hat" not in fit.summary()


def test_the_bound_of_a_fit_on_minibatches_on_all_rows():
    """Without noise, and the mean of the bounds of minibatches."""
    fit = gpx.fit_svi(
        one, gpx.guides.WhitenedGaussian, X, Y, batch_size=2, num_steps=50,
        key=jr.key(0), progress=False,
    )  # fmt: skip
    whole = fit.elbo(all_rows=True)
    assert whole.standard_error == 0.0
    noisy = fit.elbo(2000)
    # False alarms: 6e-5.
    assert abs(noisy.value - whole.value) < 4.0 * noisy.standard_error
    assert noisy.standard_error > 0.0
    assert fit.objective(all_rows=True) == whole
