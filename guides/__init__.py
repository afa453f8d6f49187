"""Guides: what `q` may look like. One a file."""

from numpyro_gpx.guides.conditional import ConditionalGaussian
from numpyro_gpx.guides.flow import Flow
from numpyro_gpx.guides.implicit import Implicit
from numpyro_gpx.guides.optimal import OptimalGaussian
from numpyro_gpx.guides.parts.base import SiteGuide
from numpyro_gpx.guides.parts.encoders import Encoder
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.guides.unscented import UnscentedLatent
from numpyro_gpx.guides.whitened import WhitenedGaussian

__all__ = [
    "ConditionalGaussian",
    "Encoder",
    "Flow",
    "GaussianGuide",
    "Implicit",
    "OptimalGaussian",
    "SiteGuide",
    "UnscentedLatent",
    "WhitenedGaussian",
]
