"""Predictions inside `jax.jit`, `grad` and `vmap`, without harm to the fit."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior

X = jnp.linspace(-1.0, 1.0, 8)[:, None]
Y = jnp.sin(3.0 * X[:, 0])
NEW = jnp.array([[0.13], [-0.42], [0.77]])
TARGETS = jnp.array([0.4, -0.8, 0.1])
rng = np.random.default_rng(0)


def model(X_, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = gpx.gp("f", gpx.kernels.RBF(1.0, scale), inducing=gpx.inducing.Points(X[::2]))
    with numpyro.plate("data", len(X_)):
        gpx.observe("y", f(X_), gpx.likelihoods.Gaussian(0.3), obs=y)


@pytest.fixture(scope="module")
def fit():
    """Two draws, far apart: predictions are mixtures."""
    draws = {
        "scale": np.array([[0.4, 1.3]]), "f": rng.normal(size=(1, 2, 4)),
    }  # fmt: skip
    program = Program.of(Call(model, (X, Y)))
    return gpx.Fit(program, ChainPosterior(draws), facts=gpx.engines.NUTS().facts)


ASKED = {
    "mean": lambda p: p.mean,
    "var": lambda p: p.var,
    "sd": lambda p: p.sd,
    "quantiles": lambda p: p.quantile([0.1, 0.8]),
    "cdf": lambda p: p.cdf(TARGETS),
    "log_prob": lambda p: p.log_prob(TARGETS),
    "rescaled": lambda p: p.rescaled(3.0, 2.0).quantile(0.3),
}


@pytest.mark.parametrize("asked", ASKED)
def test_compiled_is_plain_and_the_fit_stays_usable(fit, asked):
    ask = ASKED[asked]
    expected = ask(fit.predict(NEW))
    assert isinstance(expected, np.ndarray)
    assert_allclose(jax.jit(lambda X: ask(fit.predict(X)))(NEW), expected, rtol=1e-9)
    one_by_one = jax.vmap(lambda x: ask(fit.predict(x[None])))
    if asked not in ("cdf", "log_prob"):  # their targets are those of all rows
        rows = jnp.moveaxis(one_by_one(NEW)[..., 0], 0, -1)
        assert_allclose(rows, expected, rtol=1e-9)
    np.testing.assert_array_equal(ask(fit.predict(NEW)), expected)


@pytest.mark.parametrize("asked", ASKED)
def test_gradients_are_those_of_finite_differences(fit, asked):
    ask, step = ASKED[asked], 1e-5

    def total(X):
        return jnp.sum(ask(fit.predict(X)))

    slope = jax.grad(total)(NEW)
    for row in range(len(NEW)):
        shift = jnp.zeros_like(NEW).at[row, 0].set(step)
        numeric = (total(NEW + shift) - total(NEW - shift)) / (2.0 * step)
        assert_allclose(slope[row, 0], numeric, rtol=1e-5, atol=1e-7)


def test_targets_may_be_traced_as_well(fit):
    prediction = fit.predict(NEW)
    slope = jax.grad(lambda y: jnp.sum(prediction.cdf(y)))(TARGETS)
    # The slope of the distribution function is the density.
    assert_allclose(slope, np.exp(prediction.log_prob(TARGETS)), rtol=1e-9)


def test_draws_and_functions_compile_too(fit):
    draws = jax.jit(lambda X: fit.predict(X).draws)(NEW)
    assert_allclose(draws, fit.predict(NEW).draws, rtol=1e-9)
    functions = fit.functions(jax.random.key(1), 5)
    assert_allclose(jax.jit(functions)(NEW), functions(NEW), rtol=1e-7, atol=1e-9)
    cov = jax.jit(lambda X: fit.full_cov(X))(NEW)
    assert_allclose(cov, fit.full_cov(NEW), rtol=1e-9)
