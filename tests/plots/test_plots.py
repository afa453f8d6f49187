"""Figures hold what they should; how they look is judged by eye."""

import jax.numpy as jnp
import jax.random as jr
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
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior

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
            Program.unchecked(Call(model, (jnp.asarray(X), jnp.asarray(y)))),
            ChainPosterior(values, independent=independent),
            facts=gpx.engines.Facts(
                engines[name], "variational" if independent else "asymptotically exact"
            ),
        )
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


@pytest.fixture(scope="module")
def latent_fit():
    """A GPLVM of 20 images of 3 by 2 pixels, two latent dimensions, hardly trained."""
    rng = np.random.default_rng(4)
    H = rng.normal(size=(20, 2))
    Y = np.sin(H @ rng.normal(size=(2, 6))) + 0.1 * rng.normal(size=(20, 6))
    model = gpx.models.gplvm(gpx.inducing.Points(H[:5], learn=True), num_outputs=6)
    guide = gpx.guides.UnscentedLatent(gpx.guides.OptimalGaussian(model))
    return gpx.fit_lbfgs(model, guide, Y, key=jr.key(0), max_steps=5, progress=False)


def lengthscales(fit):
    return np.asarray(fit.draws(4)["lengthscale"][0])


def test_the_latent_space_has_a_point_and_an_ellipse_a_row(latent_fit):
    labels = np.repeat(["a", "b"], [12, 8])
    ax = plots.latent_space(latent_fit, labels=labels, dims=(1, 0))
    moments = latent_fit.latent_inputs()
    ellipses, points = ax.collections[::2], ax.collections[1::2]
    for label, drawn, round_it in zip("ab", points, ellipses, strict=True):
        rows = labels == label
        assert_allclose(drawn.get_offsets(), moments.mean[rows][:, ::-1])
        assert_allclose(round_it.get_offsets(), drawn.get_offsets())
        # One standard deviation on each side.
        assert_allclose(round_it.get_widths(), 2.0 * moments.sd[rows, 1])
        assert_allclose(round_it.get_heights(), 2.0 * moments.sd[rows, 0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert ax.get_xlabel() == "latent dimension 1"
    assert len({tuple(drawn.get_facecolor()[0]) for drawn in points}) == 2


def test_the_latent_space_shows_the_shortest_lengthscale_across(latent_fit):
    _, ax = plt.subplots()
    assert plots.latent_space(latent_fit, ax=ax) is ax
    shortest = int(np.argmin(lengthscales(latent_fit)))
    assert ax.get_xlabel() == f"latent dimension {shortest}"
    assert ax.get_legend() is None
    assert len(ax.collections[1].get_offsets()) == 20


def test_relevance_is_one_over_the_lengthscale(latent_fit):
    ax = plots.relevance(latent_fit)
    heights = [bar.get_height() for bar in ax.patches]
    assert_allclose(heights, 1.0 / lengthscales(latent_fit))
    assert not ax.collections  # a point estimate has no whiskers


def test_relevance_has_whiskers_where_lengthscales_have_spread(latent_fit):
    draws = np.exp(np.random.default_rng(8).normal(size=(2, 60, 2)))
    chains = {
        name: np.broadcast_to(x, (2, 60, *x.shape[1:]))
        for name, x in latent_fit.draws(1).items()
    }
    fit = gpx.Fit(
        Program.unchecked(Call(latent_fit.model, latent_fit.call.args)),
        ChainPosterior({**chains, "lengthscale": draws}),
        facts=gpx.engines.NUTS().facts,
        params=latent_fit.params,
    )
    ax = plots.relevance(fit)
    (whiskers,) = ax.collections
    expected = np.quantile(1.0 / draws.reshape(-1, 2), [0.05, 0.95], axis=0)
    ends = np.array([path[:, 1] for path in whiskers.get_segments()])
    assert_allclose(ends.T, expected)


def test_the_manifold_shows_predicted_means_at_a_grid(latent_fit):
    shift = np.arange(6.0)
    figure = plots.manifold(
        latent_fit,
        (3, 2),
        dims=(0, 1),
        num=(3, 2),
        limits=((-1.0, 1.0), (0.0, 2.0)),
        shift=shift,
        scale=2.0,
    )
    (ax,) = figure.axes
    sheet = ax.images[0].get_array()
    assert sheet.shape == (2 * 3, 3 * 2)
    # The second dimension grows upwards: the first row of images has it at 2.
    H = np.array([[0.0, 2.0], [1.0, 0.0]])
    means = latent_fit.predict(num_rows=2, given={"h": H}, of="f").mean
    images = (shift + 2.0 * means).reshape(2, 3, 2)
    assert_allclose(sheet[:3, 2:4], images[0], atol=1e-10)
    assert_allclose(sheet[3:, 4:], images[1], atol=1e-10)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["-1.0", "0.0", "1.0"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["2.0", "0.0"]


def test_reconstructions_show_truth_gaps_moments_and_draws(latent_fit):
    truth = np.asarray(latent_fit.call.args[0])[:4]
    observed = np.where(np.arange(6) < 3, truth, np.nan)
    H = latent_fit.latent_inputs().mean[:4]
    prediction = latent_fit.predict(num_rows=4, given={"h": H})
    figure = plots.reconstructions(truth, observed, prediction, (3, 2), num=3)
    panels = [ax for ax in figure.axes if ax.images]
    assert len(panels) == 6 * 3
    names = [ax.get_ylabel() for ax in panels[::3]]
    assert names == ["truth", "observed", "mean", "sd", "draw 1", "draw 2"]
    shown = [panels[3 * row + 1].images[0].get_array() for row in range(6)]
    assert_allclose(shown[0], truth[1].reshape(3, 2))
    assert shown[1].mask.sum() == 3
    assert_allclose(shown[2], prediction.mean[1].reshape(3, 2))
    assert_allclose(shown[3], prediction.sd[1].reshape(3, 2))
    # Grey means the same in all rows but that of the standard deviation.
    scales = {panels[3 * row].images[0].get_clim() for row in (0, 1, 2, 4, 5)}
    assert scales == {(truth[:3].min(), truth[:3].max())}


def test_figures_of_latents_name_what_they_need(latent_fit):
    with pytest.raises(ValueError, match="two different dimensions below 2"):
        plots.latent_space(latent_fit, dims=(0, 2))
    with pytest.raises(ValueError, match=r"`labels` must have shape \(20,\)"):
        plots.latent_space(latent_fit, labels=np.zeros(3))
    with pytest.raises(ValueError, match="one of the rows' latent sites"):
        plots.latent_space(latent_fit, site="f")
    with pytest.raises(ValueError, match="one lengthscale a dimension"):
        plots.relevance(latent_fit, site="variance")
    with pytest.raises(ValueError, match="`shape` must be"):
        plots.manifold(latent_fit, (4, 2), num=(2, 2))
    prediction = latent_fit.predict(num_rows=2, given={"h": np.zeros((2, 2))})
    with pytest.raises(ValueError, match="must have the same shape"):
        plots.reconstructions(np.zeros((3, 6)), np.zeros((3, 6)), prediction, (3, 2))


def test_one_latent_dimension_is_no_plane():
    model = gpx.models.gplvm(
        gpx.inducing.Points(np.arange(3.0)[:, None]), num_outputs=6
    )
    draws = {
        "h": np.zeros((1, 2, 20, 1)),
        "f": np.zeros((1, 2, 6, 3)),
        "lengthscale": np.ones((1, 2, 1)),
        "variance": np.ones((1, 2)),
        "noise": np.ones((1, 2)),
    }
    fit = gpx.Fit(
        Program.unchecked(Call(model, (jnp.zeros((20, 6)),))),
        ChainPosterior(draws),
        facts=gpx.engines.NUTS().facts,
    )
    with pytest.raises(ValueError, match="two or more dimensions"):
        plots.latent_space(fit)
