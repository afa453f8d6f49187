"""SGHMC on targets whose moments are known."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

import numpyro_gpx as gpx
from numpyro_gpx.infer import SGHMC


def run(kernel, *args, num_warmup=300, num_samples=2000, **kwargs):
    mcmc = MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False
    )
    mcmc.run(jr.key(3), *args, **kwargs)
    return mcmc


def standard_errors(draws):
    """Of mean and standard deviation, from the effective number of draws."""
    ess = np.maximum(effective_sample_size(draws[None]), 10.0)
    sd = draws.std(axis=0)
    return sd / np.sqrt(ess), sd / np.sqrt(2.0 * ess)


def test_moments_of_a_correlated_gaussian():
    """4 standard errors on 6 numbers: false alarms below 4e-4."""
    loc = np.array([1.3, -0.4, 20.0])
    cov = np.array([[2.0, 0.9, 0.0], [0.9, 0.8, 0.1], [0.0, 0.1, 30.0]])

    def model():
        numpyro.sample("x", dist.MultivariateNormal(loc, cov))

    draws = np.asarray(run(SGHMC(model, step_size=0.3)).get_samples()["x"])
    mean_error, sd_error = standard_errors(draws)
    assert np.all(np.abs(draws.mean(axis=0) - loc) < 4.0 * mean_error)
    sd = np.sqrt(np.diag(cov))
    assert np.all(np.abs(draws.std(axis=0) - sd) < 4.0 * sd_error)


def test_points_of_em_are_not_taken_for_chains_that_stand():
    X = jnp.linspace(-1.0, 1.0, 10)[:, None]

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(scale), obs=y)

    Z = np.asarray(X[::3])
    with pytest.warns(gpx.FitWarning):
        fit = gpx.fit_sghmc(
            model, X, jnp.sin(3.0 * X[:, 0]), em=gpx.infer.MonteCarloEM(num_rounds=20),
            key=jr.key(0), num_warmup=2, num_samples=20, progress=False,
        )  # fmt: skip
    kinds = [note.kind for note in fit.check()]
    assert "points" in kinds and "frozen" not in kinds


def test_moments_of_a_constrained_target():
    """4 standard errors on 2 numbers, and 2 % for the step size: below 2e-4."""

    def model():
        numpyro.sample("x", dist.Gamma(3.5, 0.7))

    draws = np.asarray(run(SGHMC(model)).get_samples()["x"])
    assert np.all(draws > 0.0)
    mean_error, sd_error = standard_errors(draws)
    assert abs(draws.mean() - 5.0) < 4.0 * mean_error + 0.02 * 5.0
    sd = np.sqrt(3.5) / 0.7
    assert abs(draws.std() - sd) < 4.0 * sd_error + 0.02 * sd


@pytest.fixture(scope="module")
def regression():
    """A sparse GP regression with its posterior of `v` in closed form."""
    rng = np.random.default_rng(5)
    X = np.sort(rng.uniform(-2.0, 2.0, 60))[:, None]
    y = np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=60)
    Z = np.linspace(-2.0, 2.0, 4)[:, None]
    kernel = gpx.kernels.RBF(variance=1.4, lengthscale=0.9)

    def model(X, y=None, *, batch_size=None):
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            likelihood = gpx.likelihoods.Gaussian(0.45)
            gpx.observe("y", f(X[i]), likelihood, obs=y, rows=i)

    K = np.asarray(kernel(Z)) + 1.4e-8 * np.eye(4)
    A = np.linalg.solve(np.linalg.cholesky(K), np.asarray(kernel(Z, X)))
    cov = np.linalg.inv(np.eye(4) + A @ A.T / 0.45**2)
    return model, X, y, cov @ A @ y / 0.45**2, cov


def test_gp_regression_within_a_tenth_of_sd_on_all_rows(regression):
    """All rows: unbiased for a Gaussian. Ten percent is over 4 standard errors."""
    model, X, y, mean, cov = regression
    fit = gpx.fit_sghmc(
        model, X, y, key=jr.key(1), num_samples=3000, step_size=0.3, progress=False
    )
    draws = fit.draws()["f"]
    sd = np.sqrt(np.diag(cov))
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 0.1 * sd)
    assert_allclose(draws.std(axis=0), sd, rtol=0.1)


def test_bias_of_minibatches_shrinks_with_the_step_size(regression):
    """The tightest direction of the posterior is heated the most."""
    model, X, y, _, cov = regression
    values, vectors = np.linalg.eigh(cov)
    ratios = []
    for step_size in (0.6, 0.1):
        fit = gpx.fit_sghmc(
            model, X, y, key=jr.key(2), batch_size=10, step_size=step_size,
            num_samples=4000, progress=False,
        )  # fmt: skip
        draws = fit.draws()["f"] @ vectors[:, 0]
        ratios.append(draws.var() / values[0])
    assert ratios[0] > 1.5
    assert abs(ratios[1] - 1.0) < 0.5 * abs(ratios[0] - 1.0)


def test_rows_of_local_sites_get_their_own_posterior():
    """Each row moves only when it is in the batch, and is still sampled right."""
    y = np.linspace(-2.0, 2.0, 8)

    def model(y, batch_size=None):
        with numpyro.plate("data", 8, subsample_size=batch_size) as i:
            h = numpyro.sample("h", dist.Normal(0.0, 1.5))
            numpyro.sample("y", dist.Normal(h, 0.8), obs=y[i])

    kernel = SGHMC(model, num_integration_steps=40)
    draws = np.asarray(run(kernel, jnp.asarray(y), batch_size=3).get_samples()["h"])
    var = 1.0 / (1.0 / 1.5**2 + 1.0 / 0.8**2)
    assert draws.shape == (2000, 8)
    mean_error, sd_error = standard_errors(draws)
    # 4.5 standard errors on 16 numbers: false alarms below 2e-4.
    assert np.all(np.abs(draws.mean(axis=0) - var * y / 0.8**2) < 4.5 * mean_error)
    assert np.all(np.abs(draws.std(axis=0) - np.sqrt(var)) < 4.5 * sd_error)


def test_adaptation_is_frozen_after_warm_up():
    def model():
        numpyro.sample("x", dist.Normal(0.0, 3.0))

    kernel = SGHMC(model, num_integration_steps=1)
    state = kernel.init(jr.key(0), 20, None, (), {})
    step = jax.jit(lambda s: kernel.sample(s, (), {}))
    masses = []
    for _ in range(30):
        state = step(state)
        masses.append(float(state.grad_square[0]))
    assert len(set(masses[:20])) == 20
    assert len(set(masses[19:])) == 1


def test_vectorised_chains_run():
    def model():
        numpyro.sample("x", dist.Normal(0.7, 1.9).expand([2]).to_event(1))

    mcmc = MCMC(
        SGHMC(model), num_warmup=100, num_samples=400, num_chains=2,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(jr.key(0))
    draws = mcmc.get_samples(group_by_chain=True)["x"]
    assert draws.shape == (2, 400, 2)
    assert not np.allclose(draws[0], draws[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step_size": 0.0}, "`step_size` must be positive and below 2, .*; got 0.0"),
        ({"friction": -1.0}, "`friction` must be positive; got -1.0"),
        (
            {"num_integration_steps": 0},
            "`num_integration_steps` must be a whole number",
        ),
    ],
)
def test_bad_settings_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        SGHMC(lambda: None, **options)
