"""SGHMC through a guide: unbiased estimates, the right posterior, or words."""

import itertools
import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.diagnostics import effective_sample_size
from scipy.special import expit, roots_hermitenorm

import numpyro_gpx as gpx
from numpyro_gpx.engines.coordinates import Coordinates, GuideState
from numpyro_gpx.engines.gradient_noise import check_noise, noise_notes
from numpyro_gpx.engines.guided_sghmc import GuidedKernel
from numpyro_gpx.engines.minibatch_energy import MinibatchEnergy
from numpyro_gpx.engines.sghmc_through_guide import ThroughGuide, _Arrays
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.guides.parts.base import set_up
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import compiled
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import Plate, Structure
from numpyro_gpx.results.posteriors import GuidePosterior

OPTIONS = {"key": jr.key(1), "progress": False}
_rng = np.random.default_rng(3)
X = np.sort(_rng.uniform(-2.0, 2.0, 6))[:, None]
Y = (np.sin(2.0 * X[:, 0]) + _rng.logistic(size=6) > 0.0).astype(float)
COUNTS = np.array([0.0, 2.0, 1.0, 4.0, 0.0, 3.0])
Z = np.array([[-1.5], [0.2], [1.4]])


def classifier(X, y=None, *, batch_size=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.2, 0.7))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.4))
    kernel = gpx.kernels.RBF(variance, lengthscale)
    mean = gpx.means.Constant(0.3)
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z), mean=mean)
    with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Bernoulli(), obs=y, rows=i)


def several(X, y=None, *, batch_size=None):
    """Two GPs, one of them of two outputs and not whitened, and a plain slope."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    points = gpx.inducing.Points(Z)
    f = gpx.gp("f", gpx.kernels.RBF(scale, 0.8), inducing=points)
    kernel = gpx.kernels.Matern32(0.6, scale)
    g = gpx.gp("g", kernel, inducing=points, num_outputs=2, whiten=False)
    with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
        latent = f(X[i]) + g(X[i])[:, 0] + slope * X[i, 0]
        gpx.observe("y", latent, gpx.likelihoods.Bernoulli(), obs=y, rows=i)
        other = gpx.likelihoods.Poisson()
        gpx.observe("n", g(X[i])[:, 1], other, obs=jnp.asarray(COUNTS), rows=i)


def taken(model, **params):
    """A fit of a guide whose parameters are what they are, trained or not."""
    call = Call.create(model, (X, Y), {})
    program = Program.of(call)
    guide = gpx.guides.ConditionalGaussian(model)
    set_up(guide, program)
    params = {name: jnp.asarray(x) for name, x in params.items()}
    posterior = GuidePosterior(guide, params, program.call, key=jr.key(0))
    facts = gpx.engines.SVI(guide).facts
    return gpx.Fit(program, posterior, facts=facts, params=params)


ROOT = np.array([[0.3, 0.0], [-0.1, 0.25]])
SITES = np.array([[0.9, 0.0, 0.0], [0.2, 0.7, 0.0], [-0.1, 0.1, 0.8]])


@pytest.fixture(scope="module")
def guide():
    return taken(
        classifier, theta_auto_loc=[0.1, 0.3], theta_auto_scale_tril=ROOT,
        f_auto_loc=[-0.8, 0.4, 1.1], f_auto_precision_tril=SITES,
    )  # fmt: skip


class Prepared:
    """One run before its chains: control variates, and energies of minibatches."""

    def __init__(self, fit):
        program = Program.of(fit.call, 2)
        engine = gpx.engines.SGHMC(guide=fit, batch_size=2)
        self.run = ThroughGuide(engine, fit, program, Watch("test"))
        state = GuideState(program.batched, fit.params, None)
        self.arrays = _Arrays(state, self.run._sites(state), None)
        whole = GuideState(fit.call, fit.params, None)
        self.size = fit.posterior.guide.transport(fit.params, fit.call).size
        self.x = 0.8 * jr.normal(jr.key(5), (self.size,))
        # Minibatches of two rows of six, all of them; their sum, and all rows.
        pairs = jnp.asarray(list(itertools.product(range(6), repeat=2)))

        def every(arrays, whole, x):
            energy = self.run._energy(arrays)

            def total(x):
                values = energy.here.target.constrain(
                    energy.here.transport.forward(x).z
                )
                v = energy.rows.inducing(values, arrays.sites.centre, pairs[0])
                return arrays.sites.total(v, x[: energy.here.transport.num_theta])

            here = Coordinates(fit.posterior.guide, fit.structure, whole)
            bare = MinibatchEnergy(energy.here)

            def one(fn):
                return jax.lax.map(lambda i: fn(x, {"data": i}), pairs)

            return (
                one(jax.value_and_grad(energy)), one(jax.grad(bare)), total(x),
                here.energy(x),
            )  # fmt: skip

        program = compiled(every, self.arrays, whole, self.x, optimise=False)
        found = program(self.arrays, whole, self.x)
        self.each, self.bare, self.total, self.all_rows = jax.tree.map(
            np.asarray, found
        )


@pytest.fixture(scope="module")
def classified(guide):
    return Prepared(guide)


def check_unbiased(found):
    """By brute force: all 36 pairs of 6 rows, against the density on all rows, and the
    gradients of the density on the same pairs without control variates."""
    values, slopes = found.each
    assert_allclose(values.mean(), found.all_rows, rtol=0.0, atol=1e-9)
    expected = found.bare.mean(axis=0)
    assert_allclose(slopes.mean(axis=0), expected, rtol=0.0, atol=1e-9)
    assert values.std() > 1e-6  # there is something to average


def test_the_mean_over_all_minibatches_is_the_target(classified):
    check_unbiased(classified)
    # What the test would see if the sum of the control variates were left out.
    assert abs(classified.total) > 1e-3


def test_control_variates_leave_little_noise(classified):
    """Of the same minibatches, beside those without them."""
    left = classified.each[1].var(axis=0).max()
    assert left < 0.2 * classified.bare.var(axis=0).max()


@pytest.mark.slow
def test_so_it_is_with_two_gps_of_several_outputs():
    """A GP of two outputs that holds `u`, two observed sites, a slope besides."""
    pair = dict(g_auto_loc=np.ones((2, 3)), g_auto_precision_tril=np.stack([SITES] * 2))
    fit = taken(
        several, theta_auto_loc=[0.1, 0.3], theta_auto_scale_tril=ROOT,
        f_auto_loc=[-0.8, 0.4, 1.1], f_auto_precision_tril=SITES, **pair,
    )  # fmt: skip
    found = Prepared(fit)
    check_unbiased(found)
    assert found.arrays.sites.curvature.shape == (6, 5, 5)
    assert found.each[1].var(axis=0).max() < 0.5 * found.bare.var(axis=0).max()


def by_hand(fit):
    """Slopes and curvatures of the rows' terms in the means of `f`: by quadrature
    and finite differences of it, from the guide's parameters."""
    theta = np.exp(fit.params["theta_auto_loc"])
    names = fit.posterior.guide.structure.hyperparameters
    values = dict(zip(sorted(names), theta, strict=True))

    def k(A, B):
        squares = (A - B.T) ** 2 / values["lengthscale"] ** 2
        return values["variance"] * np.exp(-0.5 * squares)

    Kuu = k(Z, Z) + 1e-8 * values["variance"] * np.eye(3)
    R = np.asarray(fit.params["f_auto_precision_tril"])
    precision = R @ R.T
    cov = np.linalg.inv(np.linalg.inv(Kuu) + precision)
    target = np.asarray(fit.params["f_auto_loc"])
    u = cov @ (np.linalg.solve(Kuu, np.full(3, 0.3)) + precision @ target)
    B = np.linalg.solve(Kuu, k(Z, X))
    m = 0.3 + B.T @ (u - 0.3)
    s = np.sqrt(
        values["variance"] - np.sum(B * (Kuu @ B), 0) + np.sum(B * (cov @ B), 0)
    )
    nodes, weights = roots_hermitenorm(60)
    weights = weights / weights.sum()

    def expected(m):
        f = m[:, None] + s[:, None] * nodes
        p = expit(np.where(Y[:, None] > 0.5, f, -f))
        return np.log(p) @ weights

    h = 1e-4
    slope = (expected(m + h) - expected(m - h)) / (2.0 * h)
    curvature = -(expected(m + h) - 2.0 * expected(m) + expected(m - h)) / h**2
    return slope + curvature * (m - 0.3), curvature, B


def test_sites_are_derivatives_of_the_expected_log_likelihood(guide, classified):
    arrays = classified.arrays
    linear, curvature, B = by_hand(guide)
    assert_allclose(arrays.sites.linear[:, 0], linear, atol=2e-4)
    assert_allclose(arrays.sites.curvature[:, 0, 0], curvature, atol=2e-4)
    # The sum over rows, in units of the centre's v: u = L v.
    factor = arrays.sites.centre.factors["f"]
    L = np.asarray(factor.lower())
    whole = L.T @ (B * curvature) @ B.T @ L
    assert_allclose(arrays.sites.total.curvature, whole, atol=1e-3)
    assert_allclose(arrays.sites.total.linear, L.T @ B @ linear, atol=1e-3)


class Noisy:
    """A standard normal whose gradient has noise of variances `V`."""

    V = jnp.array([0.5, 3.0, 0.0])

    def __call__(self, x, batch):
        shifts = jnp.sqrt(self.V) * (batch["data"][0] / 500.0 - 1.0) * jnp.sqrt(3.0)
        return 0.5 * jnp.sum(x**2) + shifts @ x


@pytest.mark.parametrize("taken_off", [True, False])
def test_known_noise_is_taken_off_and_unknown_noise_heats(taken_off):
    """5 standard errors on 3 variances of 20000 draws of ESS above 4000: false alarms
    below 2e-6; the bias of the step is below 1 %. The noise that stays shows."""
    structure = Structure({}, {}, (), (), {"data": Plate(1001, 1)}, {})
    kernel = GuidedKernel(
        Noisy(), structure, Noisy.V * taken_off, step_size=0.2, friction=1.0,
        num_integration_steps=5,
    )  # fmt: skip
    state = kernel.init(jr.key(0), 0, {"x": jnp.zeros(3)}, (), {})

    def draw(state, _):
        state = kernel.sample(state, (), {})
        return state, state.z["x"]

    x = np.asarray(jax.jit(lambda s: jax.lax.scan(draw, s, length=20000)[1])(state))
    ess = effective_sample_size(x[None])
    assert np.min(ess) > 4000
    error = np.abs(x.var(axis=0) - 1.0)
    allowed = 5.0 * np.sqrt(2.0 / ess) + 0.01
    if taken_off:
        assert np.all(error < allowed)
    else:
        # Theory: h V / (2 gamma), 0.3 for the noisiest.
        assert_allclose(x.var(axis=0)[1], 1.3, atol=0.1)
        assert error[2] < allowed[2]


def test_too_noisy_steps_are_refused_with_what_would_do():
    check_noise(np.array([2.0]), 0.2, 1.0, 100, 5000)  # 0.054 of 0.33
    with pytest.raises(ValueError, match="is too large for `batch_size=100`") as found:
        check_noise(np.array([1.0, 25.0]), 0.2, 1.0, 100, 5000)
    words = str(found.value)
    batch_size = int(re.search(r"Use `batch_size=(\d+)`", words)[1])
    assert 100 < batch_size < 1000
    check_noise(np.array([25.0]) * 100 / batch_size, 0.2, 1.0, batch_size, 5000)
    step = float(re.search(r"`step_size=([\d.e-]+)`", words)[1])
    assert 0.05 < step < 0.2
    check_noise(np.array([25.0]), step, 1.0, 100, 5000)
    with pytest.raises(ValueError, match="all 120 rows"):
        check_noise(np.array([25.0]), 0.2, 1.0, 100, 120)


def test_noise_that_stays_is_told_with_what_would_do():
    asked = dict(batch_size=20, num_rows=200, first="Use `fit_guided`")
    (note,) = noise_notes(np.array([0.1, 0.9]), 0.2, 0.3, **asked)
    assert note.kind == "gradient_noise" and "14 % too large" in note.message
    assert note.advice.startswith("Use `fit_guided`, all 200 rows")
    step = float(re.search(r"`step_size=([\d.e-]+)`", note.advice)[1])
    assert not noise_notes(np.array([0.9]), step, 0.3, **asked)
    assert not noise_notes(np.array([0.3]), 0.2, 0.3, **asked)
    asked["num_rows"] = 10_000
    (note,) = noise_notes(np.array([0.9]), 0.2, 0.3, **asked)
    times = int(re.search(r"`batch_size=(\d+)`", note.advice)[1]) / 20
    left = 0.9 / times / (0.9 / times + 0.1)
    assert not noise_notes(np.array([left]), 0.2, 0.3, **asked)


NOISE = 0.4


def regression(X, y=None, *, batch_size=None):
    f = gpx.gp("f", gpx.kernels.RBF(1.2, 0.7), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(NOISE), obs=y, rows=i)


@pytest.mark.slow
def test_a_gaussian_posterior_is_sampled_right_through_a_guide_that_is_not(tmp_path):
    """Closed form by NumPy. 4.5 standard errors on 6 numbers: false alarms below 5e-5;
    1 % is for the step size."""
    guide = taken(regression, f_auto_loc=np.ones(3), f_auto_precision_tril=SITES)
    fit = gpx.fit_sghmc(
        regression, X, Y, guide=guide, batch_size=2, num_warmup=50, **OPTIONS
    )
    k = lambda A, B: 1.2 * np.exp(-0.5 * (A - B.T) ** 2 / 0.49)  # noqa: E731
    A = np.linalg.solve(np.linalg.cholesky(k(Z, Z) + 1.2e-8 * np.eye(3)), k(Z, X))
    cov = np.linalg.inv(np.eye(3) + A @ A.T / NOISE**2)
    sd, chains = np.sqrt(np.diag(cov)), fit.chains()["f"]
    ess = effective_sample_size(chains)
    error = chains.mean(axis=(0, 1)) - cov @ A @ Y / NOISE**2
    assert np.all(np.abs(error) < 4.5 * sd / np.sqrt(ess))
    ratio = chains.std(axis=(0, 1)) / sd
    assert np.all(np.abs(ratio - 1.0) < 4.5 / np.sqrt(2.0 * ess) + 0.01)
    # The rows are quadratic: nothing is left of their noise.
    assert fit.info["gradient_variance"] < 1e-12
    assert fit.info["num_gradients"] == 10_000 and fit.info["batch_size"] == 2
    fit.save(tmp_path / "fit")
    again = gpx.load(tmp_path / "fit", regression)
    assert again.facts == fit.facts and again.facts.settings["guide"] == "svi"
    assert_allclose(again.chains()["f"], chains)


def local(X, y=None, *, batch_size=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
        h = numpyro.sample("h", dist.Normal())
        gpx.observe("y", f(X[i]) + h, gpx.likelihoods.Gaussian(NOISE), obs=y, rows=i)


def elsewhere(X, y=None, *, batch_size=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
    a = f(jnp.ones((1, 1))).mean[0]
    with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a, 1.0), obs=None if y is None else y[i])


def test_what_guides_cannot_serve_is_refused_in_words(guide):
    def ask(model, fit):
        return gpx.fit_sghmc(model, X, Y, guide=fit, batch_size=2, **OPTIONS)

    with pytest.raises(ValueError, match="of another model"):
        ask(regression, guide)
    with pytest.raises(ValueError, match=r"latent sites of their own, \['h'\]"):
        ask(local, guide)
    other = taken(elsewhere, f_auto_loc=np.ones(3), f_auto_precision_tril=SITES)
    with pytest.raises(ValueError, match="No GP is called at the rows"):
        ask(elsewhere, other)
    for name, value in {"em": gpx.infer.MonteCarloEM(), "params": {}}.items():
        with pytest.raises(ValueError, match=f"`{name}` must be left out"):
            gpx.engines.SGHMC(guide=guide, **{name: value})
    with pytest.raises(TypeError, match="`guide` must be"):
        gpx.engines.SGHMC(guide=guide.posterior.guide)


@pytest.mark.slow
def test_a_sparse_classifier_beside_guided_hmc_on_all_rows():
    """N=5000, M=30, minibatches of 100; the bounds are those of the design."""
    rng = np.random.default_rng(1)
    rows = rng.uniform(-2.0, 2.0, (5000, 2))
    f = np.sin(2.0 * rows[:, 0]) + rows[:, 1]
    y = (f + rng.logistic(size=5000) > 0.0).astype(float)
    points = np.asarray(gpx.inducing.kmeans(jr.key(0), rows, 30))

    def sparse(X, y=None, *, batch_size=None):
        names = ("lengthscale", "variance")
        theta = {n: numpyro.sample(n, dist.LogNormal(0.0, 1.0)) for n in names}
        f = gpx.gp("f", gpx.kernels.RBF(**theta), inducing=gpx.inducing.Points(points))
        with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
            gpx.observe("y", f(X[i]), gpx.likelihoods.Bernoulli(), obs=y, rows=i)

    guide = gpx.fit_sites(sparse, rows, y, **OPTIONS)
    exact = gpx.fit_guided(
        sparse, rows, y, guide=guide, method="hmc", num_samples=500, **OPTIONS
    )
    fit = gpx.fit_sghmc(
        sparse, rows, y, guide=guide, batch_size=100, num_samples=2500, num_warmup=100,
        **OPTIONS,
    )  # fmt: skip
    ours, theirs = (x.predict(rows[:200], of="f") for x in (fit, exact))
    sd = np.sqrt(theirs.var)
    assert abs(np.median(np.sqrt(ours.var) / sd) - 1.0) < 0.03
    assert np.max(np.abs(ours.mean - theirs.mean) / sd) < 0.15
    for name in ("lengthscale", "variance"):
        a, b = np.log(fit.chains()[name]), np.log(exact.chains()[name])
        assert abs(a.std() / b.std() - 1.0) < 0.3
        assert abs(a.mean() - b.mean()) < 0.15 * b.std()
    assert min(effective_sample_size(np.log(fit.chains()["variance"])), 500) == 500
    assert abs(fit.info["temperature"] - 1.0) < 0.01 and not fit.check()
    # A step that is too large is refused, and the minibatch that is named would do.
    with pytest.raises(ValueError, match="is too large for `batch_size=20`") as found:
        gpx.fit_sghmc(
            sparse, rows, y, guide=guide, batch_size=20, step_size=0.4, **OPTIONS
        )
    enough = int(re.search(r"Use `batch_size=(\d+)`", str(found.value))[1])
    gpx.fit_sghmc(
        sparse, rows, y, guide=guide, batch_size=enough, step_size=0.4, num_samples=10,
        num_warmup=1, **OPTIONS,
    )  # fmt: skip
