"""Models with latent inputs, fitted, saved, projected and compared."""

import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.comparison.notes import notes_for
from numpyro_gpx.engines import training
from numpyro_gpx.guides import OptimalGaussian, UnscentedLatent, WhitenedGaussian
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.results.fit import Estimate
from numpyro_gpx.results.scalar_entries import scalar_entries


def make_data(num_rows=24, num_outputs=4, seed=0):
    """Rows on a curve, a function of one hidden number."""
    rng = np.random.default_rng(seed)
    t = rng.uniform(-1.5, 1.5, num_rows)
    waves = np.stack([np.sin((1.0 + 0.4 * j) * t + j) for j in range(num_outputs)], 1)
    return waves + 0.05 * rng.normal(size=waves.shape), t


Y, HIDDEN = make_data()
Z = gpx.inducing.Points(gpx.latent_space.pca(Y, 2)[::3], learn=True)


def make_model(**options):
    return gpx.models.gplvm(Z, num_outputs=4, **options)


@pytest.fixture(scope="module")
def fit():
    model = make_model(missing=True)
    guide = UnscentedLatent(OptimalGaussian(model))
    return gpx.fit_lbfgs(model, guide, Y, key=jr.key(0), max_steps=150, progress=False)


def test_a_fit_reports_objective_and_bound(fit):
    assert fit.info["objective"] == pytest.approx(-fit.info["losses"].min(), abs=1e-6)
    bound, error = fit.info["elbo"], fit.info["elbo_standard_error"]
    assert 0.0 < error < 1.0
    assert fit.elbo(1000).value == pytest.approx(bound, abs=6.0 * error)
    assert fit.objective().value == pytest.approx(fit.info["objective"], rel=1e-9)


@pytest.mark.parametrize(
    ("rule", "cause"),
    [
        (gpx.cubature.Analytic(), "have lost their digits.*gpx.jitter"),
        (gpx.cubature.Unscented(), "exploits the few points of its rule"),
    ],
)
def test_an_objective_above_the_bound_names_its_cause(rule, cause, monkeypatch):
    """Both happen: on USPS by 3000 nats, and on a two-peaked likelihood by 8."""

    def bound_of(*args):
        """The objective, asked second, is far above the bound."""
        asked.append(args)
        return Estimate(1e3 * len(asked), 0.0)

    asked = []
    monkeypatch.setattr(training, "bound_of", bound_of)
    model = make_model()
    guide = UnscentedLatent(OptimalGaussian(model), rule=rule)
    with pytest.warns(gpx.FitWarning):
        fit = gpx.fit_lbfgs(model, guide, Y, key=jr.key(0), max_steps=1, progress=False)
    (note,) = [note for note in fit.check() if note.kind == "objective"]
    assert re.search(cause, f"{note.message} {note.advice}") and len(asked) == 2
    assert note.evidence["objective"] == 2e3 and note.evidence["elbo"] == 1e3


def test_the_latent_space_orders_the_hidden_number(fit):
    means = fit.latent_inputs().mean
    relevant = np.argmin(fit.draws(4)["lengthscale"][0])
    ranks = [np.argsort(np.argsort(x)) for x in (means[:, relevant], HIDDEN)]
    assert abs(np.corrcoef(*ranks)[0, 1]) > 0.9


def test_moments_of_latents_are_those_of_draws(fit):
    mean, sd = fit.latent_inputs()
    draws = fit.draws(2000)["h"]
    # Means of 2000 draws: false alarms below 1e-5 over 48 entries at 5.5.
    assert np.all(np.abs(draws.mean(0) - mean) < 5.5 * sd / np.sqrt(2000))
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.15)


def test_rows_are_generated_and_decoded(fit):
    assert fit.predict(num_rows=3).mean.shape == (3, 4)
    means = fit.latent_inputs().mean
    decoded = fit.predict(num_rows=24, given={"h": means})
    assert np.sqrt(np.mean((decoded.mean - Y) ** 2)) < 0.2
    # Cut into chunks, padded, or in one piece: the same.
    parts = fit.predict(num_rows=24, given={"h": means}, chunk_rows=10)
    np.testing.assert_allclose(parts.mean, decoded.mean, rtol=1e-10)


def test_saved_fits_come_back(fit, tmp_path):
    fit.save(tmp_path / "fit.npz")
    loaded = gpx.load(tmp_path / "fit.npz", fit.model)
    np.testing.assert_array_equal(loaded.latent_inputs().mean, fit.latent_inputs().mean)
    assert loaded.objective().value == pytest.approx(fit.objective().value, rel=1e-12)


@pytest.fixture(scope="module")
def projection(fit):
    """Training rows with their last two columns hidden, as if they were new."""
    seen = Y.copy()
    seen[:, 2:] = np.nan
    return gpx.latent_space.project(
        fit, seen, key=jr.key(1), num_starts=3, num_steps=150
    )


def test_projection_completes_rows(projection):
    completed = projection.reconstruct()
    rmse = np.sqrt(np.mean((completed.mean - Y)[:, 2:] ** 2))
    assert rmse < 0.5 * np.sqrt(np.mean((Y - Y.mean(0))[:, 2:] ** 2))
    assert completed.sd.shape == (24, 4)
    assert projection.draws(jr.key(0), 5).shape == (5, 24, 2)


def test_projection_finds_the_highest_objective_of_its_starts(projection):
    objectives, means = projection.starts
    np.testing.assert_allclose(projection.objective, objectives.max(0))
    best = means[objectives.argmax(0), np.arange(24)]
    np.testing.assert_allclose(projection.mean, best)


def test_projection_agrees_with_the_posterior_on_a_grid(fit):
    """One whole row: mean and sd against brute force over the two latents."""
    row = Y[5:6]
    rule = gpx.cubature.GaussHermite(5)
    found = gpx.latent_space.project(fit, row, key=jr.key(1), rule=rule, num_steps=600)
    grid = np.linspace(-3.0, 3.0, 61)
    H = np.stack([g.ravel() for g in np.meshgrid(grid, grid)], axis=1)
    decoded = fit.predict(num_rows=len(H), given={"h": H}, of="f")
    noise = fit.draws(4)["noise"][0]
    log_p = -0.5 * np.sum(((row - decoded.mean) ** 2 + decoded.var) / noise**2, axis=1)
    log_p = log_p - 0.5 * np.sum(H**2, axis=1)
    weights = np.exp(log_p - log_p.max())
    weights /= weights.sum()
    mean = weights @ H
    sd = np.sqrt(weights @ (H - mean) ** 2)
    assert np.all(np.abs(found.mean[0] - mean) < 0.3 * sd)
    assert np.all((found.sd[0] < 1.2 * sd) & (found.sd[0] > 0.5 * sd))


def test_a_row_that_was_not_seen_has_its_prior(fit):
    rows = np.stack([np.full(4, np.nan), Y[0]])
    found = gpx.latent_space.project(fit, rows, key=jr.key(1), num_steps=600)
    np.testing.assert_allclose(found.mean[0], 0.0, atol=0.02)
    np.testing.assert_allclose(found.sd[0], 1.0, atol=0.02)
    # Nothing is known, and nothing is lost: the divergence is 0.
    np.testing.assert_allclose(found.objective[0], 0.0, atol=1e-3)
    assert np.all(found.sd[1] < 0.9)


def test_two_views_share_a_latent_input():
    """Projection uses both; a view that is missing is completed from the other."""

    def model(a=None, b=None, *, num_rows=None):
        rows = num_rows if a is None else a.shape[0]
        inducing = gpx.inducing.Points(Z.Z)
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=inducing, num_outputs=2)
        g = gpx.gp("g", gpx.kernels.RBF(), inducing=inducing, num_outputs=2)
        noise = gpx.likelihoods.Gaussian(0.1)
        with numpyro.plate("data", rows):
            h = numpyro.sample("h", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
            gpx.observe("a", f(h), noise, obs=a, missing=True)
            gpx.observe("b", g(h), noise, obs=b, missing=True)

    guide = UnscentedLatent(WhitenedGaussian(model), init=gpx.latent_space.pca(Y, 2))
    fit = gpx.fit_lbfgs(
        model, guide, Y[:, :2], Y[:, 2:], key=jr.key(0), max_steps=100, progress=False
    )
    half = np.full((24, 2), np.nan)
    half[0] = Y[0, 2:]  # a site whose targets are all missing is refused
    found = gpx.latent_space.project(fit, Y[:, :2], half, key=jr.key(1), num_steps=100)
    completed = found.reconstruct(site="b").mean
    error = np.sqrt(np.mean((completed - Y[:, 2:]) ** 2))
    assert error < 0.7 * np.std(Y[:, 2:])


def test_minibatches_and_missing_entries():
    """The uncollapsed bound on batches, a tenth of the entries missing."""
    seen = np.where(np.random.default_rng(1).random(Y.shape) < 0.1, np.nan, Y)
    model = make_model(missing=True)
    guide = UnscentedLatent(WhitenedGaussian(model))
    fit = gpx.fit_svi(
        model, guide, seen, key=jr.key(0), batch_size=12, num_steps=200, progress=False
    )
    losses = fit.info["losses"]
    assert losses[-50:].mean() < losses[:20].mean() - 20.0
    assert np.isfinite(fit.info["elbo"])
    with pytest.raises(ValueError, match="`y` must be finite; got nan.*missing=True"):
        plain = make_model()
        gpx.fit_lbfgs(
            plain, UnscentedLatent(OptimalGaussian(plain)), seen, key=jr.key(0)
        )


def test_collapsed_fits_with_missing_entries_equal_uncollapsed_ones():
    """Entry by entry: the belief of each output has its own covariance."""
    from numpyro_gpx.infer import ELBO

    seen = jnp.asarray(
        np.where(np.random.default_rng(1).random(Y.shape) < 0.2, np.nan, Y)
    )
    model = make_model(missing=True)
    values = {}
    for rule in (gpx.cubature.Analytic(), gpx.cubature.GaussHermite(9)):
        guide = UnscentedLatent(OptimalGaussian(model), rule=rule)
        run = jax.jit(lambda y, g=guide: -ELBO().loss(jr.key(0), {}, model, g, y))
        values[type(rule).__name__] = float(run(seen))
    assert values["Analytic"] == pytest.approx(values["GaussHermite"], abs=1e-3)


@pytest.mark.slow
def test_nuts_beside_the_guide_on_distances(fit):
    params = {"f/Z": fit.params["f/Z"]}
    small = gpx.fit_nuts(
        fit.model, Y, key=jr.key(0), init=fit, params=params, num_warmup=20,
        num_samples=30, num_chains=2, progress=False, max_tree_depth=5,
    )  # fmt: skip
    summaries = {"distance": gpx.latent_space.pairwise_distances("h")}
    found = gpx.compare(
        {"nuts": small, "ut": fit}, None, make_data(6, seed=1)[0], summaries=summaries
    )
    rows = found.sites.index.get_level_values("site")
    assert any("distance" in row for row in rows)
    assert not any(row.startswith("h") for row in rows)
    assert np.all(np.isfinite(found.fits["log_density"]))
    assert not any("known up to symmetries" in note for note in found.notes)
    raw = {"nuts": scalar_entries(small)}
    notes = notes_for({"nuts": small}, raw, "nuts", None, None)
    assert any("known up to symmetries" in note for note in notes)


def test_distances_do_not_see_rotations():
    rng = np.random.default_rng(0)
    H, lengthscale = rng.normal(size=(3, 5, 2)), rng.uniform(0.5, 2.0, (3, 2))
    angle = 0.7
    R = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    distances = gpx.latent_space.pairwise_distances("h")
    np.testing.assert_allclose(distances({"h": H}), distances({"h": H @ R.T}))
    scaled = gpx.latent_space.pairwise_distances("h", "lengthscale")
    found = scaled({"h": H, "lengthscale": lengthscale})
    expected = np.linalg.norm((H[1, 0] - H[1, 3]) / lengthscale[1])
    np.testing.assert_allclose(found[1, 2], expected)  # pairs (0,1), (0,2), (0,3), ...


def test_any_prior_kernel_and_likelihood():
    """Student-t latents, a periodic kernel and counts: every engine's density."""
    counts = np.random.default_rng(0).poisson(np.exp(Y)).astype(float)
    model = gpx.models.gplvm(
        gpx.inducing.Points(Z.Z), num_outputs=4,
        kernel=gpx.kernels.Periodic() * gpx.kernels.Matern52() + gpx.kernels.Linear(),
        likelihood=gpx.likelihoods.Poisson(),
        prior=dist.StudentT(4.0, jnp.zeros(2), 1.0).to_event(1),
    )  # fmt: skip
    guide = UnscentedLatent(WhitenedGaussian(model))
    fit = gpx.fit_svi(model, guide, counts, key=jr.key(0), num_steps=20, progress=False)
    assert np.isfinite(fit.info["elbo"])
    target = Target(Call(model, (jnp.asarray(counts),)))
    slope = jax.jit(jax.grad(target.log_density))(target.initial(jr.key(0)))
    assert slope["h"].shape == (24, 2)
    assert all(np.all(np.isfinite(x)) and np.any(x != 0.0) for x in slope.values())


def test_latent_regression_predicts_from_the_prior_of_its_latent():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (60, 1))
    y = np.sign(rng.random(60) - 0.5) * (1.5 + X[:, 0]) + 0.1 * rng.normal(size=60)
    places = np.c_[rng.uniform(-2.0, 2.0, 15), rng.normal(size=15)]
    model = gpx.models.latent_gp(gpx.inducing.Points(places, learn=True))
    guide = UnscentedLatent(WhitenedGaussian(model), rule=gpx.cubature.MonteCarlo(2))
    fit = gpx.fit_svi(
        model, guide, X, y, key=jr.key(0), batch_size=30, num_steps=400, progress=False,
        loss=gpx.infer.ImportanceWeighted(5),
    )  # fmt: skip
    assert fit.predict(X[:3]).mean.shape == (3,)
    # The bound that is reported is the importance-weighted one, above the plain one.
    plain = gpx.Fit(
        fit.program,
        fit.posterior,
        facts=gpx.engines.Facts("svi", "variational"),
        params=fit.params,
    )
    assert fit.info["elbo"] > plain.elbo(200).value


def test_words(fit):
    with pytest.raises(ValueError, match="pass the number of new rows alone"):
        fit.predict(Y)
    with pytest.raises(ValueError, match=r"`given\['h'\]` must have shape \(3, 2\)"):
        fit.predict(num_rows=3, given={"h": np.zeros((3, 1))})
    with pytest.raises(
        ValueError, match=r"`given` must hold sites of the rows, \['h'\]"
    ):
        fit.predict(num_rows=3, given={"f": np.zeros((3, 2))})
    with pytest.raises(ValueError, match="`num_latents` must lie between"):
        gpx.models.latent_gp(Z, num_latents=3)
    for family in (gpx.models.latent_gp, gpx.models.gplvm):
        with pytest.raises(
            TypeError, match=r"gpx.inducing.Points\(Z, learn=True\); got"
        ):
            family(np.asarray(Z.Z), num_outputs=4)
    with pytest.raises(ValueError, match=r"`prior` must have event shape \(2,\)"):
        make_model(prior=dist.Normal())
    with pytest.raises(ValueError, match="`rule` must have points"):
        gpx.latent_space.project(fit, Y, key=jr.key(0), rule=gpx.cubature.Analytic())
    model = make_model()
    guide = UnscentedLatent(OptimalGaussian(model), rule=gpx.cubature.MonteCarlo())
    with pytest.raises(ValueError, match="draws hyperparameters or latent inputs"):
        gpx.fit_lbfgs(model, guide, Y, key=jr.key(0))
    with pytest.raises(ValueError, match="`num_dims` must lie between 1 and"):
        gpx.latent_space.pca(Y, 5)
