"""`ConditionalGaussian` against the density it is defined by, normalised in NumPy."""

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

import numpyro_gpx as gpx
from numpyro_gpx.sites.marks import held_beliefs

RNG = np.random.default_rng(52)
Z = np.array([[-0.7], [0.9]])  # two points: the density can be put on a grid
X = np.array([[-1.1], [0.2], [1.4]])
Y = RNG.normal(size=(3, 2))
LINEAR = RNG.normal(size=(2, 2))
PRECISION_TRIL = np.array([[[0.8, 0.0], [-0.5, 1.3]], [[1.6, 0.0], [0.7, 0.4]]])
WEIGHTS, BIAS = np.array([[0.6, -0.4]]), np.array([0.3, 1.1])
LENGTHSCALE = 1.3


def k(X, X2, lengthscale=LENGTHSCALE):
    r = np.sqrt(3.0) * np.abs(X - X2[:, 0]) / lengthscale
    return 1.7 * (1.0 + r) * np.exp(-r)


def model(X, y=None, *, whiten=True, outputs=2, kernels=1):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.2, 0.6))
    W, b = (WEIGHTS, BIAS) if outputs else (WEIGHTS[:, 0], BIAS[0])
    kernel = gpx.kernels.Matern32(1.7, lengthscale)
    f = gpx.gp(
        "f", kernel if kernels == 1 else [kernel, kernel * 0.5], whiten=whiten,
        inducing=gpx.inducing.Points(jnp.asarray(Z)), num_outputs=outputs,
        mean=gpx.means.Linear(jnp.asarray(W), jnp.asarray(b)),
    )  # fmt: skip
    with numpyro.plate("data", 3):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.6), obs=y)


def pseudo_observation(linear, precision_tril):
    """The guide's parameters that stand for `b` and `R`: `Lambda t = b`."""
    precision = precision_tril @ np.swapaxes(precision_tril, -1, -2)
    t = np.linalg.solve(precision, np.asarray(linear)[..., None])[..., 0]
    return {
        "f_auto_loc": jnp.asarray(t),
        "f_auto_precision_tril": jnp.asarray(precision_tril),
    }


def grid_moments(p, kuu):
    """Mean and covariance of `u` and of `v` under N(v; 0, I) exp(b'u - u'Lu / 2)."""
    t = np.linspace(-9.0, 9.0, 721)
    v = np.stack(np.meshgrid(t, t, indexing="ij"), axis=-1).reshape(-1, 2)
    L = np.linalg.cholesky(kuu + 1e-8 * np.mean(np.diag(kuu)) * np.eye(2))
    u = Z @ WEIGHTS[:, p] + BIAS[p] + v @ L.T
    precision = PRECISION_TRIL[p] @ PRECISION_TRIL[p].T
    log_q = -0.5 * np.sum(v**2, 1) + u @ LINEAR[p]
    log_q -= 0.5 * np.einsum("ni,ij,nj->n", u, precision, u)
    q = np.exp(log_q - log_q.max())
    q = q / q.sum()

    def moments(x):
        mean = q @ x
        return mean, np.einsum("n,ni,nj->ij", q, x - mean, x - mean)

    return moments(v), moments(u)


@pytest.mark.parametrize(
    "whiten, outputs, kernels",
    [(True, None, 1), (True, 2, 1), (False, None, 1), (False, 2, 1), (True, 2, 2)],
)
def test_belief_is_the_density_normalised_on_a_grid(whiten, outputs, kernels):
    options = {"whiten": whiten, "outputs": outputs, "kernels": kernels}
    guide = gpx.guides.ConditionalGaussian(model, theta="point")
    index = slice(None) if outputs else 0
    params = {
        **pseudo_observation(LINEAR[index], PRECISION_TRIL[index]),
        "theta_auto_loc": jnp.log(jnp.asarray([LENGTHSCALE])),
    }
    y = jnp.asarray(Y[:, index])

    @jax.jit
    def belief():
        seeded = handlers.substitute(handlers.seed(guide, 0), data=params)
        trace = handlers.trace(seeded).get_trace(jnp.asarray(X), y, **options)
        return held_beliefs(trace)["f"]

    q = belief()
    assert q.mean.shape == ((2, 2) if outputs else (2,))
    for p in range(outputs or 1):
        scale = 0.5 if kernels == 2 and p == 1 else 1.0
        of_v, of_u = grid_moments(p, scale * k(Z, Z))
        mean, cov = of_v if whiten else of_u
        S = np.asarray(q.scale_tril[p] if outputs else q.scale_tril)
        assert_allclose(q.mean[p] if outputs else q.mean, mean, rtol=1e-7, atol=1e-8)
        assert_allclose(S @ S.T, cov, rtol=1e-7, atol=1e-8)
        assert_allclose(np.triu(S, 1), 0.0, atol=1e-14)


def test_bound_is_the_same_whichever_the_site_holds():
    guide = gpx.guides.ConditionalGaussian(model, theta="full")
    params = {
        **pseudo_observation(LINEAR, PRECISION_TRIL),
        "theta_auto_loc": jnp.asarray([0.3]),
        "theta_auto_scale_tril": jnp.asarray([[0.4]]),
    }

    @jax.jit
    def bounds(key):
        args = jnp.asarray(X), jnp.asarray(Y)
        return [
            -gpx.infer.ELBO().loss(key, params, model, guide, *args, whiten=whiten)
            for whiten in (True, False)
        ]

    one, other = bounds(jr.key(3))
    assert_allclose(one, other, rtol=1e-9)


def learnt(X, y=None):
    Z_learnt = numpyro.param("Z", jnp.asarray(Z))
    f = gpx.gp(
        "f", gpx.kernels.Matern32(1.7, LENGTHSCALE),
        inducing=gpx.inducing.Points(Z_learnt),
    )  # fmt: skip
    gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.6), obs=y)


def test_belief_follows_learnt_inducing_inputs():
    # As in test_optimal: the guide must not see the initial value of `Z`.
    moved = Z + np.array([[0.4], [-0.3]])
    guide = gpx.guides.ConditionalGaussian(learnt)
    params = {
        "Z": jnp.asarray(moved), **pseudo_observation(LINEAR[0], PRECISION_TRIL[0])
    }  # fmt: skip

    @jax.jit
    def belief():
        seeded = handlers.substitute(handlers.seed(guide, 0), data=params)
        trace = handlers.trace(seeded).get_trace(jnp.asarray(X), jnp.asarray(Y[:, 0]))
        return held_beliefs(trace)["f"]

    L = np.linalg.cholesky(k(moved, moved) + 1.7e-8 * np.eye(2))
    precision = PRECISION_TRIL[0] @ PRECISION_TRIL[0].T
    cov = np.linalg.inv(np.eye(2) + L.T @ precision @ L)
    q = belief()
    assert_allclose(q.scale_tril @ q.scale_tril.T, cov, rtol=1e-9)
    assert_allclose(q.mean, cov @ L.T @ LINEAR[0], rtol=1e-9)


def test_it_can_be_the_optimal_belief():
    """At a fixed theta the pseudo-observation `Kuu^-1 Kuf r / s2` gives q*."""
    s2 = 0.36
    Kuu = k(Z, Z) + 1.7e-8 * np.eye(2)
    B = np.linalg.solve(Kuu, k(Z, X))
    r = Y[:, 0]
    params = pseudo_observation(B @ r / s2, np.linalg.cholesky(B @ B.T / s2))
    guide = gpx.guides.ConditionalGaussian(learnt)
    value = jax.jit(
        lambda p: (
            -gpx.infer.ELBO().loss(
                jr.key(0), p, learnt, guide, jnp.asarray(X), jnp.asarray(r)
            )
        )
    )({**jax.tree.map(jnp.asarray, params), "Z": jnp.asarray(Z)})
    Q = k(X, Z) @ B
    expected = scipy.stats.multivariate_normal(np.zeros(3), Q + s2 * np.eye(3)).logpdf(
        r
    ) - np.trace(k(X, X) - Q) / (2.0 * s2)
    assert_allclose(value, expected, rtol=1e-8)
