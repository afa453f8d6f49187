"""The piecewise-constant link: its expectations, its convergence, its error bounds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from numpy.testing import assert_allclose

from numpyro_gpx.beliefs import DiagonalBelief
from numpyro_gpx.likelihoods import Bernoulli, From, Gamma, Gaussian, Poisson
from numpyro_gpx.links import (
    Exp,
    Identity,
    Link,
    Logit,
    PiecewiseConstant,
    exp_error,
    lipschitz_error,
    pieces_for_error,
    step,
)
from numpyro_gpx.links.piecewise import even_edges, places

EDGES = np.array([-1.4, -0.2, 0.5, 1.9])
VALUES = np.array([0.15, 0.4, 0.35, 0.7, 0.92])  # need not rise
M = np.array([-2.0, -0.3, 0.4, 1.1, 30.0])
V = np.array([0.3, 2.0, 1e-6, 0.8, 4.0])


def probabilities(m, v):
    """`(K, N)` by SciPy, from the definition."""
    ends = np.concatenate([[-np.inf], EDGES, [np.inf]])
    cdf = scipy.stats.norm.cdf(ends[:, None], m, np.sqrt(v))
    return np.diff(cdf, axis=0)


def free(values=VALUES, base=None):
    return PiecewiseConstant(
        jnp.asarray(values), jnp.asarray(EDGES), base or Identity()
    )


def test_the_link_is_a_step_function():
    f = np.array([-5.0, -1.4, -1.0, 0.49, 0.5, 1.9, 8.0])
    expected = [0.15, 0.4, 0.4, 0.35, 0.7, 0.92, 0.92]  # lower edges belong to a piece
    assert_allclose(eqx.filter_jit(free())(jnp.asarray(f)), expected)
    assert_allclose(free().values, VALUES)


def test_places_are_those_of_the_paper():
    edges = even_edges(5, -3.0, 3.0)
    assert_allclose(edges, [-3.0, -1.0, 1.0, 3.0])
    assert_allclose(places(edges, "upper"), [-3.0, -1.0, 1.0, 3.0, 3.0])
    assert_allclose(places(edges, "middle"), [-3.0, -2.0, 0.0, 2.0, 3.0])
    link = PiecewiseConstant.of("logit", num_pieces=5)
    assert_allclose(link.values, scipy.special.expit(places(edges, "upper")))


LIKELIHOODS = {
    "bernoulli": (
        lambda link: Bernoulli(link=link),
        lambda y, g: scipy.stats.bernoulli.logpmf(y, g),
        1,
    ),
    "poisson": (
        lambda link: Poisson(link=link, exposure=2.3),
        lambda y, g: scipy.stats.poisson.logpmf(y, 2.3 * g),
        3,
    ),
    "gamma": (
        lambda link: Gamma(1.7, link=link),
        lambda y, g: scipy.stats.gamma.logpdf(y, 1.7, scale=g / 1.7),
        0.6,
    ),
    "gaussian": (
        lambda link: Gaussian(0.4, link=link),
        lambda y, g: scipy.stats.norm.logpdf(y, g, 0.4),
        0.6,
    ),
    "any": (
        lambda link: From(lambda g: dist.Laplace(g, 0.3), link=link),
        lambda y, g: scipy.stats.laplace.logpdf(y, g, 0.3),
        0.6,
    ),
}


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_expectations_are_sums_over_pieces_for_any_likelihood(name):
    """Eq. 13, and the mixture of eq. 14."""
    make, logpdf, y = LIKELIHOODS[name]
    # Logit and exp as bases, with points at the inverse, hold the same values.
    base = Logit() if name == "bernoulli" else Exp()
    inverse = scipy.special.logit if name == "bernoulli" else np.log
    likelihood = make(free(inverse(VALUES), base))
    y_all = jnp.full(M.shape, y)

    @jax.jit
    def ours(m, v):
        mixture = likelihood.predictive(m, v)
        return (
            likelihood.expected_log_prob(y_all, m, v),
            likelihood.predictive_log_prob(y_all, m, v),
            mixture.log_prob(y_all),
        )

    expected, predictive, mixture = ours(jnp.asarray(M), jnp.asarray(V))
    P, log_p = probabilities(M, V), logpdf(y, VALUES)[:, None]
    assert_allclose(expected, np.sum(P * log_p, axis=0), rtol=1e-11)
    density = np.log(np.sum(P * np.exp(log_p), axis=0))
    assert_allclose(predictive, density, rtol=1e-11)
    assert_allclose(mixture, density, rtol=1e-6)  # NumPyro clips small weights


def test_gradients_in_values_means_and_variances_agree_with_differences():
    y = jnp.asarray([1, 0, 1, 1])
    m, v = jnp.asarray(M[:4]), jnp.asarray([0.3, 2.0, 0.6, 0.8])

    def total(points, m, v):
        return jnp.sum(Bernoulli(link=free(points, Logit())).expected_log_prob(y, m, v))

    points = jnp.asarray(scipy.special.logit(VALUES))
    from jax.test_util import check_grads

    check_grads(jax.jit(total), (points, m, v), order=2, modes=("rev",), rtol=1e-4)


def test_a_belief_about_the_values_is_integrated():
    """Eq. 24, corrected: against draws of the values on a fine grid."""
    y, scale = 0.6, 0.4
    sd = np.array([0.2, 0.5, 0.1, 0.3, 0.7])
    belief = DiagonalBelief(jnp.asarray(VALUES), jnp.asarray(sd))
    likelihood = Gaussian(scale, link=PiecewiseConstant(belief, jnp.asarray(EDGES)))
    m, v = M[:4], V[:4]
    P = probabilities(m, v)
    g = VALUES[:, None] + sd[:, None] * np.linspace(-8.0, 8.0, 4001)
    w = scipy.stats.norm.pdf(np.linspace(-8.0, 8.0, 4001))
    w = w / w.sum()
    log_p = scipy.stats.norm.logpdf(y, g, scale)
    expected = P.T @ (log_p @ w)
    predictive = np.log(P.T @ (np.exp(log_p) @ w))
    y_all = jnp.full(4, y)
    ours = likelihood.expected_log_prob(y_all, jnp.asarray(m), jnp.asarray(v))
    assert_allclose(ours, expected, rtol=1e-10)
    ours = likelihood.predictive_log_prob(y_all, jnp.asarray(m), jnp.asarray(v))
    assert_allclose(ours, predictive, rtol=1e-10)
    mean, var = likelihood.predictive_moments(jnp.asarray(m), jnp.asarray(v))
    assert_allclose(mean, P.T @ VALUES, rtol=1e-12)
    second = P.T @ (VALUES**2 + sd**2) + scale**2
    assert_allclose(var, second - (P.T @ VALUES) ** 2, rtol=1e-10)


def test_a_belief_needs_a_gaussian_likelihood_and_the_identity():
    belief = DiagonalBelief(jnp.asarray(VALUES), jnp.full(5, 0.1))
    link = PiecewiseConstant(belief, jnp.asarray(EDGES), Exp())
    y, m, v = jnp.ones(2), jnp.zeros(2), jnp.ones(2)
    with pytest.raises(TypeError, match="leave out `integrate=True`"):
        Poisson(link=link).expected_log_prob(y, m, v)
    with pytest.raises(TypeError, match="needs the identity as `base`; got Exp"):
        Gaussian(0.3, link=link).expected_log_prob(y, m, v)


@pytest.mark.parametrize("at, order", [("upper", 1), ("middle", 2)])
def test_the_bound_converges_at_the_rate_of_the_theorem(at, order):
    """The error of the value falls like 1/K with upper edges, and like 1/K^2 in the
    middle of pieces, where errors of first order cancel; theorem 1 allows 1/K."""
    y = jnp.asarray([0, 1, 1])
    m, v = jnp.asarray([-0.7, 0.4, 1.3]), jnp.asarray([0.5, 1.2, 0.3])
    exact = np.sum(Bernoulli().expected_log_prob(y, m, v))

    def error(num_pieces):
        link = PiecewiseConstant.of(
            "logit", num_pieces=num_pieces, lower=-8.0, upper=8.0, at=at
        )
        return abs(np.sum(Bernoulli(link=link).expected_log_prob(y, m, v)) - exact)

    sizes = np.array([161, 321, 641, 1281])
    errors = np.array([error(int(k)) for k in sizes])
    rates = np.log(errors[:-1] / errors[1:]) / np.log(2.0)
    assert_allclose(rates, order, atol=0.1)
    assert errors[-1] < (0.01 if order == 1 else 1e-5)


@pytest.mark.parametrize("at", ["upper", "middle"])
@pytest.mark.parametrize("name", ["logit", "exp"])
def test_errors_of_the_theorems_are_those_of_integration(name, at):
    """Theorem 1 bounds, theorem 2 equals, the mean squared error of the link."""
    edges = even_edges(9, -2.0, 2.5)
    link = PiecewiseConstant(
        places(edges, at), edges, {"logit": Logit(), "exp": Exp()}[name]
    )
    smooth = {"logit": scipy.special.expit, "exp": np.exp}[name]
    m, v = np.array([-0.4, 0.9, 1.7]), np.array([0.3, 1.1, 0.05])
    errors, distances = [], []
    for mean, var in zip(m, v, strict=True):
        ends = np.concatenate([[mean - 12 * var**0.5], edges, [mean + 12 * var**0.5]])
        parts = [[], []]
        for k, (a, b) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            if a >= b:
                continue
            value, x_k = float(link.values[k]), float(link.points[k])

            def square(x, value=value, mean=mean, var=var):
                return (smooth(x) - value) ** 2 * scipy.stats.norm.pdf(
                    x, mean, var**0.5
                )

            def distance(x, x_k=x_k, mean=mean, var=var):
                return (x - x_k) ** 2 * scipy.stats.norm.pdf(x, mean, var**0.5)

            parts[0].append(scipy.integrate.quad(square, a, b, epsabs=1e-13)[0])
            parts[1].append(scipy.integrate.quad(distance, a, b, epsabs=1e-13)[0])
        errors.append(sum(parts[0]))
        distances.append(sum(parts[1]))
    arguments = edges, link.points, jnp.asarray(m), jnp.asarray(v)
    if name == "exp":
        assert_allclose(exp_error(*arguments), errors, rtol=1e-7, atol=1e-12)
    else:
        bound = lipschitz_error(*arguments, lipschitz=0.25)
        assert_allclose(bound, 0.25**2 * np.array(distances), rtol=1e-8)
        assert np.all(np.array(errors) <= np.asarray(bound))


@pytest.mark.parametrize(
    "name, error", [("logit", 0.01), ("probit", 0.05), ("exp", 0.1)]
)
def test_pieces_for_an_error_keep_it_and_are_few(name, error):
    link = pieces_for_error(name, error, f_mean=0.3, f_var=1.4)
    rng = np.random.default_rng(0)
    f = 0.3 + np.sqrt(1.4) * rng.normal(size=200_000)
    smooth = {"logit": scipy.special.expit, "probit": scipy.special.ndtr, "exp": np.exp}
    measured = np.sqrt(
        np.mean((smooth[name](f) - np.asarray(link(jnp.asarray(f)))) ** 2)
    )
    assert measured < 1.05 * error  # the mean of 200000 heavy-tailed squares
    assert link.num_pieces < 400
    with pytest.raises(ValueError, match="needs more than 100000 pieces"):
        pieces_for_error("logit", 1e-8)


def test_unknown_links_need_their_lipschitz_constant():
    class Cube(Link):
        def __call__(self, f):
            return f**3

    with pytest.raises(ValueError, match="`lipschitz` must be given for Cube"):
        pieces_for_error(Cube(), 0.1)


def test_a_step_with_errors_is_robust_max_for_two_classes():
    m, v = jnp.asarray([-0.8, 0.3]), jnp.asarray([0.5, 1.4])
    P = scipy.stats.norm.cdf(np.asarray(m) / np.sqrt(v))
    ours = Bernoulli(link=step(0.02)).expected_log_prob(jnp.ones(2), m, v)
    assert_allclose(ours, P * np.log(0.98) + (1.0 - P) * np.log(0.02), rtol=1e-12)
    assert Bernoulli(link="robust").discontinuous
    assert not Bernoulli().discontinuous


def test_wrong_arguments_are_named():
    with pytest.raises(
        ValueError, match=r"`points` must have shape \(K,\).*\(5,\) and"
    ):
        PiecewiseConstant(jnp.zeros(5), jnp.zeros(3))
    with pytest.raises(
        ValueError, match="`at` must be 'upper' or 'middle'; got 'left'"
    ):
        PiecewiseConstant.of("logit", at="left")
    with pytest.raises(ValueError, match="`num_pieces` must be at least 3; got 2"):
        PiecewiseConstant.of("logit", num_pieces=2)
    with pytest.raises(ValueError, match="`lower` must be below `upper`; got 1.0"):
        PiecewiseConstant.of("logit", lower=1.0, upper=-1.0)
