"""GP calls as messages: they can be seen, answered, and are not part of a trace."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import pytest
import scipy.stats
from numpy.testing import assert_allclose
from numpyro import handlers

import numpyro_gpx as gpx
from numpyro_gpx.sites.gp_calls import (
    CallId,
    drawn_functions,
    given_marginals,
    recorded_calls,
)
from numpyro_gpx.sites.observation import observation

X = np.linspace(-1.0, 1.0, 5)[:, None]
Y = np.array([0.3, -0.2, 0.8, 1.1, -0.6])
NOISE = 0.4


def model(X, y=None):
    points = gpx.inducing.Points(X[::2] + 0.1)
    f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=points)
    g = gpx.gp("g", gpx.kernels.Matern32(0.6, 0.9), inducing=points)
    with numpyro.plate("data", X.shape[0]):
        latent = f(X) - 2.0 * g(X) + f(X + 0.5).bare() * 0.0
        gpx.observe("y", latent, gpx.likelihoods.Gaussian(NOISE), obs=y)


def two_gps(X, y=None):
    points = gpx.inducing.Points(X[::2] + 0.1)
    f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=points)
    g = gpx.gp("g", gpx.kernels.Matern32(0.6, 0.9), inducing=points)
    with numpyro.plate("data", X.shape[0]):
        likelihood = gpx.likelihoods.Gaussian(NOISE)
        gpx.observe("y", f(X) - 2.0 * g(X), likelihood, obs=y)


def traced(model):
    with handlers.seed(rng_seed=0):
        return handlers.trace(model).get_trace(X, Y)


def test_calls_are_recorded_and_leave_no_site():
    with recorded_calls() as seen:
        trace = traced(two_gps)
    assert set(seen.calls) == {CallId("f", 0), CallId("g", 0)}
    assert_allclose(seen.calls[CallId("f", 0)].X, X)
    assert set(trace) == {"f", "g", "data", "y"}


def test_several_calls_of_one_gp_are_told_apart():
    def twice(X, y=None):
        points = gpx.inducing.Points(X[::2] + 0.1)
        f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=points)
        with numpyro.plate("data", X.shape[0]):
            f(X + 1.0)
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(NOISE), obs=y)

    with recorded_calls() as seen:
        traced(twice)
    assert_allclose(seen.calls[CallId("f", 1)].X - X, 0.0)
    assert_allclose(seen.calls[CallId("f", 0)].X - X, 1.0)


def test_marginals_can_be_put_in_the_place_of_calls():
    """The site's density is the closed form of these, whatever the GPs' values are."""
    rng = np.random.default_rng(1)
    f_mean, g_mean = rng.normal(size=(2, 5))
    f_var, g_var = rng.uniform(0.1, 0.5, (2, 5))
    marginals = {
        CallId("f", 0): (jnp.asarray(f_mean), jnp.asarray(f_var)),
        CallId("g", 0): (jnp.asarray(g_mean), jnp.asarray(g_var)),
    }
    site = traced(given_marginals(two_gps, marginals=marginals))["y"]
    mean, var = f_mean - 2.0 * g_mean, f_var + 4.0 * g_var
    expected = scipy.stats.norm(mean, NOISE).logpdf(Y) - 0.5 * var / NOISE**2
    assert_allclose(site["fn"].log_prob(jnp.asarray(Y)), expected, rtol=1e-12)


def test_calls_without_an_answer_are_the_conditional():
    plain = traced(two_gps)["y"]["fn"].log_prob(jnp.asarray(Y))
    answered = given_marginals(two_gps, marginals={})
    assert_allclose(traced(answered)["y"]["fn"].log_prob(jnp.asarray(Y)), plain)


def test_one_gp_cannot_be_added_to_itself():
    with pytest.raises(ValueError, match=r"different GP sites; both use \['f'\]"):
        traced(model)


def test_drawn_functions_of_like_gps_are_independent():
    """Variance of a sum of two far from their points, which is 2 and not 4.

    2000 draws, 6 standard errors (false alarm 1e-8).
    """

    def alike(X, y=None):
        far = gpx.inducing.Points(np.array([[30.0]]))
        f, g = (
            gpx.gp(name, gpx.kernels.RBF(1.0, 0.7), inducing=far) for name in ("f", "g")
        )
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X) + g(X), gpx.likelihoods.Gaussian(NOISE), obs=y)

    def one(key):
        with drawn_functions(key=key):
            return observation(traced(alike)["y"]).latent().mean

    draws = np.asarray(jax.lax.map(one, jr.split(jr.key(0), 2000)))
    assert_allclose(draws.var(axis=0), 2.0, atol=6.0 * 2.0 * np.sqrt(2.0 / 2000))
