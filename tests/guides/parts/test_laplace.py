"""NumPyro's Laplace approximation, which registers points, becomes its normal."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoLaplaceApproximation

import numpyro_gpx as gpx

Y = jnp.array([0.3, 1.1, 0.4, 0.9, 1.6])


def model(y=None):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", 5):
        numpyro.sample("y", dist.Exponential(rate), obs=y)


def flat(y=None):
    numpyro.sample("rate", dist.Cauchy(0.0, 1.0))
    with numpyro.plate("data", 5):
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


@pytest.fixture(scope="module")
def by_numpyro():
    guide = AutoLaplaceApproximation(model)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    return svi, svi.run(jr.key(0), 800, Y, progress_bar=False)


def curvature():
    """Of the log density of log(rate) at its mode, by hand: a + n and b + sum."""
    a, b = 2.0 + 5.0, 1.0 + float(Y.sum())
    mode = np.log(a / b)
    return mode, 1.0 / np.sqrt(b * np.exp(mode))


def test_plain_svi_has_the_spread_of_the_curvature(by_numpyro):
    svi, result = by_numpyro
    draws = np.log(gpx.Fit.from_svi(svi, result, Y).draws(4000)["rate"])
    mode, sd = curvature()
    # Six standard errors of mean and sd of 4000 draws: false alarms below 1e-8.
    assert_allclose(draws.mean(), mode, atol=6 * sd / np.sqrt(4000))
    assert_allclose(draws.std(), sd, rtol=6 / np.sqrt(8000))


def test_a_fit_has_it_too_and_its_bound_is_below_the_evidence():
    engine = gpx.engines.SVI(
        AutoLaplaceApproximation, num_steps=800, optimizer=optax.adam(0.05)
    )
    fit = gpx.fit(model, engine, Y, key=jr.key(0), progress=False)
    assert_allclose(np.log(fit.draws(4000)["rate"]).std(), curvature()[1], rtol=0.07)
    a, b = 7.0, 1.0 + float(Y.sum())
    evidence = jax.scipy.special.gammaln(a) - a * np.log(b)
    bound = fit.elbo(2000)
    assert evidence - 0.1 < bound.value < evidence + 3.0 * bound.standard_error


def test_a_start_whose_curvature_has_the_wrong_sign_is_told():
    start = init_to_value(values={"rate": 5.0})
    guide = AutoLaplaceApproximation(flat, init_loc_fn=start)
    engine = gpx.engines.SVI(guide, num_steps=2)
    fit = gpx.fit(flat, engine, Y, key=jr.key(0), progress=False)
    assert "singular" in [note.kind for note in fit.check()]
