"""Gaussian processes as ordinary NumPyro models."""

from numpyro_gpx import (
    beliefs,
    conditionals,
    cubature,
    guides,
    inducing,
    infer,
    kernels,
    likelihoods,
    linalg,
    links,
    means,
    models,
    plots,
    psi,
    starting,
    uncertain,
)
from numpyro_gpx.comparison import compare
from numpyro_gpx.diagnostics import loo, pairwise_distances, to_arviz
from numpyro_gpx.fit import Fit
from numpyro_gpx.infer import (
    fit_implicit,
    fit_lbfgs,
    fit_mcmc,
    fit_nuts,
    fit_sghmc,
    fit_svi,
)
from numpyro_gpx.latents import stack
from numpyro_gpx.linalg import jitter
from numpyro_gpx.projection import project
from numpyro_gpx.row_model import row_model
from numpyro_gpx.rows import predictive
from numpyro_gpx.scaling import standardise
from numpyro_gpx.simulation import lagged, simulate, simulate_paths
from numpyro_gpx.sites import exact, gp, observe, propagate
from numpyro_gpx.storage import load_fit
from numpyro_gpx.uncertain import inputs

__version__ = "0.1.0"

__all__ = [
    "Fit",
    "beliefs",
    "compare",
    "conditionals",
    "cubature",
    "exact",
    "fit_implicit",
    "fit_lbfgs",
    "fit_mcmc",
    "fit_nuts",
    "fit_sghmc",
    "fit_svi",
    "gp",
    "guides",
    "inducing",
    "infer",
    "inputs",
    "jitter",
    "kernels",
    "lagged",
    "likelihoods",
    "linalg",
    "links",
    "load_fit",
    "loo",
    "means",
    "models",
    "observe",
    "pairwise_distances",
    "plots",
    "predictive",
    "project",
    "propagate",
    "psi",
    "row_model",
    "simulate",
    "simulate_paths",
    "stack",
    "standardise",
    "starting",
    "to_arviz",
    "uncertain",
]
