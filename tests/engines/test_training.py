"""What the training of guides shares: starts, programs, what it says of NaN."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import autoguide

import numpyro_gpx as gpx
from numpyro_gpx.cache import num_compiled

X = np.linspace(-1.0, 1.0, 12)[:, None]
Y = 0.7 * X[:, 0] + 0.1


def line(X, y=None):
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(slope[0] + X[:, 0] * slope[1], 0.3), obs=y)


def fitted(guide, num_steps=2, init=None, **options):
    engine = gpx.engines.SVI(guide, num_steps=num_steps, **options)
    with pytest.warns(gpx.FitWarning, match="too few to tell"):
        return gpx.fit(line, engine, X, Y, key=jr.key(0), init=init, progress=False)


def test_another_number_of_steps_is_the_same_program():
    fitted(autoguide.AutoNormal)
    before = num_compiled()
    assert fitted(autoguide.AutoNormal, 7).info["num_steps"] == 7
    assert num_compiled() == before


def test_numpyros_guides_start_from_values():
    start = jnp.asarray([0.4, -1.7])
    fit = fitted(autoguide.AutoDelta, init={"slope": start}, optimizer=optax.adam(0.01))
    # Adam's first two steps are of 0.01 each.
    assert_allclose(fit.params["slope_auto_loc"], start, atol=0.021)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(autoguide.AutoIAFNormal, marks=pytest.mark.slow),
        autoguide.AutoLaplaceApproximation,
    ],
)
def test_numpyros_guides_go_on_from_their_own_fits(kind):
    """Parameters that are trees, and those of what a Laplace fit has become."""
    first = fitted(kind, 15)
    again = fitted(kind, 1, init=first)
    cold = fitted(kind, 1)
    assert again.info["losses"][0] < cold.info["losses"][0]


def broken(y=None):
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.factor("gone", jnp.sqrt(-1.0 - x**2))


@pytest.mark.parametrize(
    "guide, words",
    {
        gpx.guides.WhitenedGaussian: "log density of site `gone` is nan",
        autoguide.AutoDelta: "No starting point with a finite density",
    }.items(),
)
def test_where_a_loss_is_not_finite_is_said(guide, words):
    engine = gpx.engines.SVI(guide, num_steps=1)
    with (
        pytest.warns(RuntimeWarning, match=words),
        pytest.raises(ValueError, match=words),
    ):
        gpx.fit(broken, engine, key=jr.key(0), progress=False)
