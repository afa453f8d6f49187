"""Likelihoods of several latent functions against brute force.

The references integrate NumPy log densities over a tensor grid of Gauss-Legendre panels
and share no line with the code. A new likelihood costs one line in `CASES`.
"""

import functools
from typing import NamedTuple

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
    Categorical,
    From,
    Gaussian,
    HeteroscedasticGaussian,
    PerOutput,
    Poisson,
    RobustMax,
)
from numpyro_gpx.links import PiecewiseConstant

PIECES = PiecewiseConstant.of("exp", num_pieces=9, lower=-2.0, upper=1.5)


class Case(NamedTuple):
    likelihood: object
    logpdf: object  # (y, f) -> log p(y | f), f of shape (..., L)
    y: tuple
    num_latent: int
    y_all: np.ndarray | None = None  # grid on which predictive densities have mass 1
    atol: float = 1e-6
    panels: int = 24  # of the reference, for each latent
    edges: tuple = ()  # where the integrand jumps, in every latent
    narrow: bool = False  # noise may be narrow: finer panels about y in the first
    predictive_atol: float = 2e-5


def softplus(f):
    return np.logaddexp(0.0, f)


def steps(link, f):
    """A piecewise-constant link, from its definition."""
    edges, values = np.asarray(link.edges), np.exp(np.asarray(link.points))
    g = np.full(f.shape, values[0])
    for edge, value in zip(edges, values[1:], strict=True):
        g = np.where(f >= edge, value, g)
    return g


def softmax(y, f):
    return f[..., y] - scipy.special.logsumexp(f, axis=-1)


def robust_max(y, f):
    right = np.argmax(f, axis=-1) == y
    return np.where(right, np.log(1.0 - 0.02), np.log(0.02 / 2.0))


def gumbel(y, f):
    return scipy.stats.gumbel_r.logpdf(y, f[..., 0], 0.5 + softplus(f[..., 1]))


def skewed(y, f):
    z = (y - f[..., 0]) * np.exp(-0.3 * f[..., 1])
    return (
        scipy.stats.norm.logpdf(z + 0.2 * np.sin(f[..., 2]), scale=2.0)
        - 0.3 * f[..., 1]
    )


REALS = np.linspace(-80.0, 80.0, 4001)
CASES = {
    "heteroscedastic-exp": Case(
        HeteroscedasticGaussian(),
        lambda y, f: scipy.stats.norm.logpdf(y, f[..., 0], np.exp(f[..., 1])),
        (-1.3, 2.2),
        2,
        np.sinh(np.linspace(-9.0, 9.0, 4001)),
        narrow=True,
    ),
    "heteroscedastic-softplus": Case(
        HeteroscedasticGaussian(link="softplus"),
        lambda y, f: scipy.stats.norm.logpdf(y, f[..., 0], softplus(f[..., 1])),
        (-1.3, 2.2),
        2,
        REALS,
        panels=40,
        narrow=True,
    ),
    "heteroscedastic-piecewise": Case(
        HeteroscedasticGaussian(link=PIECES),
        lambda y, f: scipy.stats.norm.logpdf(y, f[..., 0], steps(PIECES, f[..., 1])),
        (-1.3, 2.2),
        2,
        REALS,
        edges=tuple(np.asarray(PIECES.edges)),
    ),
    "categorical": Case(Categorical(3), softmax, (0, 2), 3, np.arange(3), panels=9),
    "robust_max": Case(
        RobustMax(3, epsilon=0.02), robust_max, (0, 2), 3, np.arange(3), panels=0
    ),
    "from-two": Case(
        From(
            lambda f: dist.Gumbel(f[..., 0], 0.5 + jax.nn.softplus(f[..., 1])),
            num_latent=2,
        ),
        gumbel,
        (-0.7, 2.2),
        2,
        REALS,
        predictive_atol=1e-4,  # noise half as wide as f, and plain nodes
    ),
    "from-two-piecewise": Case(
        From(lambda f: dist.Normal(f[..., 0], f[..., 1]), num_latent=2, link=PIECES),
        lambda y, f: scipy.stats.norm.logpdf(
            y, steps(PIECES, f[..., 0]), steps(PIECES, f[..., 1])
        ),
        (0.3, 2.2),
        2,
        REALS,
        edges=tuple(np.asarray(PIECES.edges)),
    ),
    "from-three": Case(
        From(
            lambda f, scale: dist.Normal(
                f[..., 0] - 0.2 * jnp.sin(f[..., 2]) * jnp.exp(0.3 * f[..., 1]),
                scale * jnp.exp(0.3 * f[..., 1]),
            ),
            2.0,
            num_latent=3,
        ),
        skewed,
        (0.3, 2.2),
        3,
        REALS,
        panels=12,
    ),
}
POINTS = {  # means and variances of two and three latents
    2: [
        ([-1.2, 0.3], [0.4, 0.2]),
        ([0.7, -0.8], [1.5, 0.9]),
        ([2.1, 0.1], [1e-6, 0.6]),
    ],
    3: [
        ([-1.2, 0.3, 0.8], [0.4, 0.2, 0.9]),
        ([0.7, -0.8, 0.1], [1.5, 0.9, 0.3]),
        ([0.2, 0.1, -0.4], [0.05, 0.6, 1.1]),
    ],
}


@pytest.fixture(params=list(CASES))
def case(request):
    return CASES[request.param]


def axis(m, v, panels, edges):
    """Gauss-Legendre points and weights of `N(m, v)` on 9 sds."""
    x, w = np.polynomial.legendre.leggauss(8)
    sd = np.sqrt(v)
    cuts = np.concatenate([m + sd * np.linspace(-9.0, 9.0, panels + 1), edges])
    cuts = np.unique(np.clip(cuts, m - 9.0 * sd, m + 9.0 * sd))
    half = 0.5 * np.diff(cuts)[:, None]
    f = (0.5 * (cuts[1:] + cuts[:-1])[:, None] + half * x).ravel()
    return f, (half * w).ravel() * scipy.stats.norm.pdf(f, m, sd)


def tensor(case, y, m, v):
    """All nodes `(S, L)` with their weights `(S,)`."""
    fine = np.concatenate([-np.geomspace(1e-3, 3.0, 40), np.geomspace(1e-3, 3.0, 40)])
    rules = [
        axis(
            m[i], v[i], case.panels, y + fine if case.narrow and i == 0 else case.edges
        )
        for i in range(len(m))
    ]
    grids = np.meshgrid(*(f for f, _ in rules), indexing="ij")
    weights = functools.reduce(np.multiply.outer, [w for _, w in rules])
    return np.stack([g.ravel() for g in grids], axis=-1), weights.ravel()


def brute_force(case, y, m, v):
    """Expected and log predictive density."""
    if case.panels == 0:
        return largest(y, np.array(m), np.sqrt(v))
    f, w = tensor(case, y, m, v)
    log_p = case.logpdf(y, f)
    return np.sum(w * log_p), scipy.special.logsumexp(log_p, b=w)


def largest(y, m, sd):
    """Robust-max jumps along surfaces: one variable at a time, by SciPy's quad."""
    others = [j for j in range(3) if j != y]

    def integrand(x):
        cdfs = [scipy.stats.norm.cdf(x, m[j], sd[j]) for j in others]
        return scipy.stats.norm.pdf(x, m[y], sd[y]) * np.prod(cdfs)

    P = scipy.integrate.quad(
        integrand, m[y] - 9.0 * sd[y], m[y] + 9.0 * sd[y], epsabs=1e-12, limit=400
    )[0]
    expected = P * np.log(0.98) + (1.0 - P) * np.log(0.01)
    return expected, np.log(0.98 * P + 0.01 * (1.0 - P))


def grid(case):
    pairs = [(y, m, v) for y in case.y for m, v in POINTS[case.num_latent]]
    return (jnp.asarray(a) for a in zip(*pairs, strict=True))


def test_expectations_and_predictive_densities_are_the_integrals(case):
    y, m, v = grid(case)
    expected, predictive = jax.jit(
        lambda y, m, v: (
            case.likelihood.expected_log_prob(y, m, v),
            case.likelihood.predictive_log_prob(y, m, v),
        )
    )(y, m, v)
    assert expected.shape == predictive.shape == y.shape
    reference = [
        brute_force(case, y, m, v) for y in case.y for m, v in POINTS[case.num_latent]
    ]
    assert_allclose(expected, [r[0] for r in reference], rtol=1e-9, atol=case.atol)
    predicted = [r[1] for r in reference]
    assert_allclose(predictive, predicted, atol=case.predictive_atol)


def test_gradients_agree_with_differences_of_the_integral(case):
    y, m, v = case.y[0], *map(np.array, POINTS[case.num_latent][0])
    gradient = jax.jit(jax.grad(case.likelihood.expected_log_prob, (1, 2)))(
        jnp.asarray(y), jnp.asarray(m), jnp.asarray(v)
    )
    h = 1e-4
    for i, step in enumerate(h * np.eye(len(m))):
        in_mean, in_var = (
            (brute_force(case, y, *up)[0] - brute_force(case, y, *down)[0]) / (2.0 * h)
            for up, down in (
                ((m + step, v), (m - step, v)),
                ((m, v + step), (m, v - step)),
            )
        )
        assert_allclose(gradient[0][i], in_mean, rtol=1e-5, atol=1e-5)
        assert_allclose(gradient[1][i], in_var, rtol=1e-5, atol=1e-5)


def test_predictive_density_has_total_mass_one_and_the_predictive_moments(case):
    m, v = (jnp.asarray(a) for a in POINTS[case.num_latent][0])

    @jax.jit
    def both(y):
        density = jax.vmap(case.likelihood.predictive_log_prob, (0, None, None))
        return jnp.exp(density(y, m, v)), case.likelihood.predictive_moments(m, v)

    density, (mean, var) = both(jnp.asarray(case.y_all))
    whole = np.issubdtype(case.y_all.dtype, np.integer)
    weights = np.ones(len(case.y_all)) if whole else np.gradient(case.y_all)
    assert_allclose(np.sum(weights * density), 1.0, atol=1e-4)
    first = np.sum(weights * density * case.y_all)
    second = np.sum(weights * density * case.y_all**2)
    assert_allclose(mean, first, atol=1e-4)
    assert_allclose(var, second - first**2, rtol=1e-3)


def test_samples_have_the_predictive_moments(case, key):
    """Means of 40000 draws, within 5 standard errors: false alarms below 1e-6 each."""
    n = 40_000
    m, v = (jnp.asarray(a) for a in POINTS[case.num_latent][0])

    @jax.jit
    def draw(key):
        key_f, key_y = jr.split(key)
        f = m[None] + jnp.sqrt(v)[None] * jr.normal(key_f, (n, case.num_latent))
        y = case.likelihood.distribution(f).sample(key_y)
        assert y.shape == (n,)
        return jnp.mean(y), case.likelihood.predictive_moments(m, v)

    average, (mean, var) = draw(key)
    assert abs(average - mean) < 5.0 * np.sqrt(var / n)


def test_cdf_is_the_mass_below(case):
    m, v = (jnp.asarray(a) for a in POINTS[case.num_latent][0])
    y = jnp.asarray(case.y)
    cdf = jax.jit(jax.vmap(case.likelihood.predictive_cdf, (0, None, None)))(y, m, v)
    density = jax.jit(jax.vmap(case.likelihood.predictive_log_prob, (0, None, None)))
    mass = np.exp(density(jnp.asarray(case.y_all), m, v))
    whole = np.issubdtype(case.y_all.dtype, np.integer)
    weights = np.ones(len(case.y_all)) if whole else np.gradient(case.y_all)
    below = [np.sum((weights * mass)[case.y_all <= one]) for one in case.y]
    step = 0.0 if whole else np.max(weights * mass)
    assert_allclose(cdf, below, atol=1e-3 + step)


def test_float32_in_float32_out_and_finite_in_the_tails(case):
    m = jnp.asarray([[-10.0] * case.num_latent, [0.0] * case.num_latent], jnp.float32)
    m = m.at[0, 0].set(20.0)
    v = jnp.asarray([[0.0] * case.num_latent, [4.0] * case.num_latent], jnp.float32)
    y = jnp.asarray(case.y)
    y = y if jnp.issubdtype(y.dtype, jnp.integer) else y.astype(jnp.float32)
    for method in ("expected_log_prob", "predictive_log_prob"):
        fn = getattr(case.likelihood, method)
        value, gradient = jax.jit(jax.vmap(jax.value_and_grad(fn, (1, 2))))(y, m, v)
        assert value.dtype == jnp.float32
        assert np.all(np.isfinite(value))
        assert all(np.all(np.isfinite(g)) for g in gradient)


def test_ten_classes_cost_no_accuracy():
    """Against 10^6 quasi-random points, whose error is about 1e-4."""
    rng = np.random.default_rng(3)
    m, v = rng.normal(size=10), rng.uniform(0.1, 1.5, 10)
    z = scipy.stats.qmc.Sobol(10, rng=4).random_base2(20)
    f = m + np.sqrt(v) * scipy.stats.norm.ppf(z)
    log_p = f[:, 4] - scipy.special.logsumexp(f, axis=1)
    y, m, v = jnp.asarray(4), jnp.asarray(m), jnp.asarray(v)
    likelihood = Categorical(10)
    expected = likelihood.expected_log_prob(y, m, v)
    assert_allclose(expected, log_p.mean(), atol=5e-4)
    predictive = likelihood.predictive_log_prob(y, m, v)
    assert_allclose(predictive, np.log(np.exp(log_p).mean()), atol=5e-4)
    total = likelihood.predictive_probabilities(m, v).sum()
    assert_allclose(total, 1.0, rtol=1e-12)


def test_columns_of_a_mixed_likelihood_are_those_of_its_parts():
    parts = Gaussian(0.4), HeteroscedasticGaussian(), Bernoulli(), Poisson()
    mixed = PerOutput(parts)
    rng = np.random.default_rng(5)
    m, v = jnp.asarray(rng.normal(size=(6, 5))), jnp.asarray(rng.uniform(size=(6, 5)))
    y = jnp.asarray(
        np.stack([*rng.normal(size=(2, 6)), rng.integers(0, 2, 6), np.arange(6)], 1)
    )
    assert mixed.num_latent == 5
    assert mixed.target_shape((6, 5)) == (6, 4)
    columns = [(m[:, 0], v[:, 0]), (m[:, 1:3], v[:, 1:3])]
    columns += [(m[:, j], v[:, j]) for j in (3, 4)]
    methods = "expected_log_prob", "predictive_log_prob", "predictive_cdf"

    @jax.jit
    def both_ways():
        joint = [getattr(mixed, method)(y, m, v) for method in methods]
        alone = [
            [
                getattr(part, method)(y[:, j], *columns[j])
                for j, part in enumerate(parts)
            ]
            for method in methods
        ]
        return joint, alone, mixed.distribution(m).sample(jr.key(0))

    joint, alone, draws = both_ways()
    for together, apart in zip(joint, alone, strict=True):
        assert_allclose(together, np.stack(apart, axis=1), rtol=1e-12)
    assert draws.shape == (6, 4)
    assert set(np.unique(draws[:, 2])) <= {0.0, 1.0}
    mixed.check(np.asarray(y))
    with pytest.raises(ValueError, match=r"`obs\[:, 2\]` must hold the labels 0 and 1"):
        mixed.check(np.asarray(y).T[::-1].T)
