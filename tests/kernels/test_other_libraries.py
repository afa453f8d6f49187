"""Networks inside kernels, and kernels of other libraries."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose
from numpyro.contrib.module import eqx_module, random_eqx_module
from numpyro.infer.util import log_density

from numpyro_gpx import kernels as K

X = np.array([[0.3, -1.1], [1.4, 0.2], [-0.6, 0.9]])
Y = np.array([0.2, -0.7, 1.1])


@pytest.fixture
def net(key):
    return eqx.nn.MLP(2, 3, 4, 1, activation=jnp.tanh, key=key)


def log_evidence(kernel, X, y):
    cov = np.asarray(kernel(X)) + 0.3 * np.eye(3)
    logdet, quadratic = np.linalg.slogdet(cov)[1], y @ np.linalg.solve(cov, y)
    return -0.5 * (logdet + quadratic + 3 * np.log(2 * np.pi))


def observe(kernel, X, y):
    cov = kernel(X) + 0.3 * jnp.eye(3)
    numpyro.sample("y", dist.MultivariateNormal(0.0, cov), obs=y)


def test_features_are_computed_once_a_row():
    calls = []

    def fn(x):
        jax.debug.callback(lambda x: calls.append(x), x)
        return jnp.tanh(x)

    K.Warped(K.RBF(1.3, 0.7), fn)(X).block_until_ready()
    jax.effects_barrier()
    assert len(calls) == 3


def test_warped_applies_the_kernel_to_features(net):
    features = np.stack([net(x) for x in X])
    kernel = K.Warped(K.RBF(1.3, 0.7), net)
    assert_allclose(kernel(X), K.RBF(1.3, 0.7)(features), rtol=1e-12)


def values(trace, kind):
    return {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == kind and name != "y"
    }


def test_network_is_trained_inside_a_model(net, key):
    def model(X, y):
        trained = eqx_module("net", net)
        observe(K.Warped(K.RBF(1.3, 0.7), trained), X, y)

    @jax.jit
    def density_and_gradient():
        seeded = numpyro.handlers.seed(model, key)
        params = values(numpyro.handlers.trace(seeded).get_trace(X, Y), "param")
        return jax.value_and_grad(
            lambda params: log_density(model, (X, Y), {}, params)[0]
        )(params)

    with jax.numpy_rank_promotion("allow"):  # NumPyro's own distributions broadcast
        value, gradient = density_and_gradient()
    expected = log_evidence(K.Warped(K.RBF(1.3, 0.7), net), X, Y)
    assert_allclose(value, expected, rtol=1e-10)
    norms = [np.abs(leaf).sum() for leaf in jax.tree.leaves(gradient)]
    assert len(norms) == 4  # weights and biases of two layers
    assert np.all(np.isfinite(norms)) and sum(norms) > 0


def test_network_gets_priors_inside_a_model(net, key):
    prior = dist.Normal(0.0, 0.8)

    def model(X, y):
        drawn = random_eqx_module("net", net, prior=prior)
        kernel = K.Warped(K.RBF(1.3, 0.7), drawn)
        numpyro.deterministic("K", kernel(X))
        observe(kernel, X, y)

    @jax.jit
    def draws_and_density():
        seeded = numpyro.handlers.seed(model, key)
        draws = values(numpyro.handlers.trace(seeded).get_trace(X, Y), "sample")
        density, trace = log_density(model, (X, Y), {}, draws)
        return draws, density, trace["K"]["value"]

    with jax.numpy_rank_promotion("allow"):
        draws, density, matrix = draws_and_density()
    assert len(draws) == 4  # weights and biases of two layers
    log_prior = sum(
        scipy.stats.norm(0.0, 0.8).logpdf(draw).sum() for draw in draws.values()
    )
    evidence = log_evidence(lambda X: matrix, X, Y)
    assert_allclose(density, evidence + log_prior, rtol=1e-10)
    assert not np.allclose(matrix, K.Warped(K.RBF(1.3, 0.7), net)(X))


def test_tinygp_kernels_enter_by_their_evaluate():
    tinygp = pytest.importorskip("tinygp")
    theirs = 1.3 * tinygp.kernels.ExpSquared(scale=jnp.array(0.7))
    kernel = K.Custom(theirs.evaluate)
    assert_allclose(kernel(X), theirs(X, X), rtol=1e-12)
    assert_allclose((kernel + K.White(0.4)).diag(X), np.full(3, 1.7), rtol=1e-12)

    gradient = eqx.filter_grad(lambda k: jnp.sum(k(X)))(kernel)
    ours = eqx.filter_grad(lambda k: jnp.sum(k(X)))(K.RBF(1.3, 0.7))
    leaves = jax.tree.leaves(eqx.filter(gradient, eqx.is_array))
    assert any(np.allclose(leaf, ours.lengthscale, rtol=1e-10) for leaf in leaves)


def test_a_tinygp_kernel_itself_is_refused_with_the_way_out():
    tinygp = pytest.importorskip("tinygp")
    for columns in (1, 2):
        with pytest.raises(ValueError, match=r"scalar .* pass `kernel.evaluate`"):
            K.Custom(tinygp.kernels.ExpSquared(scale=0.7))(X[:, :columns])


class CallableKernel(eqx.Module):
    """Called on two rows, as GPJax's kernels are."""

    lengthscale: jax.Array

    def __call__(self, x, y):
        return jnp.exp(-jnp.sum((x - y) ** 2) / (2.0 * self.lengthscale**2))


def test_kernels_that_are_called_on_two_rows_enter_as_they_are():
    kernel = K.Custom(CallableKernel(jnp.array(0.7)))
    assert_allclose(kernel(X), K.RBF(1.0, 0.7)(X), rtol=1e-12)
    assert jax.tree.leaves(kernel) == [0.7]


def test_gpjax_kernels_enter_as_they_are():
    gpjax = pytest.importorskip("gpjax")
    theirs = gpjax.kernels.RBF(lengthscale=0.7, variance=1.3)
    assert_allclose(K.Custom(theirs)(X), K.RBF(1.3, 0.7)(X), rtol=1e-10)


def test_a_plain_function_passes_through_jit():
    kernel = K.Custom(lambda x, x2: 0.6 * jnp.dot(x, x2))
    compiled = jax.jit(lambda kernel, X: kernel(X))
    assert_allclose(compiled(kernel, X), K.Linear(0.6)(X), rtol=1e-12)


def test_a_function_may_close_over_draws(key):
    def model(X, y):
        slope = numpyro.sample("slope", dist.LogNormal(0.0, 1.0))
        observe(K.Custom(lambda x, x2: slope * jnp.dot(x, x2)), X, y)

    with jax.numpy_rank_promotion("allow"):
        density = jax.jit(
            lambda slope: log_density(model, (X, Y), {}, {"slope": slope})[0]
        )
        value = density(0.6)
    prior = float(dist.LogNormal(0.0, 1.0).log_prob(0.6))
    assert_allclose(value, log_evidence(K.Linear(0.6), X, Y) + prior, rtol=1e-10)
