"""Draws through a guide: right whatever the guide, or the notes say that they are not.

The target is known by quadrature: three rows, two hyperparameters, no approximation.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.extend.core import jaxprs_in_params
from numpy.testing import assert_allclose
from numpyro.diagnostics import effective_sample_size

import numpyro_gpx as gpx
from numpyro_gpx.engines import rotation
from numpyro_gpx.engines.coordinates import Coordinates, GuideState, Reference
from numpyro_gpx.engines.importance import Weighted, smoothed
from numpyro_gpx.guides.parts import transport

E, G = gpx.engines, gpx.guides
ROWS = np.array([[-1.0], [0.1], [0.8]])
Y = np.array([0.9, -0.4, -0.7])
NOISE = 0.4
OPTIONS = {"key": jr.key(1), "progress": False}


def model(X, y=None):
    """Its hyperparameters' posterior is known on a grid, `f` marginalised."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.7))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.7))
    kernel = gpx.kernels.RBF(variance, lengthscale)
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Data(ROWS))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(NOISE), obs=y)


def by_quadrature():
    """Mean and sd of log variance and log lengthscale, from the definition."""
    grid = np.linspace(-3.5, 3.5, 141)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    squares = (ROWS - ROWS.T) ** 2
    K = np.exp(a)[..., None, None] * np.exp(
        -0.5 * squares / np.exp(2.0 * b)[..., None, None]
    )
    C = K + NOISE**2 * np.eye(3)
    quadratic = Y @ np.linalg.solve(C, np.broadcast_to(Y[:, None], (*a.shape, 3, 1)))
    log_p = -0.5 * (np.linalg.slogdet(C)[1] + quadratic[..., 0])
    log_p = log_p - 0.5 * (a**2 + b**2) / 0.7**2
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    means = np.array([np.sum(p * a), np.sum(p * b)])
    return means, np.sqrt([np.sum(p * a**2), np.sum(p * b**2)] - means**2)


MEANS, SDS = by_quadrature()


def errors(fit):
    """Of means and sds of the two, in Monte Carlo standard errors."""
    chains = fit.chains()
    found = []
    for name, mean, sd in zip(("variance", "lengthscale"), MEANS, SDS, strict=True):
        x = np.log(chains[name])
        ess = float(effective_sample_size(x))
        if not fit.is_mcmc:
            ess = min(x.size, fit.info["importance_ess"])
        found.append((x.mean() - mean) / (sd / np.sqrt(ess)))
        found.append((x.std() - sd) / (sd / np.sqrt(ess)))
    return np.abs(found)


@pytest.fixture(scope="module")
def guide():
    return gpx.fit_sites(model, ROWS, Y, **OPTIONS)


def with_params(fit, **changes):
    """The same guide with other parameters."""
    params = {**fit.params, **changes}
    return gpx.Fit(
        fit.program,
        type(fit.posterior)(fit.posterior.guide, params, fit.call, key=jr.key(0)),
        facts=fit.facts, params=params,
    )  # fmt: skip


def wrong(fit, how):
    """Guides that are wrong on purpose."""
    loc, root = fit.params["theta_auto_loc"], fit.params["theta_auto_scale_tril"]
    precision = fit.params["f_auto_precision_tril"]
    return with_params(fit, **{
        "right": {},
        "theta off": {"theta_auto_loc": loc + 2.0 * jnp.diagonal(root)},
        "theta narrow": {"theta_auto_scale_tril": 0.3 * root},
        "sites x5": {"f_auto_precision_tril": jnp.sqrt(5.0) * precision},
        "sites x0.2": {"f_auto_precision_tril": jnp.sqrt(0.2) * precision},
        "covariance halved": {"theta_auto_scale_tril": np.sqrt(0.5) * root},
    }[how])  # fmt: skip


HOW = [
    "right", "theta off", "sites x5",
    *(
        pytest.param(how, marks=pytest.mark.slow)
        for how in ("theta narrow", "sites x0.2", "covariance halved")
    ),
]  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", ["importance", "hmc"])
def test_wrong_guides_give_the_right_posterior_or_say_that_they_do_not(
    guide, method, how
):
    """4 standard errors on 4 numbers in 12 cases: false alarms below 0.004."""
    fit = gpx.fit_guided(
        model, ROWS, Y, guide=wrong(guide, how), method=method, **OPTIONS
    )
    doubted = {note.kind for note in fit.check() if note.severity != "remark"}
    assert np.all(errors(fit) < 4.0) or doubted
    assert how != "right" or not doubted


@pytest.mark.parametrize("method", ["importance", "hmc"])
def test_without_the_log_determinant_it_is_another_posterior(
    guide, method, monkeypatch
):
    """What the test above would see if the formula were wrong."""

    def flat(self, x, target):
        return target.log_density(self.forward(x).z)

    monkeypatch.setattr(transport.PlacingTransport, "log_density", flat)
    fit = gpx.fit_guided(model, ROWS, Y, guide=guide, method=method, **OPTIONS)
    assert np.max(errors(fit)) > 4.0


def fixed(X, y=None):
    f = gpx.gp("f", gpx.kernels.RBF(1.2, 0.7), inducing=gpx.inducing.Data(ROWS))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(NOISE), obs=y)


def test_where_the_guide_is_exact_nothing_is_left_to_do():
    exact = gpx.fit_sites(fixed, ROWS, Y, **OPTIONS)
    fit = gpx.fit_guided(fixed, ROWS, Y, guide=exact, **OPTIONS)
    assert fit.info["method"] == "importance" and fit.info["k_hat"] == 0.0
    assert_allclose(fit.info["importance_ess"], 8000.0)
    fit = gpx.fit_guided(fixed, ROWS, Y, guide=exact, method="hmc", **OPTIONS)
    # Less than 1 only since the reference is estimated.
    assert fit.info["acceptance_rate"] > 0.95 and fit.info["angle"] > 1.5
    assert fit.sample_stats["n_steps"].max() <= 2
    _, _, before, after = turned(coordinates(exact), 1.0, 4, 1.5)
    assert_allclose(after.total, before.total, atol=1e-8)


def coordinates(fit):
    state = GuideState(fit.call, fit.params, None)
    return Coordinates(fit.posterior.guide, fit.structure, state)


def turned(here, width, kicks, angle):
    """There and back: where it ends, where it began, energies before and after."""
    size, num_theta = here.transport.size, here.transport.num_theta
    no = jnp.asarray(False)
    how = rotation.Rotation(Reference.standard(size, num_theta, width), no, no)
    chains = rotation._Chains(lambda strength: here, how, False)
    y, p = 0.5 * jr.normal(jr.key(0), (2, 2, size))
    state = rotation.RotationState.start(jr.key(1), y)
    (y1, p1, *_), before = chains._trajectory(state, p, kicks, angle)
    again = state._replace(y=y1, fresh=jnp.asarray(True))
    (y2, p2, *_), after = chains._trajectory(again, -p1, kicks, angle)
    return (y2, -p2), (y, p), before, after


def test_a_trajectory_that_is_turned_around_returns(guide):
    end, begin, before, after = turned(coordinates(guide), 1.2, 5, 0.3)
    assert_allclose(end[0], begin[0], atol=1e-9)
    assert_allclose(end[1], begin[1], atol=1e-9)
    # The energy is nearly kept on the way: the error is that of the step.
    assert np.all(np.abs(after.total - before.total) < 0.1)


def test_the_energy_is_that_of_target_and_map(guide):
    here = coordinates(guide)
    x = jr.normal(jr.key(0), (here.transport.size,))
    z = here.transport.forward(x).z
    J = jax.jacobian(
        lambda x: jnp.concatenate(
            [jnp.ravel(v) for v in here.transport.forward(x).z.values()]
        )
    )(x)
    values = {name: np.asarray(v) for name, v in here.target.constrain(z).items()}
    K = values["variance"] * np.exp(
        -0.5 * (ROWS - ROWS.T) ** 2 / values["lengthscale"] ** 2
    )
    L = np.linalg.cholesky(K + 1e-8 * values["variance"] * np.eye(3))
    log_p = -0.5 * np.sum(values["f"] ** 2) - 1.5 * np.log(2.0 * np.pi)
    residual = (Y - L @ values["f"]) / NOISE
    log_p += np.sum(-0.5 * residual**2 - np.log(NOISE * np.sqrt(2.0 * np.pi)))
    for name in ("variance", "lengthscale"):  # normal on the real line
        e = float(z[name]) / 0.7
        log_p += -0.5 * e**2 - np.log(0.7 * np.sqrt(2.0 * np.pi))
    assert_allclose(here.energy(x), -log_p - np.linalg.slogdet(J)[1], rtol=1e-6)


def test_map_and_model_factorise_each_covariance_once(guide):
    """That of `u`, and the precision of the guide: no third."""
    here = coordinates(guide)
    x = jnp.zeros(here.transport.size)
    slope = jax.make_jaxpr(jax.value_and_grad(lambda x: here.energy(x)))(x)

    def number(jaxpr):
        return sum(
            (eqn.primitive.name == "cholesky")
            + sum(map(number, jaxprs_in_params(eqn.params)))
            for eqn in jaxpr.eqns
        )

    assert number(slope.jaxpr) == 2


def test_nuts_through_a_guide_finds_the_same_posterior(guide):
    """4 standard errors on 4 numbers: false alarms below 3e-4."""
    fit = gpx.fit_nuts(
        model, ROWS, Y, through=guide, num_warmup=200, num_samples=500, **OPTIONS
    )
    assert np.all(errors(fit) < 4.0) and fit.is_mcmc
    assert fit.facts.settings["through"] == "sites"
    for message, options in {
        "`init` and `through` both": {"init": {"variance": 1.0}},
        "says already what `params`": {"params": {"a": 1.0}},
    }.items():
        with pytest.raises(ValueError, match=message):
            gpx.fit_nuts(model, ROWS, Y, through=guide, **options, **OPTIONS)
    with pytest.raises(ValueError, match="`through` is of another model"):
        gpx.fit_nuts(fixed, ROWS, Y, through=guide, **OPTIONS)


def test_auto_takes_hmc_where_the_weights_object(guide):
    good = gpx.fit_guided(model, ROWS, Y, guide=guide, **OPTIONS)
    assert good.info["method"] == "importance" and good.info["k_hat"] < 0.7
    assert good.approximation == "asymptotically exact" and not good.is_mcmc
    assert good.draws()["f"].shape == (4000, 3)
    strong = with_params(
        guide, f_auto_precision_tril=6.0 * guide.params["f_auto_precision_tril"]
    )
    poor = gpx.fit_guided(model, ROWS, Y, guide=strong, **OPTIONS)
    assert poor.info["method"] == "hmc" and poor.is_mcmc
    assert np.all(errors(poor) < 4.5)


def with_batches(X, y=None, *, batch_size=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(ROWS))
    with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(NOISE), obs=y, rows=i)


def test_what_has_no_map_is_refused_in_words(guide):
    def rows(y=None):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(ROWS))
        with numpyro.plate("data", 3 if y is None else len(y)):
            h = numpyro.sample("h", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
            gpx.observe("y", f(h), gpx.likelihoods.Gaussian(NOISE), obs=y)

    with pytest.raises(ValueError, match=r"latent sites of their own, \['h'\]"):
        gpx.fit_guided(rows, Y, **OPTIONS)
    with pytest.raises(ValueError, match="of another model"):
        gpx.fit_guided(fixed, ROWS, Y, guide=guide, **OPTIONS)
    with pytest.raises(TypeError, match="`guide` must"):
        gpx.fit_guided(model, ROWS, Y, guide=G.ConditionalGaussian, **OPTIONS)
    with pytest.raises(ValueError, match="needs all rows"):
        gpx.fit_guided(with_batches, ROWS, Y, batch_size=2, **OPTIONS)


def test_weights_that_are_alike_have_no_tail_and_a_single_one_has():
    weights, k_hat = smoothed(np.full(500, -3.0))
    assert k_hat == 0.0 and abs(weights.sum() - 1.0) < 1e-9
    log_weights = np.random.default_rng(0).standard_t(1, size=4000)
    weights, k_hat = smoothed(3.0 * np.abs(log_weights))
    assert k_hat > 0.7 and abs(weights.sum() - 1.0) < 1e-9
    with pytest.raises(FloatingPointError, match="not finite at 400 of 500"):
        smoothed(np.where(np.arange(500) < 400, -np.inf, 0.0))


def test_resampling_keeps_the_weights():
    x = np.arange(4.0)[:, None]
    weighted = Weighted(x, np.array([0.1, 0.2, 0.3, 0.4]), 0.1, None)
    drawn = weighted.resampled(jr.key(0), 1000)[:, 0]
    assert_allclose(np.bincount(drawn.astype(int)), [100, 200, 300, 400], atol=1)
    assert np.any(np.diff(drawn) < 0.0)
    assert_allclose(weighted.ess, 1.0 / 0.3)


def test_points_have_the_curvature_of_the_bound():
    point = gpx.fit_lbfgs(model, G.OptimalGaussian, ROWS, Y, **OPTIONS)
    fit = gpx.fit_guided(model, ROWS, Y, guide=point, **OPTIONS)
    assert np.all(errors(fit) < 4.0)
