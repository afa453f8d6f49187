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
    starting,
)
from numpyro_gpx.comparison import compare
from numpyro_gpx.diagnostics import loo, to_arviz
from numpyro_gpx.fit import Fit
from numpyro_gpx.infer import fit_lbfgs, fit_mcmc, fit_nuts, fit_sghmc, fit_svi
from numpyro_gpx.latents import stack
from numpyro_gpx.linalg import jitter
from numpyro_gpx.rows import predictive
from numpyro_gpx.scaling import standardise
from numpyro_gpx.sites import exact, gp, observe, propagate
from numpyro_gpx.storage import load_fit

__version__ = "0.1.0"

__all__ = [
    "Fit",
    "beliefs",
    "compare",
    "conditionals",
    "cubature",
    "exact",
    "fit_lbfgs",
    "fit_mcmc",
    "fit_nuts",
    "fit_sghmc",
    "fit_svi",
    "gp",
    "guides",
    "inducing",
    "infer",
    "jitter",
    "kernels",
    "likelihoods",
    "linalg",
    "links",
    "load_fit",
    "loo",
    "means",
    "models",
    "observe",
    "plots",
    "predictive",
    "propagate",
    "stack",
    "standardise",
    "starting",
    "to_arviz",
]
