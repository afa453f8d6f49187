"""One door for compiled code: it compiles once, and never answers for old values."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers

import numpyro_gpx as gpx
from numpyro_gpx.numerics.jitter import current_jitter
from numpyro_gpx.program.compile_cache import compiled, num_compiled, run

X = np.linspace(-2.0, 2.0, 16)[:, None]
Y = np.sin(2.0 * X[:, 0])
Z = X[::4]
NOISE = 0.3


def model(X, y=None):
    """Reads two globals."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    kernel = gpx.kernels.RBF(lengthscale=lengthscale)
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", X.shape[0]) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(NOISE), obs=y, rows=i)


def fitted(**options):
    guide = gpx.guides.WhitenedGaussian
    options = dict(key=jr.key(0), num_steps=200, progress=False) | options
    return gpx.fit_svi(model, guide, X, Y, **options)


def by_hand(fit, points, noise):
    """Predictive mean and variance from the fitted parameters, in NumPy."""
    lengthscale = float(fit.draws(1)["lengthscale"][0])

    def k(a, b):
        return np.exp(-0.5 * ((a - b.T) / lengthscale) ** 2)

    L = np.linalg.cholesky(k(points, points) + 1e-8 * np.eye(len(points)))
    A = np.linalg.solve(L, k(points, X))
    m, S = (np.asarray(fit.params[f"f_auto_{n}"]) for n in ("loc", "scale_tril"))
    var = 1.0 - np.sum(A**2, axis=0) + np.sum((S.T @ A) ** 2, axis=0)
    return A.T @ m, var + noise**2


@pytest.fixture
def restored(monkeypatch):
    """Globals that a test changes are put back."""
    monkeypatch.setitem(globals(), "Z", Z)
    monkeypatch.setitem(globals(), "NOISE", NOISE)


def test_a_second_fit_compiles_nothing_and_follows_what_has_changed(restored):
    first = fitted()
    first.predict(X).var.sum()
    first.draws(1)
    before = num_compiled()
    again = fitted()
    assert_allclose(again.predict(X).mean, first.predict(X).mean, rtol=1e-12)
    assert num_compiled() == before
    # Another array of the same shape: the same program with another argument.
    globals()["Z"] = X[1::4] + 0.05
    moved = fitted()
    mean, var = by_hand(moved, Z, NOISE)
    prediction = moved.predict(X)
    assert_allclose(prediction.mean, mean, atol=1e-6)
    assert_allclose(prediction.var, var, atol=1e-6)
    assert num_compiled() == before
    assert np.abs(prediction.mean - first_mean(again)).max() > 1e-3
    # Another number inside: another program, and the right one.
    globals()["NOISE"] = 1.7
    noisy = fitted()
    mean, var = by_hand(noisy, Z, 1.7)
    assert_allclose(noisy.predict(X).var, var, atol=1e-6)
    assert num_compiled() > before


def by_engine(engine):
    options = dict(key=jr.key(0), progress=False)
    if engine == "svi":
        return gpx.fit_svi(
            model, gpx.guides.WhitenedGaussian, X, Y, num_steps=3, **options
        )
    if engine == "lbfgs":
        guide = gpx.guides.OptimalGaussian
        return gpx.fit_lbfgs(model, guide, X, Y, max_steps=3, **options)
    sampler = {"nuts": gpx.fit_nuts, "sghmc": gpx.fit_sghmc}[engine]
    return sampler(model, X, Y, num_warmup=3, num_samples=4, num_chains=2, **options)


@pytest.fixture
def compiled_by_xla():
    """Names of all programs that XLA compiles, ours or not."""
    found = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("engine", ["svi", "lbfgs", "nuts", "sghmc"])
def test_no_engine_compiles_twice(engine, restored, compiled_by_xla):
    """Counted by XLA itself, and for another `Z` of the same shape as well."""
    gpx.cache.clear()  # of what other tests have left
    by_engine(engine)
    assert compiled_by_xla  # what is counted, is counted
    first = by_engine(engine)
    compiled_by_xla.clear()
    again = by_engine(engine)
    assert not compiled_by_xla
    before = again.draws(4)["f"]
    assert_allclose(before, first.draws(4)["f"], rtol=1e-9)
    globals()["Z"] = X[1::4] + 0.05
    compiled_by_xla.clear()
    moved = by_engine(engine)
    assert not compiled_by_xla
    assert np.abs(moved.draws(4)["f"] - before).max() > 1e-6


def first_mean(fit):
    """A fit of before the change says so instead of answering for new values."""
    words = r"changed since the fit \(constant of shape \(4, 1\)\)"
    with pytest.raises(ValueError, match=words):
        fit.predict(X)
    with pytest.raises(ValueError, match=words):
        fit.functions(jr.key(0), 2)(X)
    return np.zeros(len(X))


def test_a_changed_number_is_seen_between_fit_and_prediction(restored):
    fit = fitted()
    fit.predict(X)
    globals()["NOISE"] = 0.31
    with pytest.raises(ValueError, match="a number or a shape in it.*Fit again"):
        fit.predict(X)
    globals()["NOISE"] = 0.3
    assert np.all(np.isfinite(fit.predict(X).mean))


def test_arrays_changed_in_place_are_seen(restored):
    globals()["Z"] = Z.copy()
    fit = fitted()
    Z[0] += 0.1
    with pytest.raises(ValueError, match="constant of shape"):
        fit.predict(X)


def test_the_fingerprint_is_the_model_not_the_arguments(restored):
    first, again = fitted(num_steps=1), fitted(num_steps=1)
    assert first.program.fingerprint == again.program.fingerprint
    globals()["Z"] = Z + 0.1
    assert fitted(num_steps=1).program.fingerprint != first.program.fingerprint


def test_predictions_work_inside_jit_and_grad_and_leave_the_fit_as_it_was():
    fit = fitted(num_steps=20)
    mean = fit.predict(X[:5]).mean
    inside = jax.jit(lambda X: fit.predict(X).mean)(jnp.asarray(X[:5]))
    assert_allclose(inside, mean, rtol=1e-10)
    slope = jax.grad(lambda x: fit.predict(x[None, None]).mean[0])(jnp.asarray(0.3))
    step = 1e-5
    ends = [fit.predict(np.array([[0.3 + s * step]])).mean[0] for s in (1.0, -1.0)]
    assert_allclose(slope, (ends[0] - ends[1]) / (2.0 * step), rtol=1e-5)
    assert_allclose(fit.predict(X[:5]).mean, mean, rtol=1e-12)
    fresh = fitted(num_steps=20)  # the components, too, are first asked for inside
    jax.jit(lambda X: fresh.predict(X).mean)(jnp.asarray(X[:5]))
    assert_allclose(fresh.predict(X[:5]).mean, mean, rtol=1e-12)


SCALE = 2.0


def scaled(x):
    return SCALE * x


def test_the_door_sees_numbers_arrays_and_inner_functions():
    x = jnp.arange(3.0)
    table = np.array([1.0, 2.0, 3.0])

    @jax.jit
    def inner(x):
        return x + table

    def outer(x):
        return scaled(inner(x))

    def value():
        return np.asarray(run(outer, x))

    assert_allclose(value(), 2.0 * (np.arange(3.0) + table))
    table[:] = 7.0
    jax.clear_caches()  # JAX's own `jit` keeps the old constant; ours does not
    assert_allclose(value(), 2.0 * (np.arange(3.0) + 7.0))


def test_callbacks_are_not_mixed_up():
    def program(fn):
        shape = jax.ShapeDtypeStruct((), jnp.float64)
        return lambda x: jax.pure_callback(fn, shape, x)

    x = jnp.asarray(3.0)
    assert float(run(program(lambda x: np.asarray(2.0 * x)), x)) == 6.0
    assert float(run(program(lambda x: np.asarray(5.0 * x)), x)) == 15.0


def test_a_compiled_function_refuses_other_arguments():
    program = compiled(lambda x: x["a"] + 1.0, {"a": jnp.zeros(2)})
    assert_allclose(program({"a": jnp.ones(2)}), 2.0)
    with pytest.raises(ValueError, match="was compiled for arguments"):
        program({"b": jnp.ones(2)})


class Settings:
    noise = 0.3


def test_a_class_that_a_model_reads_may_change(monkeypatch):
    """A refit follows it, and a fit from before says so."""

    def classed(X, y=None):
        f = gpx.gp("f", gpx.kernels.RBF(1.0, 0.8), inducing=gpx.inducing.Points(X_OWN))
        with numpyro.plate("data", X.shape[0]):
            noise = gpx.likelihoods.Gaussian(Settings.noise)
            gpx.observe("y", f(X), noise, obs=y)

    options = dict(key=jr.key(0), num_steps=2, progress=False)
    fit = gpx.fit_svi(classed, gpx.guides.WhitenedGaussian, X, Y, **options)
    small = fit.predict(X).var
    monkeypatch.setattr(Settings, "noise", 3.0)
    for ask in (
        lambda: fit.predict(X), fit.elbo, fit.replicate, lambda: gpx.loo(fit),
        fit.to_arviz,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="changed since the fit"):
            ask()
    again = gpx.fit_svi(classed, gpx.guides.WhitenedGaussian, X, Y, **options)
    assert np.all(again.predict(X).var > small + 8.0)


X_OWN = X[::5]


class Config:
    """An argument of a model that is no array."""

    scale = 1.0


def configured(X, y=None, *, config):
    f = gpx.gp("f", gpx.kernels.RBF(1.0, 0.8), inducing=gpx.inducing.Points(X_OWN))
    with numpyro.plate("data", X.shape[0]):
        latent = config.scale * f(X)
        gpx.observe("y", latent, gpx.likelihoods.Gaussian(NOISE), obs=y)


def fitted_to(model, *args, **options):
    options = dict(key=jr.key(0), num_steps=2, progress=False) | options
    return gpx.fit_svi(model, gpx.guides.WhitenedGaussian, X, *args, **options)


def test_objects_among_the_arguments_may_change():
    config = Config()
    fit = fitted_to(configured, Y, config=config)
    small = fit.predict(X, config=config).var
    config.scale = 5.0
    with pytest.raises(ValueError, match="changed since the fit"):
        fit.predict(X, config=config)
    again = fitted_to(configured, Y, config=config)
    assert np.all(again.predict(X, config=config).var > 10.0 * small - 2.0)


WIDTH = 0.5


def laplace(f):
    return dist.Laplace(f, WIDTH)


def own_family(X, y=None):
    f = gpx.gp("f", gpx.kernels.RBF(1.0, 0.8), inducing=gpx.inducing.Points(X_OWN))
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", f(X), gpx.likelihoods.From(laplace), obs=y)


def test_what_a_likelihood_reads_may_change(monkeypatch):
    """Also where predictions are worked out, after the model has been called."""
    fitted_to(own_family, Y).predict(X).var.sum()
    monkeypatch.setitem(globals(), "WIDTH", 4.0)
    var = fitted_to(own_family, Y).predict(X).var
    assert np.all((var > 32.0) & (var < 34.0))


def noisy(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 0.1))
    f = gpx.gp("f", gpx.kernels.RBF(1.0, 0.8), inducing=gpx.inducing.Points(X_OWN))
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(noise), obs=y)


def test_handlers_around_a_prediction_do_not_reach_into_it():
    fit = fitted_to(noisy, Y)
    with handlers.substitute(data={"noise": 9.0}):
        inside = fit.predict(X).var
    assert np.all(inside < 20.0)
    assert_allclose(fit.predict(X).var, inside)


def test_fits_predict_inside_other_models():
    fit = fitted_to(noisy, Y)
    mean = fit.predict(X).mean

    def second():
        numpyro.sample("noise", dist.Normal(0.0, 1.0))
        numpyro.deterministic("mean", fit.predict(X + 0.0).mean)

    trace = handlers.trace(handlers.seed(second, rng_seed=0)).get_trace()
    assert sorted(trace) == ["mean", "noise"]
    assert_allclose(trace["mean"]["value"], mean)


def test_predictions_have_densities_inside_jit():
    fit = fitted_to(noisy, Y)
    density = jax.jit(lambda X: fit.predict(X).log_prob(Y))
    assert_allclose(density(jnp.asarray(X)), fit.predict(X).log_prob(Y), rtol=1e-9)


def test_programs_with_the_same_text_and_other_constants_live_together():
    """One reads a matrix, the other takes it: the text of both is the same."""
    W = jnp.eye(3)
    reads = compiled(lambda x: W @ x, jnp.ones(3))
    takes = compiled(lambda W, x: W @ x, W, jnp.ones(3))
    assert_allclose(reads(jnp.arange(3.0)), [0.0, 1.0, 2.0])
    assert_allclose(takes(2.0 * W, jnp.arange(3.0)), [0.0, 2.0, 4.0])


def test_programs_are_known_by_their_options_too():
    x = jnp.ones(3)

    def fn(x):
        return jnp.sin(x) + 0.123

    compiled(fn, x)
    before = num_compiled()
    compiled(fn, x, optimise=False)
    assert num_compiled() == before + 1


def with_jitter(x):
    return x + current_jitter(x.dtype)


def test_programs_follow_the_jitter_around_them():
    found = []
    for relative in (1e-3, 1e-2):
        with gpx.jitter(relative):
            found.append(float(run(with_jitter, jnp.asarray(0.0))))
    assert_allclose(found, [1e-3, 1e-2])


def learnt(X, y=None):
    inducing = gpx.inducing.Points(Z, learn=True)
    f = gpx.gp("f", gpx.kernels.RBF(1.0, 0.8), inducing=inducing)
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(NOISE), obs=y)


def test_where_a_parameter_started_does_not_matter_after_the_fit(restored):
    fit = fitted_to(learnt, Y)
    before = fit.predict(X).mean
    globals()["Z"] = Z + 0.01
    assert_allclose(fit.predict(X).mean, before)
    globals()["NOISE"] = 0.7
    with pytest.raises(ValueError, match="changed since the fit"):
        fit.predict(X)


def test_a_full_gp_may_be_called_inside_the_users_own_jit():
    def inner(X_, y=None):
        f = gpx.gp("f", gpx.kernels.RBF(1.0, 0.8), inducing=gpx.inducing.Data(X))
        mean = jax.jit(lambda X: f(X).mean)(X_)
        with numpyro.plate("data", X_.shape[0]):
            gpx.observe("y", mean, gpx.likelihoods.Gaussian(NOISE), obs=y)

    fit = fitted_to(inner, Y)
    assert np.all(np.isfinite(fit.predict(X).mean))
    assert fit.target == "sparse"  # not proven to be exact
