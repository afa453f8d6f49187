"""Model families: functions that return ordinary NumPyro models. One a file."""

from numpyro_gpx.models import priors
from numpyro_gpx.models.deep_gp import deep_gp
from numpyro_gpx.models.exact_gp import exact_gp
from numpyro_gpx.models.gplvm import gplvm, latent_gp
from numpyro_gpx.models.svgp import svgp

__all__ = [
    "deep_gp",
    "exact_gp",
    "gplvm",
    "latent_gp",
    "priors",
    "svgp",
]
