"""For NumPyro's own `SVI` and `MCMC`: bounds, samplers and predictive draws."""

from numpyro_gpx.engines.blackjax_kernel import Blackjax
from numpyro_gpx.engines.monte_carlo_em import MonteCarloEM
from numpyro_gpx.engines.sghmc_kernel import SGHMC
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
