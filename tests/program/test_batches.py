"""The size of a minibatch, by every way that takes one."""

import jax.random as jr
import numpy as np
import numpyro
import pytest

import numpyro_gpx as gpx

X = np.linspace(-1.0, 1.0, 12)[:, None]
Y = np.sin(2.0 * X[:, 0])
KEY = {"key": jr.key(0), "progress": False}


def model(X, y=None, *, batch_size=None):
    kernel = gpx.kernels.RBF(variance=1.0, lengthscale=0.7)
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(np.array([[-0.7], [0.6]])))
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(0.3), obs=y, rows=i)


def by_fit_svi(size):
    guide = gpx.guides.WhitenedGaussian
    return gpx.fit_svi(model, guide, X, Y, num_steps=2, batch_size=size, **KEY)


def by_fit_sghmc(size):
    short = dict(num_warmup=2, num_samples=4, num_integration_steps=2)
    return gpx.fit_sghmc(model, X, Y, batch_size=size, **short, **KEY)


def by_engine(size):
    guide = gpx.guides.WhitenedGaussian
    engine = gpx.engines.SVI(guide, num_steps=2, batch_size=size)
    return gpx.fit(model, engine, X, Y, **KEY)


WAYS = [by_fit_svi, by_fit_sghmc, by_engine]


@pytest.mark.filterwarnings("ignore:`fit")  # so few steps
@pytest.mark.parametrize("way", WAYS)
def test_whole_numbers_of_numpy_are_whole_numbers(way):
    fit = way(np.int64(5))
    assert fit.batch_size == 5
    assert np.isfinite(fit.predict(X[:3], num_components=2).mean).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [5.0, True, "5", np.float64(5.0)])
def test_what_is_no_whole_number_is_refused(way, size):
    with pytest.raises(
        TypeError, match="`batch_size` must be a whole number of rows; "
    ):
        way(size)
