"""Engines: the bound, the samplers, and `fit_*`, which run them."""

from numpyro_gpx.infer.adversarial import fit_implicit
from numpyro_gpx.infer.blackjax_kernel import Blackjax
from numpyro_gpx.infer.elbo import ELBO
from numpyro_gpx.infer.importance import ImportanceWeighted
from numpyro_gpx.infer.monte_carlo_em import MonteCarloEM
from numpyro_gpx.infer.sampling import fit_mcmc, fit_nuts, fit_sghmc
from numpyro_gpx.infer.sghmc import SGHMC
from numpyro_gpx.infer.target import Target
from numpyro_gpx.infer.variational import fit_lbfgs, fit_svi

__all__ = [
    "ELBO",
    "ImportanceWeighted",
    "SGHMC",
    "Blackjax",
    "MonteCarloEM",
    "Target",
    "fit_implicit",
    "fit_lbfgs",
    "fit_mcmc",
    "fit_nuts",
    "fit_sghmc",
    "fit_svi",
]
