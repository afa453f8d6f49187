"""Figures hold what they should; how they look is judged by eye."""

import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

import numpyro_gpx as gpx
from numpyro_gpx import plots
from numpyro_gpx.infer.posteriors import ChainPosterior

X = np.linspace(-1.0, 1.0, 6)[:, None]
Y = np.array([0.1, 0.4, -0.2, 0.5, 0.9, 0.3])
LABELS = np.array([0, 0, 1, 0, 1, 1])


def regression(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", slope * X[:, 0], gpx.likelihoods.Gaussian(scale), obs=y)


def classification(X, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", slope * X[:, 0], gpx.likelihoods.Bernoulli(), obs=y)


def make_fits(model, y, *names):
    rng = np.random.default_rng(2)
    engines = {"guide": "svi", "point": "svi", "nuts": "nuts"}
    fits = {}
    for name in names:
        values = {"slope": 1.0 + 0.3 * rng.normal(size=(2, 60))}
        if model is regression:
            values["scale"] = np.exp(0.2 * rng.normal(size=(2, 60)))
        if name == "point":
            values = {n: np.full_like(x, x.mean()) for n, x in values.items()}
        independent = engines[name] == "svi"
        fits[name] = gpx.Fit(
            model, (jnp.asarray(X), jnp.asarray(y)), {},
            ChainPosterior(values, independent=independent), engine=engines[name],
        )  # fmt: skip
    return fits


@pytest.fixture(scope="module")
def fits():
    return make_fits(regression, Y, "guide", "point", "nuts")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def test_names_have_styles_of_their_own():
    looks = plots.styles("abcdefg")
    assert len({look["color"] for look in looks.values()}) == 7
    assert plots.styles("ab")["a"] == looks["a"]


def test_posteriors_have_a_panel_a_site_and_log_axes_where_positive(fits):
    axes = plots.posteriors(fits)
    panels = {ax.get_xlabel(): ax for ax in axes}
    assert set(panels) == {"scale (log scale)", "slope"}
    assert panels["scale (log scale)"].get_xscale() == "log"
    assert panels["slope"].get_xscale() == "linear"
    labels = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert labels == ["guide", "point", "nuts"]
    # A point estimate is a vertical line, not a density.
    lines = {line.get_label(): line for line in panels["slope"].get_lines()}
    assert len(lines["point"].get_xdata()) == 2
    x, density = lines["nuts"].get_data()
    assert_allclose(np.trapezoid(density, x), 1.0, atol=0.03)


def test_posteriors_draw_chosen_sites_into_given_axes(fits):
    _, ax = plt.subplots()
    assert plots.posteriors(fits, ["slope"], ax=ax) == [ax]
    with pytest.raises(ValueError, match="`sites` must be among"):
        plots.posteriors(fits, ["width"])
    with pytest.raises(ValueError, match="`ax` must have one"):
        plots.posteriors(fits, ["slope", "scale"], ax=ax)


def test_predictions_show_means_bands_and_data(fits):
    x = np.linspace(-1.0, 1.0, 9)
    ax = plots.predictions(fits, x, data=(X, Y), truth=x)
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert {"guide", "point", "nuts", "truth", "data"} <= set(lines)
    mean = fits["nuts"].predict(x[:, None]).mean
    assert_allclose(lines["nuts"].get_ydata(), mean)
    assert_allclose(lines["data"].get_ydata(), Y)
    assert len(ax.collections) == 3  # the bands
    with pytest.raises(ValueError, match="`X` must have one column"):
        plots.predictions(fits, np.zeros((4, 2)))


def test_binary_predictions_show_the_band_of_the_probability():
    fits = make_fits(classification, LABELS, "nuts")
    x = np.linspace(0.2, 1.0, 5)
    ax = plots.predictions(fits, x, data=(X, LABELS))
    assert ax.get_ylabel() == "probability of y = 1"
    lower, upper = ax.get_lines()[0].get_ydata(), ax.get_lines()[1].get_ydata()
    slopes = np.quantile(fits["nuts"].draws()["slope"], [0.05, 0.95])
    expected = 1.0 / (1.0 + np.exp(-slopes[:, None] * x))
    # 10 000 draws from 120 components: an error of a few thousandths.
    assert_allclose([lower, upper], expected, atol=0.02)


def test_a_comparison_has_marginals_distances_and_scores(fits):
    comparison = gpx.compare(fits, X, Y)
    figure = comparison.plot()
    figure.canvas.draw()
    marginals, distances, scores = figure.axes[:2], figure.axes[2], figure.axes[3]
    assert {ax.get_xlabel() for ax in marginals} == {"scale (log scale)", "slope"}
    assert "distance to nuts" in distances.get_xlabel()
    assert [tick.get_text() for tick in distances.get_yticklabels()] == [
        "scale", "slope",
    ]  # fmt: skip
    assert "log predictive density" in scores.get_xlabel()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[0] == "guide (exact target, variational)"


def test_a_single_fit_can_be_plotted():
    fits = make_fits(regression, Y, "nuts")
    gpx.compare(fits, X, Y).plot().canvas.draw()
