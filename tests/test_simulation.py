"""Free simulation: exact where moments are closed, within noise of drawn paths."""

import functools

import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

import numpyro_gpx as gpx
from numpyro_gpx.cubature import (
    Analytic,
    GaussHermite,
    MonteCarlo,
    SphericalRadial,
    Unscented,
)
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import num_compiled
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior
from numpyro_gpx.simulation import Simulation

WEIGHTS = np.array([1.3, -0.6])
NOISE = 0.3
HISTORY = np.array([0.4, -1.1])  # the most recent value last
STEPS = 4  # the same in most tests, which then share what is compiled


def make_series(num=40, seed=1):
    """A nonlinear series with lag 2, and noise."""
    rng = np.random.default_rng(seed)
    y = list(rng.normal(size=2))
    for _ in range(num - 2):
        y.append(1.4 * np.sin(1.5 * y[-1]) - 0.5 * y[-2] + 0.2 * rng.normal())
    return np.array(y)


def fixed_fit(model, X, y, draws=None):
    """A fit whose posterior is given: nothing is random, or these draws."""
    data = jnp.asarray(X), jnp.asarray(y)
    return gpx.Fit(
        Program.unchecked(Call(model, data)),
        ChainPosterior(draws or {}),
        facts=gpx.engines.NUTS().facts,
    )


@functools.cache
def autoregression(weights=tuple(WEIGHTS)):
    """A fit whose function is known: linear in the columns."""

    def model(X, y=None):
        with numpyro.plate("data", X.shape[0]):
            likelihood = gpx.likelihoods.Gaussian(NOISE)
            gpx.observe("y", X @ jnp.asarray(weights), likelihood, obs=y)

    return fixed_fit(model, np.ones((5, len(weights))), np.ones(5))


@pytest.fixture(scope="module")
def fit():
    """A GP on two lags of a nonlinear series, hyperparameters at their best."""
    X, y = gpx.timeseries.lagged(make_series(), 2)
    model = gpx.models.svgp(gpx.inducing.Data(X))
    guide = gpx.guides.OptimalGaussian(model)
    return gpx.fit_lbfgs(
        model, guide, X, y, key=jr.key(0), max_steps=30, progress=False
    )


def test_rows_hold_the_most_recent_lag_first_and_the_exogenous_columns_last():
    y = np.arange(6.0)
    X, targets = gpx.timeseries.lagged(y, 3, exogenous=10.0 * y[:, None])
    assert_allclose(X, [[2, 1, 0, 30], [3, 2, 1, 40], [4, 3, 2, 50]])
    assert_allclose(targets, [3, 4, 5])


def companion_moments(num_steps):
    """Mean and variance of an AR(2) in state-space form."""
    A = np.array([WEIGHTS, [1.0, 0.0]])
    m, P = HISTORY[::-1], np.zeros((2, 2))
    means, variances = [], []
    for _ in range(num_steps):
        m, P = A @ m, A @ P @ A.T + np.diag([NOISE**2, 0.0])
        means.append(m[0])
        variances.append(P[0, 0])
    return np.array(means), np.array(variances)


@pytest.mark.parametrize(
    "rule", [None, Unscented(0.2), GaussHermite(3), SphericalRadial(5)], ids=str
)
def test_a_known_autoregression_has_its_closed_form_moments(rule):
    sim = gpx.timeseries.simulate(autoregression(), HISTORY, 15, rule=rule)
    mean, var = companion_moments(15)
    assert_allclose(sim.mean, mean, atol=1e-10)
    assert_allclose(sim.var, var, atol=1e-10)


def test_independent_lags_lose_the_covariance_of_an_autoregression():
    sim = gpx.timeseries.simulate(autoregression(), HISTORY, 6, joint=False)
    mean, exact = companion_moments(6)
    var = [0.0, 0.0]
    for _ in range(6):
        var.append(NOISE**2 + WEIGHTS[0] ** 2 * var[-1] + WEIGHTS[1] ** 2 * var[-2])
    assert_allclose(sim.mean, mean, atol=1e-10)  # linear: nothing lost
    assert_allclose(sim.var, var[2:], atol=1e-10)
    # At most one lag is uncertain up to step 2; then positive covariance counts.
    assert_allclose(sim.var[:2], exact[:2], atol=1e-10)
    assert np.all(np.abs(sim.var[2:] - exact[2:]) > 0.05)


def test_uncertain_coefficients_are_integrated_exactly():
    """Bayesian linear regression: the variance is quadratic in the lags.

    With w ~ N(a, S) at each step and lags (m, C): E y = a'm and
    V y = a'Ca + m'Sm + tr(SC) + noise, cov(x, y) = Ca; degree 2, so any rule is exact.
    """
    rng = np.random.default_rng(4)
    X, y = rng.normal(size=(8, 2)), rng.normal(size=8)
    prior_var = 0.7

    def model(X, y=None):
        gpx.exact("y", gpx.kernels.Linear(prior_var), X, NOISE, obs=y)

    S = np.linalg.inv(X.T @ X / NOISE**2 + np.eye(2) / prior_var)
    a = S @ X.T @ y / NOISE**2
    m, C = HISTORY[::-1].copy(), np.zeros((2, 2))
    means, variances = [], []
    for _ in range(8):
        mean = a @ m
        var = a @ C @ a + m @ S @ m + np.trace(S @ C) + NOISE**2
        cross = (C @ a)[0]
        m, C = np.array([mean, m[0]]), np.array([[var, cross], [cross, C[0, 0]]])
        means.append(mean)
        variances.append(var)
    sim = gpx.timeseries.simulate(fixed_fit(model, X, y), HISTORY, 8)
    assert_allclose(sim.mean, means, atol=1e-9)
    assert_allclose(sim.var, variances, atol=1e-9)


def test_exogenous_columns_are_known_and_take_no_nodes():
    weights = np.array([*WEIGHTS, 0.9])
    known = np.array([[0.5], [-1.0], [2.0], [0.3]])
    sim = gpx.timeseries.simulate(
        autoregression(tuple(weights)), HISTORY, 4, exogenous=known
    )
    y = list(HISTORY)
    for c in known[:, 0]:
        y.append(weights @ [y[-1], y[-2], c])
    assert_allclose(sim.mean, y[2:], atol=1e-10)
    assert_allclose(sim.var, companion_moments(4)[1], atol=1e-10)
    paths = gpx.timeseries.simulate_paths(
        autoregression(tuple(weights)),
        HISTORY,
        4,
        exogenous=known,
        key=jr.key(3),
        num_paths=4000,
    )
    # 4 tests at 4.5 standard errors: false alarms at a rate of 3e-5.
    assert np.all(np.abs(paths.mean(0) - sim.mean) < 4.5 * sim.sd / np.sqrt(4000))


def symmetric_root(C):
    """Of a 2 x 2 matrix, by Cayley and Hamilton."""
    det = np.sqrt(max(np.linalg.det(C), 0.0))
    trace = np.sqrt(np.trace(C) + 2.0 * det)
    return (C + det * np.eye(2)) / trace if trace > 0.0 else np.zeros((2, 2))


def test_the_scan_equals_a_loop_over_predictions(fit):
    m, C = HISTORY[::-1].copy(), np.zeros((2, 2))
    means, variances = [], []
    for _ in range(STEPS):
        root = symmetric_root(C)
        points = m + np.sqrt(2.0) * np.concatenate([root, -root])
        at = fit.predict(points)
        mean = at.mean.mean()
        var = np.mean(at.var + (at.mean - mean) ** 2)
        cross = np.mean((points - m) * (at.mean - mean)[:, None], axis=0)[0]
        m, C = np.array([mean, m[0]]), np.array([[var, cross], [cross, C[0, 0]]])
        means.append(mean)
        variances.append(var)
    sim = gpx.timeseries.simulate(fit, HISTORY, STEPS)
    assert_allclose(sim.mean, means, atol=1e-6)
    assert_allclose(sim.var, variances, atol=1e-6)


def test_one_node_is_the_plain_narx_model_that_feeds_back_means(fit):
    y, variances = list(HISTORY), []
    for _ in range(STEPS):
        at = fit.predict(np.array([[y[-1], y[-2]]]))
        y.append(at.mean[0])
        variances.append(at.var[0])
    for joint in (True, False):
        sim = gpx.timeseries.simulate(
            fit, HISTORY, STEPS, rule=GaussHermite(1), joint=joint
        )
        assert_allclose(sim.mean, y[2:], atol=1e-10)
        assert_allclose(sim.var, variances, atol=1e-10)


def test_the_first_step_from_known_lags_is_the_prediction(fit):
    at = fit.predict(HISTORY[None, ::-1])
    rules = {Unscented(): True, MonteCarlo(5): True, SphericalRadial(5): False}
    for rule, joint in rules.items():
        sim = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=rule, joint=joint)
        assert_allclose(sim.mean[0], at.mean[0], atol=1e-9)
        assert_allclose(sim.var[0], at.var[0], atol=1e-9)
        assert np.all(np.isfinite(sim.mean)) and np.all(sim.var > 0.0)


@pytest.fixture(scope="module")
def paths(fit):
    return gpx.timeseries.simulate_paths(
        fit, HISTORY, STEPS, key=jr.key(8), num_paths=20_000
    )


def test_two_steps_agree_with_drawn_paths(fit, paths):
    """Up to step 2 the lags are exactly Gaussian, so a fine rule is exact.

    4 tests at 4.5 standard errors: false alarms at a rate of 3e-5.
    """
    sim = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=GaussHermite(20))
    number = len(paths)
    squares = (paths - paths.mean(0)) ** 2
    mean_error = paths.std(0) / np.sqrt(number)
    var_error = squares.std(0) / np.sqrt(number)
    assert np.all(np.abs(paths.mean(0) - sim.mean)[:2] < 4.5 * mean_error[:2])
    assert np.all(np.abs(squares.mean(0) - sim.var)[:2] < 4.5 * var_error[:2])
    # The second value is no Gaussian: step 3 is off by more, but not by much.
    assert_allclose(sim.mean[2], paths[:, 2].mean(), atol=0.1 * sim.sd[2])
    assert_allclose(sim.sd[2], paths[:, 2].std(), rtol=0.1)


def test_the_unscented_rule_is_near_the_paths_and_nearer_than_means_alone(fit, paths):
    unscented = gpx.timeseries.simulate(fit, HISTORY, STEPS)
    plain = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=GaussHermite(1))
    assert_allclose(unscented.sd, paths.std(0), rtol=0.15)
    error, plain_error = (abs(s.sd - paths.std(0))[1:] for s in (unscented, plain))
    assert np.all(error < 0.5 * plain_error)


def test_covariances_between_lags_matter_from_the_third_step_on(fit):
    joint = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=GaussHermite(20))
    apart = gpx.timeseries.simulate(
        fit, HISTORY, STEPS, rule=GaussHermite(20), joint=False
    )
    assert_allclose(apart.var[:2], joint.var[:2], rtol=1e-9)
    assert np.all(np.abs(apart.var / joint.var - 1.0)[2:] > 0.01)


def test_monte_carlo_converges_to_the_tensor_rule_and_follows_its_key(fit):
    exact = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=GaussHermite(20))
    rule = MonteCarlo(20_000)
    first = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=rule, key=jr.key(1))
    # The mean of 20000 nodes, at 4.5 standard errors: false alarms at a rate of 7e-6.
    assert abs(first.mean[1] - exact.mean[1]) < 4.5 * exact.sd[1] / np.sqrt(20_000)
    small = MonteCarlo(5)
    default = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=small)
    same = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=small, key=jr.key(0))
    other = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=small, key=jr.key(1))
    assert_allclose(default.mean, same.mean)
    assert abs(default.mean[1] - other.mean[1]) > 1e-4


def test_the_analytic_rule_equals_a_fine_tensor_rule(fit):
    """Both are exact for a GP with an RBF kernel and given hyperparameters."""
    ours = gpx.timeseries.simulate(fit, HISTORY, STEPS, rule=Analytic(), joint=False)
    fine = gpx.timeseries.simulate(
        fit, HISTORY, STEPS, rule=GaussHermite(20), joint=False
    )
    assert_allclose(ours.mean, fine.mean, atol=1e-6)
    assert_allclose(ours.var, fine.var, rtol=1e-6)


def test_the_analytic_rule_takes_exogenous_columns():
    rng = np.random.default_rng(6)
    X, known = rng.normal(size=(6, 3)), rng.normal(size=(3, 1))
    model = gpx.models.svgp(
        gpx.inducing.Data(X),
        kernel=gpx.kernels.RBF(0.8, 1.3) + gpx.kernels.Linear(0.4),
        likelihood=gpx.likelihoods.Gaussian(NOISE),
    )
    drawn = fixed_fit(model, X, X[:, 0], {"f": rng.normal(size=(1, 2, 6))})
    ours, fine = (
        gpx.timeseries.simulate(
            drawn, HISTORY, 3, exogenous=known, rule=rule, joint=False
        )
        for rule in (Analytic(), GaussHermite(30))
    )
    assert_allclose(ours.mean, fine.mean, atol=1e-6)
    assert_allclose(ours.var, fine.var, rtol=1e-6)


def test_posterior_draws_are_averaged_at_each_step():
    slopes = np.array([[0.2, 0.5, 0.9]])

    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(slope * X[:, 0], NOISE), obs=y)

    fit = fixed_fit(model, np.ones((3, 1)), np.ones(3), {"slope": slopes})
    sim = gpx.timeseries.simulate(fit, [2.0], 2)
    a, s = slopes.mean(), slopes.var()
    assert_allclose(sim.mean, [2.0 * a, 2.0 * a**2])
    first = 4.0 * s + NOISE**2
    second = a**2 * first + s * (first + (2.0 * a) ** 2) + NOISE**2
    assert_allclose(sim.var, [first, second])
    # 2 tests at 4.5 standard errors: false alarms at a rate of 1e-5.
    paths = gpx.timeseries.simulate_paths(fit, [2.0], 2, key=jr.key(5), num_paths=5000)
    assert np.all(np.abs(paths.mean(0) - sim.mean) < 4.5 * sim.sd / np.sqrt(5000))


def test_one_program_serves_all_steps_and_the_next_history():
    def model(X, y=None):
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", X[:, 0], gpx.likelihoods.Gaussian(NOISE), obs=y)

    fit = fixed_fit(model, np.ones((3, 1)), np.ones(3))
    before = num_compiled()
    gpx.timeseries.simulate(fit, [1.0], 50)
    once = num_compiled()
    assert 0 < once - before <= 3
    gpx.timeseries.simulate(fit, [2.0], 50)
    assert num_compiled() == once


def test_float32_stays_float32():
    def model(X, y=None):
        with numpyro.plate("data", X.shape[0]):
            scale = jnp.asarray(NOISE, X.dtype)
            gpx.observe("y", 0.5 * X[:, 0], gpx.likelihoods.Gaussian(scale), obs=y)

    ones = np.ones((3, 1), np.float32)
    sim = gpx.timeseries.simulate(fixed_fit(model, ones, ones[:, 0]), [1.0], 3)
    assert sim.mean.dtype == sim.var.dtype == np.float32


def test_a_simulation_is_gaussian_at_each_step():
    sim = Simulation(np.array([1.0, 2.0]), np.array([4.0, 0.25]))
    y = np.array([0.3, 2.2])
    normal = scipy.stats.norm([1.0, 2.0], [2.0, 0.5])
    assert_allclose(sim.log_prob(y), normal.logpdf(y))
    assert_allclose(sim.quantile(0.9), normal.ppf(0.9))
    assert_allclose(sim.quantile([0.1, 0.9])[0], normal.ppf(0.1))
    scaled = sim.rescaled(10.0, 3.0)
    assert_allclose(scaled.log_prob(10.0 + 3.0 * y), normal.logpdf(y) - np.log(3.0))
    with pytest.raises(ValueError, match=r"`y` must have the shape \(2,\).*\(3,\)"):
        sim.log_prob(np.zeros(3))
    with pytest.raises(ValueError, match="`q` must lie between 0 and 1"):
        sim.quantile(1.0)


@pytest.mark.parametrize(
    ("history", "options", "message"),
    [
        ([1.0], {}, "`history` must have 2 values.*got 1 values. Earlier"),
        (np.ones(5), {}, r"`history` must have 2 values.*got 5.*history\[-2:\]"),
        ([[1.0, 2.0]], {}, r"`history` must have shape \(L,\).*\(1, 2\)"),
        ([1.0, np.nan], {}, "`history` must be finite"),
        (HISTORY, {"exogenous": np.ones(4)}, r"`exogenous`.*\(4, E\).*got \(4,\)"),
        (HISTORY, {"exogenous": np.ones((3, 1))}, r"\(4, E\).*got \(3, 1\)"),
        (HISTORY, {"exogenous": np.full((4, 1), np.inf)}, "`exogenous` must be finite"),
        (HISTORY, {"exogenous": np.ones((4, 2))}, "trained on 2 columns; got 2 exog"),
        (HISTORY, {"exogenous": np.ones((4, 1))}, "`history` must have 1 values"),
        (HISTORY, {"rule": Analytic()}, "Pass `joint=False`"),
        (HISTORY, {"site": "z"}, "`site` must be one of"),
    ],
)
def test_wrong_arguments_are_named(history, options, message):
    with pytest.raises(ValueError, match=message):
        gpx.timeseries.simulate(autoregression(), history, 4, **options)


def test_other_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="`num_steps` must be a whole number"):
        gpx.timeseries.simulate(autoregression(), HISTORY, 0)
    with pytest.raises(TypeError, match="`rule` must be a Rule"):
        gpx.timeseries.simulate(autoregression(), HISTORY, 3, rule="unscented")
    with pytest.raises(TypeError, match="`key` must be a JAX random key"):
        gpx.timeseries.simulate_paths(autoregression(), HISTORY, 3, key=None)
    with pytest.raises(ValueError, match=r"`y` must have shape \(T,\).*\(3,\)"):
        gpx.timeseries.lagged(np.ones(3), 3)
    with pytest.raises(ValueError, match=r"`exogenous` must have shape \(5, E\)"):
        gpx.timeseries.lagged(np.ones(5), 2, exogenous=np.ones((3, 1)))


def test_models_of_several_targets_are_refused():
    def model(X, y=None):
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", X, gpx.likelihoods.Gaussian(NOISE), obs=y)

    fit = fixed_fit(model, np.ones((3, 2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="`y` must have one target a row"):
        gpx.timeseries.simulate(fit, HISTORY, 3)


def test_the_fan_chart_shows_bands_mean_history_and_truth():
    sim = Simulation(np.array([1.0, 2.0, 1.5]), np.array([0.1, 0.4, 0.9]))
    y = np.array([1.1, 2.5, 0.5])
    ax = gpx.plots.simulation(sim, history=HISTORY, y=y, ylabel="passengers")
    assert len(ax.collections) == 3
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert_allclose(lines["mean"].get_xydata(), np.c_[[1, 2, 3], sim.mean])
    assert_allclose(lines["history"].get_xydata(), np.c_[[-1, 0], HISTORY])
    truth = np.c_[[0, 1, 2, 3], [HISTORY[-1], *y]]
    assert_allclose(lines["observed"].get_xydata(), truth)
    assert ax.get_ylabel() == "passengers"
    widest = ax.collections[0].get_paths()[0].vertices
    half = scipy.stats.norm.ppf(0.975) * sim.sd[2]
    assert_allclose(widest[:, 1].max(), max(sim.quantile(0.975)))
    assert_allclose(widest[:, 1].min(), sim.mean[2] - half)
    assert gpx.plots.simulation(sim, ax=ax) is ax
    plt.close("all")
    with pytest.raises(ValueError, match=r"`time` must have shape \(5,\).*\(4,\)"):
        gpx.plots.simulation(sim, history=HISTORY, time=np.arange(4))
    with pytest.raises(ValueError, match="`y` must have the shape"):
        gpx.plots.simulation(sim, y=np.ones(2))
