"""Bijections with known log-determinants: what normalizing flows are made of."""

from numpyro_gpx.numerics.bijections.base import Affine, Beside, Bijection, Chain, Stack
from numpyro_gpx.numerics.bijections.channels import ChannelMixing
from numpyro_gpx.numerics.bijections.coupling import SplineCoupling
from numpyro_gpx.numerics.bijections.density import along_the_path, log_density
from numpyro_gpx.numerics.bijections.design import Design, Start
from numpyro_gpx.numerics.bijections.layout import Layout
from numpyro_gpx.numerics.bijections.points import PointMixing, TriangularAffine
from numpyro_gpx.numerics.bijections.splines import (
    ElementwiseSplines,
    spline,
    spline_inverse,
)

__all__ = [
    "Affine",
    "Beside",
    "Bijection",
    "Chain",
    "ChannelMixing",
    "Design",
    "ElementwiseSplines",
    "Layout",
    "PointMixing",
    "SplineCoupling",
    "Stack",
    "Start",
    "TriangularAffine",
    "along_the_path",
    "log_density",
    "spline",
    "spline_inverse",
]
