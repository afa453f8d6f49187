"""Guides that are made again from files, and those that cannot be."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.example_libraries import stax
from numpy.testing import assert_array_equal
from numpyro.infer import SVI, Trace_ELBO, autoguide, init_to_value

import numpyro_gpx as gpx
from numpyro_gpx import guides
from numpyro_gpx.cubature import GaussHermite, MonteCarlo, Unscented
from numpyro_gpx.guides.parts.base import set_up
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import once
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.archive import read_archive
from numpyro_gpx.results.guide_records import _NUMPYRO, guide_record

_rng = np.random.default_rng(5)
X = _rng.normal(size=(12, 1))
Y = np.sin(X[:, 0])
Y2 = np.hstack([Y[:, None], X])
X_NEW = np.linspace(-1.0, 1.0, 5)[:, None]
POINTS = gpx.inducing.Points(np.linspace(-2.0, 2.0, 4)[:, None])


def regression(inputs, y=None):
    scale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = gpx.gp("f", gpx.kernels.RBF(1.3, scale), inducing=POINTS)
    with numpyro.plate("data", inputs.shape[0]):
        gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(0.3), obs=y)


def linear(inputs, y=None):
    """Quick to compile; its site is a batch of rows, as batched guides want it."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(1))
    with numpyro.plate("data", inputs.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.sum(w) * inputs[:, 0], 0.3), obs=y)


def decoder(y=None, *, num_rows=None, batch_size=None):
    """A GPLVM: its rows have latent inputs."""
    num_rows = num_rows if y is None else y.shape[0]
    kernel = gpx.kernels.RBF(1.3, numpyro.sample("lengthscale", dist.LogNormal(0, 1)))
    f = gpx.gp("f", kernel, inducing=POINTS, num_outputs=2)
    with numpyro.plate("data", num_rows, subsample_size=batch_size) as i:
        h = numpyro.sample("h", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        gpx.observe("y", f(h), gpx.likelihoods.Gaussian(0.3), obs=y, rows=i)


def fit_of(guide, model=regression, loss=None, **options):
    """A fit with the parameters of the start, moved a little: no steps to compile."""
    data = (jnp.asarray(Y2),) if model is decoder else (jnp.asarray(X), jnp.asarray(Y))
    loss = gpx.infer.ELBO() if loss is None else loss
    svi = SVI(model, guide, optax.sgd(0.1), loss)
    set_up(guide, Program.unchecked(Call(model, data, options)))
    init = once(lambda key: svi.get_params(svi.init(key, *data, **options)))
    params = init(jr.key(1))
    params = jax.tree.map(lambda x: 1.1 * x, params)
    return gpx.Fit.from_svi(svi, params, *data, key=jr.key(2, impl="rbg"), **options)


def drawn(fit):
    """All that a guide has to say: draws, and beliefs that predictions integrate."""
    draws = fit.posterior.sample(jr.key(3), 3)
    return jax.tree.leaves((draws, fit.posterior.components(2)))


def assert_same(fit, again):
    """To the last bit."""
    for x, y in zip(drawn(fit), drawn(again), strict=True):
        assert_array_equal(x, y)
    assert repr(again) == repr(fit) and again.facts == fit.facts
    assert again.posterior.guide.prefix == fit.posterior.guide.prefix


def reloaded(fit, tmp_path, **options):
    fit.save(tmp_path / "fit")
    return gpx.load(tmp_path / "fit", fit.model, **options)


# None of the settings is what it is if left out.
OURS = {
    "WhitenedGaussian": lambda: guides.WhitenedGaussian(
        regression, theta="mean_field", covariance="diagonal", prefix="q"
    ),
    "ConditionalGaussian": lambda: guides.ConditionalGaussian(
        regression, theta="mean_field", prefix="q"
    ),
    "OptimalGaussian": lambda: guides.OptimalGaussian(
        regression, theta="full", prefix="q"
    ),
    "Flow": lambda: guides.Flow(
        regression, theta="point", mixing="channel", num_blocks=2, num_bins=3,
        hidden=5, base_hidden=None, bound=4.0, init_scale=0.2, path_gradient=True,
        prefix="q",
    ),
    "Implicit": lambda: guides.Implicit(
        regression, widths=(5, 4), discriminator_widths=(3,), noise_dim=2,
        init_scale=0.2, prefix="q",
    ),
    "UnscentedLatent": lambda: guides.UnscentedLatent(
        guides.OptimalGaussian(decoder, theta="mean_field", prefix="q"),
        rule=GaussHermite(3), covariance="full", init="random",
    ),
    "Encoder": lambda: guides.UnscentedLatent(
        guides.WhitenedGaussian(decoder, covariance="diagonal", prefix="q"),
        rule=MonteCarlo(3), encoder=guides.Encoder((5, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_guides_of_this_library_come_back(name, tmp_path):
    guide = OURS[name]()
    fit = fit_of(guide, guide.model)
    again = reloaded(fit, tmp_path)
    assert_same(fit, again)
    assert again.elbo(3) == fit.elbo(3)
    assert again.posterior.guide.config == guide.config


def test_guides_of_minibatches_come_back(tmp_path):
    """They look at the model on a minibatch first."""
    fit = fit_of(latent(), decoder, batch_size=5)
    again = reloaded(fit, tmp_path)
    assert_same(fit, again)
    assert again.elbo(3) == fit.elbo(3)


def test_every_guide_is_in_the_table():
    """A new one needs a line here."""
    abstract = {"SiteGuide", "GaussianGuide"}
    assert set(OURS) == set(guides.__all__) - abstract
    assert set(NUMPYRO) == set(_NUMPYRO)
    # What NumPyro has beyond that holds functions, or is turned into another guide.
    others = {
        "AutoGuide", "AutoContinuous", "AutoGuideList", "AutoLaplaceApproximation",
        "AutoSemiDAIS", "AutoSurrogateLikelihoodDAIS",
    }  # fmt: skip
    assert set(autoguide.__all__) - others == set(NUMPYRO)


NUMPYRO = {
    "AutoDelta": {"forward_mode_differentiation": True},
    "AutoNormal": {"init_scale": 0.3},
    "AutoDiagonalNormal": {"init_scale": 0.3},
    "AutoMultivariateNormal": {"init_scale": 0.3},
    "AutoLowRankMultivariateNormal": {"init_scale": 0.3, "rank": 4},
    "AutoBatchedMultivariateNormal": {"init_scale": 0.3, "batch_ndim": 1},
    "AutoBatchedLowRankMultivariateNormal": {
        "init_scale": 0.3, "rank": 1, "batch_ndim": 1,
    },
    "AutoIAFNormal": {
        "num_flows": 2, "hidden_dims": (7, 8), "skip_connections": True,
    },
    "AutoBNAFNormal": {"num_flows": 2, "hidden_factors": [2]},
    "AutoDAIS": {
        "K": 3, "base_dist": "cholesky", "eta_init": 0.02, "eta_max": 0.2,
        "gamma_init": 0.8, "init_scale": 0.2,
    },
}  # fmt: skip


# Networks take seconds to compile.
SLOW = ("AutoIAFNormal", "AutoBNAFNormal")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NUMPYRO],
)
def test_guides_of_numpyro_come_back(name, tmp_path):
    guide = getattr(autoguide, name)(linear, prefix="q", **NUMPYRO[name])
    fit = fit_of(guide, linear, loss=Trace_ELBO())
    again = reloaded(fit, tmp_path)
    assert_same(fit, again)
    config = guide_record(again.posterior.guide)["config"]
    assert {**NUMPYRO[name], "prefix": "q"}.items() <= config.items()


def test_guides_come_back_where_others_find_no_start(tmp_path):
    """NumPyro's guides look for a finite density before anything else."""

    def narrow(inputs, y=None):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        # Finite near the value that the guide is told, on which nobody else hits.
        numpyro.factor("wall", jnp.where(jnp.abs(x - 7.0) < 1.0, 0.0, -jnp.inf))
        with numpyro.plate("data", inputs.shape[0]):
            numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    start = init_to_value(values={"x": 6.4})
    guide = autoguide.AutoNormal(narrow, init_loc_fn=start, init_scale=1e-3)
    fit = fit_of(guide, narrow)
    assert_same(fit, reloaded(fit, tmp_path))


class Mine(guides.WhitenedGaussian):
    """A user's, that believes something else."""

    def beliefs(self, theta, call):
        return super().beliefs({n: 2.0 * x for n, x in theta.items()}, call)


class Halved(guides.Encoder):
    """A user's, that sees something else."""

    def inputs(self, call, num_rows, rows):
        return 0.5 * super().inputs(call, num_rows, rows)


MyRule = type("Unscented", (Unscented,), {})  # a user's, by the name of ours


class AutoNormal(autoguide.AutoNormal):
    """A user's, by the name of NumPyro's."""


def by_hand(inputs, y=None):
    numpyro.sample("lengthscale", dist.LogNormal(numpyro.param("m", 0.3), 0.1))
    loc = numpyro.param("loc", jnp.full(4, 0.5))
    numpyro.sample("f", dist.Normal(loc, 0.2).to_event(1))


def _plates(*args):
    return numpyro.plate("data", 12)


def latent(**options):
    """Like what can be made again but for one thing."""
    inner = options.pop("inner", guides.WhitenedGaussian)
    return guides.UnscentedLatent(inner(decoder), **{"rule": Unscented(), **options})


LOST = {
    "function": lambda: by_hand,
    "own": lambda: Mine(regression),
    "own_inner": lambda: latent(inner=Mine),
    "own_encoder": lambda: latent(encoder=Halved((3,))),
    "own_features": lambda: latent(encoder=guides.Encoder((3,), lambda y: y)),
    "own_rule": lambda: latent(rule=MyRule()),
    "own_auto": lambda: AutoNormal(regression),
    "create_plates": lambda: autoguide.AutoNormal(regression, create_plates=_plates),
    "nonlinearity": lambda: autoguide.AutoIAFNormal(
        regression, nonlinearity=stax.Relu, num_flows=1
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_guides_that_cannot_be_made_again_are_told_apart(name):
    assert guide_record(LOST[name]()) is None
    assert guide_record(latent()) is not None


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """A fit whose guide is a function, and its file."""
    fit = fit_of(by_hand)
    path = tmp_path_factory.mktemp("lost") / "fit"
    with pytest.warns(UserWarning, match="guide `by_hand` cannot be made") as found:
        fit.save(path)
    assert found[0].filename == __file__
    return fit, path


def test_lost_guides_predict_within_monte_carlo_error(lost):
    """Means of 1000 draws, 5 standard errors: false alarms below 1e-5."""
    fit, path = lost
    again = gpx.load(path, regression)
    assert not again.is_mcmc and again.approximation == "variational"
    assert np.isnan(again.elbo().value)
    for name, x in fit.draws(4000).items():
        error = x.std(0) * np.sqrt(1 / 1000 + 1 / 4000)
        assert np.all(np.abs(again.draws().get(name).mean(0) - x.mean(0)) < 5.0 * error)
    error = np.max(np.abs(again.predict(X_NEW).mean - fit.predict(X_NEW).mean))
    assert 0.0 < error < 0.1


def test_with_their_guide_they_come_back_whole(lost):
    fit, path = lost
    with jax.default_prng_impl("rbg"):  # whose keys draw other numbers
        again = gpx.load(path, regression, guide=by_hand)
    for x, y in zip(drawn(fit), drawn(again), strict=True):
        assert_array_equal(x, y)
    assert_array_equal(again.predict(X_NEW).mean, fit.predict(X_NEW).mean)
    assert again.elbo(3) == fit.elbo(3)


def shifted(inputs, y=None):
    numpyro.sample("lengthscale", dist.LogNormal(numpyro.param("m", 0.3), 0.1))
    loc = numpyro.param("loc", jnp.full(4, 0.5))
    numpyro.sample("f", dist.Normal(loc + 0.1, 0.2).to_event(1))


WRONG = {
    "another guide": (shifted, "is not the one that was fitted: .* draws other values"),
    "too few sites": (lambda x, y=None: None, "it raises KeyError"),
    "another model's": (guides.Flow(linear), "was made for another model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_guides_are_refused(name, lost):
    guide, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        gpx.load(lost[1], regression, guide=guide)


def test_a_guide_is_refused_where_none_is_needed(lost, tmp_path):
    gpx.load(lost[1], regression).save(tmp_path / "draws")  # nothing more is lost
    with pytest.raises(ValueError, match="draws` holds draws alone. Leave it out"):
        gpx.load(tmp_path / "draws", regression, guide=by_hand)
    guide = guides.WhitenedGaussian(regression)
    fit_of(guide).save(tmp_path / "whole")
    with pytest.raises(ValueError, match="whole` holds its guide. Leave it out"):
        gpx.load(tmp_path / "whole", regression, guide=guide)


def test_the_file_of_a_known_guide_holds_no_draws_of_it(tmp_path):
    fit_of(guides.WhitenedGaussian(regression)).save(tmp_path / "fit")
    record, _ = read_archive(tmp_path / "fit")
    assert "draws" not in record["kept"]
