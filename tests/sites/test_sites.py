"""The NumPyro sites: what they register, what they mean, and what they refuse."""

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
from numpyro.infer.inspect import get_model_relations
from numpyro.infer.util import log_density

import numpyro_gpx as gpx
from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.means import Linear, Zero
from numpyro_gpx.sites.gp_calls import drawn_functions
from numpyro_gpx.sites.marginals import ExactRegression
from numpyro_gpx.sites.marks import Held, Noise, as_infer, find, held_beliefs

RNG = np.random.default_rng(31)
X = np.sort(RNG.uniform(-2.5, 2.5, size=8))[:, None]
Z = np.array([[-2.1], [-0.6], [0.7], [2.2]])
y = np.cos(1.3 * X[:, 0]) + 0.3 * RNG.normal(size=8)
X_NEW = X[::-1] + 0.37
V = RNG.normal(size=4)
SCALE = 0.45


def matern32(variance, lengthscale):
    def k(X, X2):
        r = np.sqrt(3.0) * np.abs(X[:, :1] - X2[:, 0]) / lengthscale
        return variance * (1.0 + r) * np.exp(-r)

    return k


def rbf(variance, lengthscale):
    def k(X, X2):
        return variance * np.exp(-0.5 * ((X[:, :1] - X2[:, 0]) / lengthscale) ** 2)

    return k


KERNEL, K = gpx.kernels.Matern32(1.6, 0.9), matern32(1.6, 0.9)
KERNEL2, K2 = gpx.kernels.RBF(0.7, 1.8), rbf(0.7, 1.8)
POINTS = gpx.inducing.Points(jnp.asarray(Z))


def jittered(K):
    return K + 1e-8 * np.mean(np.diag(K)) * np.eye(len(K))


def marginals(k, v, X, Z=Z):
    """Mean and variance of f(X) given whitened `v`, dense."""
    L = np.linalg.cholesky(jittered(k(Z, Z)))
    A = np.linalg.solve(L, k(Z, X))
    return A.T @ v, np.diag(k(X, X) - A.T @ A)


def gaussian_ell(y, mean, var, scale):
    return scipy.stats.norm.logpdf(y, mean, scale) - var / (2.0 * scale**2)


def trace_of(model, *args, data=None, **kwargs):
    data = jax.tree.map(jnp.asarray, data or {})
    model = handlers.substitute(handlers.seed(model, 0), data=data)
    return handlers.trace(model).get_trace(*args, **kwargs)


def density(model, args, values):
    values = jax.tree.map(jnp.asarray, values)
    return jax.jit(lambda values: log_density(model, args, {}, values)[0])(values)


def regression(X, y=None, *, kernel=KERNEL, likelihood=None, **options):
    f = gpx.gp("f", kernel, inducing=POINTS)
    with numpyro.plate("data", X.shape[0]):
        gpx.observe(
            "y", f(X), likelihood or gpx.likelihoods.Gaussian(SCALE), obs=y, **options
        )


# gp ---------------------------------------------------------------------------------


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("outputs, shape", [(None, (4,)), (3, (3, 4))])
def test_gp_registers_one_site_all_of_it_event(outputs, shape, whiten):
    mean = gpx.means.Constant(0.6)

    def model():
        return gpx.gp(
            "f", KERNEL, inducing=POINTS, num_outputs=outputs, whiten=whiten, mean=mean
        )

    trace = trace_of(model)
    assert list(trace) == ["f"]
    fn, value = trace["f"]["fn"], trace["f"]["value"]
    assert fn.batch_shape == () and fn.event_shape == value.shape == shape
    if whiten:
        expected = scipy.stats.norm.logpdf(value).sum()
    else:
        u = np.reshape(value, (-1, 4))
        prior = scipy.stats.multivariate_normal(np.full(4, 0.6), jittered(K(Z, Z)))
        expected = np.sum(prior.logpdf(u))
    assert_allclose(fn.log_prob(value), expected, rtol=1e-9)


def test_gp_with_a_kernel_for_each_output():
    def model():
        f = gpx.gp("f", [KERNEL, KERNEL2], inducing=POINTS)
        return f(jnp.asarray(X))

    v = RNG.normal(size=(2, 4))
    model = handlers.substitute(model, data={"f": jnp.asarray(v)})
    latent = model()
    for p, k in enumerate((K, K2)):
        mean, var = marginals(k, v[p], X)
        assert_allclose(latent.mean[:, p], mean, rtol=1e-9, atol=1e-10)
        assert_allclose(latent.var[:, p], var, rtol=1e-8, atol=1e-10)


def test_both_parameterisations_are_one_prior_and_one_function():
    mean = Linear(jnp.asarray([0.6]), 0.3)

    def model(whiten):
        return gpx.gp("f", KERNEL, inducing=POINTS, mean=mean, whiten=whiten)(
            jnp.asarray(X), full_cov=True
        )

    u = 0.6 * Z[:, 0] + 0.3 + np.linalg.cholesky(jittered(K(Z, Z))) @ V
    f = handlers.substitute(model, data={"f": jnp.asarray(V)})(True)
    g = handlers.substitute(model, data={"f": jnp.asarray(u)})(False)
    assert_allclose(f.mean, g.mean, rtol=1e-9)
    assert_allclose(f.row_cov, g.row_cov, rtol=1e-9, atol=1e-12)
    m, var = marginals(K, V, X)
    assert_allclose(f.mean, m + 0.6 * X[:, 0] + 0.3, rtol=1e-9)
    assert_allclose(f.var, var, rtol=1e-8, atol=1e-10)


# observe ----------------------------------------------------------------------------


def test_observe_registers_the_expected_log_likelihood():
    trace = trace_of(regression, jnp.asarray(X), jnp.asarray(y), data={"f": V})
    assert [n for n, s in trace.items() if s["type"] == "sample"] == ["f", "y"]
    site = trace["y"]
    assert site["is_observed"]
    assert site["fn"].batch_shape == (8,) and site["fn"].event_shape == ()
    mean, var = marginals(K, V, X)
    ell = gaussian_ell(y, mean, var, SCALE)
    assert_allclose(site["fn"].log_prob(site["value"]), ell, rtol=1e-8)
    predictive = scipy.stats.norm.logpdf(y, mean, np.sqrt(var + SCALE**2))
    assert_allclose(site["fn"].predictive_log_prob(y), predictive, rtol=1e-8)
    total = density(regression, (X, y), {"f": V})
    assert_allclose(total, ell.sum() + scipy.stats.norm.logpdf(V).sum(), rtol=1e-9)


def test_observe_with_outputs_has_them_as_event():
    def model(X, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS, num_outputs=2)
        with numpyro.plate("data", 8):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian([0.4, 0.9]), obs=y)

    v, Y = RNG.normal(size=(2, 4)), RNG.normal(size=(8, 2))
    site = trace_of(model, jnp.asarray(X), jnp.asarray(Y), data={"f": v})["y"]
    assert site["fn"].batch_shape == (8,) and site["fn"].event_shape == (2,)
    expected = sum(
        gaussian_ell(Y[:, p], *marginals(K, v[p], X), s)
        for p, s in enumerate((0.4, 0.9))
    )
    assert_allclose(site["fn"].log_prob(Y), expected, rtol=1e-8)
    assert trace_of(model, jnp.asarray(X))["y"]["value"].shape == (8, 2)


def test_draws_of_an_observed_site_are_predictive():
    # Mean and variance of 20 000 draws; 16 z tests at 5 sd: false alarm 1e-5.
    fn = trace_of(regression, jnp.asarray(X), data={"f": V})["y"]["fn"]
    number = 20_000
    draws = np.asarray(jax.jit(lambda: fn.sample(jr.key(4), (number,)))())
    mean, var = marginals(K, V, X)
    var = var + SCALE**2
    assert draws.shape == (number, 8)
    assert np.all(np.abs(draws.mean(0) - mean) < 5.0 * np.sqrt(var / number))
    assert np.all(np.abs(draws.var(0) / var - 1.0) < 5.0 * np.sqrt(2.0 / number))
    assert_allclose(fn.mean, mean, rtol=1e-9, atol=1e-10)
    assert_allclose(fn.variance, var, rtol=1e-8)


def test_offset_shifts_the_function_and_weights_scale_the_terms():
    offset, weights = RNG.normal(size=8), RNG.uniform(0.2, 2.5, size=8)
    counts = np.array([2, 0, 1, 4, 1, 0, 3, 2])
    mean, var = marginals(K, V, X)
    fn = trace_of(
        regression, X, counts, data={"f": V}, likelihood=gpx.likelihoods.Poisson(),
        offset=offset, weights=weights,
    )["y"]["fn"]  # fmt: skip
    m = mean + offset
    ell = counts * m - np.exp(m + 0.5 * var) - scipy.special.gammaln(counts + 1.0)
    assert_allclose(fn.log_prob(counts), weights * ell, rtol=1e-8)


def test_an_offset_of_one_entry_a_row_moves_every_output_of_the_row():
    offset = np.array([1.5, 20.0, -300.0])

    def model(offset):
        f = gpx.gp("f", KERNEL, inducing=POINTS, num_outputs=3)
        gpx.observe("y", f(X[:3]), gpx.likelihoods.Gaussian(0.3), offset=offset)

    data = {"f": RNG.normal(size=(3, 4))}
    moved = trace_of(model, offset, data=data)["y"]["fn"].latent.mean
    plain = trace_of(model, None, data=data)["y"]["fn"].latent.mean
    assert_allclose(moved - plain, offset[:, None] * np.ones((3, 3)), rtol=1e-9)


def test_masked_rows_are_rows_that_were_dropped_and_may_be_nan():
    keep = np.array([True, True, False, True, False, True, True, True])
    holes = np.where(keep, y, np.nan)

    @jax.jit
    @jax.value_and_grad
    def masked(v):
        return log_density(regression, (X, holes), {"mask": keep}, {"f": v})[0]

    @jax.jit
    @jax.value_and_grad
    def dropped(v):
        return log_density(regression, (X[keep], y[keep]), {}, {"f": v})[0]

    for a, b in zip(masked(jnp.asarray(V)), dropped(jnp.asarray(V)), strict=True):
        assert_allclose(a, b, rtol=1e-12)
    # The same for the targets: none of the gradient leaks through the holes.
    fn = trace_of(regression, X, holes, data={"f": V}, mask=keep)["y"]["fn"]
    grad = jax.grad(lambda y: fn.log_prob(y).sum())(jnp.asarray(holes))
    assert np.all(np.isfinite(grad)) and np.all(np.asarray(grad)[~keep] == 0.0)


def test_masked_entries_of_several_outputs():
    Y = RNG.integers(0, 2, size=(8, 2)).astype(float)
    keep = RNG.uniform(size=(8, 2)) < 0.6
    holes = np.where(keep, Y, np.nan)

    def model(Y, mask=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS, num_outputs=2)
        gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(), obs=Y, mask=mask)

    v = {"f": RNG.normal(size=(2, 4))}
    fn = trace_of(model, Y, data=v)["y"]["fn"]
    each = fn.likelihood.expected_log_prob(
        jnp.asarray(Y), fn.latent.mean, fn.latent.var
    )
    fn = trace_of(model, holes, keep, data=v)["y"]["fn"]
    expected = np.where(keep, each, 0.0).sum(1)
    assert_allclose(fn.log_prob(jnp.asarray(holes)), expected, rtol=1e-12)
    row = keep[:, 0]
    fn = trace_of(model, np.where(row[:, None], Y, np.nan), row, data=v)["y"]["fn"]
    holes = jnp.asarray(np.where(row[:, None], Y, np.nan))
    assert_allclose(fn.log_prob(holes), np.where(row, np.sum(each, 1), 0.0), rtol=1e-12)


# Handlers ---------------------------------------------------------------------------


def test_condition_fixes_the_gp_and_the_targets():
    model = handlers.condition(regression, data={"f": jnp.asarray(V), "y": y})
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(jnp.asarray(X))
    assert trace["f"]["is_observed"] and trace["y"]["is_observed"]
    ell = gaussian_ell(y, *marginals(K, V, X), SCALE)
    assert_allclose(trace["y"]["fn"].log_prob(y), ell, rtol=1e-8)


def test_two_copies_live_side_by_side_under_scope():
    def model(X, y=None):
        with handlers.scope(prefix="trend"):
            f = gpx.gp("f", KERNEL, inducing=POINTS)
        with handlers.scope(prefix="season"):
            g = gpx.gp("f", KERNEL2, inducing=POINTS)
        gpx.observe("y", f(X) + g(X), gpx.likelihoods.Gaussian(SCALE), obs=y)

    v2 = RNG.normal(size=4)
    data = {"trend/f": V, "season/f": v2}
    trace = trace_of(model, jnp.asarray(X), jnp.asarray(y), data=data)
    assert set(trace) == {"trend/f", "season/f", "y"}
    (m1, s1), (m2, s2) = marginals(K, V, X), marginals(K2, v2, X)
    ell = gaussian_ell(y, m1 + m2, s1 + s2, SCALE)
    assert_allclose(trace["y"]["fn"].log_prob(y), ell, rtol=1e-7)


def test_function_draws_of_two_scopes_are_independent():
    def model(X):
        with handlers.scope(prefix="trend"):
            f = gpx.gp("f", KERNEL, inducing=POINTS)
        with handlers.scope(prefix="season"):
            g = gpx.gp("f", KERNEL, inducing=POINTS)
        return f(X).mean, g(X).mean

    zeros = {"trend/f": jnp.zeros(4), "season/f": jnp.zeros(4)}
    with drawn_functions(key=jr.key(5)):
        f, g = handlers.substitute(model, data=zeros)(jnp.asarray(X))
    assert not np.allclose(f, g)


def test_numpyro_mask_handler_leaves_a_site_out():
    def model(X, y):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with handlers.mask(mask=jnp.arange(8) < 5):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(SCALE), obs=y)

    total = density(model, (X, y), {"f": V})
    ell = gaussian_ell(y, *marginals(K, V, X), SCALE)[:5].sum()
    assert_allclose(total, ell + scipy.stats.norm.logpdf(V).sum(), rtol=1e-9)


# Sums and products of GPs -----------------------------------------------------------


def two_gps(X, y, combine):
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    g = gpx.gp("g", KERNEL2, inducing=gpx.inducing.Points(jnp.asarray(Z[:3])))
    with numpyro.plate("data", 8):
        latent = f(X) + g(X) if combine == "sum" else f(X) * g(X)
        gpx.observe("y", latent, gpx.likelihoods.Gaussian(SCALE), obs=y)


@pytest.mark.parametrize("combine", ["sum", "product"])
def test_two_gps_in_one_likelihood(combine):
    """Under draws (log density) and under beliefs (ELBO)."""
    v2 = RNG.normal(size=3)
    S1, S2 = 0.6 * np.eye(4) + 0.1, 0.8 * np.eye(3) + 0.2
    S1, S2 = np.linalg.cholesky(S1), np.linalg.cholesky(S2)

    def ell(first, second):
        (m1, s1), (m2, s2) = first, second
        if combine == "sum":
            return gaussian_ell(y, m1 + m2, s1 + s2, SCALE)
        var = s1 * s2 + m1**2 * s2 + m2**2 * s1
        return gaussian_ell(y, m1 * m2, var, SCALE)

    def believed(k, v, S, Z):
        A = np.linalg.solve(np.linalg.cholesky(jittered(k(Z, Z))), k(Z, X))
        return A.T @ v, np.diag(k(X, X) - A.T @ A + A.T @ S @ S.T @ A)

    def kl(m, S):
        S = S @ S.T
        return 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])

    def guide(X, y, combine):
        for name, v, S in (("f", V, S1), ("g", v2, S2)):
            belief = GaussianBelief(jnp.asarray(v), jnp.asarray(S))
            held = as_infer(Held(Group.alone(name, belief)))
            numpyro.sample(name, belief.distribution(), infer=held)

    total = density(two_gps, (X, y, combine), {"f": V, "g": v2})
    expected = ell(marginals(K, V, X), marginals(K2, v2, X, Z[:3])).sum()
    expected += scipy.stats.norm.logpdf(np.concatenate([V, v2])).sum()
    assert_allclose(total, expected, rtol=1e-8)

    elbo = -gpx.infer.ELBO().loss(jr.key(0), {}, two_gps, guide, X, y, combine)
    expected = ell(believed(K, V, S1, Z), believed(K2, v2, S2, Z[:3])).sum()
    assert_allclose(elbo, expected - kl(V, S1) - kl(v2, S2), rtol=1e-8)


# propagate --------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("full_cov", [False, True])
def test_propagate_registers_noise_and_a_deterministic_draw(full_cov, outputs):
    def model(X):
        f = gpx.gp("f", KERNEL, inducing=POINTS, num_outputs=outputs)
        with numpyro.plate("data", 3):
            return f(X, full_cov=full_cov), gpx.propagate("h", f(X, full_cov=full_cov))

    at = np.array([[-1.4], [0.1], [1.5]])
    v = jnp.asarray(RNG.normal(size=4 if outputs is None else (2, 4)))
    model = handlers.substitute(handlers.seed(model, 0), data={"f": v})
    traced = handlers.trace(model)
    latent, h = traced(jnp.asarray(at))
    trace = traced.trace
    assert {n: s["type"] for n, s in trace.items() if n != "data"} == {
        "f": "sample", "h/noise": "sample", "h": "deterministic"
    }  # fmt: skip
    noise = trace["h/noise"]
    assert find(noise, Noise) and noise["fn"].batch_shape == (3,)
    assert noise["value"].shape == h.shape == latent.mean.shape
    assert_allclose(
        noise["fn"].log_prob(noise["value"]),
        scipy.stats.norm.logpdf(noise["value"]).reshape(3, -1).sum(1),
        rtol=1e-12,
    )
    eps = np.reshape(noise["value"], (3, -1))
    for p in range(outputs or 1):
        v_p = v if outputs is None else v[p]
        A = np.linalg.solve(np.linalg.cholesky(jittered(K(Z, Z))), K(Z, at))
        cov = K(at, at) - A.T @ A
        root = np.linalg.cholesky(cov) if full_cov else np.diag(np.sqrt(np.diag(cov)))
        expected = A.T @ v_p + root @ eps[:, p]
        assert_allclose(np.reshape(h, (3, -1))[:, p], expected, rtol=1e-6)


# exact ------------------------------------------------------------------------------

NOISE = RNG.uniform(0.2, 0.8, size=8)
SUM, K_SUM = KERNEL + KERNEL2, lambda X, X2: K(X, X2) + K2(X, X2)
MEAN, M = Linear(jnp.asarray([0.4]), -0.3), lambda X: 0.4 * X[:, 0] - 0.3


@pytest.mark.parametrize("scale", [SCALE, NOISE])
def test_exact_registers_the_evidence(scale):
    def model(X, y=None):
        gpx.exact("y", SUM, X, scale, obs=y, mean=MEAN)

    trace = trace_of(model, jnp.asarray(X), jnp.asarray(y))
    assert list(trace) == ["y"]
    cov = K_SUM(X, X) + np.diag(np.broadcast_to(scale, 8) ** 2)
    expected = scipy.stats.multivariate_normal(M(X), cov).logpdf(y)
    assert_allclose(trace["y"]["fn"].log_prob(y), expected, rtol=1e-10)
    assert_allclose(trace["y"]["fn"].variance, np.diag(cov), rtol=1e-10)
    assert trace_of(model, jnp.asarray(X))["y"]["value"].shape == (8,)


def sites(scale=NOISE):
    train = ExactRegression(SUM, jnp.asarray(X), jnp.asarray(scale), MEAN)
    new = ExactRegression(SUM, jnp.asarray(X_NEW), jnp.asarray(scale), MEAN)
    return train, new


def test_exact_posterior_is_the_textbook_one_and_falls_into_parts():
    train, new = sites()
    C_inv = np.linalg.inv(K_SUM(X, X) + np.diag(NOISE**2))

    @jax.jit
    def posteriors():
        state = train.conditioned(jnp.asarray(y))
        return [
            new.latent_given(state, full_cov=True, part=part) for part in (None, 0, 1)
        ]

    whole, *parts = posteriors()
    for latent, k, mean in zip(
        (whole, *parts), (K_SUM, K, K2), (M(X_NEW), 0.0, 0.0), strict=True
    ):
        # k is the covariance of this part with itself and, the parts being
        # independent, with f at the data.
        B = k(X_NEW, X) @ C_inv
        cov = k(X_NEW, X_NEW) - B @ k(X, X_NEW)
        assert_allclose(latent.mean, mean + B @ (y - M(X)), rtol=1e-9, atol=1e-11)
        assert_allclose(latent.row_cov, cov, rtol=1e-9, atol=1e-10)
        assert_allclose(latent.var, np.diag(cov), rtol=1e-9, atol=1e-10)
    total = parts[0].mean + parts[1].mean + M(X_NEW)
    assert_allclose(total, whole.mean, rtol=1e-10)


def test_leave_one_out_is_a_refit_without_the_row():
    train, _ = sites()
    found = train.leave_one_out_log_prob(jnp.asarray(y))
    for n in range(8):
        rest = np.arange(8) != n
        C_inv = np.linalg.inv(K_SUM(X[rest], X[rest]) + np.diag(NOISE[rest] ** 2))
        B = K_SUM(X[[n]], X[rest]) @ C_inv
        mean = M(X[[n]]) + B @ (y[rest] - M(X[rest]))
        var = K_SUM(X[[n]], X[[n]]) - B @ K_SUM(X[rest], X[[n]]) + NOISE[n] ** 2
        expected = scipy.stats.norm.logpdf(y[n], mean[0], np.sqrt(var[0, 0]))
        assert_allclose(found[n], expected, rtol=1e-9)


def test_exact_regression_agrees_with_tinygp():
    tinygp = pytest.importorskip("tinygp")
    kernel = 1.6 * tinygp.kernels.Matern32(0.9) + 0.7 * tinygp.kernels.ExpSquared(1.8)
    gp = tinygp.GaussianProcess(
        kernel, X[:, 0], diag=NOISE**2, mean=lambda x: 0.4 * x - 0.3
    )
    train, new = sites()

    @jax.jit
    def both():
        log_prob, given = gp.condition(y, X_NEW[:, 0])[:2]
        latent = new.latent_given(train.conditioned(jnp.asarray(y)))
        ours = train.log_prob(jnp.asarray(y)), latent
        return (log_prob, given.loc, given.variance), ours

    (log_prob, mean, var), (ours, latent) = both()
    # tinygp adds 1.5e-8 to its diagonals.
    assert_allclose(ours, log_prob, rtol=1e-7)
    assert_allclose(latent.mean, mean, rtol=1e-6)
    assert_allclose(latent.var, var, rtol=1e-6)


def test_parts_of_a_sparse_gp_add_up_to_the_whole():
    f = handlers.substitute(
        lambda: gpx.gp("f", SUM, inducing=POINTS, mean=MEAN), data={"f": jnp.asarray(V)}
    )()
    at = jnp.asarray(X)
    L = np.linalg.cholesky(jittered(K_SUM(Z, Z)))
    parts = [f.part(j, at, full_cov=True) for j in range(2)]
    assert_allclose(parts[0].mean + parts[1].mean + M(X), f(at).mean, rtol=1e-10)
    for part, k in zip(parts, (K, K2), strict=True):
        A = np.linalg.solve(L, k(Z, X))
        assert_allclose(part.mean, A.T @ V, rtol=1e-9)
        assert_allclose(part.row_cov, k(X, X) - A.T @ A, rtol=1e-8, atol=1e-10)


def test_full_gp_at_shifted_inputs_of_equal_length_is_exact_regression():
    """`Data` closes over the training rows: the site does not follow `X`."""

    def model(X_at, y=None):
        f = gpx.gp("f", KERNEL, inducing=gpx.inducing.Data(jnp.asarray(X)))
        with numpyro.plate("data", X_at.shape[0]):
            gpx.observe("y", f(X_at), gpx.likelihoods.Gaussian(SCALE), obs=y)

    guide = gpx.guides.OptimalGaussian(model)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(
        jnp.asarray(X), jnp.asarray(y)
    )
    belief = held_beliefs(trace)["f"]
    fn = trace_of(model, jnp.asarray(X_NEW), data={"f": belief})["y"]["fn"]
    C_inv = np.linalg.inv(K(X, X) + SCALE**2 * np.eye(8))
    B = K(X_NEW, X) @ C_inv
    assert_allclose(fn.latent.mean, B @ y, atol=1e-6)
    var = np.diag(K(X_NEW, X_NEW) - B @ K(X, X_NEW))
    assert_allclose(fn.latent.var, var, atol=1e-6)


# Words ------------------------------------------------------------------------------


def refuse(error, match, fn, *args, **kwargs):
    with pytest.raises(error, match=match):
        handlers.seed(fn, 0)(*args, **kwargs)


BAD_INPUTS = {
    "rank": (X[:, 0], r"`X` must have shape \(N, D\); got \(8,\).*pass `X\[:, None\]`"),
    "dtype": (X.astype(int), r"`X` must be floating point; got int64. Pass `X.astype"),
    "nan": (np.where(X == X[2], np.nan, X), r"`X` must be finite; got nan at index "
            r"\(2, 0\) and 1 such values"),
    "infinite": (np.where(X == X[3], np.inf, X), "`X` must be finite; got inf"),
    "empty": (X[:0], r"`X` must have at least one row; got shape \(0, 1\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs_are_refused_in_words(case):
    value, words = BAD_INPUTS[case]

    def model(X):
        gpx.gp("f", KERNEL, inducing=POINTS)(X)

    refuse(ValueError, words, model, value)
    refuse(ValueError, words, lambda X: gpx.exact("y", KERNEL, X, 0.3), value)


BAD_TARGETS = {
    "column": (y[:, None], None, r"`obs` of site `y` must have the shape \(8,\) of its "
               r"latent function; got \(8, 1\). Pass `y\[:, 0\]`."),
    "rows": (y[:5], None, r"got \(5,\). `X` and `y` must have the same number of rows"),
    "nan": (np.where(y == y[4], np.nan, y), None, "`y` must be finite; got nan at index"
            r" 4 \(1 of 8 values\). Leave missing values out with `mask="),
    "labels": (np.array([0, 1, 2, 1, 0, 0, 1, 1]), gpx.likelihoods.Bernoulli(),
               "must hold the labels 0 and 1 for the likelihood Bernoulli; got 2 at"),
    "signs": (np.array([1, -1, 1, 1, -1, 1, 1, 1]), gpx.likelihoods.Bernoulli(),
              r"labels -1 and 1: map them with `\(y \+ 1\) / 2`"),
    "counts": (np.array([0, 1, -2, 1, 0, 0, 1, 1]), gpx.likelihoods.Poisson(),
               "must hold counts 0, 1, 2, ... for the likelihood Poisson; got -2 at"),
    "fractions": (np.full(8, 0.5), gpx.likelihoods.Poisson(), "Counts are whole numb"),
    "strings": (np.array(list("abcdefgh")), None, "`y` must be an array of numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_bad_targets_are_refused_in_words(case):
    obs, likelihood, words = BAD_TARGETS[case]
    refuse(ValueError, words, regression, X, obs, likelihood=likelihood)


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("weights", np.full(5, 0.4), r"`weights` of site `y` must have shape \(8,\); "
         r"got \(5,\)"),
        ("mask", np.full(5, True), r"`mask` of site `y` must have shape \(8,\); got"),
        ("offset", np.where(y == y[1], np.nan, y), "`offset` must be finite; got nan"),
        ("offset", y[:5], r"`offset` .*\(8,\).*got.*\(5,\)"),
        ("offset", y[:, None], r"`offset` .*\(8,\).*got.*\(8, 1\)"),
    ],
)  # fmt: skip
def test_bad_options_of_observe_are_refused_in_words(option, value, words):
    refuse(ValueError, words, regression, X, y, **{option: value})


@pytest.mark.parametrize("option", ["weights", "mask"])
def test_bad_options_are_refused_without_targets_too(option):
    value = np.full(5, 0.4) if option == "weights" else np.full(5, True)
    words = rf"`{option}` of site `y` must have shape"
    refuse(ValueError, words, regression, X, None, **{option: value})


def test_bad_targets_of_exact_are_refused_in_words():
    def model(y):
        gpx.exact("y", KERNEL, X, 0.3, obs=y)

    words = r"`obs` of site `y` must have shape \(8,\), one target for each row"
    refuse(ValueError, words, model, y[:3])
    refuse(ValueError, r"Pass `y\[:, 0\]`", model, y[:, None])
    words = "`y` must be finite; got nan"
    refuse(ValueError, words, model, np.where(y == y[0], np.nan, y))


def test_bad_inducing_variables_are_refused_in_words():
    Points, Data = gpx.inducing.Points, gpx.inducing.Data
    twice = np.concatenate([Z, Z[:1]])
    words = "`Z` must have distinct rows; 1 of 5 repeat an earlier one. Choose inducing"
    with pytest.raises(ValueError, match=words):
        Points(jnp.asarray(twice))
    assert Data(jnp.asarray(twice)).size == 5  # repeated rows are data
    with pytest.raises(ValueError, match=r"`Z` must have shape \(M, D\); got \(4,\)"):
        Points(jnp.asarray(Z[:, 0]))
    with pytest.raises(ValueError, match="`Z` must be floating point; got int64"):
        Points(jnp.arange(4)[:, None])
    with pytest.raises(ValueError, match="`X` must be finite; got NaN or infinity"):
        Data(jnp.asarray([[0.3], [np.nan]]))
    words = "`inducing` must be an Inducing, such as gpx.inducing.Points.Z.; got"
    refuse(TypeError, words, lambda: gpx.gp("f", KERNEL, inducing=Z))


def test_draws_of_another_shape_are_refused_in_words():
    words = r"The value of GP site `f` must have shape \(4,\); got \(5,\). These draws"
    model = handlers.substitute(regression, data={"f": jnp.full(5, 0.3)})
    refuse(ValueError, words, model, X, y)


def test_kernels_that_are_none_are_refused_in_words():
    refuse(
        TypeError, "`kernel` must be a Kernel, wrap other callables in kernels.Custom",
        lambda: gpx.gp("f", [KERNEL, max], inducing=POINTS),
    )  # fmt: skip
    refuse(
        ValueError, "one for each output; got 2 for num_outputs=3",
        lambda: gpx.gp("f", [KERNEL, KERNEL2], inducing=POINTS, num_outputs=3),
    )  # fmt: skip
    refuse(
        TypeError, "`latent` must be a Gaussian, such as f",
        lambda: gpx.propagate("h", jnp.full(3, 0.4)),
    )  # fmt: skip


def test_nothing_is_registered_by_a_call_that_is_refused():
    def model():
        try:
            gpx.exact("y", KERNEL, X, 0.3, obs=y[:2])
        except ValueError:
            numpyro.sample("z", dist.Normal(0.3, 0.7))

    assert list(trace_of(model)) == ["z"]
    assert isinstance(Zero()(jnp.asarray(X)), jax.Array)


def by_rows(X, y=None, *, batch_size=None, obs=lambda y, i: {"obs": y, "rows": i}):
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    with (
        numpyro.plate("groups", 1, dim=-2),
        numpyro.plate("data", len(X), dim=-1, subsample_size=batch_size) as i,
    ):
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(SCALE), **obs(y, i))


def test_rows_are_taken_from_the_targets_of_the_innermost_plate():
    def indexed(y, i):
        return {"obs": y[i]}

    batch = jnp.array([5, 0, 5])
    v = jnp.asarray(V)
    values = {"f": v, "data": batch}
    found, expected = (
        jax.jit(lambda y, o=options: log_density(
            handlers.seed(by_rows, 0), (jnp.asarray(X), y),
            {"batch_size": 3, **o}, values,
        )[0])(y)
        for options in ({}, {"obs": indexed})
    )  # fmt: skip
    assert_allclose(found, expected, rtol=1e-14)
    # NumPy targets under `jit`, where `y[i]` would fail.
    data = (jnp.asarray(X), y)
    closed = jax.jit(lambda v: log_density(by_rows, data, {}, {"f": v})[0])(v)
    assert_allclose(closed, log_density(by_rows, data, {}, {"f": v})[0])
    assert trace_of(by_rows, X)["y"]["value"].shape == (1, 8)


def test_targets_with_other_rows_than_the_plate_are_refused_in_words():
    for batch_size in (None, 3):
        refuse(
            ValueError, "`obs` of site `y` has 3 rows; plate `data` has 8.",
            lambda b=batch_size: trace_of(lambda: by_rows(X, y[:3], batch_size=b)),
        )  # fmt: skip
    refuse(
        ValueError, "`obs` of site `y` must have 8 rows, those of plate `data`; got a",
        lambda: trace_of(lambda: by_rows(X, 0.3)),
    )  # fmt: skip
    known, rows = jnp.full(8, 0.3), jnp.arange(8)
    for obs in (None, y):
        refuse(
            ValueError, "`rows` of site `y` must be those of a plate around it",
            lambda o=obs: gpx.observe(
                "y", known, gpx.likelihoods.Gaussian(SCALE), obs=o, rows=rows
            ),
        )  # fmt: skip


def test_learnt_inducing_inputs_are_a_parameter_named_after_the_gp():
    def model(X, y=None):
        with handlers.scope(prefix="trend"):
            f = gpx.gp("f", KERNEL, inducing=gpx.inducing.Points(Z, learn=True))
        g = gpx.gp("g", KERNEL2, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X) + g(X), gpx.likelihoods.Gaussian(SCALE), obs=y)

    sites = trace_of(lambda: model(X, y))
    params = {n: s for n, s in sites.items() if s["type"] == "param"}
    assert list(params) == ["trend/f/Z"]
    np.testing.assert_array_equal(params["trend/f/Z"]["value"], Z)
    moved = Z + 0.21
    values = {"trend/f/Z": moved, "trend/f": V, "g": V[::-1]}
    found, _ = log_density(model, (X, y), {}, jax.tree.map(jnp.asarray, values))
    f, g = marginals(K, V, X, moved), marginals(K2, V[::-1], X)
    prior = 2.0 * scipy.stats.norm.logpdf(V).sum()
    ell = gaussian_ell(y, f[0] + g[0], f[1] + g[1], SCALE)
    assert_allclose(found, prior + np.sum(ell), rtol=1e-7)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(obs=np.ones(3) * 1j), "`y` must be real; got complex128"),
        (dict(weights=np.array([1.0, -0.5, 1.0])), "`weights` of site `y` .* got -0.5"),
        (dict(weights=1j * np.ones(3)), "`weights` must be real; got complex128"),
        (dict(weights=np.full(3, np.inf)), "`weights` must be finite; got inf"),
        (dict(offset=1j * np.ones(3)), "`offset` must be real; got complex128"),
        (dict(latent=np.array([0.1, np.nan, 0.3])), "`latent` of site `y`.*got nan"),
        (dict(latent=1j * np.ones(3)), "`latent` of site `y` must be real"),
    ],
)
def test_what_a_site_cannot_hold_is_refused_outside_fits_too(options, words):
    options = {"latent": np.zeros(3), "obs": np.ones(3)} | options
    with pytest.raises(ValueError, match=words):
        gpx.observe("y", likelihood=gpx.likelihoods.Gaussian(0.3), **options)


@pytest.mark.parametrize(
    "scale, words",
    [
        (-0.3, "`scale` of site `y` must be positive; got -0.3"),
        (np.inf, "`scale` must be finite"),
        (0.3j, "`scale` must be real"),
        ([0.3, 0.3j, 0.3], "`scale` must be real"),
        (np.array([0.3, np.nan, 0.3]), "`scale` must be finite; got nan"),
        (np.ones(2), r"or have shape \(3,\); got \(2,\)"),
    ],
)
def test_scales_of_exact_regression_are_checked(scale, words):
    with pytest.raises(ValueError, match=words):
        gpx.exact("y", gpx.kernels.RBF(), np.zeros((3, 1)), scale, obs=np.ones(3))


@pytest.mark.parametrize("scale", ["0.3", None, [None, 0.3, 0.3]])
def test_scales_that_are_no_numbers_are_named(scale):
    with pytest.raises(TypeError, match="`scale` must be a number or an array of numb"):
        gpx.exact("y", gpx.kernels.RBF(), np.zeros((3, 1)), scale, obs=np.ones(3))


def test_sites_look_at_numbers_and_not_at_tracers():
    """Inside `jit` there are none: nothing is computed for the checks."""

    def density(f, y, weights, scale):
        def model():
            likelihood = gpx.likelihoods.Gaussian(0.3)
            gpx.observe("y", f, likelihood, obs=y, weights=weights)
            gpx.exact("z", KERNEL, X, [scale] * 8, obs=y)

        return log_density(model, (), {}, {})[0]

    given = jnp.zeros(8), jnp.asarray(y), jnp.ones(8), 0.3
    assert np.isfinite(density(*given))
    assert_allclose(jax.jit(density)(*given), density(*given), rtol=1e-10)
    assert np.isnan(jax.jit(density)(jnp.full(8, jnp.nan), *given[1:]))


def test_models_can_be_rendered_more_than_once():
    model = gpx.models.svgp(gpx.inducing.Points(np.linspace(-1.0, 1.0, 3)[:, None]))
    X = jnp.linspace(-1.0, 1.0, 5)[:, None]
    found = [get_model_relations(model, (X, X[:, 0])) for _ in range(3)]
    assert found[0]["sample_sample"] == found[2]["sample_sample"]
    assert "f" in found[0]["sample_sample"]["y"]


def test_models_can_be_rendered_in_turn():
    """NumPyro compares what a trace carries along with that of the trace before."""

    def exact(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        gpx.exact("y", KERNEL, X, scale, obs=y)

    def sparse(X, y=None):
        f = gpx.gp("f", KERNEL, inducing=gpx.inducing.Points(Z, learn=True))
        g = gpx.gp("g", KERNEL, inducing=POINTS, whiten=False)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        weights = jnp.ones(X.shape[0])
        with numpyro.plate("data", X.shape[0]) as i:
            gpx.observe(
                "y", f(X[i]) * g(X[i]), gpx.likelihoods.Gaussian(scale), obs=y, rows=i,
                weights=weights,
            )  # fmt: skip

    given = jnp.asarray(X), jnp.asarray(y)
    for _ in range(2):
        assert get_model_relations(exact, given)["sample_sample"]["y"] == ["scale"]
        found = get_model_relations(sparse, given)
        assert set(found["sample_sample"]["y"]) == {"f", "g", "scale"}
        assert found["observed"] == ["y"]
