"""Predictive distributions: mixtures over posterior components."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.results.prediction import Prediction
from numpyro_gpx.sites.predictive import FromLikelihood


def test_covariances_of_outputs_are_mixed_over_components_and_rescaled():
    """Two draws of a mixed latent: within components, and between their means."""
    rng = np.random.default_rng(2)
    A = rng.normal(size=(3, 2))
    mean, var = rng.normal(size=(2, 4, 2)), rng.uniform(0.2, 1.0, (2, 4, 2))

    def one(mean, var):
        latent = A @ Gaussian(mean, var, sites=frozenset("g"))
        return FromLikelihood(latent, gpx.likelihoods.Gaussian(0.3))

    chunk = jax.vmap(one)(jnp.asarray(mean), jnp.asarray(var))
    scale = np.array([2.0, 0.5, 1.5])
    found = Prediction([chunk], [4], jr.key(0)).rescaled(np.ones(3), scale)
    means = mean @ A.T
    for n in range(4):
        within = [A @ np.diag(var[s, n]) @ A.T + 0.09 * np.eye(3) for s in range(2)]
        apart = means[:, n] - means[:, n].mean(axis=0)
        cov = np.mean(within, axis=0) + apart.T @ apart / 2
        assert_allclose(found.cov[n], np.outer(scale, scale) * cov, rtol=1e-9)
    assert_allclose(found.var, np.einsum("npp->np", found.cov), rtol=1e-9)
