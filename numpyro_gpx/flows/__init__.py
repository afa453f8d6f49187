"""Bijections with known log-determinants: what normalizing flows are made of."""

from numpyro_gpx.flows.base import Affine, Beside, Bijection, Chain, Stack
from numpyro_gpx.flows.channels import ChannelMixing
from numpyro_gpx.flows.coupling import SplineCoupling
from numpyro_gpx.flows.density import along_the_path, log_density
from numpyro_gpx.flows.design import Design, Start
from numpyro_gpx.flows.layout import Layout
from numpyro_gpx.flows.points import PointMixing, TriangularAffine
from numpyro_gpx.flows.splines import ElementwiseSplines, spline, spline_inverse

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
