"""Likelihoods `p(y | f)` and their expectations under Gaussian marginals."""

from numpyro_gpx.likelihoods.base import Likelihood, Moments
from numpyro_gpx.likelihoods.bernoulli import Bernoulli
from numpyro_gpx.likelihoods.gaussian import Gaussian
from numpyro_gpx.likelihoods.poisson import Poisson
from numpyro_gpx.likelihoods.student_t import StudentT

__all__ = [
    "Bernoulli",
    "Gaussian",
    "Likelihood",
    "Moments",
    "Poisson",
    "StudentT",
]
