"""What reviews found: each of these once went wrong, or could have unseen."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_gpx as gpx
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import Plate, Structure
from numpyro_gpx.results.posteriors import ChainPosterior

_rng = np.random.default_rng(3)
X = np.sort(_rng.uniform(-2.0, 2.0, 16))[:, None]
Y = np.sin(2.0 * X[:, 0]) + 0.2 * _rng.normal(size=16)
KERNEL = gpx.kernels.RBF(variance=1.1, lengthscale=0.8)
POINTS = gpx.inducing.Points(np.array([[-1.5], [0.1], [1.7]]))
OPTIONS = dict(key=jr.key(0), progress=False)


def model(inputs, y=None, *, offset=None, weights=None, mask=None, batch_size=None):
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    with numpyro.plate("data", inputs.shape[0], subsample_size=batch_size) as i:
        gpx.observe(
            "y", f(inputs[i]), gpx.likelihoods.Gaussian(0.2),
            obs=y, rows=i, offset=offset, weights=weights, mask=mask,
        )  # fmt: skip


def chain_fit(model, args, draws, **kwargs):
    return gpx.Fit(
        Program.unchecked(Call(model, args, kwargs)),
        ChainPosterior(draws),
        facts=gpx.engines.NUTS().facts,
    )


DRAWS = {"f": np.random.default_rng(4).normal(size=(1, 200, 3))}


def test_padding_does_not_hide_arguments_of_the_wrong_length():
    fit = chain_fit(model, (X, Y), DRAWS)
    with pytest.raises(ValueError, match=r"`offset` .* shape \(9,\); got \(16,\)"):
        fit.predict(X[:9], offset=np.zeros(16))
    assert fit.predict(X[:9], offset=np.zeros(9)).mean.shape == (9,)


def test_arguments_that_did_not_follow_the_rows_are_not_cut():
    def moved(inputs, y=None, *, centres=None):
        f = gpx.gp("f", KERNEL, inducing=gpx.inducing.Points(centres))
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(0.2), obs=y)

    centres = np.array([[-1.5], [0.1], [1.7]])
    fit = chain_fit(moved, (X, Y), DRAWS, centres=centres)
    both = (
        fit.predict(X[:3], centres=centres).mean,
        fit.predict(X, centres=centres).mean,
    )
    assert_allclose(both[0], both[1][:3], rtol=1e-10)


def test_loo_knows_scaled_likelihoods():
    """`handlers.scale` multiplies what leaves the posterior with a row."""

    def scaled(inputs, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", inputs.shape[0]), handlers.scale(scale=0.3):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(0.2), obs=y)

    fit = gpx.fit_lbfgs(scaled, gpx.guides.OptimalGaussian(scaled), X, Y, **OPTIONS)
    refits = []
    for n in range(3):
        rest = np.arange(16) != n
        guide = gpx.guides.OptimalGaussian(scaled)
        one = gpx.fit_lbfgs(scaled, guide, X[rest], Y[rest], **OPTIONS)
        refits.append(one.predict(X[n : n + 1]).log_prob(Y[n : n + 1])[0])
    assert_allclose(gpx.loo(fit, num_draws=4000)["loo_i"][:3], refits, atol=0.15)


def test_weights_leave_with_a_row_and_do_not_score_it():
    weights = np.where(np.arange(16) == 5, 0.0, 1.0 + np.arange(16) / 16.0)
    with_weights = gpx.loo(chain_fit(model, (X, Y), DRAWS, weights=weights))
    assert with_weights["n_data_points"] == 15
    idata = chain_fit(model, (X, Y), DRAWS, weights=weights).to_arviz(
        posterior_predictive=False
    )
    plain = chain_fit(model, (X, Y), DRAWS).to_arviz(posterior_predictive=False)
    kept = weights > 0.0
    scores = plain.log_predictive_density["y"][..., kept]
    assert_allclose(idata.log_predictive_density["y"], scores)
    expected = plain.expected_log_likelihood["y"].values[..., kept] * weights[kept]
    assert_allclose(idata.expected_log_likelihood["y"], expected)


def test_rows_that_are_partly_masked_are_data():
    def pairs(inputs, y=None, mask=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS, num_outputs=2)
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(0.2), obs=y, mask=mask)

    mask = np.ones((16, 2), bool)
    mask[2], mask[7, 0] = False, False
    draws = {"f": np.random.default_rng(4).normal(size=(1, 100, 2, 3))}
    fit = chain_fit(pairs, (X, np.stack([Y, Y], 1), mask), draws)
    assert gpx.loo(fit)["n_data_points"] == 15


def test_loo_reports_the_spread_over_rows_and_the_effective_parameters():
    fit = gpx.fit_lbfgs(model, gpx.guides.OptimalGaussian(model), X, Y, **OPTIONS)
    result = gpx.loo(fit, num_draws=4000)
    rows = result["loo_i"].values
    assert_allclose(result["se"], np.sqrt(16.0) * rows.std(), rtol=1e-12)
    lpd = fit.predict(X).log_prob(Y)  # the whole posterior, integrated
    assert_allclose(result["p_loo"], lpd.sum() - rows.sum(), atol=0.2)


@pytest.mark.parametrize("kind", [AutoNormal, AutoDelta])
def test_numpyros_guides_can_be_fitted_again(kind):
    guide = kind(model)
    for seed in (0, 1):
        fit = gpx.fit_svi(
            model, guide, X, Y, key=jr.key(seed), num_steps=5, progress=False
        )
    assert np.isfinite(fit.predict(X).mean).all()


def test_lbfgs_says_whether_it_converged():
    guide = gpx.guides.WhitenedGaussian(model)
    short = gpx.fit_lbfgs(model, guide, X, Y, max_steps=2, **OPTIONS)
    assert not short.info["converged"] and short.info["num_steps"] == 2
    long = gpx.fit_lbfgs(model, guide, X, Y, **OPTIONS)
    assert long.info["converged"]
    notes = gpx.compare({"short": short, "long": long}, X, Y).notes
    assert any(note.startswith("short: doubt: L-BFGS stopped") for note in notes)
    assert not any(note.startswith("long:") for note in notes)


def test_plain_results_remember_the_jitter_in_force():
    guide = gpx.guides.WhitenedGaussian(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), gpx.infer.ELBO())
    data = jnp.asarray(X), jnp.asarray(Y)
    with gpx.jitter(1e-2):
        result = svi.run(jr.key(0), 3, *data, progress_bar=False)
        fit = gpx.Fit.from_svi(svi, result, *data)
        inside = -gpx.infer.ELBO().loss(jr.key(0), result.params, model, guide, *data)
    assert fit.jitter == 1e-2
    assert_allclose(fit.elbo().value, inside, rtol=1e-9)


def test_warm_starts_take_only_parameters_of_the_same_meaning():
    def free(inputs, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(scale), obs=y)

    whitened = gpx.guides.WhitenedGaussian(free)
    first = gpx.fit_lbfgs(free, whitened, X, Y, **OPTIONS)
    frozen = dict(optimizer=optax.sgd(0.0), num_steps=1, init=first, **OPTIONS)
    again = gpx.fit_svi(free, gpx.guides.WhitenedGaussian(free), X, Y, **frozen)
    assert_allclose(again.params["f_auto_loc"], first.params["f_auto_loc"])
    other = gpx.guides.ConditionalGaussian(free, theta="point")
    other = gpx.fit_svi(free, other, X, Y, **frozen)
    assert_allclose(other.params["f_auto_loc"], 0.0)  # a pseudo-target, not a mean
    assert_allclose(other.params["theta_auto_loc"], first.params["theta_auto_loc"])


def local(inputs, y=None, *, batch_size=None):
    with numpyro.plate("data", inputs.shape[0], subsample_size=batch_size) as i:
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(h, 0.5), obs=None if y is None else y[i])


def test_row_local_sites_start_where_they_are_told_under_minibatches():
    target = Target(Call(local, (jnp.asarray(X), jnp.asarray(Y)), {"batch_size": 4}))
    start = target.initial(jr.key(0), values={"h": jnp.arange(16.0)})
    assert_allclose(start["h"], np.arange(16.0))
    free = target.initial(jr.key(0))["h"]
    assert free.shape == (16,)
    assert len(np.unique(free)) == 16  # spread, not one value repeated
    first = chain_fit(
        local, (jnp.asarray(X), jnp.asarray(Y)), {"h": np.zeros((1, 9, 16))}
    )
    fit = gpx.fit_sghmc(
        local, X, Y, batch_size=4, init=first, num_warmup=2, num_samples=3, **OPTIONS
    )
    assert fit.draws()["h"].shape == (6, 16)


def test_plates_are_subsampled_independently():
    plates = {"a": Plate(50, 20), "b": Plate(50, 20)}
    structure = Structure({}, {}, (), (), plates, {})
    batch = draw_batch(jr.key(0), structure)
    assert not np.array_equal(batch["a"], batch["b"])


def test_particles_and_the_model_have_keys_of_their_own():
    """Two particles are two draws, and noise in the model is not that of the guide."""

    def deep(inputs, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", inputs.shape[0]):
            h = gpx.propagate("h", f(inputs))
            gpx.observe("y", h, gpx.likelihoods.Gaussian(scale), obs=y)

    guide = gpx.guides.WhitenedGaussian(deep, theta="mean_field")
    data = jnp.asarray(X), jnp.asarray(Y)
    params = {
        "theta_auto_loc": jnp.zeros(1),
        "theta_auto_scale": jnp.full(1, 0.5),
        "f_auto_loc": jnp.zeros(3),
        "f_auto_scale_tril": jnp.eye(3),
    }

    @jax.jit
    def estimates(keys):
        def one(key, particles):
            loss = gpx.infer.ELBO(num_particles=particles)
            return -loss.loss(key, params, deep, guide, *data)

        return jax.lax.map(lambda k: jnp.stack([one(k, 1), one(k, 16)]), keys)

    values = np.asarray(estimates(jr.split(jr.key(0), 300)))
    ratio = values[:, 1].std() / values[:, 0].std()
    # 16 independent particles: 1/4, to 300 estimates' sampling error of about 0.03.
    assert 0.12 < ratio < 0.45


def test_sums_of_products_pair_every_component():
    latents = [
        Gaussian(jnp.asarray([m]), jnp.asarray([v]), sites=frozenset([name]))
        for m, v, name in (
            (0.5, 0.3, "a"),
            (-0.8, 0.6, "b"),
            (1.2, 0.2, "c"),
            (0.3, 0.4, "d"),
        )
    ]
    a, b, c, d = latents
    total = a * b + c * d
    z = np.random.default_rng(0).normal(size=(400_000, 4))
    f = np.array([0.5, -0.8, 1.2, 0.3]) + np.sqrt([0.3, 0.6, 0.2, 0.4]) * z
    sample = f[:, 0] * f[:, 1] + f[:, 2] * f[:, 3]
    third = np.mean((sample - sample.mean()) ** 3)
    log_w, means, variances = total.components()
    w, means, variances = (
        np.exp(log_w),
        np.asarray(means)[:, 0],
        np.asarray(variances)[:, 0],
    )
    centred = means - w @ means
    assert_allclose(w @ means, sample.mean(), atol=0.01)
    # The third moment sees which components belong together. 5 standard errors.
    error = 5.0 * np.std((sample - sample.mean()) ** 3) / np.sqrt(400_000)
    assert_allclose(w @ (centred**3 + 3.0 * centred * variances), third, atol=error)


def test_a_retry_that_helps_keeps_its_jitter():
    """Two inducing inputs nearly coincide: in float32 the default jitter fails."""
    Z = np.linspace(-2.0, 2.0, 40)[:, None]

    def smooth(inputs, y=None):
        kernel = gpx.kernels.RBF(variance=1.0, lengthscale=4.0)
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(0.2), obs=y)

    def fit():
        guide = gpx.guides.WhitenedGaussian(smooth)
        return gpx.fit_svi(smooth, guide, X, Y, num_steps=3, **OPTIONS)

    with gpx.jitter(1e-17), pytest.warns(RuntimeWarning, match="Starting again"):
        retried = fit()
    assert retried.jitter == pytest.approx(1e-15)
    assert np.isfinite(retried.elbo().value)
    with gpx.jitter(retried.jitter):
        direct = fit()
    assert_allclose(retried.elbo().value, direct.elbo().value, rtol=1e-12)


def test_the_model_is_no_guide_and_a_guide_no_argument_of_nuts():
    with pytest.raises(ValueError, match=r"The guide observes \['y'\]"):
        gpx.fit_svi(model, model, X, Y, **OPTIONS)
    with pytest.raises(TypeError, match=r"must be a guide of the model.*got an array"):
        gpx.fit_svi(model, X, Y, **OPTIONS)
    guide = gpx.guides.WhitenedGaussian(model)
    with pytest.raises(TypeError, match=r"got the class ELBO. Make one: `ELBO\("):
        gpx.fit_svi(model, guide, X, Y, loss=gpx.infer.ELBO, **OPTIONS)
    with pytest.raises(TypeError, match="number 0 of the model is a guide"):
        gpx.fit_nuts(model, gpx.guides.WhitenedGaussian(model), X, Y, **OPTIONS)


def test_inputs_may_be_tables_lists_and_named():
    import pandas as pd

    fit = gpx.fit_lbfgs(
        model,
        gpx.guides.OptimalGaussian(model),
        pd.DataFrame(X),
        pd.Series(Y),
        **OPTIONS,
    )
    mean = fit.predict(X).mean
    assert_allclose(fit.predict(pd.DataFrame(X)).mean, mean)
    assert_allclose(fit.predict(inputs=X.tolist()).mean, mean)
    assert_allclose(fit.parts(X.tolist())["f"].mean, mean)
    holes = np.where(np.arange(16)[:, None] == 3, np.nan, X)
    for call in (fit.predict, fit.parts, fit.functions(jr.key(0), 2)):
        with pytest.raises(ValueError, match="`X` must be finite; got nan at index"):
            call(holes)
    with pytest.raises(ValueError, match="`X` must be finite"):
        gpx.fit_nuts(model, inputs=holes, y=Y, **OPTIONS)


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"weights": -np.ones(16)},
            "`weights` of site `y` must be at least 0; got -1.0",
        ),
        ({"mask": np.zeros(16, bool)}, "`mask` of site `y` leaves out every target"),
        ({"num_steps": 0}, "`num_steps` must be a whole number, at least 1; got 0"),
    ],
)
def test_numbers_that_make_no_fit_are_refused(options, words):
    guide = gpx.guides.WhitenedGaussian(model)
    with pytest.raises(ValueError, match=words):
        gpx.fit_svi(model, guide, X, Y, **options, **OPTIONS)


def test_draws_are_as_many_as_asked_for():
    fit = gpx.fit_lbfgs(model, gpx.guides.OptimalGaussian(model), X, Y, **OPTIONS)
    for number in (1, 10, 999):
        assert fit.draws(number)["f"].shape == (number, 3)
    assert chain_fit(model, (X, Y), DRAWS).draws(7)["f"].shape == (7, 3)
    with pytest.raises(ValueError, match="`num_components` must be a whole number"):
        fit.predict(X, num_components=0)


def test_vector_hyperparameters_are_drawn_on_a_log_axis():
    import matplotlib

    matplotlib.use("Agg")

    def ard(inputs, y=None):
        prior = dist.LogNormal(0.0, 1.0).expand([1]).to_event(1)
        kernel = gpx.kernels.RBF(1.0, numpyro.sample("lengthscale", prior))
        f = gpx.gp("f", kernel, inducing=POINTS)
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(0.2), obs=y)

    draws = {**DRAWS, "lengthscale": np.exp(_rng.normal(size=(1, 200, 1)))}
    fits = {"a": chain_fit(ard, (X, Y), draws)}
    axes = gpx.plots.posteriors(fits)
    assert axes[0].get_xscale() == "log"
    matplotlib.pyplot.close("all")


def test_fits_of_other_sizes_and_foreign_files_are_not_loaded(tmp_path):
    fit = gpx.fit_lbfgs(model, gpx.guides.OptimalGaussian(model), X, Y, **OPTIONS)
    fit.save(tmp_path / "fit.npz")

    def larger(inputs, y=None):
        f = gpx.gp("f", KERNEL, inducing=gpx.inducing.Points(X[:5]))
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(0.2), obs=y)

    with pytest.raises(ValueError, match=r"shapes {'f': \[3\]}; it has {'f': \[5\]}"):
        gpx.load(tmp_path / "fit.npz", larger)
    np.savez(tmp_path / "other.npz", x=X)
    with pytest.raises(ValueError, match="was not written by `Fit.save`"):
        gpx.load(tmp_path / "other.npz", model)
