"""What all Gaussian guides share: `q(theta)`, draws, quantiles, words."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose
from numpyro import handlers

import numpyro_gpx as gpx
from numpyro_gpx.guides.parts.base import _standardised

RNG = np.random.default_rng(63)
N, M = 4, 3
X = jnp.asarray(RNG.uniform(-2.0, 2.0, size=(N, 1)))
y = jnp.asarray(RNG.normal(size=N))
Z = jnp.asarray([[-1.3], [0.4], [1.6]])


def model(X, y=None, *, batch_size=None):
    """Sites, in the order of the alphabet: (0, 1), the positive reals, two reals."""
    rho = numpyro.sample("a_rho", dist.Beta(2.5, 1.5))
    variance = numpyro.sample("b_variance", dist.LogNormal(0.2, 0.6))
    w = numpyro.sample("c_w", dist.Normal(jnp.asarray([0.3, -0.6]), 1.2).to_event(1))
    f = gpx.gp("f", gpx.kernels.RBF(variance, 0.9), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", N, subsample_size=batch_size) as i:
        latent = f(X[i]) + X[i, 0] * w[0]
        gpx.observe(
            "y", latent, gpx.likelihoods.Gaussian(0.2 + rho),
            obs=y, rows=i,
        )  # fmt: skip


LOC = np.array([0.4, -0.3, 0.8, -1.1])
SD = np.array([0.5, 0.3, 0.7, 0.4])
ROOT = np.tril(RNG.normal(size=(4, 4)), -1) * 0.3 + np.diag(SD)
V_LOC = RNG.normal(size=M)
V_ROOT = np.tril(RNG.normal(size=(M, M)), -1) * 0.3 + np.diag([0.4, 0.9, 1.3])
PARAMS = {"f_auto_loc": V_LOC, "f_auto_scale_tril": V_ROOT, "theta_auto_loc": LOC}
FAMILIES = {
    "point": ({}, None),
    "mean_field": ({"theta_auto_scale": SD}, np.diag(SD**2)),
    "full": ({"theta_auto_scale_tril": ROOT}, ROOT @ ROOT.T),
}


def setting(family):
    extra, cov = FAMILIES[family]
    params = jax.tree.map(jnp.asarray, {**PARAMS, **extra})
    return gpx.guides.WhitenedGaussian(model, theta=family), params, cov


def constrain(z):
    return {
        "a_rho": 1.0 / (1.0 + np.exp(-z[..., 0])),
        "b_variance": np.exp(z[..., 1]),
        "c_w": z[..., 2:],
    }


@pytest.mark.parametrize("family", ["mean_field", "full"])
def test_density_of_draws_is_the_change_of_variables(family):
    guide, params, cov = setting(family)

    @jax.jit
    def draw(key):
        seeded = handlers.substitute(handlers.seed(guide, key), data=params)
        trace = handlers.trace(seeded).get_trace(X, y)
        sites = {n: s for n, s in trace.items() if s["type"] == "sample"}
        log_q = sum(jnp.sum(s["fn"].log_prob(s["value"])) for s in sites.values())
        return {n: s["value"] for n, s in sites.items()}, log_q

    values, log_q = draw(jr.key(9))
    rho, variance, w = (np.asarray(values[n]) for n in ("a_rho", "b_variance", "c_w"))
    z = np.array([np.log(rho / (1.0 - rho)), np.log(variance), *w])
    expected = scipy.stats.multivariate_normal(LOC, cov).logpdf(z)
    expected -= np.log(rho * (1.0 - rho)) + np.log(variance)
    expected += scipy.stats.multivariate_normal(V_LOC, V_ROOT @ V_ROOT.T).logpdf(
        values["f"]
    )
    assert_allclose(log_q, expected, rtol=1e-10)


def test_points_have_no_density_and_sit_on_the_support():
    guide, params, _ = setting("point")
    seeded = handlers.substitute(handlers.seed(guide, 1), data=params)
    trace = jax.jit(
        lambda: {
            n: (s["value"], s["fn"].log_prob(s["value"]))
            for n, s in handlers.trace(seeded).get_trace(X, y).items()
            if s["type"] == "sample"
        }
    )()
    assert set(trace) == {"a_rho", "b_variance", "c_w", "f"}
    for name, value in constrain(LOC).items():
        assert_allclose(trace[name][0], value, rtol=1e-12)
        assert_allclose(trace[name][1], 0.0, atol=0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_have_the_moments_and_quantiles_of_the_guide(family):
    guide, params, cov = setting(family)
    number = 8000
    draws = guide.sample_posterior(
        jr.key(4), params, X, y, sample_shape=(2, number // 2)
    )
    shapes = {"a_rho": (), "b_variance": (), "c_w": (2,), "f": (M,)}
    for name, shape in shapes.items():
        assert draws[name].shape == (2, number // 2, *shape)
    one = guide.sample_posterior(jr.key(5), params, X, y)
    assert {n: x.shape for n, x in one.items()} == shapes
    levels = [0.1, 0.5, 0.8]
    quantiles = guide.quantiles(params, levels, X, y)
    median = guide.median(params, X, y)
    sd = np.zeros(4) if cov is None else np.sqrt(np.diag(cov))
    z = LOC + scipy.stats.norm.ppf(levels)[:, None] * sd
    for name, value in constrain(z).items():
        assert_allclose(quantiles[name], value, rtol=1e-10)
        assert_allclose(median[name], value[1], rtol=1e-10)
    v_sd = np.sqrt(np.diag(V_ROOT @ V_ROOT.T))
    v = V_LOC + scipy.stats.norm.ppf(levels)[:, None] * v_sd
    assert_allclose(quantiles["f"], v, rtol=1e-9)
    assert_allclose(median["f"], V_LOC, rtol=1e-12)
    # The share of draws below each quantile, 3 levels of 3 to 7 entries at 5 standard
    # errors: false alarm about 1e-5.
    for name in shapes:
        if cov is None and name != "f":
            continue
        flat = np.asarray(draws[name]).reshape(number, -1)
        for level, q in zip(levels, np.asarray(quantiles[name]), strict=True):
            share = np.mean(flat < q.reshape(-1), axis=0)
            error = np.sqrt(level * (1.0 - level) / number)
            assert np.all(np.abs(share - level) < 5.0 * error)
    # The covariance of v; 5 standard errors.
    f = np.asarray(draws["f"]).reshape(number, M)
    C = V_ROOT @ V_ROOT.T
    error = np.sqrt((C**2 + np.outer(np.diag(C), np.diag(C))) / number)
    assert np.all(np.abs(np.cov(f.T) - C) < 5.0 * error)


def test_quantiles_rise_where_the_support_is_bounded_above():
    def capped(y):
        a = numpyro.sample("a", dist.RightTruncatedDistribution(dist.Normal(), 0.7))
        numpyro.sample("y", dist.Normal(a, 0.5).expand([N]).to_event(1), obs=y)

    guide = gpx.guides.WhitenedGaussian(capped, theta="mean_field")
    params = {
        "theta_auto_loc": jnp.asarray([0.3]), "theta_auto_scale": jnp.asarray([0.4])
    }  # fmt: skip
    low, high = guide.quantiles(params, [0.1, 0.9], y)["a"]
    draws = np.asarray(
        guide.sample_posterior(jr.key(1), params, y, sample_shape=(2000,))["a"]
    )
    # False alarm below 1e-6 at 5 standard errors of the share.
    assert abs(np.mean(draws < low) - 0.1) < 5.0 * np.sqrt(0.09 / 2000)
    assert abs(np.mean(draws < high) - 0.9) < 5.0 * np.sqrt(0.09 / 2000)


def test_a_guide_that_has_seen_the_arguments_remembers_them():
    guide, params, _ = setting("point")
    fresh, _, _ = setting("point")
    with pytest.raises(ValueError, match="does not know the model's arguments"):
        fresh.median(params)
    guide.setup(X, y)
    assert_allclose(guide.median(params)["f"], V_LOC)
    draws = guide.sample_posterior(jr.key(4), params, sample_shape=(3,))
    assert draws["f"].shape == (3, M)


def test_parameters_start_where_they_should_and_keep_their_names():
    guide = gpx.guides.WhitenedGaussian(model, theta="full", prefix="q")
    params = _params(guide, jr.key(0))
    assert set(params) == {
        "f_q_loc", "f_q_scale_tril", "theta_q_loc", "theta_q_scale_tril"
    }  # fmt: skip
    assert_allclose(params["f_q_loc"], 0.0)
    assert_allclose(params["f_q_scale_tril"], np.eye(M), atol=1e-12)
    assert_allclose(params["theta_q_scale_tril"], 0.1 * np.eye(4), atol=1e-12)


def _params(guide, key):
    trace = handlers.trace(handlers.seed(guide, key)).get_trace(X, y)
    return {n: s["value"] for n, s in trace.items() if s["type"] == "param"}


# Words ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["WhitenedGaussian", "ConditionalGaussian", "OptimalGaussian"]
)
def test_other_families_are_refused(kind):
    words = r"`theta` must be one of \('point', 'mean_field', 'full'\); got 'laplace'"
    with pytest.raises(ValueError, match=words):
        getattr(gpx.guides, kind)(model, theta="laplace")


def test_other_covariances_are_refused():
    with pytest.raises(ValueError, match="'full' or 'diagonal'; got 'block'"):
        gpx.guides.WhitenedGaussian(model, covariance="block")


def test_local_sites_are_fine_on_all_rows_and_refused_under_subsampling():
    def local(y, *, batch_size=None):
        with numpyro.plate("data", N, subsample_size=batch_size) as i:
            h = numpyro.sample("h", dist.Normal(0.3, 1.2))
            numpyro.sample("y", dist.Normal(h, 0.5), obs=y[i])

    guide = gpx.guides.WhitenedGaussian(local)
    words = r"Sites \['h'\] live inside a subsampled plate; WhitenedGaussian covers"
    with pytest.raises(ValueError, match=words):
        handlers.seed(guide, 0)(y, batch_size=2)
    values = handlers.seed(gpx.guides.WhitenedGaussian(local), 0)(y)
    assert values["h"].shape == (N,)


def test_inducing_inputs_are_standardised_also_where_a_column_is_constant():
    """Equal numbers whose mean rounds are no spread, and have no slope."""
    rng = np.random.default_rng(0)
    Z = jnp.asarray(np.column_stack([rng.normal(3.0, 5.0, 20), np.full(20, 0.1)]))
    found, slope = jax.value_and_grad(lambda Z: jnp.sum(_standardised(Z) ** 3))(Z)
    assert np.isfinite(found) and np.all(np.abs(slope) < 10.0)
    found = _standardised(Z)
    assert_allclose(found[:, 1], 0.0)
    assert_allclose([found[:, 0].mean(), found[:, 0].std()], [0.0, 1.0], atol=1e-12)


def test_a_gp_called_as_guides_call_the_hyperparameters_is_refused():
    def other(X, y=None):
        f = gpx.gp("theta", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", N):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.3), obs=y)

    with pytest.raises(ValueError, match="must not be called `theta`"):
        gpx.guides.WhitenedGaussian(other).setup(X, y)
