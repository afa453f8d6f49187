"""Inducing variables, their covariances, and where to put them."""

from numpyro_gpx.inducing.base import Inducing
from numpyro_gpx.inducing.covariances import Kuf, Kuu, psi, root
from numpyro_gpx.inducing.initialisers import greedy_variance, kmeans, random_subset
from numpyro_gpx.inducing.points import Data, Points

__all__ = [
    "Data",
    "Inducing",
    "Kuf",
    "Kuu",
    "Points",
    "greedy_variance",
    "kmeans",
    "psi",
    "random_subset",
    "root",
]
