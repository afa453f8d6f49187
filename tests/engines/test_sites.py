"""Closed-form updates: exact where they can be, and as good as training elsewhere."""

import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program

RNG = np.random.default_rng(3)
X = np.linspace(-2.0, 2.0, 30)[:, None]
LATENT = np.sin(2.0 * X[:, 0])
Y = LATENT + 0.2 * RNG.normal(size=30)
COUNTS = RNG.poisson(np.exp(1.0 + LATENT)).astype(float)
Z = X[::4]
OPTIONS = {"key": jr.key(0), "progress": False}


def fixed(likelihood, num_outputs=None):
    def model(X, y=None):
        f = gpx.gp(
            "f", gpx.kernels.RBF(1.2, 0.7), inducing=gpx.inducing.Points(Z),
            mean=gpx.means.Constant(0.3), num_outputs=num_outputs,
        )  # fmt: skip
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), likelihood, obs=y)

    return model


def counts(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    kernel = gpx.kernels.RBF(variance, lengthscale)
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Poisson(), obs=y)


def exact(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    gpx.exact("y", gpx.kernels.RBF(1.0, lengthscale), X, noise, obs=y)


@pytest.mark.parametrize("num_outputs", [None, 2])
def test_one_update_reaches_the_collapsed_bound(num_outputs):
    model = fixed(gpx.likelihoods.Gaussian(0.2), num_outputs)
    y = Y if num_outputs is None else np.stack([Y, 2.0 - Y], axis=1)
    best = gpx.fit_lbfgs(model, gpx.guides.OptimalGaussian, X, y, **OPTIONS)
    with pytest.warns(gpx.FitWarning, match="1 updates"):
        fit = gpx.fit_sites(model, X, y, max_updates=1, **OPTIONS)
    bound = best.elbo(1).value
    assert_allclose(-fit.info["losses"][0], bound, atol=1e-6)
    assert_allclose(fit.elbo(1).value, bound, atol=1e-6)
    for mine, theirs in zip(
        (fit.predict(X).mean, fit.predict(X).var),
        (best.predict(X).mean, best.predict(X).var), strict=True,
    ):  # fmt: skip
        assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize("likelihood, y", [
    (gpx.likelihoods.Bernoulli(), (Y > 0.0).astype(float)),
    (gpx.likelihoods.Poisson(), COUNTS),
    (gpx.likelihoods.StudentT(4.0, 0.2), Y + 3.0 * (np.arange(30) % 11 == 5)),
], ids=["labels", "counts", "outliers"])  # fmt: skip
def test_the_bound_is_that_of_long_training_and_rises_to_it(likelihood, y):
    model = fixed(likelihood)
    fit = gpx.fit_sites(model, X, y, **OPTIONS)
    trained = gpx.fit_lbfgs(model, gpx.guides.WhitenedGaussian, X, y, **OPTIONS)
    assert fit.info["converged"] and fit.check() == []
    assert np.all(np.diff(fit.info["losses"]) < 1e-9)
    assert_allclose(fit.elbo(1).value, trained.elbo(1).value, atol=5e-3)
    assert len(fit.info["losses"]) < 40


@pytest.mark.slow
def test_hyperparameters_are_those_of_the_same_guide_by_svi():
    fit = gpx.fit_sites(counts, X, COUNTS, **OPTIONS)
    rate = optax.cosine_decay_schedule(0.1, 1500, 0.01)
    svi = gpx.fit_svi(
        counts, gpx.guides.ConditionalGaussian, X, COUNTS, num_steps=1500,
        optimizer=optax.adam(rate), **OPTIONS,
    )  # fmt: skip
    # Training averages over its hyperparameters, sites look at one value of them.
    assert fit.elbo(1000).value > svi.elbo(1000).value - 0.3
    for name in ("variance", "lengthscale"):
        mine, theirs = (np.log(f.draws(1000)[name]) for f in (fit, svi))
        assert abs(mine.mean() - theirs.mean()) < 0.6 * theirs.std()
        assert 0.6 < mine.std() / theirs.std() < 1.7


def test_without_gps_it_is_laplaces_approximation():
    fit = gpx.fit_sites(exact, X, Y, **OPTIONS)
    nuts = gpx.fit_nuts(exact, X, Y, num_samples=500, **OPTIONS)
    for name in ("lengthscale", "noise"):
        mine, theirs = (np.log(f.draws(1000)[name]) for f in (fit, nuts))
        assert abs(mine.mean() - theirs.mean()) < 0.4 * theirs.std()
        assert 0.75 < mine.std() / theirs.std() < 1.3


def objection(model, *args):
    return gpx.engines.Sites().objection(Program.of(Call.create(model, args, {})))


def test_what_it_cannot_train_is_named_with_the_way_out():
    def rows(y=None):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", 30 if y is None else len(y)):
            h = numpyro.sample("h", dist.Normal(np.zeros(1), 1.0).to_event(1))
            gpx.observe("y", f(h), gpx.likelihoods.Gaussian(0.3), obs=y)

    def learnt(X, y=None):
        scale = numpyro.param("scale", 0.3)
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(scale), obs=y)

    def unwhitened(X, y=None):
        points = gpx.inducing.Points(Z)
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=points, whiten=False)
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.3), obs=y)

    assert objection(counts, X, COUNTS) is None
    assert "latent sites of their own, ['h']" in objection(rows, Y)
    assert "parameters ['scale']" in objection(learnt, X, Y)
    assert "['f'] are not whitened" in objection(unwhitened, X, Y)
    with pytest.raises(ValueError, match="`fit_sites` cannot.*Use `fit_svi`"):
        gpx.fit_sites(learnt, X, Y, **OPTIONS)
