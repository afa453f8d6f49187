"""The bound of `gpx.infer.ELBO` against an SVGP bound written in NumPy."""

import itertools

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
from numpyro.infer import Trace_ELBO

import numpyro_gpx as gpx

RNG = np.random.default_rng(17)
N, M = 5, 3
X = np.array([[-1.9], [-0.8], [0.2], [1.1], [2.3]])
Z = np.array([[-1.5], [0.4], [1.8]])
Y = RNG.normal(size=(N, 2))
y = Y[:, 0]
SCALE = 0.45
LOC = RNG.normal(size=(2, M))
ROOT = np.tril(RNG.normal(size=(2, M, M)), -1) * 0.4 + np.eye(M) * RNG.uniform(
    0.3, 0.9, size=(2, M, 1)
)
LENGTHSCALE, VARIANCE = 0.8, 1.7
# Sorted by name, on the real line: lengthscale, variance.
THETA = np.log([LENGTHSCALE, VARIANCE])
PARAMS = {
    "f_auto_loc": jnp.asarray(LOC[0]),
    "f_auto_scale_tril": jnp.asarray(ROOT[0]),
    "theta_auto_loc": jnp.asarray(THETA),
}


def matern32(X, X2, lengthscale=LENGTHSCALE, variance=VARIANCE):
    r = np.sqrt(3.0) * np.abs(X - X2[:, 0]) / lengthscale
    return variance * (1.0 + r) * np.exp(-r)


def svgp(m, S, y, *, Z=Z, k=matern32, scale=SCALE, prior=0.0):
    """Rows of the expected log likelihood, and the KL, in terms of `u` (Hensman 2015).

    `m`, `S` are mean and covariance root of whitened `v`; all else is about `u`.
    """
    Kuu = k(Z, Z)
    Kuu = Kuu + 1e-8 * np.mean(np.diag(Kuu)) * np.eye(len(Z))
    L = np.linalg.cholesky(Kuu)
    u, U = prior + L @ m, L @ S @ S.T @ L.T
    K_inv = np.linalg.inv(Kuu)
    B = k(X, Z) @ K_inv
    mean = prior + B @ (u - prior)
    var = np.diag(k(X, X) - B @ k(Z, X) + B @ U @ B.T)
    rows = scipy.stats.norm.logpdf(y, mean, scale) - var / (2.0 * scale**2)
    d = u - prior
    log_dets = np.linalg.slogdet(Kuu)[1] - np.linalg.slogdet(U)[1]
    kl = 0.5 * (np.trace(K_inv @ U) + d @ K_inv @ d - len(m) + log_dets)
    return rows, kl, mean, var


def log_prior(lengthscale=LENGTHSCALE, variance=VARIANCE):
    return scipy.stats.gamma.logpdf(
        lengthscale, 3.0, scale=1.0 / 2.5
    ) + scipy.stats.lognorm.logpdf(variance, 0.6, scale=np.exp(0.2))


def kernel():
    return gpx.kernels.Matern32(
        variance=numpyro.sample("variance", dist.LogNormal(0.2, 0.6)),
        lengthscale=numpyro.sample("lengthscale", dist.Gamma(3.0, 2.5)),
    )


def model(X, y=None, *, batch_size=None, whiten=True, mean=None):
    f = gpx.gp(
        "f", kernel(), inducing=gpx.inducing.Points(jnp.asarray(Z)), whiten=whiten,
        mean=mean,
    )  # fmt: skip
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
        gpx.observe(
            "y",
            f(X[i]),
            gpx.likelihoods.Gaussian(SCALE),
            obs=y,
            rows=i,
        )


def elbo(params, model, guide, *args, key=None, loss=None, **kwargs):
    """The estimate, compiled."""
    loss = gpx.infer.ELBO() if loss is None else loss
    key = jr.key(0) if key is None else key
    args = jax.tree.map(jnp.asarray, args)
    params = jax.tree.map(jnp.asarray, params)
    return jax.jit(
        lambda key, params: -loss.loss(key, params, model, guide, *args, **kwargs)
    )(key, params)


@pytest.fixture(scope="module")
def guide():
    return gpx.guides.WhitenedGaussian(model)


@pytest.fixture(scope="module")
def bound():
    rows, kl, *_ = svgp(LOC[0], ROOT[0], y)
    return rows.sum() - kl + log_prior()


def test_bound_is_that_of_svgp(guide, bound):
    assert_allclose(elbo(PARAMS, model, guide, X, y), bound, rtol=1e-9)


def test_bound_has_no_noise_and_particles_do_not_change_it(guide, bound):
    loss = gpx.infer.ELBO(num_particles=3)
    assert loss.num_particles == 3
    value = elbo(PARAMS, model, guide, X, y, key=jr.key(8), loss=loss)
    assert_allclose(value, bound, rtol=1e-9)


def test_diagonal_guide():
    guide = gpx.guides.WhitenedGaussian(model, covariance="diagonal")
    sd = np.array([0.4, 1.7, 0.8])
    params = {**PARAMS, "f_auto_scale": sd}
    rows, kl, *_ = svgp(LOC[0], np.diag(sd), y)
    expected = rows.sum() - kl + log_prior()
    assert_allclose(elbo(params, model, guide, X, y), expected, rtol=1e-9)


def test_unwhitened_bound_is_the_same_at_the_transformed_parameters():
    mean = gpx.means.Constant(0.6)
    Kuu = matern32(Z, Z)
    L = np.linalg.cholesky(Kuu + 1e-8 * VARIANCE * np.eye(M))
    params = {
        **PARAMS, "f_auto_loc": 0.6 + L @ LOC[0], "f_auto_scale_tril": L @ ROOT[0]
    }  # fmt: skip
    guide = gpx.guides.WhitenedGaussian(model)
    value = elbo(params, model, guide, X, y, whiten=False, mean=mean)
    rows, kl, *_ = svgp(LOC[0], ROOT[0], y, prior=0.6)
    assert_allclose(value, rows.sum() - kl + log_prior(), rtol=1e-9)


def test_bound_with_several_outputs():
    def model(X, y):
        f = gpx.gp(
            "f", gpx.kernels.Matern32(VARIANCE, LENGTHSCALE), num_outputs=2,
            inducing=gpx.inducing.Points(jnp.asarray(Z)),
        )  # fmt: skip
        with numpyro.plate("data", N):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(SCALE), obs=y)

    params = {"f_auto_loc": LOC, "f_auto_scale_tril": ROOT}
    value = elbo(params, model, gpx.guides.WhitenedGaussian(model), X, Y)
    expected = 0.0
    for p in range(2):
        rows, kl, *_ = svgp(LOC[p], ROOT[p], Y[:, p])
        expected += rows.sum() - kl
    assert_allclose(value, expected, rtol=1e-9)


def test_learnt_inducing_inputs_are_used():
    def learnt(X, y):
        Z_param = numpyro.param("Z", jnp.asarray(Z))
        f = gpx.gp("f", kernel(), inducing=gpx.inducing.Points(Z_param))
        with numpyro.plate("data", N):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(SCALE), obs=y)

    moved = Z + np.array([[0.3], [-0.2], [0.4]])
    guide = gpx.guides.WhitenedGaussian(learnt)
    value, grad = jax.jit(
        jax.value_and_grad(
            lambda Z: -gpx.infer.ELBO().loss(
                jr.key(0), {**PARAMS, "Z": Z}, learnt, guide, jnp.asarray(X),
                jnp.asarray(y),
            )
        )
    )(jnp.asarray(moved))  # fmt: skip

    def reference(Z):
        rows, kl, *_ = svgp(LOC[0], ROOT[0], y, Z=Z)
        return rows.sum() - kl + log_prior()

    assert_allclose(value, reference(moved), rtol=1e-9)
    for m in range(M):
        step = 1e-6 * np.eye(M)[:, [m]]
        slope = (reference(moved + step) - reference(moved - step)) / 2e-6
        assert_allclose(grad[m, 0], slope, rtol=1e-5, atol=1e-6)


def test_scale_handler_multiplies_likelihood_and_kl():
    scaled = handlers.scale(model, scale=0.7)
    guide = gpx.guides.WhitenedGaussian(scaled)
    rows, kl, *_ = svgp(LOC[0], ROOT[0], y)
    expected = 0.7 * (rows.sum() - kl + log_prior())
    assert_allclose(elbo(PARAMS, scaled, guide, X, y), expected, rtol=1e-9)


def test_minibatches_average_to_the_bound(guide, bound):
    """Over all pairs of rows, as a plate draws them without replacement."""
    pairs = jnp.asarray(list(itertools.combinations(range(N), 2)))

    @jax.jit
    def estimates(pairs, keys):
        def one(batch, key):
            params = PARAMS if batch is None else {**PARAMS, "data": batch}
            return -gpx.infer.ELBO().loss(
                key, params, model, guide, jnp.asarray(X), jnp.asarray(y), batch_size=2
            )

        chosen = jax.vmap(lambda batch: one(batch, jr.key(0)))(pairs)
        return chosen, jax.vmap(lambda key: one(None, key))(keys)

    chosen, drawn = estimates(pairs, jr.split(jr.key(3), 4000))
    rows, kl, *_ = svgp(LOC[0], ROOT[0], y)
    each = [2.5 * (rows[i] + rows[j]) - kl + log_prior() for i, j in np.array(pairs)]
    assert_allclose(chosen, each, rtol=1e-9)
    assert_allclose(np.mean(chosen), bound, rtol=1e-9)
    # NumPyro's own subsampling; false alarm 6e-5 at 4 standard errors.
    error = np.std(drawn) / np.sqrt(4000)
    assert abs(np.mean(drawn) - bound) < 4.0 * error


def test_plain_trace_elbo_agrees_within_monte_carlo_error(guide, bound):
    @jax.jit
    def losses(keys):
        return jax.vmap(
            lambda key: (
                -Trace_ELBO().loss(
                    key, PARAMS, model, guide, jnp.asarray(X), jnp.asarray(y)
                )
            )
        )(keys)

    values = np.asarray(losses(jr.split(jr.key(5), 20_000)))
    error = values.std() / np.sqrt(20_000)
    assert error < 0.2  # otherwise the next line says nothing
    assert abs(values.mean() - bound) < 4.0 * error  # false alarm 6e-5


@pytest.mark.parametrize("family", ["mean_field", "full"])
def test_bound_with_a_density_of_the_hyperparameters(family):
    """The same key gives the guide's draw, at which the bound is computed in NumPy."""
    guide = gpx.guides.WhitenedGaussian(model, theta=family)
    root = np.array([[0.3, 0.0], [-0.2, 0.4]])
    if family == "mean_field":
        params, cov = {"theta_auto_scale": np.array([0.3, 0.4])}, np.diag([0.09, 0.16])
    else:
        params, cov = {"theta_auto_scale_tril": root}, root @ root.T
    params = {**PARAMS, **params}
    args = jnp.asarray(X), jnp.asarray(y)

    @jax.jit
    def evaluate(key):
        key_guide, _ = jr.split(key)
        seeded = handlers.substitute(handlers.seed(guide, key_guide), data=params)
        trace = handlers.trace(seeded).get_trace(*args)
        theta = [trace[name]["value"] for name in ("lengthscale", "variance")]
        return -gpx.infer.ELBO().loss(key, params, model, guide, *args), theta

    value, theta = evaluate(jr.key(6))
    theta = np.asarray(theta)
    rows, kl, *_ = svgp(LOC[0], ROOT[0], y, k=lambda X, X2: matern32(X, X2, *theta))
    log_q = scipy.stats.multivariate_normal(THETA, cov).logpdf(np.log(theta))
    log_q -= np.log(theta).sum()
    expected = rows.sum() - kl + log_prior(*theta) - log_q
    assert not np.allclose(theta, np.exp(THETA))
    assert_allclose(value, expected, rtol=1e-9)


def noisy(X, y):
    f = gpx.gp(
        "f", gpx.kernels.Matern32(VARIANCE, LENGTHSCALE),
        inducing=gpx.inducing.Points(jnp.asarray(Z)),
    )  # fmt: skip
    with numpyro.plate("data", N):
        h = gpx.propagate("h", f(X))
        numpyro.sample("y", dist.Normal(h, SCALE), obs=y)


def test_noise_sites_are_drawn_and_left_out_of_the_sum():
    guide = gpx.guides.WhitenedGaussian(noisy)
    eps = RNG.normal(size=N)
    value = elbo({**PARAMS, "h/noise": eps}, noisy, guide, X, y)
    rows, kl, mean, var = svgp(LOC[0], ROOT[0], y)
    given = scipy.stats.norm.logpdf(y, mean + np.sqrt(var) * eps, SCALE).sum()
    assert_allclose(value, given - kl, rtol=1e-9)
    # Afresh at every evaluation; their mean is the closed form. False alarm 6e-5.
    loss = gpx.infer.ELBO(num_particles=500)
    values = np.array(
        jax.jit(
            lambda keys: jax.vmap(
                lambda key: (
                    -loss.loss(
                        key, PARAMS, noisy, guide, jnp.asarray(X), jnp.asarray(y)
                    )
                )
            )(keys)
        )(jr.split(jr.key(2), 40))
    )
    error = values.std(ddof=1) / np.sqrt(40)
    assert error > 0.0
    assert abs(values.mean() - (rows.sum() - kl)) < 4.5 * error


def test_sites_that_do_not_match_are_named():
    def guide(X, y):
        numpyro.sample("f", dist.Normal(jnp.zeros(M), 0.5).to_event(1))
        numpyro.sample("lengthscale", dist.LogNormal(0.2, 0.3))
        numpyro.sample("period", dist.LogNormal(0.2, 0.3))

    words = (
        r"only in the model: \['variance'\], only in the guide: \['period'\]. Build the"
    )
    with pytest.raises(ValueError, match=words):
        elbo({}, model, guide, X, y)


def test_bound_with_a_plain_guide_is_trace_elbo():
    """A guide without beliefs: every site is a draw."""

    def guide(X, y):
        numpyro.sample(
            "f", dist.MultivariateNormal(LOC[0], scale_tril=jnp.asarray(ROOT[0]))
        )
        numpyro.sample("lengthscale", dist.LogNormal(0.2, 0.3))
        numpyro.sample("variance", dist.LogNormal(0.1, 0.4))

    def value(key):
        return elbo({}, model, guide, X, y, key=key)

    key_guide, _ = jr.split(jr.key(4))
    trace = handlers.trace(handlers.seed(guide, key_guide)).get_trace(X, y)
    v, *theta = (
        np.asarray(trace[n]["value"]) for n in ("f", "lengthscale", "variance")
    )
    rows, *_ = svgp(v, np.zeros((M, M)) + 1e-9 * np.eye(M), y,
                    k=lambda X, X2: matern32(X, X2, *theta))  # fmt: skip
    log_q = scipy.stats.multivariate_normal(LOC[0], ROOT[0] @ ROOT[0].T).logpdf(v)
    log_q += scipy.stats.lognorm.logpdf(theta[0], 0.3, scale=np.exp(0.2))
    log_q += scipy.stats.lognorm.logpdf(theta[1], 0.4, scale=np.exp(0.1))
    expected = rows.sum() + scipy.stats.norm.logpdf(v).sum() + log_prior(*theta) - log_q
    assert_allclose(value(jr.key(4)), expected, rtol=1e-9)
