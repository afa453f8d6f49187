"""Fits in several threads: NumPyro's handlers are shared, so they take turns."""

import threading
import warnings

import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_gpx as gpx

X = np.linspace(-1.0, 1.0, 12)[:, None]
Y = np.sin(2.0 * X[:, 0])
Z = X[::4]


def model(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = gpx.gp("f", gpx.kernels.RBF(scale), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.3), obs=y)


def fit(seed):
    return gpx.fit_svi(
        lambda X, y=None: model(X, y), gpx.guides.WhitenedGaussian, X, Y,
        key=jr.key(seed), num_steps=20 + seed, progress=False,
    )  # fmt: skip


def test_four_fits_in_four_threads_are_those_of_one_thread(patience):
    found, failed = {}, []

    def run(seed):
        try:
            found[seed] = fit(seed).predict(X).mean
        except Exception as error:
            failed.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that they wait
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120.0 * patience)
    assert not failed and sorted(found) == [0, 1, 2, 3]
    for seed in (0, 3):
        np.testing.assert_array_equal(found[seed], fit(seed).predict(X).mean)
