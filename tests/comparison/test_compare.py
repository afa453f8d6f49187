"""Comparisons on draws whose moments, distances and scores are known."""

from types import SimpleNamespace

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.comparison import Comparison
from numpyro_gpx.comparison.notes import _bound_notes
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.chain_notes import mixing_notes
from numpyro_gpx.results.posteriors import ChainPosterior

Z = np.array([[-1.0], [0.2], [1.1]])
X = np.linspace(-1.5, 1.5, 7)[:, None]
X_TEST = np.linspace(-1.2, 1.3, 5)[:, None]
Y_TEST = np.array([0.3, -0.4, 0.9, 0.1, -1.2])
VARIANCE, LENGTHSCALE = 1.3, 0.7


def regression(X, y=None, *, inducing=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    line = numpyro.sample("line", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    kernel = gpx.kernels.RBF(variance=VARIANCE, lengthscale=LENGTHSCALE)
    inducing = gpx.inducing.Points(jnp.asarray(Z)) if inducing is None else inducing
    f = gpx.gp("f", kernel, inducing=inducing)
    with numpyro.plate("data", X.shape[0]):
        offset = line[0] + line[1] * X[:, 0]
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(scale), obs=y, offset=offset)


def exact_regression(X_, y=None):
    regression(X_, y, inducing=gpx.inducing.Data(jnp.asarray(X)))


def classification(X, y=None):
    bias = numpyro.sample("bias", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        likelihood = gpx.likelihoods.Bernoulli()
        gpx.observe("y", bias + X[:, 0], likelihood, obs=y)


def deep(X, y=None):
    kernel = gpx.kernels.RBF(variance=VARIANCE, lengthscale=LENGTHSCALE)
    inducing = gpx.inducing.Points(jnp.asarray(Z))
    f1 = gpx.gp("f1", kernel, inducing=inducing)
    f2 = gpx.gp("f2", kernel, inducing=inducing)
    with numpyro.plate("data", X.shape[0]):
        h = gpx.propagate("h", f1(X))
        gpx.observe("y", f2(h[:, None]), gpx.likelihoods.Gaussian(0.3), obs=y)


APPROXIMATIONS = {
    "nuts": "asymptotically exact",
    "sghmc": "biased by the step size",
    "svi": "variational",
}


def draws(rng, *shape, chains=2, length=150):
    return rng.normal(size=(chains, length, *shape))


def make_fit(values, *, model=regression, y=None, engine="nuts", info=None, notes=()):
    y = np.sin(2.0 * X[:, 0]) if y is None else y
    posterior = ChainPosterior(values, independent=engine == "svi")
    return gpx.Fit(
        Program.unchecked(Call(model, (jnp.asarray(X), jnp.asarray(y)))),
        posterior,
        facts=gpx.engines.Facts(engine, APPROXIMATIONS[engine]),
        info=info,
        notes=notes,
        seconds=1.5,
    )


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(3)
    return {
        "scale": 0.4 * np.exp(0.2 * draws(rng)),
        "line": 0.3 * draws(rng, 2),
        "f": 0.5 * draws(rng, 3),
    }


@pytest.fixture(scope="module")
def shifted(values):
    """`line[0]` moved by half an sd, the second entry of `f` by 0.8 sd."""
    moved = {name: x.copy() for name, x in values.items()}
    moved["line"][..., 0] += 0.5 * values["line"][..., 0].std()
    moved["f"][..., 1] += 0.8 * values["f"][..., 1].std()
    return moved


@pytest.fixture(scope="module")
def result(values, shifted):
    fits = {
        "svi": make_fit(shifted, engine="svi"),
        "sghmc": make_fit(shifted, engine="sghmc"),
        "nuts": make_fit(values),
    }
    return gpx.compare(fits, X_TEST, Y_TEST)


def log_densities(values):
    """Log predictive density of the test rows, from the definition."""

    def k(a, b):
        return VARIANCE * np.exp(-0.5 * (a - b.T) ** 2 / LENGTHSCALE**2)

    Kuu, Kuf = k(Z, Z), k(Z, X_TEST)
    L = np.linalg.cholesky(Kuu + 1e-8 * VARIANCE * np.eye(3))
    A = np.linalg.solve(L, Kuf)
    f_var = VARIANCE - (A**2).sum(axis=0)
    v = values["f"].reshape(-1, 3)
    line = values["line"].reshape(-1, 2)
    scale = values["scale"].reshape(-1, 1)
    mean = v @ A + line[:, :1] + line[:, 1:] * X_TEST[:, 0]
    each = scipy.stats.norm(mean, np.sqrt(f_var + scale**2)).pdf(Y_TEST)
    return np.log(each.mean(axis=0)), mean


def test_moments_and_distances_are_those_of_the_draws(result, values):
    table = result.sites
    x = values["line"][..., 0]
    assert_allclose(table.loc[("line[0]", "nuts"), "mean"], x.mean(), rtol=1e-12)
    assert_allclose(table.loc[("line[0]", "nuts"), "sd"], x.std(), rtol=1e-12)
    assert_allclose(table.loc[("line[0]", "svi"), "distance"], 0.5, rtol=1e-9)
    assert_allclose(table.loc[("line[0]", "sghmc"), "distance"], 0.5, rtol=1e-9)
    assert_allclose(table.loc[("line[1]", "svi"), "distance"], 0.0, atol=1e-12)
    assert_allclose(table.loc[("scale", "nuts"), "distance"], 0.0, atol=1e-12)


def test_inducing_variables_are_summarised(result, values):
    table = result.sites
    assert not any(site.startswith("f[") for site in table.index.unique("site"))
    assert_allclose(table.loc[("f: mean of 3", "svi"), "distance"], 0.8 / 3, rtol=1e-9)
    assert_allclose(table.loc[("f: worst of 3", "svi"), "distance"], 0.8, rtol=1e-9)
    assert_allclose(table.loc[("f: mean of 3", "nuts"), "mean"], values["f"].mean())


def test_ess_and_r_hat_belong_to_samplers(result):
    mixing = result.sites[["ess", "r_hat"]]
    assert mixing.xs("svi", level="fit").isna().all(axis=None)
    for name in ("nuts", "sghmc"):
        own = mixing.xs(name, level="fit")
        # 300 independent draws; ESS has a relative error of about 0.1.
        assert (own["ess"] > 150).all() and (own["r_hat"] < 1.1).all()


def test_the_floor_is_what_equal_posteriors_show():
    rng = np.random.default_rng(8)
    pairs = rng.normal(size=(400, 2, 300))
    found = np.mean([scipy.stats.wasserstein_distance(*pair) for pair in pairs])
    base = {"scale": 0.4 * np.exp(draws(rng)), "f": draws(rng, 3)}
    line = draws(rng, 2)
    fits = {
        "a": make_fit({**base, "line": line}, engine="svi"),
        "b": make_fit({**base, "line": line}, engine="svi"),
    }
    floor = gpx.compare(fits, X_TEST, Y_TEST).sites.loc[("line[0]", "b"), "floor"]
    # Draws of a guide count in full. 400 pairs leave an error of about 2 %.
    assert_allclose(floor, found, rtol=0.1)


def test_log_density_is_that_of_the_mixture(result, values, shifted):
    rows, mean = log_densities(values)
    table = result.fits
    assert_allclose(table.loc["nuts", "log_density"], rows.mean(), rtol=1e-6)
    error = rows.std(ddof=1) / np.sqrt(5)
    assert_allclose(table.loc["nuts", "log_density_se"], error, rtol=1e-6)
    difference = log_densities(shifted)[0] - rows
    assert_allclose(table.loc["svi", "difference"], difference.mean(), rtol=1e-5)
    error = difference.std(ddof=1) / np.sqrt(5)
    assert_allclose(table.loc["svi", "difference_se"], error, rtol=1e-5)
    rmse = np.sqrt(np.mean((mean.mean(axis=0) - Y_TEST) ** 2))
    assert_allclose(table.loc["nuts", "rmse"], rmse, rtol=1e-6)


def test_coverage_counts_targets_inside_the_interval(values):
    fits = {"nuts": make_fit(values)}
    # In the tails of N(0, about 1) at every row: 3 inside, 2 far outside.
    y = np.array([0.0, 0.1, 50.0, -0.1, -50.0])
    table = gpx.compare(fits, X_TEST, y).fits
    assert_allclose(table.loc["nuts", "coverage_90"], 0.6)


def test_binary_targets_are_scored_by_errors_and_calibration():
    labels = np.array([0, 0, 1, 0, 1, 1, 1])
    constant = {"bias": np.full((2, 5), 0.25)}
    fits = {"nuts": make_fit(constant, model=classification, y=labels)}
    x = np.array([-1.0, -0.9, -0.3, 0.4, 0.5])[:, None]
    y = np.array([0, 1, 0, 0, 1])
    table = gpx.compare(fits, x, y).fits
    p = 1.0 / (1.0 + np.exp(-0.25 - x[:, 0]))  # 0.32, 0.34, 0.49, 0.66, 0.68
    assert_allclose(table.loc["nuts", "error_rate"], 2 / 5)
    gaps = [abs(1 - p[0] - p[1]), abs(0 - p[2]), abs(1 - p[3] - p[4])]
    assert_allclose(table.loc["nuts", "ece_10_bins"], sum(gaps) / 5, rtol=1e-5)
    assert "rmse" not in table and "coverage_90" not in table


def test_the_bound_of_a_guide_is_shown(values, key):
    guide = gpx.guides.WhitenedGaussian(regression, theta="point")
    y = jnp.sin(2.0 * X[:, 0])
    svi = gpx.fit_svi(
        regression, guide, jnp.asarray(X), y, key=key, num_steps=2, progress=False
    )
    table = gpx.compare({"svi": svi, "nuts": make_fit(values)}, X_TEST, Y_TEST).fits
    assert_allclose(table.loc["svi", "elbo"], svi.elbo().value)
    assert np.isnan(table.loc["nuts", "elbo"])
    assert table.loc["svi", "seconds"] == svi.seconds


def test_the_reference_is_the_first_exact_sampler(result, values):
    assert result.reference == "nuts"
    assert "reference: nuts" in str(result)
    named = gpx.compare(result.members, X_TEST, Y_TEST, reference="svi")
    assert named.reference == "svi"
    only = gpx.compare({"a": make_fit(values, engine="svi")}, X_TEST, Y_TEST)
    assert only.reference == "a"


def test_text_says_what_was_fitted_in_100_columns(result):
    text = str(result)
    for words in ("variational", "biased by the step size", "asymptotically exact"):
        assert words in text
    assert "not the exact" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "<table" in result._repr_html_()


def test_arguments_after_the_inputs_come_as_a_tuple(result):
    fits = {"nuts": result.members["nuts"]}
    alone = gpx.compare(fits, X_TEST, Y_TEST).fits
    pair = gpx.compare(fits, (X_TEST, None), Y_TEST).fits
    assert alone.equals(pair)


def test_different_targets_are_named(values):
    rng = np.random.default_rng(5)
    exact = make_fit({**values, "f": draws(rng, 7)}, model=exact_regression)
    both = gpx.compare({"full": exact, "few": make_fit(values)}, X_TEST, Y_TEST)
    notes = " ".join(both.notes)
    assert "different targets (full: exact, few: sparse)" in notes
    assert "few: no distances for f" in notes
    assert np.isnan(both.sites.loc[("f: mean of 3", "few"), "distance"])
    assert both.sites.loc[("scale", "few"), "distance"] == 0.0
    assert "different targets" not in str(gpx.compare({"a": exact}, X_TEST, Y_TEST))


def test_different_noise_targets_are_named():
    rng = np.random.default_rng(6)
    values = {"f1": draws(rng, 3), "f2": draws(rng, 3)}
    svi = make_fit(values, model=deep, engine="svi")
    averaged = make_fit(values, model=deep, info={"noise": "A, 16 noise sets"})
    sampled = make_fit(values, model=deep, info={"noise": "B"})
    mixed = gpx.compare({"svi": svi, "nuts": sampled}, X_TEST, Y_TEST)
    assert any("noise targets (svi: A, nuts: B)" in note for note in mixed.notes)
    same = gpx.compare({"svi": svi, "nuts": averaged}, X_TEST, Y_TEST)
    assert not any("noise targets" in note for note in same.notes)
    assert "A, 16 noise sets" in str(same)


def test_chains_that_have_not_met_are_named(values):
    apart = {name: x.copy() for name, x in values.items()}
    apart["scale"][1] *= 3.0
    fits = {"nuts": make_fit(apart, notes=tuple(mixing_notes(apart)))}
    (note,) = [n for n in gpx.compare(fits, X_TEST, Y_TEST).notes if "R-hat" in n]
    assert note.startswith("nuts: doubt: ") and "`scale`" in note


def test_what_the_fits_say_of_themselves_is_repeated(values):
    doubt = gpx.engines.Note("divergences", "doubt", "4 draws diverged.", "Reparam.")
    fits = {"nuts": make_fit(values, notes=(doubt,)), "other": make_fit(values)}
    notes = gpx.compare(fits, X_TEST, Y_TEST).notes
    assert "nuts: doubt: 4 draws diverged. Reparam." in notes
    assert not any("diverged" in note for note in notes if "nuts:" not in note)


def test_fits_to_other_data_are_named(values):
    fits = {"nuts": make_fit(values), "svi": make_fit(values, y=X[:, 0], engine="svi")}
    words = "Fitted to other data than nuts: svi."
    notes = gpx.compare(fits, X_TEST, Y_TEST).notes
    assert any(note.startswith(words) for note in notes)
    fits = {"nuts": make_fit(values), "svi": make_fit(values, engine="svi")}
    notes = gpx.compare(fits, X_TEST, Y_TEST).notes
    assert not any("other data" in note for note in notes)


def test_a_point_estimate_has_a_distance_and_no_spread(values):
    point = {
        n: np.broadcast_to(x.mean((0, 1)), x.shape).copy() for n, x in values.items()
    }
    fits = {"map": make_fit(point, engine="svi"), "nuts": make_fit(values)}
    table = gpx.compare(fits, X_TEST, Y_TEST).sites
    x = values["scale"]
    expected = np.abs(x - x.mean()).mean() / x.std()
    assert_allclose(table.loc[("scale", "map"), "distance"], expected, rtol=1e-9)
    reverse = gpx.compare(fits, X_TEST, Y_TEST, reference="map").sites
    assert np.isnan(reverse.loc[("scale", "nuts"), "distance"])


def test_posteriors_are_laid_side_by_side_without_test_rows():
    """Of a plain model, which predicts nothing."""

    def plain():
        numpyro.sample("u", dist.Normal(0.0, 1.0))

    rng = np.random.default_rng(8)
    fits = {
        name: gpx.Fit(
            Program.unchecked(Call(plain, ())),
            ChainPosterior({"u": shift + draws(rng)}),
            facts=gpx.engines.Facts(e, APPROXIMATIONS[e]),
        )
        for name, e, shift in (("a", "nuts", 0.0), ("b", "sghmc", 0.5))
    }
    found = gpx.compare(fits)
    assert found.num_rows == 0 and "log_density" not in found.fits
    assert_allclose(found.sites.loc[("u", "b"), "distance"], 0.5, atol=0.2)
    text = str(found)
    assert "test rows" not in text and "Predictions" not in text
    assert "test rows" not in found._repr_html_()
    figure = found.plot()
    assert len(figure.axes) == 2  # the marginal and the distances
    plt.close(figure)


def test_bad_arguments_are_named(result):
    fits = result.members
    with pytest.raises(ValueError, match="`fits` must be a dictionary.*an empty one"):
        gpx.compare({}, X_TEST, Y_TEST)
    with pytest.raises(
        ValueError, match=r"`fits\['nuts'\]` must be a gpx.Fit; got str"
    ):
        gpx.compare({"nuts": "draws"}, X_TEST, Y_TEST)
    with pytest.raises(ValueError, match="same number of rows; got 5 and 4"):
        gpx.compare(fits, X_TEST, Y_TEST[:4])
    with pytest.raises(ValueError, match="`X_test` was given without `y_test`"):
        gpx.compare(fits, X_TEST)
    with pytest.raises(ValueError, match="`site` was given without `y_test`"):
        gpx.compare(fits, site="y")
    with pytest.raises(ValueError, match=r"`y_test` must have the shape \(5,\)"):
        gpx.compare(fits, X_TEST, Y_TEST[:, None])
    with pytest.raises(
        ValueError, match=r"one of the names \['svi', 'sghmc', 'nuts'\]"
    ):
        gpx.compare(fits, X_TEST, Y_TEST, reference="hmc")
    with pytest.raises(ValueError, match="`y_test` must be finite"):
        gpx.compare(fits, X_TEST, np.full(5, np.nan))
    labels = np.array([0, 0, 1, 0, 1, 1, 1])
    binary = {
        "nuts": make_fit({"bias": np.ones((2, 5))}, model=classification, y=labels)
    }
    with pytest.raises(ValueError, match="labels 0 and 1"):
        gpx.compare(binary, X_TEST, np.array([-1, 1, 1, -1, 1]))


def test_a_comparison_is_what_compare_returns(result):
    assert isinstance(result, Comparison)
    assert list(result.fits.index) == ["svi", "sghmc", "nuts"]
    assert result.num_rows == 5


def test_a_reference_without_spread_is_named(values):
    points = {**values, "scale": np.full_like(values["scale"], 0.4)}
    points["line"] = np.ones_like(values["line"])
    fits = {"point": make_fit(points), "drawn": make_fit(values)}
    words = "the reference, holds"
    assert any(words in n for n in gpx.compare(fits, reference="point").notes)
    assert not any(words in n for n in gpx.compare(fits, reference="drawn").notes)


def test_bounds_that_are_not_comparable_are_named():
    """Points beside draws, and a discriminator's guess."""

    def fit(info=None, is_mcmc=False):
        structure = SimpleNamespace(hyperparameters=("noise",))
        return SimpleNamespace(structure=structure, is_mcmc=is_mcmc, info=info or {})

    fits = {"a": fit(), "b": fit({"elbo_kind": "estimate"}), "c": fit(is_mcmc=True)}
    drawn = {"noise": {"noise": np.array([[0.3, 0.4]])}}
    point = {"noise": {"noise": np.full((1, 2), 0.3)}}
    notes = _bound_notes(fits, {"a": point, "b": drawn, "c": drawn})
    assert "points in some fits only (a: point, b: drawn)" in notes[0]
    assert "The bound of b is an estimate" in notes[1]
    assert _bound_notes({"a": fits["a"]}, {"a": point}) == []
