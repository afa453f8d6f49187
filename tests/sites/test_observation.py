"""What an observed site says of its rows, with handlers around it or not."""

import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers

import numpyro_gpx as gpx
from numpyro_gpx.program.density import log_terms
from numpyro_gpx.sites.observation import observation

X = np.linspace(-1.0, 1.0, 6)[:, None]
Y = np.array([0.3, -0.2, 0.8, 1.1, -0.6, 0.1])
FIRST = np.array([1, 0, 1, 1, 1, 0], bool)
SECOND = np.array([1, 1, 1, 0, 1, 0], bool)
WEIGHTS = np.array([1.0, 2.0, 0.5, 1.0, 0.0, 3.0])


def model(weights=None, mask=None):
    points = gpx.inducing.Points(X[::2])
    f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=points)
    with numpyro.plate("data", len(X)):
        likelihood = gpx.likelihoods.Gaussian(0.4)
        gpx.observe("y", f(X), likelihood, obs=Y, weights=weights, mask=mask)


def traced(model):
    value = {"f": jnp.array([0.3, -1.1, 0.6])}
    return handlers.trace(handlers.substitute(model, data=value)).get_trace()


def rows():
    """Terms of all rows, without handlers."""
    return np.asarray(observation(traced(model)["y"]).terms(Y))


def test_terms_leave_out_what_any_mask_leaves_out_and_carry_weights_and_scale():
    def masked():
        with handlers.scale(scale=2.5), handlers.mask(mask=jnp.asarray(FIRST)):
            model(weights=WEIGHTS, mask=jnp.asarray(SECOND))

    trace = traced(masked)
    found = observation(trace["y"])
    expected = 2.5 * WEIGHTS * rows() * FIRST * SECOND
    assert_allclose(found.terms(Y), expected, rtol=1e-12)
    assert_allclose(log_terms(trace)[1], expected.sum(), rtol=1e-12)
    assert_allclose(found.counts(), FIRST & SECOND & (WEIGHTS > 0.0))


def test_masks_inside_masks_are_joined():
    def masked():
        with handlers.mask(mask=jnp.asarray(FIRST)):
            with handlers.mask(mask=jnp.asarray(SECOND)):
                model()

    trace = traced(masked)
    found = observation(trace["y"])
    assert_allclose(found.terms(Y), rows() * FIRST * SECOND, rtol=1e-12)
    assert_allclose(found.counts(), FIRST & SECOND)


@pytest.mark.parametrize("rows", [5, 7])
def test_a_latent_of_other_rows_than_its_plate_is_named(rows):
    def wrong():
        f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=gpx.inducing.Points(X[:3]))
        with numpyro.plate("data", rows):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.4), obs=Y)

    words = f"`y` has 6 rows in plate `data`, which has {rows}"
    with pytest.raises(ValueError, match=words):
        traced(wrong)


def test_a_latent_in_the_place_of_an_array_is_named():
    with handlers.seed(rng_seed=0):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(X))
    with pytest.raises(TypeError, match="not an array: hand it to `gpx.observe"):
        np.asarray(f(X))
