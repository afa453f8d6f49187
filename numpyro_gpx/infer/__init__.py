"""For NumPyro's own `SVI` and `MCMC`: bounds, samplers and predictive draws."""

from numpyro_gpx.infer.blackjax_sampler import Blackjax
from numpyro_gpx.infer.monte_carlo_em import MonteCarloEM
from numpyro_gpx.infer.sghmc import SGHMC
from numpyro_gpx.program.elbo import ELBO
from numpyro_gpx.program.importance import ImportanceWeighted
from numpyro_gpx.results.row_chunks import predictive

__all__ = [
    "ELBO",
    "Blackjax",
    "ImportanceWeighted",
    "MonteCarloEM",
    "SGHMC",
    "predictive",
]
