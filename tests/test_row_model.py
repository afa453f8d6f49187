"""The latent inputs of new rows as a model: its density, and engines on it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target

RNG = np.random.default_rng(3)
H = RNG.normal(size=(12, 1))
Y = np.concatenate([np.sin(2.0 * H), H**2, 0.5 * H], axis=1)
Y += 0.1 * RNG.normal(size=Y.shape)
NEW = np.array([[np.nan, 0.8, np.nan]])


@pytest.fixture(scope="module")
def fit():
    Z = np.linspace(-2.0, 2.0, 5)[:, None]
    model = gpx.models.gplvm(
        gpx.inducing.Points(Z, learn=True), num_outputs=3, missing=True
    )
    guide = gpx.guides.UnscentedLatent(gpx.guides.WhitenedGaussian(model))
    return gpx.fit_svi(
        model, guide, Y, key=jr.key(0), num_steps=300, optimizer=optax.adam(0.05),
        progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def log_density(fit):
    """The model's, on a batch `(B,)` of latent inputs."""
    target = Target(Call(gpx.latent_space.row_model(fit, NEW), ()))
    return jax.jit(jax.vmap(lambda h: target.log_density({"h": h.reshape(1, 1)})))


def test_the_density_is_the_prior_times_that_of_the_seen_entries(fit, log_density):
    """By `predict` at given latent inputs, and SciPy."""
    h = np.array([-1.3, 0.2, 0.9])
    given = fit.predict(given={"h": h[:, None]})
    seen = scipy.stats.norm(given.mean[:, 1], given.sd[:, 1]).logpdf(0.8)
    expected = seen + scipy.stats.norm.logpdf(h)
    assert_allclose(log_density(jnp.asarray(h)), expected, rtol=1e-8)


def test_its_fits_go_to_arviz_and_say_that_they_score_nothing(fit):
    """Factors are no data."""
    model = gpx.latent_space.row_model(fit, NEW)
    guide = gpx.guides.Flow(model, num_blocks=0)
    found = gpx.fit_svi(model, guide, key=jr.key(0), num_steps=2, progress=False)
    assert found.to_arviz().groups() == ["posterior"]
    with pytest.raises(ValueError, match="observes no data"):
        gpx.loo(found)


@pytest.mark.slow
def test_a_flow_finds_its_moments(fit, log_density):
    """Two modes, of `h` and about `-h`; moments by quadrature."""
    grid = np.linspace(-4.0, 4.0, 401)
    log_p = np.asarray(log_density(jnp.asarray(grid)))
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    sd = np.sqrt(p @ grid**2 - (p @ grid) ** 2)
    model = gpx.latent_space.row_model(fit, NEW)
    flow = gpx.fit_svi(
        model, gpx.guides.Flow(model, init_scale=1.0, path_gradient=True),
        key=jr.key(0), num_steps=800, temperature=10.0, loss=gpx.infer.ELBO(16),
        optimizer=optax.adam(0.01), progress=False,
    )  # fmt: skip
    draws = flow.draws(4000)["h"][:, 0, 0]
    assert abs(draws.mean() - p @ grid) < 0.2 * sd
    assert_allclose(draws.std(), sd, rtol=0.15)
