"""Data in units that a model at its start cannot see, and those that it can."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.units import unit_notes

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 1))
Y = np.sin(2.0 * X[:, 0])
YEARS = np.arange(1900.0, 1960.0)[:, None]
COUNTS = RNG.poisson(80.0, size=60).astype(float)
POINTS, DATA = gpx.inducing.Points, gpx.inducing.Data


def make(inducing, lengthscale=1.0, counts=False):
    def model(X, y=None):
        drawn = numpyro.sample("l", dist.LogNormal(jnp.log(lengthscale), 1.0))
        f = gpx.gp("f", gpx.kernels.RBF(1.0, drawn), inducing=inducing)
        noise = gpx.likelihoods.Gaussian(0.3)
        likelihood = gpx.likelihoods.Poisson() if counts else noise
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), likelihood, obs=y)

    return model


def evidence(model, X, y):
    call = Call.create(model, (X, y), {})
    return [next(iter(note.evidence)) for note in unit_notes(Program.of(call))]


@pytest.mark.parametrize("model, X, y, expected", [
    (make(POINTS(X[::5])), X, Y, []),
    (make(POINTS(X[::5])), 1e6 * X, Y, ["unexplained"]),
    (make(POINTS(1e6 * X[::5])), 1e6 * X, Y, ["unexplained"]),
    (make(DATA(1e6 * X)), 1e6 * X, Y, ["unexplained"]),
    (make(DATA(1e6 * X), 1e6), 1e6 * X, Y, []),
    (make(POINTS(1e6 * X[::5]), 1e6), 1e6 * X, Y, []),
    (make(POINTS(X[::5])), X, 5000.0 + 100.0 * Y, ["distance"]),
    (make(POINTS(YEARS[::5]), 10.0), YEARS, Y, []),
    (make(POINTS(X[::5]), counts=True), X, COUNTS, []),
    (make(POINTS(X[::5])), X, 3.0 + 2.0 * Y, []),
], ids=["standard", "X", "X and Z", "rows", "rows, wide", "X and Z, wide", "y", "years",
        "counts", "moved"])  # fmt: skip
def test_data_out_of_sight_are_named_and_no_others(model, X, y, expected):
    assert evidence(model, X, y) == expected


def test_a_fit_says_so():
    model = make(POINTS(X[::5]))
    with pytest.warns(gpx.FitWarning, match="other units than the lengthscales"):
        fit = gpx.fit_svi(
            model, gpx.guides.WhitenedGaussian, 1e6 * X, Y, key=jr.key(0), num_steps=20,
            progress=False,
        )  # fmt: skip
    assert "units" in [note.kind for note in fit.check()]
