"""Gaussian processes as ordinary NumPyro models."""

from numpyro_gpx import (
    cache,
    cubature,
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
    plots,
    testing,
    timeseries,
)
from numpyro_gpx.comparison import compare
from numpyro_gpx.comparison.loo import loo
from numpyro_gpx.infer.adversarial import fit_implicit
from numpyro_gpx.infer.sampling import fit_mcmc, fit_nuts, fit_sghmc
from numpyro_gpx.infer.variational import fit_lbfgs, fit_svi
from numpyro_gpx.numerics.jitter import jitter
from numpyro_gpx.processes.combining import stack
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.load import load
from numpyro_gpx.scaling import standardise
from numpyro_gpx.sites import exact, gp, observe, propagate

__version__ = "0.1.0"

__all__ = [
    "Fit",
    "cache",
    "compare",
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
    "latent_space",
    "likelihoods",
    "links",
    "load",
    "loo",
    "means",
    "models",
    "observe",
    "plots",
    "propagate",
    "stack",
    "standardise",
    "testing",
    "timeseries",
]
