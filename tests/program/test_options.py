"""Options that nobody knows: who was asked, what was meant, what the model takes."""

import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call

X = np.linspace(-1.0, 1.0, 12)[:, None]
Y = np.sin(2.0 * X[:, 0])
GUIDE = gpx.guides.WhitenedGaussian
QUICK = {"key": jr.key(0), "progress": False}


def model(X, y=None, *, batch_size=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    kernel = gpx.kernels.RBF(variance=1.0, lengthscale=lengthscale)
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(np.array([[-0.7], [0.6]])))
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(0.3), obs=y, rows=i)


def takes_anything(X, y=None, **rest):
    model(X, y, batch_size=rest.get("batch_size"))


@pytest.mark.parametrize(
    "name, words",
    [
        ("num_step", r"`num_steps`\?$"),
        ("learning_rate", r"`optimizer=optax.adam\(...\)`\?$"),
        ("seed", r"`key=jax.random.key\(...\)`\?$"),
        ("something", r"'batch_size'\]\.$"),
    ],
)
def test_the_nearest_option_of_the_function_is_named(name, words):
    start = rf"`{name}` is neither an option of `fit_svi`.*which takes \['X', 'y', .*"
    with pytest.raises(TypeError, match=start + words):
        gpx.fit_svi(model, GUIDE, X, Y, **QUICK, **{name: 5})


def test_short_forms_of_samplers_name_theirs():
    words = r"option of `fit_nuts` nor.*Did you mean `thinning`\?"
    with pytest.raises(TypeError, match=words):
        gpx.fit_nuts(model, X, Y, **QUICK, thining=2)


def test_options_of_the_engine_are_told_from_those_of_the_fit():
    for name, words in [
        ("thining", r"Did you mean `gpx.engines.NUTS\(thinning=...\)`\?"),
        ("thinning", r"an option of the engine: `gpx.engines.NUTS\(thinning=...\)`"),
        ("progres", r"Did you mean `progress`\?"),
    ]:
        with pytest.raises(TypeError, match=words):
            gpx.fit(model, gpx.engines.NUTS(), X, Y, key=jr.key(0), **{name: 2})


@pytest.mark.parametrize(
    "name, words",
    [
        ("num_step", r"`num_steps`\?"),
        ("num_sample", "`num_samples`, an option of `fit_"),
        ("learning_rate", r"`optimizer=optax.adam\(...\)`\?"),
        ("chains", "`num_chains`, an option of"),
    ],
)
def test_a_model_that_takes_anything_does_not_swallow_what_is_like_an_option(
    name, words
):
    words = (
        rf"`{name}` is not an option of `fit_svi`.*its `\*\*rest`.*Did you mean {words}"
    )
    with pytest.raises(TypeError, match=words):
        gpx.fit_svi(takes_anything, GUIDE, X, Y, **QUICK, **{name: 5})


def test_a_model_that_takes_anything_gets_what_is_its_own():
    call = Call.create(takes_anything, (X, Y), {"periods": 3}, function="fit_svi")
    assert call.kwargs == {"periods": 3}
    # By name, a model may have what other fits call an option.
    named = Call.create(
        lambda X, y=None, *, chains, **rest: None, (X, Y), {"chains": 4, "x": 1},
        function="fit_svi",
    )  # fmt: skip
    assert named.kwargs == {"chains": 4, "x": 1}
    fit = gpx.fit_svi(takes_anything, GUIDE, X, Y, **QUICK, num_steps=2, batch_size=4)
    assert fit.batch_size == 4


def test_predictions_and_prior_draws_name_their_options():
    fit = gpx.Fit.from_prior(model, X, key=jr.key(0), num_draws=3)
    with pytest.raises(TypeError, match=r"of `predict` nor.*`num_components`\?"):
        fit.predict(X, num_component=2)
    with pytest.raises(TypeError, match=r"of `from_prior` nor.*`num_draws`\?"):
        gpx.Fit.from_prior(model, X, key=jr.key(0), num_draw=3)
