"""What holds for every likelihood of one latent function, as shipped to users.

A new likelihood costs one line in `CASES`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jaxtyping import Array
from numpyro.distributions import constraints

import numpyro_gpx as gpx
from numpyro_gpx import likelihoods as L
from numpyro_gpx.testing import check_likelihood


class Toy(L.Likelihood):
    """What a user writes: a logistic law around `f`, of a scale."""

    scale: Array = eqx.field(converter=jnp.asarray)

    @property
    def support(self):
        return constraints.real

    def distribution(self, f):
        return dist.Logistic(f, self.scale)


CASES = {
    "gaussian": (L.Gaussian(scale=0.37), (-2.3, 0.4)),
    "laplace": (L.Laplace(scale=0.23), (-2.3, 1.7)),
    "student_t": (L.StudentT(df=3.6, scale=0.31), (-2.3, 0.4, 9.0)),
    "bernoulli": (L.Bernoulli(link="probit"), (0, 1)),
    "binomial": (L.Binomial(total_count=11), (0, 4, 11)),
    "poisson": (L.Poisson(exposure=1.6), (0, 3, 41)),
    "negative_binomial": (L.NegativeBinomial(concentration=1.7), (0, 3, 41)),
    "gamma": (L.Gamma(concentration=2.3), (0.2, 1.7, 9.0)),
    "exponential": (L.Exponential(), (0.2, 3.0)),
    "beta": (L.Beta(concentration=5.3), (0.05, 0.4, 0.93)),
    "ordinal": (L.Ordinal((-1.1, 0.4, 1.6)), (0, 1, 3)),
    "from": (
        L.From(lambda f, scale: dist.Gumbel(f, scale), 0.8, log_concave=True),
        (-2.3, 0.4, 2.1),
    ),
    "toy": (Toy(1.1), (-2.3, 0.4)),
}
# Peaks that the plain grid of the shipped contract does not resolve; those of
# tests/likelihoods/test_integrals.py do, against SciPy's densities.
NARROW = ("laplace", "toy")


@pytest.mark.parametrize("name", CASES)
def test_likelihoods_keep_the_contract(name):
    atol = 1e-4 if name in NARROW else 1e-5
    with jax.numpy_rank_promotion("raise"):
        check_likelihood(*CASES[name], atol=atol)


def test_a_toy_likelihood_runs_everywhere(key):
    X = np.linspace(-1.0, 1.0, 12)[:, None]
    model = gpx.models.svgp(gpx.inducing.Points(X[::3]), likelihood=Toy(1.1))
    guide = gpx.guides.WhitenedGaussian
    fit = gpx.fit_svi(model, guide, X, X[:, 0], key=key, num_steps=3, progress=False)
    assert np.all(np.isfinite(fit.predict(X[:4] + 0.1).log_prob(np.zeros(4))))


class WrongExpectation(Toy):
    def expected_log_prob(self, y, f_mean, f_var):
        return super().expected_log_prob(y, f_mean, f_var) + 0.01 * f_var


class WrongDensity(Toy):
    def predictive_log_prob(self, y, f_mean, f_var):
        return super().predictive_log_prob(y, f_mean, 1.05 * f_var)


class WrongMoments(Toy):
    def predictive_moments(self, f_mean, f_var):
        mean, var = super().predictive_moments(f_mean, f_var)
        return L.Moments(mean, var - 0.1 * f_var)


class NoGradient(Toy):
    def expected_log_prob(self, y, f_mean, f_var):
        return super().expected_log_prob(y, jax.lax.stop_gradient(f_mean), f_var)


class AlwaysDouble(Toy):
    def expected_log_prob(self, y, f_mean, f_var):
        found = super().expected_log_prob(y, f_mean, f_var)
        return found.astype(jnp.float64)


@pytest.mark.parametrize(
    "kind, words",
    {
        WrongExpectation: "WrongExpectation.expected_log_prob",
        WrongDensity: "WrongDensity.predictive_log_prob",
        WrongMoments: "variance of WrongMoments",
        NoGradient: "slope of NoGradient.expected_log_prob",
        AlwaysDouble: "float32 in",
    }.items(),
)
def test_the_contract_names_what_is_broken(kind, words):
    with pytest.raises(AssertionError, match=words):
        check_likelihood(kind(1.1), (-2.3, 0.4))


def test_the_contract_says_what_it_cannot_integrate():
    with pytest.raises(ValueError, match="one latent function; Hetero"):
        check_likelihood(L.HeteroscedasticGaussian(), (0.3,))
