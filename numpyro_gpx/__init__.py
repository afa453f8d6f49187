"""Gaussian processes as ordinary NumPyro models."""

from numpyro_gpx import (
    cache,
    cubature,
    engines,
    guides,
    inducing,
    infer,
    inputs,
    kernels,
    latent_space,
    likelihoods,
    links,
    means,
    models,
    optimizers,
    plots,
    testing,
    timeseries,
)
from numpyro_gpx.comparison import compare
from numpyro_gpx.comparison.loo import loo
from numpyro_gpx.engines.run import fit
from numpyro_gpx.engines.short import (
    fit_guided,
    fit_implicit,
    fit_lbfgs,
    fit_mcmc,
    fit_nuts,
    fit_sghmc,
    fit_sites,
    fit_svi,
)
from numpyro_gpx.notes import FitWarning
from numpyro_gpx.numerics.jitter import jitter
from numpyro_gpx.processes.combining import stack
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.load import load
from numpyro_gpx.scaling import standardise
from numpyro_gpx.sites import exact, gp, observe, propagate

__version__ = "0.1.0"

__all__ = [
    "Fit",
    "FitWarning",
    "cache",
    "compare",
    "cubature",
    "engines",
    "exact",
    "fit",
    "fit_guided",
    "fit_implicit",
    "fit_lbfgs",
    "fit_mcmc",
    "fit_nuts",
    "fit_sghmc",
    "fit_sites",
    "fit_svi",
    "gp",
    "guides",
    "inducing",
    "infer",
    "inputs",
    "jitter",
    "kernels",
    "latent_space",
    "likelihoods",
    "links",
    "load",
    "loo",
    "means",
    "models",
    "observe",
    "optimizers",
    "plots",
    "propagate",
    "stack",
    "standardise",
    "testing",
    "timeseries",
]
