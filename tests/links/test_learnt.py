"""Links that are learnt, as parameters and with priors, by every engine that can."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import optax
import pytest
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.structure import structure_of

_rng = np.random.default_rng(1)
X = np.sort(_rng.uniform(-2.0, 2.0, 60))[:, None]
# A cubed latent: the identity is the wrong link.
Y = np.sin(2.0 * X[:, 0]) ** 3 + 0.1 * _rng.normal(size=60)
LABELS = (_rng.uniform(size=60) < 0.1 + 0.8 * (np.sin(2.0 * X[:, 0]) > 0)) * 1.0
POINTS = gpx.inducing.Points(np.linspace(-2.0, 2.0, 7)[:, None])
KERNEL = gpx.kernels.RBF(variance=1.0, lengthscale=0.7)
OPTIONS = dict(key=jr.key(0), progress=False)


def regression(link, inducing=POINTS):
    def model(inputs, y=None):
        f = gpx.gp("f", KERNEL, inducing=inducing)
        likelihood = gpx.likelihoods.Gaussian(0.2, link())
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), likelihood, obs=y)

    return model


def classification(link, inducing=POINTS):
    def model(inputs, y=None):
        f = gpx.gp("f", KERNEL, inducing=inducing)
        likelihood = gpx.likelihoods.Bernoulli(link())
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), likelihood, obs=y)

    return model


def svi(model, y, num_steps=300, **options):
    guide = gpx.guides.WhitenedGaussian(model, **options)
    return gpx.fit_svi(
        model, guide, X, y, num_steps=num_steps, optimizer=optax.adam(0.05), **OPTIONS
    )


@pytest.fixture(scope="module")
def fixed():
    return svi(classification(lambda: gpx.links.PiecewiseConstant.of("logit")), LABELS)


def learnt(**options):
    return lambda: gpx.links.learnt_link("link", "logit", num_pieces=12, **options)


def test_a_learnt_link_has_a_higher_bound_than_the_fixed_one(fixed):
    fit = svi(classification(learnt()), LABELS)
    assert fit.elbo().value > fixed.elbo().value + 1.0
    values = jax.nn.sigmoid(fit.params["link"])
    assert values.shape == (12,)
    # The labels have error rates of 10 %, which the logistic link does not know.
    assert 0.02 < values[0] < 0.2 and 0.8 < values[-1] < 0.99


def test_penalties_are_those_of_the_paper():
    """Eq. 22 and 23: the bound is lower by the penalty, at the same parameters."""
    points = jnp.linspace(-1.0, 2.0, 12)
    start = gpx.links.PiecewiseConstant.of("logit", num_pieces=12)
    values = jax.nn.sigmoid(points)
    penalties = {
        None: np.sum((values - start.values) ** 2),
        0.3: np.sum((values - 0.3) ** 2),
    }
    arguments = jnp.asarray(X), jnp.asarray(LABELS)

    def bound(**options):
        model = classification(learnt(**options))
        guide = gpx.guides.WhitenedGaussian(model)
        params = {
            "link": points,
            "f_auto_loc": jnp.linspace(-1.0, 1.0, 7),
            "f_auto_scale_tril": 0.4 * jnp.eye(7),
        }
        return -gpx.infer.ELBO().loss(jr.key(0), params, model, guide, *arguments)

    plain = bound()
    for towards, distance in penalties.items():
        penalised = bound(penalty=1.7, towards=towards)
        assert_allclose(plain - penalised, 1.7 * distance, rtol=1e-9)


def test_a_monotone_link_rises_and_starts_near_its_base():
    model = classification(learnt(monotone=True))
    fit = svi(model, LABELS, num_steps=150)
    assert np.all(np.diff(fit.params["link"]) > 0.0)
    start = svi(model, LABELS, num_steps=1)
    assert_allclose(start.params["link"][0], -3.0, atol=0.1)


def random(**options):
    return lambda: gpx.links.random_link("link", num_pieces=8, **options)


def test_the_integrated_bound_is_the_mean_of_the_drawn_one():
    """Eq. 24, corrected: 4000 draws of the values, 5 standard errors (6e-7)."""
    arguments = jnp.asarray(X), jnp.asarray(Y)
    loc, scale = jnp.linspace(-2.0, 2.5, 8), jnp.linspace(0.1, 0.4, 8)
    belief = {
        "f_auto_loc": jnp.linspace(-1.0, 1.0, 7),
        "f_auto_scale_tril": 0.4 * jnp.eye(7),
    }
    closed = regression(random(integrate=True))
    guide = gpx.guides.WhitenedGaussian(closed)
    params = {**belief, "link_auto_loc": loc, "link_auto_scale": scale}
    exact = -gpx.infer.ELBO().loss(jr.key(0), params, closed, guide, *arguments)
    drawn = regression(random())
    guide = gpx.guides.WhitenedGaussian(drawn, theta="mean_field")
    params = {**belief, "theta_auto_loc": loc, "theta_auto_scale": scale}

    @jax.jit
    def estimates(keys):
        def one(key):
            return -gpx.infer.ELBO().loss(key, params, drawn, guide, *arguments)

        return jax.lax.map(one, keys, batch_size=100)

    values = np.asarray(estimates(jr.split(jr.key(1), 4000)))
    assert abs(values.mean() - exact) < 5.0 * values.std() / np.sqrt(4000)
    assert values.std() / np.sqrt(4000) < 2.0


@pytest.mark.slow
def test_links_with_a_prior_agree_between_engines():
    """A variational and a sampled posterior of the values, on the same model.

    Pieces that the latent function visits; the rest keep their prior N(x_k, 1).
    """
    model = regression(random(integrate=True, lower=-1.5, upper=1.5))
    q = svi(model, Y, num_steps=1500)
    nuts = gpx.fit_nuts(model, X, Y, num_warmup=300, num_samples=300, init=q, **OPTIONS)
    a, b = q.draws(2000)["link"], nuts.draws()["link"]
    assert a.shape[1] == b.shape[1] == 8
    X_new = np.linspace(-1.9, 1.9, 9)[:, None]
    gap = q.predict(X_new).mean - nuts.predict(X_new).mean
    assert np.max(np.abs(gap)) < 0.15
    assert np.corrcoef(a.mean(0), b.mean(0))[0, 1] > 0.9


def test_every_engine_moves_a_link_with_a_prior():
    model = regression(random(integrate=True))
    draws = dict(num_warmup=5, num_samples=5, num_chains=1, **OPTIONS)
    for fit in (gpx.fit_nuts, gpx.fit_sghmc):
        found = fit(model, X, Y, **draws).draws()["link"]
        assert found.shape == (5, 8) and np.all(found.std(axis=0) > 0.0)


def test_a_monotone_prior_gives_rising_values():
    model = regression(random(monotone=True))
    trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(X)
    assert np.all(np.diff(trace["link"]["value"]) > 0.0)
    with pytest.raises(ValueError, match="leave out `monotone`"):
        gpx.links.random_link("link", monotone=True, integrate=True)


def test_the_optimal_guide_refuses_a_link():
    model = regression(lambda: gpx.links.PiecewiseConstant.of("identity"))
    with pytest.raises(ValueError, match="identity as link at site `y`; got Piecewise"):
        gpx.fit_lbfgs(model, gpx.guides.OptimalGaussian(model), X, Y, **OPTIONS)


def full(link):
    return classification(link, gpx.inducing.Data(X))


STEPS = full(lambda: gpx.links.PiecewiseConstant.of("logit"))


def test_gradients_that_vanish_are_refused():
    words = "Bernoulli at site `y` jumps.*elliptical slice"
    with pytest.raises(ValueError, match=words):
        gpx.fit_nuts(STEPS, X, LABELS, **OPTIONS)
    with pytest.raises(ValueError, match=words):
        gpx.fit_sghmc(STEPS, X, LABELS, **OPTIONS)


@pytest.mark.slow
def test_elliptical_slice_samples_the_full_gp_with_steps():
    import blackjax

    kernel = gpx.infer.Blackjax(STEPS, blackjax.elliptical_slice, thinning=5)
    fit = gpx.fit_mcmc(
        kernel, X, LABELS, num_warmup=200, num_samples=300, num_chains=1, **OPTIONS
    )
    smooth = full(lambda: "logit")
    exact = gpx.fit_nuts(smooth, X, LABELS, num_warmup=200, num_samples=300, **OPTIONS)
    gap = fit.predict(X).mean - exact.predict(X).mean
    assert np.max(np.abs(gap)) < 0.1


def test_a_link_inside_the_data_plate_is_refused():
    with numpyro.handlers.seed(rng_seed=0), numpyro.plate("data", 4):
        with pytest.raises(ValueError, match=r"outside the plates \['data'\]"):
            gpx.links.random_link("link")
        with pytest.raises(ValueError, match="shared by all rows"):
            gpx.links.learnt_link("link", "logit")


def test_every_piece_is_in_the_trace_under_its_own_name():
    model = regression(random(integrate=True))
    structure = structure_of(Call(model, (X, Y)))
    assert structure.integrated == ("link",)
    assert structure.hyperparameters == ()
