"""Engines: what `gpx.fit(model, engine, ...)` takes, and what one is made of."""

from numpyro_gpx.engines.engine import Engine, Outcome, Start
from numpyro_gpx.engines.guided import Guided
from numpyro_gpx.engines.implicit import Implicit
from numpyro_gpx.engines.kernels import MCMC, Blackjax
from numpyro_gpx.engines.lbfgs import LBFGS
from numpyro_gpx.engines.nuts import HMC, NUTS
from numpyro_gpx.engines.retry import NotFinite
from numpyro_gpx.engines.sghmc import SGHMC
from numpyro_gpx.engines.sites import Sites
from numpyro_gpx.engines.svi import SVI
from numpyro_gpx.engines.taking import Taking, taking
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.notes import Note
from numpyro_gpx.results.facts import Facts

__all__ = [
    "HMC",
    "LBFGS",
    "MCMC",
    "NUTS",
    "SGHMC",
    "SVI",
    "Blackjax",
    "Engine",
    "Facts",
    "Guided",
    "Implicit",
    "NotFinite",
    "Note",
    "Outcome",
    "Sites",
    "Start",
    "Taking",
    "Watch",
    "taking",
]
