"""Figures. Pure matplotlib: nothing is shown or saved; axes drawn into are returned."""

from numpyro_gpx.plots.fits import comparison, posteriors, predictions, styles
from numpyro_gpx.plots.links import link

__all__ = ["comparison", "link", "posteriors", "predictions", "styles"]
