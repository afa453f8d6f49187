"""The target density of the samplers, against NumPyro's and against NumPy."""

import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer.util import potential_energy

import numpyro_gpx as gpx
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target

RNG = np.random.default_rng(23)
N = 5
X = jnp.asarray(RNG.uniform(-2.0, 2.0, size=(N, 1)))
y = jnp.asarray(RNG.normal(size=N))
Z = jnp.asarray([[-1.3], [0.4], [1.6]])


def model(X, y=None, *, batch_size=None):
    """Sites on the half-line, an interval, a simplex and the reals."""
    kernel = gpx.kernels.RBF(
        variance=numpyro.sample("variance", dist.LogNormal(0.2, 0.6)),
        lengthscale=numpyro.sample("lengthscale", dist.Uniform(0.3, 2.7)),
    )
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.asarray([1.5, 2.5, 0.7])))
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
    scale = 0.2 + weights[0]
    with numpyro.plate("data", N, subsample_size=batch_size) as i:
        gpx.observe(
            "y",
            f(X[i]),
            gpx.likelihoods.Gaussian(scale),
            obs=y,
            rows=i,
        )


POINT = {
    "f": jnp.asarray(RNG.normal(size=3)),
    "lengthscale": jnp.asarray(0.4),
    "variance": jnp.asarray(-0.3),
    "weights": jnp.asarray([0.5, -0.9]),
}


def test_log_density_is_numpyros_with_jacobians():
    target = Target(Call(model, (X, y)))

    @jax.jit
    def both(z):
        def ours(z):
            return target.log_density(z)

        def theirs(z):
            return -potential_energy(model, (X, y), {}, z)

        return [jax.value_and_grad(f)(z) for f in (ours, theirs)]

    (ours, grad), (theirs, their_grad) = both(POINT)
    assert_allclose(ours, theirs, rtol=1e-12)
    for name in POINT:
        assert_allclose(grad[name], their_grad[name], rtol=1e-9, atol=1e-11)


def test_scaled_sites_agree_with_numpyro_too():
    scaled = handlers.scale(model, scale=0.6)
    target = Target(Call(scaled, (X, y)))
    ours, theirs = jax.jit(
        lambda z: (target.log_density(z), -potential_energy(scaled, (X, y), {}, z))
    )(POINT)
    assert_allclose(ours, theirs, rtol=1e-12)


def test_terms_add_up_and_the_prior_is_scipys():
    target = Target(Call(model, (X, y)))
    prior, likelihood = jax.jit(target.terms)(POINT)
    values = {n: np.asarray(x) for n, x in target.constrain(POINT).items()}
    assert 0.3 < values["lengthscale"] < 2.7 and np.isclose(values["weights"].sum(), 1)
    z = {n: np.asarray(x) for n, x in POINT.items()}
    expected = (
        scipy.stats.norm.logpdf(z["f"]).sum()
        + scipy.stats.norm.logpdf(z["variance"], 0.2, 0.6)
        + scipy.stats.logistic.logpdf(z["lengthscale"])
        + scipy.stats.dirichlet.logpdf(values["weights"], [1.5, 2.5, 0.7])
    )
    # The simplex's Jacobian, by finite differences of the map to the first two.
    transform = target.structure.latents["weights"].transform
    J = np.array(
        [
            (transform(z["weights"] + h) - transform(z["weights"] - h))[:2] / 2e-6
            for h in 1e-6 * np.eye(2)
        ]
    )
    expected += np.log(abs(np.linalg.det(J)))
    assert_allclose(prior, expected, rtol=1e-8)
    total = jax.jit(target.log_density)(POINT)
    assert_allclose(prior + likelihood, total, rtol=1e-12)


def test_minibatches_average_to_the_full_density():
    target = Target(Call(model, (X, y), {"batch_size": 2}))
    pairs = jnp.asarray(list(itertools.product(range(N), repeat=2)))

    @jax.jit
    def densities(pairs):
        full = Target(Call(model, (X, y))).log_density(POINT)
        return full, jax.vmap(lambda i: target.log_density(POINT, batch={"data": i}))(
            pairs
        )

    full, batches = densities(pairs)  # all draws with replacement
    assert np.std(batches) > 0.1
    assert_allclose(np.mean(batches), full, rtol=1e-11)


def test_batches_are_drawn_evenly():
    structure = Target(Call(model, (X, y), {"batch_size": 2})).structure
    keys = jr.split(jr.key(1), 5000)
    index = np.asarray(jax.vmap(lambda k: draw_batch(k, structure)["data"])(keys))
    assert index.shape == (5000, 2)
    # 10 000 draws of 5 rows, each 2000 +- 40; 5 sd: false alarm 3e-6.
    assert np.all(np.abs(np.bincount(index.ravel(), minlength=N) - 2000) < 200)


def local(y, *, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0.3, 1.4))
    with numpyro.plate("data", N, subsample_size=batch_size) as i:
        h = numpyro.sample("h", dist.LogNormal(mu, 0.8))
        numpyro.sample("y", dist.Normal(h, 0.5), obs=y[i])


def test_local_sites_hold_all_rows_and_batches_take_theirs():
    target = Target(Call(local, (y,), {"batch_size": 2}))
    assert target.structure.local == {"h": {"data": 0}}
    z = {"mu": jnp.asarray(0.7), "h": jnp.asarray(RNG.normal(size=N))}
    h = np.asarray(z["h"])
    # On the real line the prior of log h is normal.
    rows = scipy.stats.norm.logpdf(h, 0.7, 0.8) + scipy.stats.norm.logpdf(
        y, np.exp(h), 0.5
    )
    prior = scipy.stats.norm.logpdf(0.7, 0.3, 1.4)
    pairs = jnp.asarray(list(itertools.combinations(range(N), 2)))
    batches = jax.jit(jax.vmap(lambda i: target.log_density(z, batch={"data": i})))(
        pairs
    )
    expected = [prior + 2.5 * (rows[i] + rows[j]) for i, j in np.asarray(pairs)]
    assert_allclose(batches, expected, rtol=1e-12)
    full = Target(Call(local, (y,))).log_density(z)
    assert_allclose(full, prior + rows.sum(), rtol=1e-12)
    assert_allclose(np.mean(batches), full, rtol=1e-12)
    start = target.initial(jr.key(0))
    assert start["h"].shape == (N,) and start["mu"].shape == ()


def test_starting_values_are_unconstrained_and_may_be_given():
    target = Target(Call(model, (X, y)))
    values = {"lengthscale": 1.9, "other": 0.4}
    start = jax.jit(jax.vmap(lambda key: target.initial(key, values=values)))
    many = start(jr.split(jr.key(2), 2000))
    z = {name: x[0] for name, x in many.items()}
    assert set(z) == set(POINT)
    # Spread about 0, so that chains start apart: sd 0.3 to 5 standard errors of 2000.
    assert_allclose(many["f"].std(axis=0), 0.3, rtol=5.0 / np.sqrt(2.0 * 2000))
    assert_allclose(many["f"].mean(axis=0), 0.0, atol=5.0 * 0.3 / np.sqrt(2000))
    assert_allclose(target.constrain(z)["lengthscale"], 1.9, rtol=1e-12)
    assert z["weights"].shape == (2,)


def deep(X, y):
    f = gpx.gp("f", gpx.kernels.RBF(1.4, 0.9), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", N):
        h = gpx.propagate("h", f(X))
        numpyro.sample("y", dist.Normal(jnp.sin(h), 0.6), obs=y)


def test_noise_is_averaged_over_fixed_sets_and_has_no_density():
    noise = jnp.asarray(RNG.normal(size=(3, N)))
    z = {"f": POINT["f"]}
    target = Target(Call(deep, (X, y)), noise={"h/noise": noise})
    value = jax.jit(target.log_density)(z)
    K = 1.4 * np.exp(-0.5 * ((Z - Z[:, 0]) / 0.9) ** 2)
    L = np.linalg.cholesky(K + 1e-8 * 1.4 * np.eye(3))
    A = np.linalg.solve(L, 1.4 * np.exp(-0.5 * ((Z - X[:, 0]) / 0.9) ** 2))
    h = A.T @ z["f"] + np.sqrt(1.4 - np.sum(A**2, 0)) * np.asarray(noise)
    terms = scipy.stats.norm.logpdf(y, np.sin(h), 0.6).sum(1)
    expected = scipy.stats.norm.logpdf(z["f"]).sum() + terms.mean()
    assert_allclose(value, expected, rtol=1e-8)


def test_noise_that_is_not_fixed_comes_from_the_key():
    target = Target(Call(deep, (X, y)))
    assert target.structure.noise == {"h/noise": (N,)}
    z = {"f": POINT["f"]}
    density = jax.jit(lambda key: target.log_density(z, key=key))
    one, same, other = (density(jr.key(k)) for k in (1, 1, 2))
    assert one == same and one != other


def test_parameters_without_a_value_are_named():
    def learnt(y):
        loc = numpyro.param("loc", jnp.asarray(0.3))
        scale = numpyro.param("scale", jnp.asarray(0.7))
        mu = numpyro.sample("mu", dist.Normal(loc, scale))
        numpyro.sample("y", dist.Normal(mu, 0.6).expand([N]).to_event(1), obs=y)

    words = r"parameters without a value: \['loc', 'scale'\]. MCMC does not move"
    with pytest.raises(ValueError, match=words):
        Target(Call(learnt, (y,)))
    with pytest.raises(ValueError, match=r"\['scale'\].*Pass `params=svi_fit`"):
        Target(Call(learnt, (y,)), params={"loc": 0.4})
    target = Target(Call(learnt, (y,)), params={"loc": 1.3, "scale": 0.4})
    value = target.log_density({"mu": jnp.asarray(0.8)})
    expected = scipy.stats.norm.logpdf(0.8, 1.3, 0.4)
    expected += scipy.stats.norm.logpdf(y, 0.8, 0.6).sum()
    assert_allclose(value, expected, rtol=1e-12)


def test_discrete_sites_and_moving_supports_are_refused():
    def discrete(y):
        k = numpyro.sample("k", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(k, 0.6).expand([N]).to_event(1), obs=y)

    with pytest.raises(ValueError, match="Site `k` is discrete"):
        Target(Call(discrete, (y,)))

    def moving(y):
        top = numpyro.sample("top", dist.LogNormal(0.3, 0.5))
        a = numpyro.sample("a", dist.Uniform(0.0, top))
        numpyro.sample("y", dist.Normal(a, 0.6).expand([N]).to_event(1), obs=y)

    with pytest.raises(ValueError, match="support of site `a` depends on other sites"):
        Target(Call(moving, (y,)))
