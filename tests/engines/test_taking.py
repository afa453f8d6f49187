"""Which engines take a model, and why the others do not."""

import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_gpx as gpx
from numpyro_gpx.engines.taking import ENGINES

X = np.linspace(-1.0, 1.0, 8)[:, None]
LABELS = np.arange(8) % 2
POINTS = gpx.inducing.Points(X[::3])


def taking(inducing=POINTS, link="probit"):
    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = gpx.gp("f", gpx.kernels.RBF(1.0, scale), inducing=inducing)
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(link=link), obs=y)

    return gpx.engines.taking(model, X, LABELS)


def test_a_smooth_model_is_taken_by_all():
    found = taking()
    assert set(found.engines) == set(ENGINES) and not found.objections
    assert "NUTS: takes this model" in str(found)


def test_jumps_in_a_known_function_are_for_engines_without_slopes():
    link = gpx.links.PiecewiseConstant.of("probit", num_pieces=5)
    found = taking(gpx.inducing.Data(X), link)
    assert {"NUTS", "HMC", "SGHMC"} <= set(found.objections)
    assert "SVI" in found.engines
    assert "elliptical" in found.objections["NUTS"]
    assert not taking(link=link).objections


def test_parameters_are_for_engines_that_move_them():
    found = taking(gpx.inducing.Points(X[::3], learn=True))
    assert {"SVI", "LBFGS", "Implicit"} == set(found.engines)
    assert "`params=svi_fit`" in found.objections["NUTS"]
    assert "f/Z" in str(found)
