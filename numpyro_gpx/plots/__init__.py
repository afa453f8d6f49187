"""Figures. Pure matplotlib: nothing is shown or saved; axes drawn into are returned."""

from numpyro_gpx.plots.fits import comparison, posteriors, predictions, styles
from numpyro_gpx.plots.latents import (
    latent_space,
    manifold,
    reconstructions,
    relevance,
)
from numpyro_gpx.plots.links import link
from numpyro_gpx.plots.simulations import simulation

__all__ = [
    "comparison",
    "latent_space",
    "link",
    "manifold",
    "posteriors",
    "predictions",
    "reconstructions",
    "relevance",
    "simulation",
    "styles",
]
