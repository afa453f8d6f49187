"""What every likelihood of one latent function must satisfy.

The references integrate SciPy's log densities on a dense grid in NumPy and share no
line with the code. A new likelihood costs one line in `CASES`.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats
from numpy.testing import assert_allclose

from numpyro_gpx.likelihoods import (
    Bernoulli,
    Beta,
    Binomial,
    Exponential,
    From,
    Gamma,
    Gaussian,
    Laplace,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from numpyro_gpx.links import Logit, WithFlips

MEANS = np.array([-2.9, -1.3, 0.2, 0.8, 3.1])
VARS = np.array([1e-6, 0.013, 0.3, 1.7, 3.9])


class Case(NamedTuple):
    likelihood: object
    law: object  # f -> the frozen SciPy distribution of y, or a `Labels`
    y: tuple  # observations of the grid
    y_all: np.ndarray  # grid on which densities sum (or, if uneven, integrate) to 1
    atol: float = 1e-6  # of expectations
    predictive_atol: float = 1e-5  # of log predictive densities
    moments_rtol: float = 1e-5
    cdf_atol: float = 1e-5
    mass_vars: tuple = (0.013, 0.3, 1.7)  # where `y_all` holds all of the mass
    mass_means: tuple = MEANS

    def logpdf(self, y, f):
        law = self.law(f)
        return law.logpmf(y) if hasattr(law, "logpmf") else law.logpdf(y)


class Labels:
    """Labels from the logs of their probabilities, a list of arrays."""

    def __init__(self, *log_probs):
        self.log_probs = np.stack(np.broadcast_arrays(*log_probs))

    def logpmf(self, y):
        y, _ = np.broadcast_arrays(y, self.log_probs[0])
        return np.take_along_axis(self.log_probs, y[None].astype(int), axis=0)[0]

    def cdf(self, y):
        return sum(
            np.where(c <= y, np.exp(p), 0.0) for c, p in enumerate(self.log_probs)
        )

    def mean(self):
        return sum(c * np.exp(p) for c, p in enumerate(self.log_probs))

    def var(self):
        square = sum(c**2 * np.exp(p) for c, p in enumerate(self.log_probs))
        return square - self.mean() ** 2


def softplus(f):
    return np.logaddexp(0.0, f)


def logit(f):
    return Labels(-softplus(f), -softplus(-f))


def probit(f):
    return Labels(scipy.special.log_ndtr(-f), scipy.special.log_ndtr(f))


def flipped(f):
    p = 0.03 + 0.94 * scipy.special.expit(f)
    return Labels(np.log1p(-p), np.log(p))


def ordinal(cdf):
    """Differences of tail probabilities, from the side where both are small."""

    def law(f):
        a, b, c = CUTPOINTS
        high = f > 0.5 * (a + b), f > 0.5 * (b + c)
        with np.errstate(divide="ignore"):
            return Labels(
                np.log(cdf(a - f)),
                np.log(
                    np.where(high[0], cdf(b - f) - cdf(a - f), cdf(f - a) - cdf(f - b))
                ),
                np.log(
                    np.where(high[1], cdf(c - f) - cdf(b - f), cdf(f - b) - cdf(f - c))
                ),
                np.log(cdf(f - c)),
            )

    return law


CUTPOINTS = (-1.1, 0.4, 1.6)
LABELS, COUNTS, MANY = np.arange(2), np.arange(2000), np.arange(12000)
REALS = np.linspace(-60.0, 60.0, 6001)
FAR = np.sinh(np.linspace(-12.0, 12.0, 12001))  # heavy tails: uneven grid
POSITIVE = np.exp(np.linspace(-60.0, 14.0, 20001))
SHARES = scipy.special.expit(np.linspace(-70.0, 35.0, 20001))

CASES = {
    "gaussian": Case(
        Gaussian(scale=0.37), lambda f: scipy.stats.norm(f, 0.37), (-2.3, 0.4), REALS
    ),
    "laplace": Case(
        Laplace(scale=0.23), lambda f: scipy.stats.laplace(f, 0.23), (-2.3, 1.7), FAR
    ),
    "student_t": Case(
        StudentT(df=3.6, scale=0.31),
        lambda f: scipy.stats.t(3.6, f, 0.31),
        (-2.3, 0.4, 9.0),
        FAR,
    ),
    "student_t-small-scale": Case(
        StudentT(df=2.7, scale=0.02),
        lambda f: scipy.stats.t(2.7, f, 0.02),
        (-2.3, 0.4),
        FAR,
    ),
    "bernoulli-logit": Case(Bernoulli(), logit, (0, 1), LABELS),
    "bernoulli-probit": Case(Bernoulli(link="probit"), probit, (0, 1), LABELS),
    "bernoulli-flips": Case(
        Bernoulli(link=WithFlips(Logit(), 0.03)), flipped, (0, 1), LABELS
    ),
    "binomial": Case(
        Binomial(total_count=11),
        lambda f: scipy.stats.binom(11, scipy.special.expit(f)),
        (0, 4, 11),
        np.arange(12),
    ),
    "poisson-exp": Case(
        Poisson(exposure=1.6),
        lambda f: scipy.stats.poisson(1.6 * np.exp(f)),
        (0, 3, 41),
        MANY,
        cdf_atol=0.02,  # at 41 a step of width 0.15, nodes 0.4 apart at variance 3.9
    ),
    "poisson-softplus": Case(
        Poisson(link="softplus", exposure=0.7),
        lambda f: scipy.stats.poisson(0.7 * softplus(f)),
        (0, 3, 7),
        COUNTS,
    ),
    "negative_binomial": Case(
        NegativeBinomial(concentration=1.7),
        lambda f: scipy.stats.nbinom(1.7, 1.7 / (1.7 + np.exp(f))),
        (0, 3, 41),
        MANY,
    ),
    "gamma-exp": Case(
        Gamma(concentration=2.3),
        lambda f: scipy.stats.gamma(2.3, scale=np.exp(f) / 2.3),
        (0.2, 1.7, 9.0),
        POSITIVE,
    ),
    "gamma-softplus": Case(
        Gamma(concentration=1.4, link="softplus"),
        lambda f: scipy.stats.gamma(1.4, scale=softplus(f) / 1.4),
        (0.2, 1.7),
        POSITIVE,
    ),
    "exponential": Case(
        Exponential(),
        lambda f: scipy.stats.expon(scale=np.exp(f)),
        (0.2, 3.0),
        POSITIVE,
    ),
    "beta": Case(
        Beta(concentration=5.3),
        lambda f: scipy.stats.beta(
            5.3 * scipy.special.expit(f), 5.3 * scipy.special.expit(-f)
        ),
        (0.05, 0.4, 0.93),
        SHARES,
        # A mean near 0 or 1 puts mass closer to it than floats can tell.
        mass_vars=(0.013,),
        mass_means=(-1.3, 0.2, 0.8),
    ),
    "ordinal-probit": Case(
        Ordinal(CUTPOINTS), ordinal(scipy.special.ndtr), (0, 1, 3), np.arange(4)
    ),
    "ordinal-logit": Case(
        Ordinal(CUTPOINTS, link="logit"),
        ordinal(scipy.special.expit),
        (0, 2, 3),
        np.arange(4),
    ),
    "from": Case(
        From(lambda f, scale: dist.Gumbel(f, scale), 0.8, log_concave=True),
        lambda f: scipy.stats.gumbel_r(f, 0.8),
        (-2.3, 0.4, 2.1),
        REALS,
    ),
}
NAMES = list(CASES)


@pytest.fixture(params=NAMES)
def case(request):
    return CASES[request.param]


def grid(case):
    """All combinations of observation, mean and variance, each `(K,)`."""
    y, m, v = np.meshgrid(np.array(case.y), MEANS, VARS, indexing="ij")
    return jnp.asarray(y.ravel()), jnp.asarray(m.ravel()), jnp.asarray(v.ravel())


def nodes(m, v, y=None):
    """Gauss-Legendre points and weights of `N(m, v)` on 12 sds, each `(K, F)`.

    400 panels of 10 points, so a panel is 0.06 sds; narrower panels around `f = y`,
    where a likelihood with little noise is narrow.
    """
    x, w = np.polynomial.legendre.leggauss(10)
    m, sd = np.asarray(m)[:, None], np.sqrt(np.asarray(v))[:, None]
    edges = m + sd * np.linspace(-12.0, 12.0, 401)
    if y is not None:
        fine = np.concatenate([[0.0], np.geomspace(1e-4, 10.0, 150)])
        near = np.asarray(y)[:, None] + np.concatenate([-fine[:0:-1], fine])
        near = np.clip(near, edges[:, :1], edges[:, -1:])
        edges = np.sort(np.concatenate([edges, near], axis=1), axis=1)
    half = 0.5 * np.diff(edges, axis=1)[:, :, None]
    f = (0.5 * (edges[:, 1:] + edges[:, :-1]))[:, :, None] + half * x
    f, w = f.reshape(len(m), -1), (half * w).reshape(len(m), -1)
    return f, w * scipy.stats.norm.pdf(f, m, sd)


def reference(case):
    """Log densities `(K, F)` and Gaussian weights `(K, F)` on the grid of a case."""
    y, m, v = grid(case)
    f, w = nodes(m, v, y)
    return case.logpdf(np.asarray(y)[:, None], f), f, w


def derivatives(g, f, w, m, v):
    """Derivatives in `m` and `v` of the integral of `g`, from those of the Gaussian."""
    x = f - np.asarray(m)[:, None]
    v = np.asarray(v)[:, None]
    d_mean = np.sum(w * g * x / v, axis=1)
    d_var = np.sum(w * g * (x**2 - v) / (2.0 * v**2), axis=1)
    return d_mean, d_var


def test_expected_log_prob_is_the_integral(case):
    y, m, v = grid(case)
    log_p, _, w = reference(case)
    result = eqx.filter_jit(case.likelihood.expected_log_prob)(y, m, v)
    assert_allclose(result, np.sum(w * log_p, axis=1), rtol=1e-9, atol=case.atol)


def test_predictive_log_prob_is_the_integral(case):
    y, m, v = grid(case)
    log_p, _, w = reference(case)
    expected = scipy.special.logsumexp(log_p, b=w, axis=1)
    result = np.asarray(eqx.filter_jit(case.likelihood.predictive_log_prob)(y, m, v))
    # Below e^-60 the peak lies outside the 12 sds of the reference.
    seen = expected > -60.0
    assert seen.mean() > 0.7
    assert_allclose(result[seen], expected[seen], atol=case.predictive_atol)


def test_gradients_of_expectations_are_those_of_the_integral(case):
    y, m, v = grid(case)
    log_p, f, w = reference(case)
    # The reference divides by v: below 0.01 it loses its digits to rounding.
    wide = np.asarray(v) > 0.01
    gradient = jax.jit(
        jax.grad(
            lambda m, v: jnp.sum(case.likelihood.expected_log_prob(y, m, v)), (0, 1)
        )
    )
    expected = derivatives(log_p, f, w, m, v)
    for result, value in zip(gradient(m, v), expected, strict=True):
        assert_allclose(result[wide], value[wide], rtol=1e-6, atol=case.atol)


def test_gradients_of_predictive_densities_are_those_of_the_integral(case):
    y, m, v = grid(case)
    log_p, f, w = reference(case)
    log_z = scipy.special.logsumexp(log_p, b=w, axis=1, keepdims=True)
    seen = (log_z[:, 0] > -60.0) & (np.asarray(v) > 0.01)
    gradient = jax.jit(
        jax.grad(
            lambda m, v: jnp.sum(case.likelihood.predictive_log_prob(y, m, v)), (0, 1)
        )
    )
    expected = derivatives(np.exp(log_p - log_z), f, w, m, v)
    for result, value in zip(gradient(m, v), expected, strict=True):
        assert_allclose(
            result[seen], value[seen], rtol=1e-4, atol=30 * case.predictive_atol
        )


def test_small_variances_expand_about_the_mean(case):
    """For small v: E l = l(m), its derivatives l'(m) and l''(m) / 2."""
    log_prob = case.likelihood.log_prob
    y, m = (a.ravel() for a in jnp.meshgrid(jnp.array(case.y), jnp.array(MEANS)))

    @jax.jit
    @jax.vmap
    def expansion(y, m):
        slope = jax.grad(log_prob, 1)
        return log_prob(y, m), slope(y, m), jax.grad(slope, 1)(y, m)

    log_p, slope, curvature = expansion(y, m)
    scalar = jax.value_and_grad(case.likelihood.expected_log_prob, (1, 2))
    # The slope in v divides differences of l' by sqrt(v): it needs room above rounding.
    for dtype, v, rtol in ((jnp.float32, 1e-6, 2e-3), (jnp.float64, 1e-10, 1e-6)):
        value, (d_mean, d_var) = jax.jit(jax.vmap(scalar))(
            y, m.astype(dtype), jnp.full(m.shape, v, dtype)
        )
        assert_allclose(value, log_p, rtol=rtol, atol=rtol)
        assert_allclose(d_mean, slope, rtol=rtol, atol=rtol)
        # A Student-t of scale 0.02 has curvatures in the thousands.
        assert_allclose(2.0 * d_var, curvature, rtol=10 * rtol, atol=10 * rtol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_values_and_gradients_are_finite_in_the_tails(case, dtype):
    y, m, v = (
        a.ravel()
        for a in jnp.meshgrid(
            jnp.array(case.y),
            jnp.array([-40.0, -5.0, 0.0, 40.0], dtype),
            jnp.array([0.0, 1e-12, 1e-6, 1.0], dtype),
        )
    )
    y = y if jnp.issubdtype(y.dtype, jnp.integer) else y.astype(dtype)
    methods = case.likelihood.expected_log_prob, case.likelihood.predictive_log_prob

    @jax.jit
    def both(y, m, v):
        return [jax.vmap(jax.value_and_grad(fn, (1, 2)))(y, m, v) for fn in methods]

    for value, gradient in both(y, m, v):
        for array in (value, *gradient):
            assert array.dtype == dtype
            assert np.all(np.isfinite(array))


def test_second_derivatives_agree_with_differences_of_the_first(case):
    y = jnp.asarray(case.y[0])

    def both(x):  # x = (mean, variance)
        return (
            case.likelihood.expected_log_prob(y, x[0], x[1]),
            case.likelihood.predictive_log_prob(y, x[0], x[1]),
        )

    @jax.jit
    def derivatives_of_both(x):
        first = jax.jacrev(both)
        return first(x), jax.jacfwd(first)(x)

    # Narrow enough that the rule resolves the derivatives, which it computes as
    # integrals, as well as the values whose differences they are compared with.
    x, h = np.array([-1.7, 0.4]), 1e-4
    _, second = derivatives_of_both(x)
    for i, step in enumerate(h * np.eye(2)):
        up, down = derivatives_of_both(x + step)[0], derivatives_of_both(x - step)[0]
        for a, b, hessian in zip(up, down, second, strict=True):
            assert_allclose(hessian[:, i], (a - b) / (2.0 * h), rtol=1e-3, atol=1e-3)


def test_gradients_in_the_parameters_agree_with_finite_differences(case):
    y, m, v = grid(case)
    leaves, tree = jax.tree.flatten(case.likelihood)

    @jax.jit
    @jax.value_and_grad
    def total(leaves):
        likelihood = jax.tree.unflatten(tree, leaves)
        return jnp.sum(likelihood.expected_log_prob(y, m, v))

    for i, leaf in enumerate(leaves):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        for j in np.ndindex(leaf.shape):
            h = 1e-5 * abs(float(leaf[j]))
            step = jnp.zeros_like(leaf).at[j].set(h)
            up, down = (
                [*leaves[:i], leaf + s, *leaves[i + 1 :]] for s in (step, -step)
            )
            difference = (total(up)[0] - total(down)[0]) / (2.0 * h)
            assert_allclose(total(leaves)[1][i][j], difference, rtol=1e-5)


def test_predictive_density_has_total_mass_one(case):
    m, v = (a.ravel() for a in np.meshgrid(case.mass_means, case.mass_vars))
    fn = jax.jit(jax.vmap(case.likelihood.predictive_log_prob, (None, 0, 0)))
    fn = jax.jit(jax.vmap(fn, (0, None, None)))
    density = np.exp(fn(jnp.asarray(case.y_all), jnp.asarray(m), jnp.asarray(v)))
    if np.issubdtype(case.y_all.dtype, np.integer):
        mass = np.sum(density, axis=0)
    else:
        mass = np.trapezoid(density, case.y_all, axis=0)
    assert_allclose(mass, 1.0, atol=1e-4)


def test_predictive_cdf_is_the_integral(case):
    y, m, v = grid(case)
    f, w = nodes(m, v, y)
    expected = np.sum(w * case.law(f).cdf(np.asarray(y)[:, None]), axis=1)
    result = eqx.filter_jit(case.likelihood.predictive_cdf)(y, m, v)
    assert_allclose(result, expected, atol=case.cdf_atol)


def test_predictive_moments_are_those_of_the_density(case):
    m, v = (jnp.asarray(a.ravel()) for a in np.meshgrid(MEANS, VARS))
    mean, var = eqx.filter_jit(case.likelihood.predictive_moments)(m, v)
    f, w = nodes(m, v)
    means, variances = case.law(f).mean(), case.law(f).var()
    expected_mean = np.sum(w * means, axis=1)
    spread = variances + (means - expected_mean[:, None]) ** 2
    assert_allclose(mean, expected_mean, rtol=case.moments_rtol, atol=1e-6)
    assert_allclose(var, np.sum(w * spread, axis=1), rtol=case.moments_rtol, atol=1e-6)


def test_samples_have_the_predictive_moments(case, key):
    """Means of 40000 draws, within 5 standard errors: false alarms below 1e-6 each."""
    n = 40_000
    m, v = jnp.asarray(0.6), jnp.asarray(0.5)

    @jax.jit
    def draw_and_predict(key):
        key_f, key_y = jr.split(key)
        f = m + jnp.sqrt(v) * jr.normal(key_f, (n,))
        y = case.likelihood.distribution(f).sample(key_y)
        return jnp.mean(y), case.likelihood.predictive_moments(m, v)

    average, (mean, var) = draw_and_predict(key)
    assert abs(average - mean) < 5.0 * np.sqrt(var / n)


def test_distribution_has_the_shape_of_f_and_the_density_of_log_prob(case):
    y, f = (a.ravel() for a in np.meshgrid(np.array(case.y), MEANS))

    @jax.jit
    def densities(y, f):
        p = case.likelihood.distribution(f)
        assert p.batch_shape == f.shape
        assert p.event_shape == ()
        return p.log_prob(y), case.likelihood.log_prob(y, f)

    numpyros, ours = densities(y, f)
    # NumPyro's own negative binomial has no more digits.
    assert_allclose(numpyros, case.logpdf(y, f), rtol=1e-8, atol=1e-8)
    assert_allclose(ours, case.logpdf(y, f), rtol=1e-10, atol=1e-10)


def test_vmap_and_other_shapes_agree_with_plain_calls(case):
    y, m, v = (a[:6] for a in grid(case))
    methods = case.likelihood.expected_log_prob, case.likelihood.predictive_log_prob

    @jax.jit
    def three_ways(y, m, v):
        shaped = [a.reshape(3, 2) for a in (y, m, v)]
        return [(fn(y, m, v), jax.vmap(fn)(y, m, v), fn(*shaped)) for fn in methods]

    for plain, mapped, shaped in three_ways(y, m, v):
        assert_allclose(mapped, plain, rtol=1e-12, atol=1e-14)
        assert_allclose(shaped.ravel(), plain, rtol=1e-12, atol=1e-14)


def test_pytree_round_trip(case):
    leaves, tree = jax.tree.flatten(case.likelihood)
    again = jax.tree.unflatten(tree, leaves)
    assert type(again) is type(case.likelihood)
    assert jax.tree.structure(again) == tree


def test_float32_in_float32_out(case):
    y, m, v = (a[:4] for a in grid(case))
    y = y if jnp.issubdtype(y.dtype, jnp.integer) else y.astype(jnp.float32)
    m, v = m.astype(jnp.float32), v.astype(jnp.float32)
    likelihood = case.likelihood
    assert jax.eval_shape(likelihood.log_prob, y, m).dtype == jnp.float32
    for moment in jax.eval_shape(likelihood.predictive_moments, m, v):
        assert moment.dtype == jnp.float32


def test_check_accepts_data_of_the_likelihood_and_names_missing_values(case):
    y = np.array(case.y, float)
    case.likelihood.check(y)
    missing = np.append(y, np.nan)
    keep = np.isfinite(missing)
    case.likelihood.check(missing, mask=keep)
    case.likelihood.check(np.stack([missing] * 2, axis=1), mask=keep)
    words = rf"`obs` must be finite; got nan at index {len(y)} \(1 of .*`mask=`"
    with pytest.raises(ValueError, match=words):
        case.likelihood.check(missing)
    with pytest.raises(ValueError, match="`target` must be finite; got inf at index 0"):
        case.likelihood.check(np.append(np.inf, y), name="target")
    jax.jit(lambda y: case.likelihood.check(y))(missing)  # tracers are let through
