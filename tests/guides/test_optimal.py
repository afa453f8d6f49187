"""`OptimalGaussian`: its ELBO is the collapsed bound, whatever the observation does.

The reference integrates `v` out densely: with rows weighted by `w` and noise sd `s`,
max_q ELBO = log N(r; 0, Q + D) + log|2 pi D|/2 + sum_n w_n log N(0; 0, s_n^2)
             - sum_n w_n (k_nn - q_nn) / 2 s_n^2,  D = diag(s^2 / w).
"""

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
from numpyro_gpx.processes.collapse import collapsed_bound
from numpyro_gpx.sites.marks import held_beliefs

RNG = np.random.default_rng(41)
N, M = 7, 3
X = np.linspace(-2.2, 2.4, N)[:, None] + RNG.uniform(-0.1, 0.1, size=(N, 1))
Z = np.array([[-1.7], [0.3], [1.9]])
y = np.sin(1.4 * X[:, 0]) + 0.3 * RNG.normal(size=N)
Y = np.stack([y, RNG.normal(size=N)], axis=1)
KEEP = np.array([True, False, True, True, False, True, True])
WEIGHTS = RNG.uniform(0.3, 2.4, size=N)
OFFSET = RNG.normal(size=N)
SD = RNG.uniform(0.3, 0.9, size=N)
KERNEL = gpx.kernels.Matern32(1.7, 0.8)
POINTS = gpx.inducing.Points(jnp.asarray(Z))


def k(X, X2, variance=1.7, lengthscale=0.8):
    r = np.sqrt(3.0) * np.abs(X - X2[:, 0]) / lengthscale
    return variance * (1.0 + r) * np.exp(-r)


def best_bound(residual, sd, weights=None, keep=None, k=k, Z=Z):
    w = np.ones(N) if weights is None else weights
    keep = np.full(N, True) if keep is None else keep
    r, w, X_kept = residual[keep], w[keep], X[keep]
    s2 = np.broadcast_to(np.square(sd), N)[keep]
    Kuu = k(Z, Z)
    Kuu = Kuu + 1e-8 * np.mean(np.diag(Kuu)) * np.eye(len(Z))
    Q = k(X_kept, Z) @ np.linalg.inv(Kuu) @ k(Z, X_kept)
    D = s2 / w
    total = scipy.stats.multivariate_normal(np.zeros(len(r)), Q + np.diag(D)).logpdf(r)
    total += 0.5 * np.sum(np.log(2.0 * np.pi * D))
    total -= 0.5 * np.sum(w * np.log(2.0 * np.pi * s2))
    return total - 0.5 * np.sum(w * np.diag(k(X_kept, X_kept) - Q) / s2)


def model_with(*, whiten=True, mean=None, scale=0.45, kernel=KERNEL, **options):
    def model(X, y=None):
        num_outputs = None if y is None or y.ndim == 1 else y.shape[1]
        f = gpx.gp(
            "f", kernel, inducing=POINTS, whiten=whiten, mean=mean,
            num_outputs=num_outputs,
        )  # fmt: skip
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(scale), obs=y, **options)

    return model


def optimal_elbo(model, y, params=None, **options):
    guide = gpx.guides.OptimalGaussian(model, **options)
    args = jnp.asarray(X), jnp.asarray(y)
    return jax.jit(
        lambda params: -gpx.infer.ELBO().loss(jr.key(0), params, model, guide, *args)
    )(params or {})


LINE = gpx.means.Linear(jnp.asarray([0.6]), -0.2)
LINE_AT_X = 0.6 * X[:, 0] - 0.2

CASES = {
    "plain": ({}, y, dict(residual=y, sd=0.45)),
    "mean": ({"mean": LINE}, y, dict(residual=y - LINE_AT_X, sd=0.45)),
    "offset": ({"offset": OFFSET}, y, dict(residual=y - OFFSET, sd=0.45)),
    "weights": (
        {"weights": WEIGHTS}, y, dict(residual=y, sd=0.45, weights=WEIGHTS)
    ),
    "mask": (
        {"mask": KEEP}, np.where(KEEP, y, np.nan), dict(residual=y, sd=0.45, keep=KEEP)
    ),
    "rows of noise": ({"scale": SD}, y, dict(residual=y, sd=SD)),
    "everything": (
        {"mean": LINE, "offset": OFFSET, "weights": WEIGHTS, "mask": KEEP, "scale": SD},
        np.where(KEEP, y, np.nan),
        dict(
            residual=y - LINE_AT_X - OFFSET, sd=SD, weights=WEIGHTS, keep=KEEP
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case, whiten",
    [*((case, True) for case in CASES), ("mean", False), ("everything", False)],
)
def test_elbo_is_the_collapsed_bound(case, whiten):
    options, targets, reference = CASES[case]
    value = optimal_elbo(model_with(whiten=whiten, **options), targets)
    assert_allclose(value, best_bound(**reference), rtol=1e-9)


@pytest.mark.parametrize("whiten", [True, False])
def test_elbo_is_the_collapsed_bound_with_several_outputs(whiten):
    keep = np.stack([KEEP, ~KEEP], axis=1)
    model = model_with(
        whiten=whiten, mean=LINE, scale=jnp.asarray([0.4, 0.7]), mask=keep,
        weights=WEIGHTS,
    )  # fmt: skip
    value = optimal_elbo(model, np.where(keep, Y, np.nan))
    expected = sum(
        best_bound(Y[:, p] - LINE_AT_X, sd, WEIGHTS, keep[:, p])
        for p, sd in enumerate((0.4, 0.7))
    )
    assert_allclose(value, expected, rtol=1e-9)


def test_elbo_is_the_collapsed_bound_with_a_kernel_for_each_output():
    model = model_with(kernel=[KERNEL, gpx.kernels.Matern32(0.6, 1.3)])
    expected = best_bound(Y[:, 0], 0.45) + best_bound(
        Y[:, 1], 0.45, k=lambda X, X2: k(X, X2, 0.6, 1.3)
    )
    assert_allclose(optimal_elbo(model, Y), expected, rtol=1e-9)


def test_elbo_is_the_packages_own_collapsed_bound():
    bound = jax.jit(
        lambda y: collapsed_bound(KERNEL, POINTS, jnp.asarray(X), y, noise_var=0.45**2)
    )(jnp.asarray(y))
    assert_allclose(optimal_elbo(model_with(), y), bound, rtol=1e-9)


def test_bound_lies_below_the_evidence_and_meets_it_at_the_data():
    cov = k(X, X) + 0.45**2 * np.eye(N)
    evidence = scipy.stats.multivariate_normal(np.zeros(N), cov).logpdf(y)
    assert optimal_elbo(model_with(), y) < evidence - 0.01

    def full(X_at, y=None):
        f = gpx.gp("f", KERNEL, inducing=gpx.inducing.Data(jnp.asarray(X)))
        gpx.observe("y", f(X_at), gpx.likelihoods.Gaussian(0.45), obs=y)

    value = optimal_elbo(full, y)
    assert_allclose(value, evidence, atol=1e-6)
    assert value <= evidence + 1e-9


def test_scaling_the_whole_model_leaves_the_belief_as_it_was():
    model = handlers.scale(model_with(), scale=0.6)
    guide = gpx.guides.OptimalGaussian(model)
    args = jnp.asarray(X), jnp.asarray(y)

    def believed():
        trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
        return held_beliefs(trace)["f"]

    belief = jax.jit(believed)()
    # Likelihood and KL are scaled alike, so q* is that of the model without `scale`.
    L = np.linalg.cholesky(k(Z, Z) + 1.7e-8 * np.eye(M))
    A = np.linalg.solve(L, k(Z, X))
    cov = np.linalg.inv(np.eye(M) + A @ A.T / 0.45**2)
    S = np.asarray(belief.scale_tril)
    assert_allclose(S @ S.T, cov, rtol=1e-8, atol=1e-10)


def test_free_guide_has_no_slope_at_the_optimal_belief():
    model = model_with(mean=LINE)
    args = jnp.asarray(X), jnp.asarray(y)
    optimal, free = (
        gpx.guides.OptimalGaussian(model), gpx.guides.WhitenedGaussian(model)
    )  # fmt: skip

    @jax.jit
    def evaluate():
        trace = handlers.trace(handlers.seed(optimal, 0)).get_trace(*args)
        belief = held_beliefs(trace)["f"]

        def bound(loc, scale_tril):
            params = {"f_auto_loc": loc, "f_auto_scale_tril": jnp.tril(scale_tril)}
            return -gpx.infer.ELBO().loss(jr.key(0), params, model, free, *args)

        at = belief.mean, belief.scale_tril
        away = belief.mean + 0.1, 1.2 * belief.scale_tril
        return (
            jax.value_and_grad(bound, (0, 1))(*at),
            jax.value_and_grad(bound, (0, 1))(*away),
        )

    (best, slopes), (worse, others) = evaluate()
    assert_allclose(best, best_bound(y - LINE_AT_X, 0.45), rtol=1e-9)
    assert worse < best - 1e-3
    for slope, other in zip(slopes, others, strict=True):
        assert_allclose(slope, 0.0, atol=1e-9)
        assert np.max(np.abs(other)) > 1e-2


def learnt(X, y=None):
    noise = numpyro.param("noise", jnp.asarray(0.9))
    Z_learnt = numpyro.param("Z", jnp.asarray(Z))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.2, 0.6))
    f = gpx.gp(
        "f", gpx.kernels.Matern32(1.7, lengthscale),
        inducing=gpx.inducing.Points(Z_learnt),
    )  # fmt: skip
    gpx.observe("y", f(X), gpx.likelihoods.Gaussian(noise), obs=y)


def test_belief_follows_hyperparameters():
    params = {
        "noise": jnp.asarray(0.9), "Z": jnp.asarray(Z), "theta_auto_loc": np.log([1.2])
    }  # fmt: skip
    expected = best_bound(y, 0.9, k=lambda X, X2: k(X, X2, 1.7, 1.2))
    expected += scipy.stats.lognorm.logpdf(1.2, 0.6, scale=np.exp(0.2))
    assert_allclose(optimal_elbo(learnt, y, params), expected, rtol=1e-9)


def test_belief_follows_parameters_of_the_model():
    # The guide traces the model by itself, under `handlers.block()`: unless it passes
    # the parameters on, q* stays that of their initial values.
    moved = Z + np.array([[0.3], [-0.2], [0.1]])
    params = {
        "noise": jnp.asarray(0.45), "Z": jnp.asarray(moved),
        "theta_auto_loc": np.log([1.2]),
    }  # fmt: skip
    expected = best_bound(y, 0.45, k=lambda X, X2: k(X, X2, 1.7, 1.2), Z=moved)
    expected += scipy.stats.lognorm.logpdf(1.2, 0.6, scale=np.exp(0.2))
    assert_allclose(optimal_elbo(learnt, y, params), expected, rtol=1e-9)


# Words ------------------------------------------------------------------------------


def refuse(words, model, *args, **kwargs):
    guide = gpx.guides.OptimalGaussian(model)
    with pytest.raises(ValueError, match=words):
        handlers.seed(guide, 0)(*args, **kwargs)


def test_subsampling_is_refused():
    def model(X, y, *, batch_size=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", N, subsample_size=batch_size) as i:
            gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(0.4), obs=y[i])

    refuse(
        r"needs all rows; the model subsamples \['data'\]. Leave `batch_size` out",
        model, jnp.asarray(X), jnp.asarray(y), batch_size=3,
    )  # fmt: skip


def test_two_gps_or_two_observations_are_refused():
    def two(X, y):
        f, g = (gpx.gp(name, KERNEL, inducing=POINTS) for name in "fg")
        gpx.observe("y", f(X) + g(X), gpx.likelihoods.Gaussian(0.4), obs=y)

    words = r"one GP site and one observed site; the model has GP sites \['f', 'g'\]"
    refuse(words, two, jnp.asarray(X), jnp.asarray(y))

    def twice(X, y):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        for name in ("y", "y2"):
            gpx.observe(name, f(X), gpx.likelihoods.Gaussian(0.4), obs=y)

    refuse(r"observed sites \['y', 'y2'\]", twice, jnp.asarray(X), jnp.asarray(y))


def test_other_likelihoods_and_transformed_functions_are_refused():
    def binary(X, y):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(), obs=y)

    words = "with a Gaussian likelihood at site `y`; got Bernoulli. Use Whitened"
    refuse(words, binary, jnp.asarray(X), jnp.asarray(KEEP))

    def scaled(X, y):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        gpx.observe("y", 2.5 * f(X), gpx.likelihoods.Gaussian(0.4), obs=y)

    refuse("needs the plain `f", scaled, jnp.asarray(X), jnp.asarray(y))

    def plain(X, y):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        numpyro.sample("y", dist.Normal(f(X).mean, 0.4), obs=y)

    refuse("at site `y`; got a plain Normal", plain, jnp.asarray(X), jnp.asarray(y))
