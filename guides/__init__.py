"""Guides: what `q` may look like. One a file."""

from numpyro_gpx.guides.base import GaussianGuide
from numpyro_gpx.guides.conditional import ConditionalGaussian
from numpyro_gpx.guides.optimal import OptimalGaussian
from numpyro_gpx.guides.whitened import WhitenedGaussian

__all__ = [
    "ConditionalGaussian",
    "GaussianGuide",
    "OptimalGaussian",
    "WhitenedGaussian",
]
