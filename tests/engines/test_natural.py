"""Natural gradients: against updates of the natural parameters in NumPy."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import SVI
from scipy.stats import multivariate_normal

import numpyro_gpx as gpx
from numpyro_gpx.engines.natural import Natural, natural_notes, natural_step
from numpyro_gpx.guides.parts.factors import dense_factor

PAIR = ("f_loc", "f_scale_tril")
rng = np.random.default_rng(3)
X = rng.uniform(-2.0, 2.0, (18, 1))
Z = np.linspace(-1.8, 1.8, 5)[:, None]
COUNTS = rng.poisson(np.exp(np.sin(1.7 * X[:, 0]))).astype(float)
REAL = np.sin(1.7 * X[:, 0]) + 0.3 * rng.normal(size=18)
VARIANCE, LENGTHSCALE, NOISE = 1.3, 0.7, 0.4


def model_of(likelihood):
    def model(X, y=None, *, batch_size=None):
        kernel = gpx.kernels.RBF(VARIANCE, LENGTHSCALE)
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
            gpx.observe("y", f(jnp.asarray(X)[i]), likelihood, obs=y, rows=i)

    return model


poisson = model_of(gpx.likelihoods.Poisson())
gaussian = model_of(gpx.likelihoods.Gaussian(NOISE))


def covariance(A, B):
    distances = (A[:, None, :] - B[None, :, :]) ** 2
    return VARIANCE * np.exp(-0.5 * distances.sum(-1) / LENGTHSCALE**2)


def projection():
    """Covariance of inducing values and rows, whitened, `(M, N)`."""
    Kuu = covariance(Z, Z)
    root = np.linalg.cholesky(Kuu + 1e-8 * VARIANCE * np.eye(len(Z)))
    return np.linalg.solve(root, covariance(Z, X))


def quadratic_loss(C, b):
    """KL to a normal with precision `C`, up to a constant: gradients are known."""

    def loss(params):
        m, raw = params[PAIR[0]], params[PAIR[1]]
        T = biject_to(dense_factor)(raw)
        quadratic = jnp.sum(C * (T @ jnp.swapaxes(T, -1, -2)))
        linear = jnp.sum(m * (b + 0.5 * jnp.einsum("...ij,...j->...i", C, m)))
        entropy = jnp.sum(jnp.log(jnp.diagonal(T, axis1=-2, axis2=-1)))
        return 0.5 * quadratic + linear - entropy

    return loss


def started(dtype=float, outputs=2, size=4):
    """Parameters of some Gaussians, and precision and linear term to move to."""
    draws = np.random.default_rng(8)
    m = draws.normal(size=(outputs, size)).astype(dtype)
    T = np.tril(0.4 * draws.normal(size=(outputs, size, size)), -1)
    T += np.eye(size) * draws.uniform(0.3, 1.7, (outputs, 1, size))
    half = draws.normal(size=(outputs, size, size))
    C = half @ half.swapaxes(-1, -2) + 0.3 * np.eye(size)
    b = draws.normal(size=(outputs, size))
    raw = biject_to(dense_factor).inv(jnp.asarray(T.astype(dtype)))
    return {PAIR[0]: jnp.asarray(m), PAIR[1]: raw}, T, C.astype(dtype), b.astype(dtype)


def stepped(params, loss, rate, pair=PAIR):
    optimizer = Natural(rate, None, lambda: (pair,))

    @jax.jit
    def step(params):
        state = optimizer.init(params)
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return {n: params[n] + updates[n] for n in params}, state

    return step(params)


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-10), (np.float32, 2e-3)])
def test_a_step_moves_precision_and_linear_term(dtype, tolerance):
    """Through the guide's own parameter and back, for two outputs."""
    params, T, C, b = started(dtype)
    rate = 0.3
    new, state = stepped(params, quadratic_loss(C, b), rate)
    assert all(x.dtype == dtype for x in new.values())
    assert (int(state.updates), int(state.skipped), int(state.number)) == (2, 0, 1)
    found = np.asarray(biject_to(dense_factor)(new[PAIR[1]]), float)
    for p in range(2):
        before = np.linalg.inv(T[p] @ T[p].T)
        precision = (1 - rate) * before + rate * C[p]
        linear = (1 - rate) * before @ np.asarray(params[PAIR[0]][p]) - rate * b[p]
        assert_allclose(np.linalg.inv(found[p] @ found[p].T), precision, tolerance)
        mean = np.linalg.solve(precision, linear)
        assert_allclose(new[PAIR[0]][p], mean, 10 * tolerance, tolerance)


def test_standard_deviations_move_in_their_own_family():
    m, raw = jnp.asarray([0.7, -1.2, 0.4]), jnp.asarray([0.2, -0.9, 1.4])
    C, b = np.array([2.3, 0.6, 1.9]), np.array([0.3, -0.8, 1.1])

    def loss(params):
        sd, m = jax.nn.softplus(params["f_scale"]), params["f_loc"]
        return jnp.sum(0.5 * C * (sd**2 + m**2) + b * m - jnp.log(sd))

    params = {"f_loc": m, "f_scale": raw}
    new, state = stepped(params, loss, 0.3, ("f_loc", "f_scale"))
    before = np.log1p(np.exp(raw)) ** -2.0
    precision = 0.7 * before + 0.3 * C
    assert_allclose(np.log1p(np.exp(new["f_scale"])) ** -2.0, precision, 1e-10)
    assert_allclose(new["f_loc"], (0.7 * before * m - 0.3 * b) / precision, 1e-10)
    assert int(state.updates) == 3


def test_a_step_without_meaning_is_skipped_and_counted():
    """The second output's loss curves the wrong way."""
    params, T, C, b = started()
    C[1] *= -9.0
    new, state = stepped(params, quadratic_loss(C, b), 0.9)
    assert (int(state.updates), int(state.skipped)) == (2, 1)
    for name in PAIR:
        np.testing.assert_array_equal(new[name][1], params[name][1])
        assert np.all(np.isfinite(new[name]))
        assert np.any(new[name][0] != params[name][0])
    before = np.linalg.inv(T[1] @ T[1].T)
    assert np.linalg.eigvalsh(0.1 * before + 0.9 * C[1]).min() < 0.0


def test_gradients_that_are_not_finite_are_not_hidden():
    eye = jnp.eye(3)
    m, T, failed = natural_step(jnp.zeros(3), eye, jnp.zeros(3), eye * jnp.nan, 0.1)
    assert not failed and np.all(np.isnan(np.diagonal(T)))


def test_one_step_solves_a_gaussian_likelihood():
    with pytest.warns(gpx.FitWarning, match="too few to tell"):
        fit = gpx.fit_svi(
            gaussian, gpx.guides.WhitenedGaussian, X, REAL, key=jr.key(0), num_steps=2,
            optimizer=gpx.optimizers.natural(1.0), progress=False,
        )  # fmt: skip
    A = projection()
    Q = A.T @ A
    evidence = multivariate_normal(cov=Q + NOISE**2 * np.eye(18)).logpdf(REAL)
    bound = evidence - 0.5 * np.sum(VARIANCE - np.diag(Q)) / NOISE**2
    assert_allclose(-fit.info["losses"][1], bound, rtol=0, atol=1e-6)
    assert fit.info["losses"][0] > 1.0 - bound
    assert (fit.info["natural_updates"], fit.info["natural_skipped"]) == (2, 0)


def test_counts_in_a_minibatch_move_by_their_slopes_under_plain_svi():
    r"""A row has the slopes :math:`y - e^{m + v/2}` and :math:`-e^{m + v/2} / 2`."""
    rows = [3, 0, 11, 16, 7]
    guide = gpx.guides.WhitenedGaussian(poisson, prefix="q")
    optimizer = gpx.optimizers.natural(0.4, guide=guide)
    svi = SVI(poisson, guide, optimizer, gpx.infer.ELBO())
    m = np.array([0.3, -0.5, 0.2, 0.9, -0.1])
    T = np.tril(np.linspace(-0.3, 0.4, 25).reshape(5, 5), -1) + 0.8 * np.eye(5)
    start = {"f_q_loc": jnp.asarray(m), "f_q_scale_tril": jnp.asarray(T)}
    y = jnp.asarray(COUNTS)

    @jax.jit
    def step(start):
        state = svi.init(jr.key(0), X, y, init_params=start, batch_size=5)
        with handlers.substitute(data={"data": jnp.asarray(rows)}):
            state, _ = svi.update(state, X, y, batch_size=5)
        return svi.get_params(state)

    new = step(start)

    A, weight, rate = projection()[:, rows], 18 / len(rows), 0.4
    f_mean = A.T @ m
    f_var = VARIANCE - np.sum(A**2, axis=0) + np.sum((T.T @ A) ** 2, axis=0)
    lam = weight * np.exp(f_mean + 0.5 * f_var)
    slope = weight * COUNTS[rows] - lam
    P = np.linalg.inv(T @ T.T)
    precision = (1 - rate) * P + rate * (np.eye(5) + (A * lam) @ A.T)
    linear = (1 - rate) * P @ m + rate * A @ (slope + lam * f_mean)
    S = new["f_q_scale_tril"] @ new["f_q_scale_tril"].T
    assert_allclose(np.linalg.inv(S), precision, rtol=1e-6, atol=1e-7)
    assert_allclose(new["f_q_loc"], np.linalg.solve(precision, linear), rtol=1e-6)


def heavy(X, y=None):
    noise = numpyro.sample("noise", numpyro.distributions.LogNormal(-1.2, 0.1))
    kernel = gpx.kernels.RBF(VARIANCE, LENGTHSCALE)
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.StudentT(3.0, noise), obs=y)


def test_heavy_tails_from_a_cold_start_are_told_to_start_with_adam():
    """Far from the targets the likelihood curves upwards; the rest goes on."""
    rows, y = np.tile(X, (3, 1)), np.where(np.arange(54) % 2 == 0, 4.0, -4.0)
    with pytest.warns(gpx.FitWarning) as told:
        fit = gpx.fit_svi(
            heavy, gpx.guides.WhitenedGaussian, rows, y, key=jr.key(0), num_steps=20,
            optimizer=gpx.optimizers.natural(1.0), progress=False,
        )  # fmt: skip
    words = " ".join(str(told[0].message).split())
    assert "of the natural steps were skipped" in words and "Start with Adam" in words
    assert fit.info["natural_skipped"] > 0.1 * fit.info["natural_updates"]
    assert all(np.all(np.isfinite(x)) for x in fit.params.values())
    # Adam's first step is of the schedule's rate.
    assert np.abs(fit.params["theta_auto_loc"] + 1.2).max() > 0.1
    assert not natural_notes({"natural_updates": 20, "natural_skipped": 2})


def latent(y=None):
    with numpyro.plate("data", 18):
        h = numpyro.sample(
            "h", numpyro.distributions.Normal(jnp.zeros(1), 1).to_event(1)
        )
    f = gpx.gp(
        "f", gpx.kernels.RBF(VARIANCE, LENGTHSCALE), inducing=gpx.inducing.Points(Z)
    )
    with numpyro.plate("data", 18):
        gpx.observe("y", f(h), gpx.likelihoods.Gaussian(NOISE), obs=y)


@pytest.mark.slow
def test_the_rest_beside_latent_inputs_follows_the_schedule():
    guide = gpx.guides.UnscentedLatent(gpx.guides.WhitenedGaussian(latent))
    with pytest.warns(gpx.FitWarning, match="too few"):
        fit = gpx.fit_svi(
            latent, guide, REAL, key=jr.key(0), num_steps=2, progress=False,
            optimizer=gpx.optimizers.natural(0.5),
        )  # fmt: skip
    assert guide.natural_pairs() == (("f_auto_loc", "f_auto_scale_tril"),)
    assert fit.info["natural_updates"] == 2
    start = REAL[:, None] - REAL.mean()
    moved = np.abs(fit.params["h_auto_loc"] - start / REAL.std())
    # Adam's first step is of the rate, its second of no more than about that.
    assert 0.5 * guide.learning_rate < moved.max() < 2.1 * guide.learning_rate


def test_latent_inputs_leave_their_inner_guide_its_pairs():
    inner = gpx.guides.WhitenedGaussian(latent, covariance="diagonal")
    guide = gpx.guides.UnscentedLatent(inner)
    guide.setup(REAL)
    assert guide.natural_pairs() == (("f_auto_loc", "f_auto_scale"),)


@pytest.mark.parametrize(
    "guide",
    [
        gpx.guides.ConditionalGaussian,
        gpx.guides.OptimalGaussian,
        gpx.guides.Flow,
    ],
)
def test_guides_without_such_parameters_are_refused(guide):
    with pytest.raises(ValueError, match=f"{guide.__name__} has none. Use"):
        gpx.fit_svi(
            gaussian, guide, X, REAL, key=jr.key(0), progress=False,
            optimizer=gpx.optimizers.natural(),
        )  # fmt: skip


def test_errors_name_the_way_out():
    params, *_ = started()
    with pytest.raises(ValueError, match="in \\(0, 1\\]; got 1.5"):
        gpx.optimizers.natural(1.5)
    with pytest.raises(ValueError, match="pass `guide=guide`"):
        gpx.optimizers.natural().init(params)
    with pytest.raises(ValueError, match="other parameters, \\['noise'\\]"):
        Natural(0.1, None, lambda: (PAIR,)).init({**params, "noise": jnp.ones(())})
    with pytest.raises(ValueError, match="a guide with parameters \\['g_loc'\\]"):
        Natural(0.1, None, lambda: (("g_loc", PAIR[1]),)).init(params)
    with pytest.raises(TypeError, match="must be an optimiser"):
        gpx.optimizers.natural(rest=0.01)
