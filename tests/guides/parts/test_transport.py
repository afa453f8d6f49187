"""Guides as maps: where vectors land, and by how much they are stretched."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.guides.parts.base import set_up
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program

G = gpx.guides
X = np.linspace(-1.0, 1.0, 7)[:, None]
Z = X[::3]
Y = np.sin(3.0 * X[:, 0])
RNG = np.random.default_rng(4)


def make(*, num_outputs=None, whiten=True, own=False):
    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.2, 0.6))
        scales = numpyro.sample("scales", dist.LogNormal(jnp.zeros(2), 0.5).to_event(1))
        kernels = [gpx.kernels.RBF(variance, scales[k]) for k in range(2)]
        f = gpx.gp(
            "f", kernels if own else kernels[0], inducing=gpx.inducing.Points(Z),
            mean=gpx.means.Constant(0.4), num_outputs=num_outputs, whiten=whiten,
        )  # fmt: skip
        with numpyro.plate("data", len(X)):
            obs = y if num_outputs is None or y is None else jnp.stack([y, -y], axis=1)
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.3), obs=obs)

    return model


def no_gps(X, y=None):
    a = numpyro.sample("a", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(a * X[:, 0], 0.3), obs=y)


def follows(X, y=None):
    """The lengthscale of one GP follows another's values."""
    f = gpx.gp("f", gpx.kernels.RBF(1.1, 0.7), inducing=gpx.inducing.Points(Z))
    there = f(X)
    kernel = gpx.kernels.RBF(0.8, jnp.exp(0.3 * there.mean[0]))
    g = gpx.gp("g", kernel, inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", there + g(X), gpx.likelihoods.Gaussian(0.3), obs=y)


CASES = {
    "whitened": (make(), lambda m: G.WhitenedGaussian(m, theta="full")),
    "mean field": (
        make(),
        lambda m: G.WhitenedGaussian(m, theta="mean_field", covariance="diagonal"),
    ),
    "conditional": (make(), G.ConditionalGaussian),
    "outputs": (make(num_outputs=2), G.ConditionalGaussian),
    "own kernels": (make(num_outputs=2, own=True), G.ConditionalGaussian),
    "unwhitened": (make(whiten=False), G.ConditionalGaussian),
    "follows": (follows, G.ConditionalGaussian),
    "optimal": (make(), lambda m: G.OptimalGaussian(m, theta="full")),
    "shared": (make(num_outputs=2), lambda m: G.OptimalGaussian(m, theta="full")),
    "flow": (make(), lambda m: G.Flow(m, num_blocks=1, hidden=4)),
    "no gps": (no_gps, lambda m: G.WhitenedGaussian(m, theta="full")),
}


def moved(name, x):
    """A parameter of a guide somewhere else, inside its support."""
    noise = RNG.normal(size=np.shape(x))
    if name.endswith("tril"):
        return x + 0.05 * np.tril(noise, -1)
    return x + 0.2 * noise if name.endswith("loc") else 1.2 * x


def transport_of(model, make_guide, *, strength=None):
    """Of a guide whose parameters are not where they start."""
    call = Call.create(model, (X, Y), {})
    guide = make_guide(model)
    set_up(guide, Program.of(call))
    trace = call.trace({}, jr.key(0), model=guide)
    params = {
        name: moved(name, site["value"])
        for name, site in trace.items()
        if site["type"] == "param"
    }
    if strength is not None:
        params = guide.weakened(params, strength)
    return guide, params, guide.transport(params, call)


@pytest.mark.parametrize("name", CASES)
def test_maps_have_inverses_and_the_log_determinant_of_their_jacobian(name):
    guide, params, transport = transport_of(*CASES[name])
    x = jr.normal(jr.key(1), (transport.size,))
    z, log_det = jax.jit(transport.forward)(x)
    assert set(z) == set(guide.structure.latents)
    for site, value in z.items():
        assert value.shape == guide.structure.latents[site].unconstrained_shape
    assert_allclose(transport.inverse(z), x, atol=1e-9)
    J = jax.jacobian(lambda x: ravel_pytree(transport.forward(x).z)[0])(x)
    assert_allclose(log_det, np.linalg.slogdet(J)[1], atol=1e-8)


@pytest.mark.parametrize("name", ["whitened", "conditional", "optimal"])
def test_the_map_is_that_of_the_guides_draws(name):
    """Moments of 4000 draws each; 5 standard errors on 6 numbers: below 1e-5."""
    guide, params, transport = transport_of(*CASES[name])
    call = Call.create(CASES[name][0], (X, Y), {})
    x = jr.normal(jr.key(2), (4000, transport.size))

    def values(x):
        return guide.structure.constrain(transport.forward(x).z)

    mapped = jax.jit(lambda x: jax.lax.map(values, x))(x)
    drawn = guide.sample_posterior(jr.key(3), params, *call.args, sample_shape=(4000,))
    for site, fn in {"variance": np.log, "f": np.asarray}.items():
        a, b = fn(mapped[site]), fn(drawn[site])
        error = np.sqrt(a.var(axis=0) / 4000 + b.var(axis=0) / 4000)
        assert np.all(np.abs(a.mean(axis=0) - b.mean(axis=0)) < 5.0 * error)
        assert_allclose(a.std(axis=0), b.std(axis=0), rtol=0.12)


def test_a_weakened_guide_is_the_prior_in_the_end():
    _, _, transport = transport_of(*CASES["conditional"], strength=1e-12)
    x = jr.normal(jr.key(1), (transport.size,))
    z, _ = transport.forward(x)
    assert_allclose(z["f"], x[transport.num_theta :], atol=1e-5)


def test_guides_that_are_no_maps_say_so():
    def latent(y=None):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", 7 if y is None else len(y)):
            h = numpyro.sample("h", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
            gpx.observe("y", f(h), gpx.likelihoods.Gaussian(0.3), obs=y)

    guide = G.UnscentedLatent(G.WhitenedGaussian(latent))
    assert not guide.can_transport
    assert G.Implicit(make()).can_transport is False
    guide = G.WhitenedGaussian(latent)
    call = Call.create(latent, (Y,), {})
    set_up(guide, Program.of(call))
    assert guide.transport({}, call) is None
