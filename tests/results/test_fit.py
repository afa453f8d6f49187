"""One `Fit` for every engine: predictions, functions, parts, bounds, storage."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from numpy.testing import assert_allclose
from numpyro.infer import MCMC, NUTS, SVI, init_to_value

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import num_compiled
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior
from numpyro_gpx.results.prediction import Prediction
from numpyro_gpx.sites.marginals import ExactRegression
from numpyro_gpx.sites.predictive import FromDistribution

NOISE = 0.3
TREND = gpx.kernels.RBF(variance=1.3, lengthscale=1.6)
WIGGLE = gpx.kernels.Matern32(variance=0.4, lengthscale=0.3)
KERNEL = TREND + WIGGLE

_rng = np.random.default_rng(11)
X = np.sort(_rng.uniform(-2.0, 2.0, 25))[:, None]
Y = np.sin(2.0 * X[:, 0]) + NOISE * _rng.normal(size=25)
X_NEW = np.linspace(-2.5, 2.5, 9)[:, None]


def model(inputs, y=None, *, batch_size=None):
    f = gpx.gp("f", KERNEL, inducing=gpx.inducing.Data(X))
    with numpyro.plate("data", inputs.shape[0], subsample_size=batch_size) as i:
        likelihood = gpx.likelihoods.Gaussian(NOISE)
        gpx.observe("y", f(inputs[i]), likelihood, obs=y, rows=i)


def posterior(X_star):
    """Exact posterior mean and covariance of `f` at new inputs, in NumPy."""
    K = np.asarray(KERNEL(X)) + NOISE**2 * np.eye(len(X))
    Ks = np.asarray(KERNEL(X_star, X))
    return Ks @ np.linalg.solve(K, Y), np.asarray(
        KERNEL(X_star)
    ) - Ks @ np.linalg.solve(K, Ks.T)


@pytest.fixture(scope="module")
def fit():
    return gpx.fit_lbfgs(
        model, gpx.guides.OptimalGaussian(model), X, Y, key=jr.key(0), progress=False
    )


def test_prediction_equals_exact_regression_at_shifted_inputs_of_equal_length(fit):
    shifted = X + 0.37
    mean, cov = posterior(shifted)
    prediction = fit.predict(shifted)
    assert_allclose(prediction.mean, mean, atol=1e-6)
    assert_allclose(prediction.var, np.diag(cov) + NOISE**2, atol=1e-6)
    latent = fit.predict(shifted, of="f")
    assert_allclose(latent.var, np.diag(cov), atol=1e-6)
    y = np.cos(shifted[:, 0])
    expected = scipy.stats.norm(mean, np.sqrt(np.diag(cov) + NOISE**2)).logpdf(y)
    assert_allclose(prediction.log_prob(y), expected, atol=1e-5)


def test_bound_of_the_full_gp_is_the_evidence(fit):
    cov = np.asarray(KERNEL(X)) + NOISE**2 * np.eye(len(X))
    evidence = scipy.stats.multivariate_normal(cov=cov).logpdf(Y)
    assert_allclose(fit.elbo().value, evidence, atol=1e-5)
    assert fit.elbo().value <= evidence
    assert fit.elbo().standard_error == 0.0


def test_chunks_agree_with_one_piece_and_compile_once(fit):
    rows = np.linspace(-2.0, 2.0, 50)[:, None]
    whole = fit.predict(rows, chunk_rows=None).mean
    assert_allclose(fit.predict(rows, chunk_rows=16).mean, whole, rtol=1e-10)
    assert_allclose(fit.predict(rows).mean, whole, rtol=1e-10)
    fit.predict(rows).log_prob(np.zeros(50))
    before = num_compiled()
    # 33 to 64 rows share one compiled size.
    assert len(fit.predict(rows[:40]).mean) == 40
    assert len(fit.predict(rows[3:45]).mean) == 42
    fit.predict(rows[2:44]).log_prob(np.zeros(42))
    fit.predict(rows[:64]).log_prob(np.zeros(50))
    assert num_compiled() == before


def test_prediction_draws_have_the_predictive_moments(fit):
    """1000 draws of 9 rows, 5 standard errors: false alarms below 1e-5."""
    prediction = fit.predict(X_NEW)
    draws = prediction.draws
    assert draws.shape == (1000, 9)
    error = prediction.sd / np.sqrt(1000)
    assert np.all(np.abs(draws.mean(axis=0) - prediction.mean) < 5.0 * error)
    assert np.all(
        np.abs(draws.var(axis=0) / prediction.var - 1.0) < 5.0 * np.sqrt(2 / 1000)
    )
    low, high = prediction.quantile([0.05, 0.95])
    assert np.all(low < prediction.mean) and np.all(prediction.mean < high)


def test_wrong_targets_and_arguments_are_named(fit):
    with pytest.raises(ValueError, match=r"`y` must have the shape \(9,\)"):
        fit.predict(X_NEW).log_prob(np.zeros(4))
    with pytest.raises(ValueError, match="Pass the model's arguments"):
        fit.predict()
    with pytest.raises(ValueError, match=r"observed sites \['y'\]; got 'z'"):
        fit.predict(X_NEW, site="z")


def test_functions_are_coherent(fit):
    """Correlations between rows, which independent rows would not have.

    4000 draws, entries of the covariance to 6 standard errors: below 1e-6.
    """
    mean, cov = posterior(X_NEW)
    draws = fit.functions(jr.key(1), 4000)(X_NEW)
    assert draws.shape == (4000, 9)
    scale = np.sqrt(np.outer(np.diag(cov), np.diag(cov)))
    assert np.all(np.abs(np.cov(draws.T) - cov) < 6.0 * scale * np.sqrt(2 / 4000))
    assert np.all(np.abs(draws.mean(0) - mean) < 6.0 * np.sqrt(np.diag(cov) / 4000))
    near = fit.functions(jr.key(1), 500)(np.array([[0.4], [0.42]]))
    assert np.corrcoef(near.T)[0, 1] > 0.9


def conditional(kernel, Z, v, X_star):
    """Mean and variance of a GP given its whitened inducing variables, in NumPy."""
    K = np.asarray(kernel(Z))
    L = np.linalg.cholesky(K + 1e-8 * np.mean(np.diag(K)) * np.eye(len(K)))
    A = np.linalg.solve(L, np.asarray(kernel(Z, X_star)))
    return A.T @ v, np.asarray(kernel.diag(X_star)) - np.sum(A**2, axis=0)


COMBINED = {
    "sum": lambda f, g: f + g + 0.7,
    "difference": lambda f, g: f - 2.0 * g,
    "product": lambda f, g: f * g,
    "stack": gpx.stack,
}


@pytest.mark.parametrize("how", COMBINED)
def test_a_gp_that_enters_the_latent_function_is_predicted_by_its_name(how):
    Z = X[::5]

    def combined(inputs, y=None):
        f = gpx.gp("f", TREND, inducing=gpx.inducing.Points(Z))
        g = gpx.gp("g", WIGGLE, inducing=gpx.inducing.Points(Z + 0.1))
        likelihood = gpx.likelihoods.Gaussian(NOISE)
        if how == "stack":
            likelihood = gpx.likelihoods.HeteroscedasticGaussian()
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", COMBINED[how](f(inputs), g(inputs)), likelihood, obs=y)

    rng = np.random.default_rng(6)
    values = {name: rng.normal(size=(1, 1, 5)) for name in "fg"}
    fit = gpx.Fit(
        Program.unchecked(Call(combined, (X, Y))),
        ChainPosterior(values),
        facts=gpx.engines.NUTS().facts,
    )
    for name, kernel, places in (("f", TREND, Z), ("g", WIGGLE, Z + 0.1)):
        found = fit.predict(X_NEW, of=name)
        mean, var = conditional(kernel, places, values[name][0, 0], X_NEW)
        assert_allclose(found.mean, mean, atol=1e-6)
        assert_allclose(found.var, var, atol=1e-6)
    words = r"`of` must be None for the targets `y`, or one of \['latent', 'f', 'g'\]"
    with pytest.raises(ValueError, match=words + ".*got 'h'"):
        fit.predict(X_NEW, of="h")


def test_the_latent_function_has_the_offset_and_its_gp_has_not():
    def shifted(inputs, y=None):
        f = gpx.gp("f", TREND, inducing=gpx.inducing.Points(X[::5]))
        with numpyro.plate("data", inputs.shape[0]):
            offset = 0.1 * inputs[:, 0]
            likelihood = gpx.likelihoods.Gaussian(NOISE)
            gpx.observe("y", f(inputs), likelihood, obs=y, offset=offset)

    values = {"f": np.full((1, 1, 5), 0.4)}
    fit = gpx.Fit(
        Program.unchecked(Call(shifted, (X, Y))),
        ChainPosterior(values),
        facts=gpx.engines.NUTS().facts,
    )
    whole, alone = (fit.predict(X_NEW, of=name).mean for name in ("latent", "f"))
    assert_allclose(whole - alone, 0.1 * X_NEW[:, 0], atol=1e-12)


def test_which_of_two_calls_of_a_gp_is_meant_must_be_known():
    def twice(inputs, y=None):
        f = gpx.gp("f", TREND, inducing=gpx.inducing.Points(X[::5]))
        with numpyro.plate("data", inputs.shape[0]):
            double = gpx.likelihoods.Gaussian(NOISE)
            gpx.observe("y", 2.0 * f(inputs), double, obs=y)
            numpyro.deterministic("before", f(inputs - 1.0).mean)

    values = {"f": np.full((1, 1, 5), 0.4)}
    fit = gpx.Fit(
        Program.unchecked(Call(twice, (X, Y))),
        ChainPosterior(values),
        facts=gpx.engines.NUTS().facts,
    )
    with pytest.raises(ValueError, match="calls `f` 2 times.*predict `of='latent'`"):
        fit.predict(X_NEW, of="f")


def test_plain_sites_have_no_latent_function():
    def plain(inputs, y=None):
        slope = numpyro.sample("slope", dist.Normal())
        with numpyro.plate("data", inputs.shape[0]):
            numpyro.sample("y", dist.Normal(slope * inputs[:, 0], NOISE), obs=y)

    posterior = ChainPosterior({"slope": np.ones((1, 2))})
    fit = gpx.Fit(
        Program.unchecked(Call(plain, (X, Y))),
        posterior,
        facts=gpx.engines.NUTS().facts,
    )
    with pytest.raises(ValueError, match="Site `y` is a plain Normal; its latent"):
        fit.predict(X_NEW, of="latent")


def test_functions_pass_through_sums_and_products():
    """In `f g + f`, the draws of `f` in both terms are the same function."""
    Z = X[::5]

    def combined(inputs, y=None):
        f = gpx.gp("f", TREND, inducing=gpx.inducing.Points(Z))
        g = gpx.gp("g", WIGGLE, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", inputs.shape[0]):
            product = f(inputs) * g(inputs)
            gpx.observe("y", product, gpx.likelihoods.Gaussian(NOISE), obs=y)

    values = {"f": np.full((1, 1, 5), 2.0), "g": np.full((1, 1, 5), 0.5)}
    fit = gpx.Fit(
        Program.unchecked(Call(combined, (X, Y))),
        ChainPosterior(values),
        facts=gpx.engines.NUTS().facts,
    )
    prediction = fit.predict(Z, of="latent")
    draws = fit.functions(jr.key(0), 200)(Z)
    # At the inducing inputs both functions are known: one value, no spread.
    assert_allclose(draws.std(axis=0), 0.0, atol=1e-3)
    assert_allclose(draws.mean(axis=0), prediction.mean, atol=1e-3)


def test_parts_of_a_sum_kernel_add_up_and_agree_with_joint_conditioning(fit):
    parts = fit.parts(X_NEW)
    assert list(parts) == ["f[0]", "f[1]"]
    mean, _ = posterior(X_NEW)
    assert_allclose(sum(p.mean for p in parts.values()), mean, atol=1e-6)
    K = np.asarray(KERNEL(X)) + NOISE**2 * np.eye(len(X))
    for kernel, part in zip((TREND, WIGGLE), parts.values(), strict=True):
        Ks = np.asarray(kernel(X_NEW, X))
        assert_allclose(part.mean, Ks @ np.linalg.solve(K, Y), atol=1e-6)
        cov = np.asarray(kernel(X_NEW)) - Ks @ np.linalg.solve(K, Ks.T)
        assert_allclose(part.var, np.diag(cov), atol=1e-6)


def test_exact_regression_predicts_like_the_full_gp(fit):
    marginal = gpx.models.exact_gp(kernel=KERNEL)
    draws = {"noise": np.full((1, 1), NOISE)}
    exact = gpx.Fit(
        Program.unchecked(Call(marginal, (X, Y))),
        ChainPosterior(draws),
        facts=gpx.engines.NUTS().facts,
    )
    assert exact.target == "exact"
    assert_allclose(exact.predict(X_NEW).mean, fit.predict(X_NEW).mean, atol=1e-6)
    assert_allclose(exact.predict(X_NEW).var, fit.predict(X_NEW).var, atol=1e-6)
    parts, same = exact.parts(X_NEW), fit.parts(X_NEW)
    for label, other in (("y[0]", "f[0]"), ("y[1]", "f[1]")):
        assert_allclose(parts[label].mean, same[other].mean, atol=1e-6)
        assert_allclose(parts[label].var, same[other].var, atol=1e-6)
    values = exact.functions(jr.key(0), 3000)(X_NEW)
    _, cov = posterior(X_NEW)
    # 6 standard errors on 9 variances: below 1e-6.
    assert_allclose(values.var(axis=0), np.diag(cov), rtol=6.0 * np.sqrt(2 / 3000))


def test_arguments_that_cannot_be_saved_are_named(tmp_path):
    draws = {"f": np.zeros((1, 3, 25))}
    posterior = ChainPosterior(draws)
    fit = gpx.Fit(
        Program.unchecked(Call(model, (X, Y))),
        posterior,
        facts=gpx.engines.NUTS().facts,
        info={"x": object()},
    )
    with pytest.raises(ValueError, match="`info/x` of the fit cannot be saved"):
        fit.save(tmp_path / "fit")


def test_plain_numpyro_results_become_fits(fit):
    guide = gpx.guides.WhitenedGaussian(model)
    svi = SVI(model, guide, optax.adam(0.05), gpx.infer.ELBO())
    data = jnp.asarray(X), jnp.asarray(Y)
    result = svi.run(jr.key(0), 1500, *data, progress_bar=False)
    plain = gpx.Fit.from_svi(svi, result, *data)
    assert_allclose(plain.predict(X_NEW).mean, fit.predict(X_NEW).mean, atol=0.02)
    mcmc = MCMC(NUTS(model), num_warmup=200, num_samples=300, progress_bar=False)
    mcmc.run(jr.key(0), *data)
    sampled = gpx.Fit.from_mcmc(mcmc, *data)
    assert sampled.engine == "nuts"
    assert sampled.chains()["f"].shape == (1, 300, 25)
    assert_allclose(sampled.predict(X_NEW).mean, fit.predict(X_NEW).mean, atol=0.2)


def test_early_stopping_and_warm_starts():
    guide = gpx.guides.WhitenedGaussian(model)
    options = dict(optimizer=optax.adam(0.05), progress=False)
    first = gpx.fit_svi(
        model, guide, X, Y, key=jr.key(0), num_steps=5000, tolerance=0.01, **options
    )
    assert 500 <= first.info["num_steps"] < 5000
    again = gpx.fit_svi(
        model, gpx.guides.WhitenedGaussian(model), X, Y, key=jr.key(1), num_steps=2,
        init=first, **options,
    )  # fmt: skip
    assert again.info["losses"][0] < first.info["losses"][0] - 5.0
    assert_allclose(again.info["losses"][0], first.info["losses"][-1], atol=0.5)


def test_a_fit_compiles_its_step_once():
    calls = []

    def counted(inputs, y=None, *, batch_size=None):
        calls.append(1)
        model(inputs, y, batch_size=batch_size)

    guide = gpx.guides.WhitenedGaussian(counted)
    options = dict(key=jr.key(0), batch_size=5, progress=False)
    gpx.fit_svi(counted, guide, X, Y, num_steps=10, **options)
    few = len(calls)
    calls.clear()
    guide = gpx.guides.WhitenedGaussian(counted)
    gpx.fit_svi(counted, guide, X, Y, num_steps=350, **options)
    assert len(calls) == few


def test_local_sites_come_from_their_prior_in_predictions():
    """Raw draws of a row-local site have the training length; new rows have none."""

    def local(inputs, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("data", inputs.shape[0]):
            h = numpyro.sample("h", dist.Normal(3.0, 0.1))
            numpyro.sample("y", dist.Normal(h, scale), obs=y)

    draws = {"scale": np.full((1, 50), 0.2), "h": np.full((1, 50, 25), -7.0)}
    fit = gpx.Fit(
        Program.unchecked(Call(local, (X, Y))),
        ChainPosterior(draws),
        facts=gpx.engines.NUTS().facts,
    )
    assert fit.structure.global_sites == ("scale",)
    prediction = fit.predict(X + 1.0)
    assert_allclose(prediction.mean, 3.0, atol=0.1)
    assert_allclose(fit.replicate().mean, -7.0)
    flat = {name: x[0] for name, x in draws.items()}
    y = gpx.infer.predictive(local, flat)(jr.key(0), jnp.asarray(X))["y"]
    assert y.shape == (50, 25)
    assert_allclose(np.mean(y), 3.0, atol=0.05)


def chains_at(*levels, draws=200):
    """A fit with one chain for each level of `v`, constant along it."""
    values = np.stack([np.full((draws, 25), level) for level in levels])
    return gpx.Fit(
        Program.unchecked(Call(model, (X, Y))),
        ChainPosterior({"f": values}),
        facts=gpx.engines.NUTS().facts,
    )


def test_few_draws_come_from_all_chains():
    """5 standard errors of 100 draws, on 9 rows: false alarms below 1e-5."""
    both = chains_at(0.0, 1.0).predict(X_NEW)
    sampled = both.sample(jr.key(0), 100)
    assert np.all(np.abs(sampled.mean(axis=0) - both.mean) < 0.5 * both.sd)
    halves = [sampled[:50].mean(), sampled[50:].mean()]
    assert abs(halves[1] - halves[0]) > 0.1  # one chain each, as the components are


def test_replicated_targets_belong_to_their_draws():
    idata = chains_at(0.0, 1.0, draws=20).to_arviz(log_likelihood=False)
    replicated = idata.posterior_predictive["y"].values.mean(axis=(1, 2))
    low, high = (chains_at(level).predict(X).mean.mean() for level in (0.0, 1.0))
    assert abs(high - low) > 0.2
    # 500 targets of noise 0.3: a standard error of 0.014.
    assert_allclose(replicated, [low, high], atol=0.07)


def test_function_draws_differ_from_key_to_key(fit):
    one, two = (fit.functions(jr.key(k), 30)(X_NEW) for k in (0, 1))
    assert len(np.unique(np.concatenate([one, two])[:, 0])) == 60


def test_noise_between_layers_is_averaged_over_in_predictions():
    """One component would be one draw of the noise, whatever the guide knows."""

    def noisy(inputs, y=None):
        f = gpx.gp("f", TREND, inducing=gpx.inducing.Points(X[::8]))
        with numpyro.plate("data", inputs.shape[0]):
            h = gpx.propagate("h", f(inputs))
            gpx.observe("y", 3.0 * h, gpx.likelihoods.Gaussian(NOISE), obs=y)

    guide = gpx.guides.WhitenedGaussian(noisy)
    svi = gpx.fit_svi(noisy, guide, X, Y, key=jr.key(0), num_steps=5, progress=False)
    far = np.full((8, 1), 90.0)  # there `h` has the prior's variance
    # 8 rows of 100 components: 0.2 is 4 standard errors of the mean variance.
    var = svi.predict(far).var.mean()
    assert_allclose(var, 9.0 * 1.3 + NOISE**2, rtol=0.2)
    with pytest.raises(ValueError, match=r"model draws noise at \['h/noise'\]"):
        gpx.loo(svi)


def lengthscale_model(step):
    def free(inputs, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        kernel = gpx.kernels.RBF(variance=1.0, lengthscale=scale)
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(X[::step]))
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(NOISE), obs=y)

    return free


def test_a_warm_start_may_have_another_number_of_inducing_points():
    options = dict(key=jr.key(0), progress=False)
    one, two = lengthscale_model(6), lengthscale_model(3)
    first = gpx.fit_lbfgs(one, gpx.guides.OptimalGaussian(one), X, Y, **options)
    guide = gpx.guides.WhitenedGaussian(two)
    again = gpx.fit_svi(
        two, guide, X, Y, num_steps=1, init=first, optimizer=optax.adam(0.01), **options
    )
    found = first.draws(4)["scale"][0]
    assert abs(found - 1.0) > 0.03  # where it would start otherwise
    assert_allclose(again.draws(4)["scale"], found, rtol=0.02)


def test_hyperparameters_fixed_by_condition_are_not_targets():
    fixed = numpyro.handlers.condition(
        lengthscale_model(6), data={"scale": jnp.asarray(0.7)}
    )
    guide = gpx.guides.OptimalGaussian(fixed)
    one = gpx.fit_lbfgs(fixed, guide, X, Y, key=jr.key(0), progress=False)
    assert one.structure.observed == ("y",)
    assert one.predict(X_NEW).mean.shape == (9,)


def test_predictions_refuse_what_fits_refuse(fit):
    with pytest.raises(ValueError, match="`X` must be finite"):
        fit.predict(np.full((3, 1), np.nan))
    with pytest.raises(ValueError, match="leave `batch_size` out"):
        fit.predict(X_NEW, batch_size=5)
    with pytest.raises(ValueError, match="`y` must be finite"):
        fit.predict(X_NEW).log_prob(np.full(9, np.nan))


def test_fits_are_not_loaded_with_another_model(fit, tmp_path):
    fit.save(tmp_path / "fit")
    other = gpx.models.svgp(gpx.inducing.Data(X))
    with pytest.raises(ValueError, match=r"shapes {'f': \[25\]}; it has {'variance'"):
        gpx.load(tmp_path / "fit", other)


def test_standardised_outputs_have_their_own_jacobians():
    rng = np.random.default_rng(4)
    raw_y = rng.normal(size=(20, 2)) * [5.0, 0.1] + [3.0, -8.0]
    data = gpx.standardise(rng.normal(size=(20, 1)), raw_y)
    shape = (1, 20, 2)
    normal = jax.vmap(lambda m, s: FromDistribution(dist.Normal(m, s)))
    standard = normal(jnp.zeros(shape), jnp.ones(shape))
    back = Prediction([standard], [20], jr.key(0)).rescaled(data.y_shift, data.y_scale)
    expected = scipy.stats.norm(data.y_shift, data.y_scale).logpdf(raw_y).sum(axis=1)
    assert_allclose(back.log_prob(raw_y), expected, rtol=1e-10)


def test_standardised_predictions_are_in_original_units():
    """Everything on the scaled data, mapped back, is everything on the raw data."""
    rng = np.random.default_rng(3)
    raw_X = rng.uniform(100.0, 300.0, (20, 2))
    raw_X[:, 1] = 4.0  # a constant column
    raw_y = 40.0 + 7.0 * np.sin(raw_X[:, 0] / 30.0)
    data = gpx.standardise(raw_X, raw_y)
    assert_allclose(data.X.mean(axis=0), 0.0, atol=1e-12)
    assert_allclose(data.y.std(), 1.0)
    assert np.all(data.X[:, 1] == 0.0)

    def scaled(inputs, y=None):
        kernel = gpx.kernels.RBF(variance=1.0, lengthscale=0.5)
        gpx.exact("y", kernel, inputs, 0.2, obs=y)

    def unscaled(inputs, y=None):
        kernel = gpx.kernels.RBF(
            variance=data.y_scale**2, lengthscale=0.5 * data.X_scale
        )
        mean = gpx.means.Constant(data.y_shift)
        gpx.exact("y", kernel, inputs, 0.2 * data.y_scale, obs=y, mean=mean)

    nothing = ChainPosterior({})
    one = gpx.Fit(
        Program.unchecked(Call(scaled, (data.X, data.y))),
        nothing,
        facts=gpx.engines.NUTS().facts,
    )
    two = gpx.Fit(
        Program.unchecked(Call(unscaled, (raw_X, raw_y))),
        nothing,
        facts=gpx.engines.NUTS().facts,
    )
    new = np.array([[120.0, 4.0], [250.0, 4.0]])
    back, direct = data.predict(one, new), two.predict(new)
    assert_allclose(back.mean, direct.mean, rtol=1e-8)
    assert_allclose(back.var, direct.var, rtol=1e-8)
    y = np.array([38.0, 44.0])
    assert_allclose(back.log_prob(y), direct.log_prob(y), rtol=1e-8)
    assert abs(back.draws.mean() - direct.draws.mean()) < 0.5
    with pytest.raises(ValueError, match="same number of rows; got 20 and 3"):
        gpx.standardise(raw_X, np.zeros(3))


def test_float32_runs_through_every_engine():
    single = [x.astype(np.float32) for x in (X, Y)]
    Z = single[0][::3]

    def sparse(inputs, y=None, *, batch_size=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        kernel = gpx.kernels.RBF(variance=1.0, lengthscale=scale)
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", inputs.shape[0], subsample_size=batch_size) as i:
            likelihood = gpx.likelihoods.Gaussian(jnp.float32(NOISE))
            gpx.observe("y", f(inputs[i]), likelihood, obs=y, rows=i)

    with jax.enable_x64(False):
        guide = gpx.guides.ConditionalGaussian(sparse)
        options = dict(key=jr.key(0), progress=False)
        fits = [
            gpx.fit_svi(sparse, guide, *single, num_steps=400, **options),
            gpx.fit_nuts(sparse, *single, num_warmup=100, num_samples=100, **options),
            gpx.fit_sghmc(sparse, *single, num_warmup=50, num_samples=100, **options),
        ]
        for fit in fits:
            assert fit.draws()["f"].dtype == np.float32
            assert np.all(np.isfinite(fit.predict(single[0]).mean))


def test_models_may_start_at_values(fit):
    def free(inputs, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        kernel = gpx.kernels.RBF(variance=1.0, lengthscale=scale)
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(X[::4]))
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(NOISE), obs=y)

    start = init_to_value(values={"scale": 0.123})
    guide = gpx.guides.WhitenedGaussian(free, init_loc_fn=start)
    svi = gpx.fit_svi(
        free, guide, X, Y, key=jr.key(0), num_steps=1, progress=False,
        optimizer=optax.adam(0.01),
    )  # fmt: skip
    assert_allclose(svi.draws(4)["scale"], 0.123, rtol=0.02)


def test_the_exact_site_is_conditioned_once_for_all_chunks(monkeypatch):
    """One factorisation a draw, however many chunks of rows are predicted."""
    count = []
    plain = ExactRegression.conditioned

    def counted(self, y):
        jax.debug.callback(lambda: count.append(1))
        return plain(self, y)

    def noisy(X, y=None):
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        gpx.exact("y", KERNEL, X, noise, obs=y)

    program = Program.of(Call.create(noisy, (X, Y), {}))
    draws = {"noise": np.array([[0.2, 0.3, 0.5]])}
    fit = gpx.Fit(program, ChainPosterior(draws), facts=gpx.engines.NUTS().facts)
    whole = fit.predict(X_NEW, chunk_rows=None)
    monkeypatch.setattr(ExactRegression, "conditioned", counted)
    cut = fit.predict(X_NEW, chunk_rows=2)
    jax.effects_barrier()
    assert len(count) == 3
    assert_allclose(cut.mean, whole.mean, rtol=1e-10)
    assert_allclose(cut.var, whole.var, rtol=1e-10)
    latent = fit.predict(X_NEW, chunk_rows=2, of="latent")
    assert_allclose(latent.mean, whole.mean, rtol=1e-10)
    K = np.asarray(KERNEL(X))
    Ks = np.asarray(KERNEL(X_NEW, X))
    means = [Ks @ np.linalg.solve(K + s**2 * np.eye(25), Y) for s in (0.2, 0.3, 0.5)]
    assert_allclose(cut.mean, np.mean(means, axis=0), rtol=1e-8)


@pytest.mark.parametrize("level", [np.nan, None, 0.0, 1.0, [0.5, np.nan]])
def test_levels_of_quantiles_lie_between_0_and_1(fit, level):
    with pytest.raises(ValueError, match="`q` must lie between 0 and 1"):
        fit.predict(X_NEW).quantile(level)


def test_numbers_that_would_spread_are_refused(fit):
    prediction = fit.predict(X_NEW)
    with pytest.raises(ValueError, match="`y` must be real"):
        prediction.log_prob(1j * np.ones(9))
    with pytest.raises(ValueError, match="`shift` must be finite"):
        prediction.rescaled(np.nan, 1.0)
