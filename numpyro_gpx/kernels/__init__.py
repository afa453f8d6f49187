"""Covariance functions: `k(X, X2)` is a matrix, `k.diag(X)` its diagonal."""

from numpyro_gpx.kernels.arccosine import ArcCosine
from numpyro_gpx.kernels.base import Kernel
from numpyro_gpx.kernels.combine import ActiveDims, Product, Scaled, Sum
from numpyro_gpx.kernels.constant import Constant, White
from numpyro_gpx.kernels.custom import Custom
from numpyro_gpx.kernels.linear import Linear, Polynomial
from numpyro_gpx.kernels.periodic import Cosine, Periodic
from numpyro_gpx.kernels.spectral import SpectralMixture
from numpyro_gpx.kernels.stationary import (
    RBF,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
)
from numpyro_gpx.kernels.warped import Warped

__all__ = [
    "RBF",
    "ActiveDims",
    "ArcCosine",
    "Constant",
    "Cosine",
    "Custom",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "SpectralMixture",
    "Sum",
    "Warped",
    "White",
]
