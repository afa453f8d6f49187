"""Standardised data: constant columns, odd units, what is refused."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import pytest
from numpy.testing import assert_allclose

import numpyro_gpx as gpx

RNG = np.random.default_rng(6)
X = RNG.normal(size=(30, 2)) * [2.0, 0.3] + [5.0, -1.0]
Y = RNG.normal(size=30) + 3.0


@pytest.mark.parametrize("unit", [1e-130, 1e-13, 1e-3, 1e13, 1e130])
def test_units_do_not_matter(unit):
    one, other = gpx.standardise(X, Y), gpx.standardise(X * unit, Y * unit)
    assert_allclose(other.X, one.X, rtol=1e-9)
    assert_allclose(other.y, one.y, rtol=1e-9)
    assert_allclose(other.X_scale, unit * X.std(axis=0), rtol=1e-9)
    assert_allclose(other.inputs(X[:3] * unit), one.X[:3], rtol=1e-9)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3e-13, 7e130])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_columns_are_shifted_and_not_scaled(constant, dtype):
    if dtype == np.float32 and constant > 1e38:
        constant = 7e13
    columns = np.stack([np.full(1000, constant), np.arange(1000.0)], axis=1)
    found = gpx.standardise(columns.astype(dtype), np.ones(1000))
    assert found.X.dtype == dtype and found.X_scale[0] == 1.0
    assert_allclose(found.X[:, 0], 0.0, atol=1e-6 * abs(constant))
    assert_allclose(found.X[:, 1].std(), 1.0, rtol=1e-5)


def test_a_small_spread_about_a_large_mean_is_a_spread():
    """Times in seconds, milliseconds apart: 2500 times the last digit."""
    times = 1.7e9 + 1e-3 * np.arange(40.0)[:, None]
    assert_allclose(gpx.standardise(times, np.arange(40.0)).X.std(), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "unit, dtype", [(1e200, float), (1.2e307, float), (1e-200, float), (1e22, "f4")]
)
def test_units_in_which_variances_are_out_of_range_are_refused(unit, dtype):
    words = "must have columns whose variance .* can hold; got a standard deviation of"
    big = (X * unit).astype(dtype)
    with pytest.raises(ValueError, match="`X` " + words):
        gpx.standardise(big, Y)
    with pytest.raises(ValueError, match="`y` " + words + ".*`y / "):
        gpx.standardise(X.astype(dtype), big[:, 0])


@pytest.mark.parametrize(
    "y, error, words",
    [
        (1j * Y, ValueError, "`y` must be real; got complex128"),
        (["a"] * 30, TypeError, "`y` must be a number or an array of numbers"),
        (np.where(Y == Y[4], np.inf, Y), ValueError, "`y` must be finite; got inf"),
        (np.full(30, np.nan), ValueError, "`y` must have a value in each column"),
    ],
)
def test_targets_that_have_no_moments_are_refused(y, error, words):
    with pytest.raises(error, match=words):
        gpx.standardise(X, y, missing=True)


def test_predictions_in_other_units_compile():
    def model(X, y=None):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.3), obs=y)

    X = 30.0 + 5.0 * np.random.default_rng(0).normal(size=(12, 1))
    data = gpx.standardise(X, np.sin(X[:, 0]))
    Z = data.X[::4]
    fit = gpx.fit_lbfgs(
        model, gpx.guides.WhitenedGaussian, data.X, data.y, key=jr.key(0),
        progress=False,
    )  # fmt: skip
    found = jax.jit(lambda X: data.predict(fit, X).mean)(jnp.asarray(X))
    np.testing.assert_allclose(found, data.predict(fit, X).mean, rtol=1e-6)


def test_targets_with_units_of_their_own_are_left_alone():
    def model(X, y=None):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), gpx.likelihoods.Poisson(), obs=y)

    X = 30.0 + 5.0 * np.random.default_rng(0).normal(size=(12, 1))
    counts = np.arange(12.0)
    data = gpx.standardise(X)
    Z = data.X[::4]
    assert data.y is None
    fit = gpx.fit_lbfgs(
        model, gpx.guides.WhitenedGaussian, data.X, counts, key=jr.key(0),
        progress=False,
    )  # fmt: skip
    assert_allclose(data.predict(fit, X).mean, fit.predict(data.X).mean, rtol=1e-6)
    both = gpx.standardise(X, counts)
    with pytest.raises(ValueError, match="other targets than.*standardise\\(X"):
        both.predict(fit, X)
    with pytest.raises(ValueError, match=r"shape \(N, 1\).*got \(3, 4\)"):
        data.inputs(np.ones((3, 4)))


def test_missing_targets_stay_missing():
    y = np.where(np.arange(30) < 4, np.nan, Y)
    found = gpx.standardise(X, y, missing=True)
    assert np.isnan(found.y[:4]).all()
    assert_allclose([found.y[4:].mean(), found.y[4:].std()], [0.0, 1.0], atol=1e-12)
    with pytest.raises(ValueError, match="got nan.*Pass `missing=True`"):
        gpx.standardise(X, y)
