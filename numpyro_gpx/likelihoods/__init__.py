"""Likelihoods `p(y | f)` and their expectations under Gaussian marginals."""

from numpyro_gpx.likelihoods.any_distribution import From
from numpyro_gpx.likelihoods.base import Likelihood, Moments
from numpyro_gpx.likelihoods.bernoulli import Bernoulli, Binomial
from numpyro_gpx.likelihoods.beta import Beta
from numpyro_gpx.likelihoods.categorical import Categorical
from numpyro_gpx.likelihoods.gamma import Exponential, Gamma
from numpyro_gpx.likelihoods.gaussian import Gaussian
from numpyro_gpx.likelihoods.heteroscedastic import HeteroscedasticGaussian
from numpyro_gpx.likelihoods.laplace import Laplace
from numpyro_gpx.likelihoods.ordinal import Ordinal
from numpyro_gpx.likelihoods.per_output import PerOutput
from numpyro_gpx.likelihoods.poisson import NegativeBinomial, Poisson
from numpyro_gpx.likelihoods.robust_max import RobustMax
from numpyro_gpx.likelihoods.student_t import StudentT

__all__ = [
    "Bernoulli",
    "Beta",
    "Binomial",
    "Categorical",
    "Exponential",
    "From",
    "Gamma",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Laplace",
    "Likelihood",
    "Moments",
    "NegativeBinomial",
    "Ordinal",
    "PerOutput",
    "Poisson",
    "RobustMax",
    "StudentT",
]
