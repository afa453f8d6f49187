"""The sparse prior, its conditionals and the collapsed bound, against dense NumPy.

References invert matrices and share no line with the code; they carry the same jitter,
`K + 1e-8 mean(diag K) I`.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose

from numpyro_gpx.beliefs import DiagonalBelief, GaussianBelief
from numpyro_gpx.inducing import Data, Points
from numpyro_gpx.kernels import RBF, Matern32, Matern52
from numpyro_gpx.means import Constant, Linear, Zero
from numpyro_gpx.processes.collapse import (
    collapsed_bound,
    from_precision,
    optimal_belief,
)
from numpyro_gpx.processes.conditional import conditional
from numpyro_gpx.processes.prior import SparsePrior

GOLDEN = Path(__file__).parent.parent / "golden"
N, M, P = 6, 4, 3


def distances(X, X2):
    return np.sqrt(np.sum((X[:, None, :] - X2[None, :, :]) ** 2, axis=-1))


def matern32(variance, lengthscale):
    def k(X, X2):
        r = np.sqrt(3.0) * distances(X, X2) / lengthscale
        return variance * (1.0 + r) * np.exp(-r)

    return k


def rbf(variance, lengthscale):
    def k(X, X2):
        return variance * np.exp(-0.5 * (distances(X, X2) / lengthscale) ** 2)

    return k


def jittered(K):
    return K + 1e-8 * np.mean(np.diag(K)) * np.eye(len(K))


def dense_conditional(k, Z, X, mean_Z, mean_X, u_mean, u_cov):
    """Mean and covariance of f(X), u ~ N(u_mean, u_cov), by explicit inverses."""
    Kuu = jittered(k(Z, Z))
    B = k(X, Z) @ np.linalg.inv(Kuu)
    mean = mean_X + B @ (u_mean - mean_Z)
    return mean, k(X, X) - B @ Kuu @ B.T + B @ u_cov @ B.T


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(12)
    X = rng.uniform(-2.0, 2.0, size=(N, 2))
    Z = rng.uniform(-2.0, 2.0, size=(M, 2))
    return X, Z


# One for each output; the first serves where one is shared.
VARIANCES, LENGTHSCALES = (1.7, 0.6, 2.3), (0.8, 1.4, 0.5)
WEIGHTS = np.array([[0.4, -0.3, 0.9], [1.2, 0.7, -0.5]])
BIAS = np.array([0.3, -0.6, 1.4])


def setting(outputs, shared, mean_kind):
    """Kernels and mean of the package, with the same in NumPy for each output."""
    number = 1 if shared else P
    kernels = tuple(Matern32(VARIANCES[i], LENGTHSCALES[i]) for i in range(number))
    pairs = [(VARIANCES[i % number], LENGTHSCALES[i % number]) for i in range(P)]
    refs = [matern32(*pair) for pair in pairs]
    if mean_kind == "constant":
        return kernels, Constant(0.7), refs, [lambda X: np.full(len(X), 0.7)] * P
    if outputs is None:
        mean = Linear(jnp.asarray(WEIGHTS[:, 0]), jnp.asarray(BIAS[0]))
    else:
        mean = Linear(jnp.asarray(WEIGHTS), jnp.asarray(BIAS))
    means = [lambda X, p=p: X @ WEIGHTS[:, p] + BIAS[p] for p in range(P)]
    return kernels, mean, refs, means


def random_value(kind, outputs):
    """A value of `u` with its mean and covariance for each output."""
    rng = np.random.default_rng(21)
    mean = rng.normal(size=(P, M))
    root = np.tril(rng.normal(size=(P, M, M)), -1)
    root = root + rng.uniform(0.3, 1.4, size=(P, M, 1)) * np.eye(M)
    if kind == "diagonal":
        root = root * np.eye(M)
    cov = root @ np.swapaxes(root, -1, -2)
    if kind == "draw":
        cov = np.zeros_like(cov)
    m, S = (mean, root) if outputs else (mean[0], root[0])
    m, S = jnp.asarray(m), jnp.asarray(S)
    diagonal = jnp.diagonal(S, axis1=-2, axis2=-1)
    value = {
        "draw": m, "full": GaussianBelief(m, S), "diagonal": DiagonalBelief(m, diagonal)
    }[kind]  # fmt: skip
    return value, mean, cov


@pytest.mark.parametrize("kind", ["draw", "full", "diagonal"])
@pytest.mark.parametrize(
    "outputs, shared, mean_kind",
    [
        (None, True, "linear"),
        (P, True, "constant"),
        (P, False, "linear"),
    ],
)
def test_conditional_is_the_dense_formula(data, outputs, shared, mean_kind, kind):
    X, Z = data
    kernels, mean, refs, means = setting(outputs, shared, mean_kind)
    u, u_mean, u_cov = random_value(kind, outputs)

    @jax.jit
    def evaluate(X, Z, u):
        prior = SparsePrior.create(kernels, Points(Z), mean)
        v = prior.whiten(u)
        return (
            conditional(prior, X, v, full_cov=True),
            conditional(prior, X, v),
            prior.inducing_mean(outputs),
        )

    joint, marginals, prior_mean = evaluate(jnp.asarray(X), jnp.asarray(Z), u)
    shape = (N,) if outputs is None else (N, P)
    assert joint.mean.shape == marginals.mean.shape == marginals.var.shape == shape
    assert_allclose(joint.mean, marginals.mean, rtol=1e-11, atol=1e-12)
    assert_allclose(joint.var, marginals.var, rtol=1e-9, atol=1e-11)
    for p in range(outputs or 1):
        at = (slice(None), p) if outputs else slice(None)
        f_mean, f_cov = dense_conditional(
            refs[p], Z, X, means[p](Z), means[p](X), u_mean[p], u_cov[p]
        )
        cov = joint.row_cov[p] if outputs else joint.row_cov
        assert_allclose(joint.mean[at], f_mean, rtol=1e-9, atol=1e-10)
        assert_allclose(cov, f_cov, rtol=1e-9, atol=1e-10)
        assert_allclose(joint.var[at], np.diag(f_cov), rtol=1e-9, atol=1e-10)
        m = prior_mean[p] if outputs else prior_mean
        assert_allclose(m, means[p](Z), rtol=1e-12)


def test_parts_of_a_sum_kernel_are_joint_gaussian_conditionals(data):
    X, Z = data
    k1, k2 = matern32(1.7, 0.8), rbf(0.6, 1.9)
    kernel = Matern32(1.7, 0.8) + RBF(0.6, 1.9)
    belief, u_mean, u_cov = random_value("full", None)
    mean = Linear(jnp.asarray(WEIGHTS[:, 0]), jnp.asarray(BIAS[0]))
    mean_Z, mean_X = (Y @ WEIGHTS[:, 0] + BIAS[0] for Y in (Z, X))

    @jax.jit
    def evaluate(u):
        prior = SparsePrior.create((kernel,), Points(jnp.asarray(Z)), mean)
        v, at = prior.whiten(u), jnp.asarray(X)
        return conditional(prior, at, v), [
            conditional(prior, at, v, full_cov=True, kernels=(part,))
            for part in kernel.parts
        ]

    whole, parts = evaluate(belief)
    Kuu_inv = np.linalg.inv(jittered(k1(Z, Z) + k2(Z, Z)))
    for k, part in zip((k1, k2), parts, strict=True):
        # (part, u) are jointly Gaussian with cross-covariance k(X, Z).
        B = k(X, Z) @ Kuu_inv
        assert_allclose(part.mean, B @ (u_mean[0] - mean_Z), rtol=1e-9, atol=1e-10)
        cov = k(X, X) - B @ k(Z, X) + B @ u_cov[0] @ B.T
        assert_allclose(part.row_cov, cov, rtol=1e-9, atol=1e-10)
    total = parts[0].mean + parts[1].mean + mean_X
    assert_allclose(total, whole.mean, rtol=1e-10)


def test_float32_in_float32_out(data):
    X, Z = (jnp.asarray(x, jnp.float32) for x in data)
    prior = SparsePrior.create((RBF(1.3, 0.9),), Points(Z), Zero())
    belief = GaussianBelief(jnp.full(M, 0.3, X.dtype), 0.6 * jnp.eye(M, dtype=X.dtype))
    f = jax.jit(lambda: conditional(prior, X, belief, full_cov=True))()
    assert f.mean.dtype == f.var.dtype == f.row_cov.dtype == jnp.float32
    bound = bound_of(RBF(1.3, 0.9), Z, X, X[:, 0], 0.3)
    assert bound.dtype == jnp.float32


def test_collapsed_bound_survives_float32_where_Kuu_is_ill_conditioned():
    golden = json.loads((GOLDEN / "collapsed_bound.json").read_text())
    X, Z, y = (np.asarray(golden[name], np.float32) for name in ("X", "Z", "y"))
    bound = bound_of(RBF(1.3, 0.7), Z[:, None], X[:, None], y, 0.05)
    # Jitter 1e-5 alone moves it by 0.002 (float64, dense formula).
    assert_allclose(bound, golden["cases"][0]["bound"], atol=0.02)


def test_variance_at_the_inducing_points_is_not_negative():
    Z = jnp.linspace(0.0, 1.0, 12)[:, None]
    prior = SparsePrior.create((RBF(1.3, 0.9),), Points(Z), Zero())
    v = jr.normal(jr.key(1), (12,))
    var, grad = jax.jit(
        lambda X: (
            conditional(prior, X, v).var,
            jax.grad(lambda X: jnp.sum(jnp.sqrt(conditional(prior, X, v).var)))(X),
        )
    )(Z)
    assert np.all(np.asarray(var) > 0.0) and np.all(np.asarray(var) < 1e-6)
    assert np.all(np.isfinite(grad))


@pytest.mark.parametrize("num_inducing", [8, 20])
def test_joint_draws_given_known_inducing_values_are_finite(num_inducing):
    Z = jnp.linspace(0.0, 3.0, num_inducing)[:, None]
    prior = SparsePrior.create((RBF(1.3, 0.9),), Points(Z), Zero())
    v = jr.normal(jr.key(1), (num_inducing,))
    X = jnp.linspace(0.0, 3.0, 40)[:, None]

    @jax.jit
    def draw_from(X):
        f = conditional(prior, X, v, full_cov=True)
        return f, f.sample(jr.key(2))

    f, draw = draw_from(X)
    # 5 sd of each row and the jitter's own spread.
    assert np.all(np.abs(draw - f.mean) < 5.0 * np.sqrt(np.asarray(f.var) + 1e-7))


# Regression -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def regression():
    rng = np.random.default_rng(5)
    # Spread out: near-duplicates magnify the effect of the jitter on predictions.
    X = (np.linspace(-3.0, 3.0, 12) + rng.uniform(-0.1, 0.1, size=12))[:, None]
    y = np.sin(1.7 * X[:, 0]) + 0.4 * rng.normal(size=12)
    X_new = np.linspace(-3.3, 3.1, 5)[:, None]
    return X, y, X_new


NOISE_VAR = 0.3


def exact_regression(k, X, y, X_new, noise):
    """Rasmussen & Williams (2006), eq. 2.23-2.24, with an explicit inverse."""
    C_inv = np.linalg.inv(k(X, X) + noise * np.eye(len(X)))
    B = k(X_new, X) @ C_inv
    return B @ y, k(X_new, X_new) - B @ k(X, X_new)


@jax.jit
def bound_of(kernel, Z, X, y, noise_var):
    arrays = (jnp.asarray(x) for x in (X, y))
    return collapsed_bound(kernel, Points(jnp.asarray(Z)), *arrays, noise_var=noise_var)


def dense_bound(k, Z, X, y, noise):
    """log N(y; 0, Q + D) - tr(D^-1 (Kff - Q)) / 2 with D the noise variances."""
    noise = np.broadcast_to(noise, len(X))
    Q = k(X, Z) @ np.linalg.solve(jittered(k(Z, Z)), k(Z, X))
    evidence = scipy.stats.multivariate_normal(np.zeros(len(X)), Q + np.diag(noise))
    return evidence.logpdf(y) - 0.5 * np.sum(np.diag(k(X, X) - Q) / noise)


def test_optimal_belief_is_the_textbook_one(regression):
    X, y, _ = regression
    rng = np.random.default_rng(7)
    A = rng.normal(size=(2, M, 12))
    r, lam = rng.normal(size=(12, 2)), rng.uniform(0.2, 3.0, size=(12, 2))

    @jax.jit
    def evaluate(A, r, lam):
        return (
            optimal_belief(A[0], r[:, 0], lam[:, 0]),
            optimal_belief(A[0], r, lam),
            optimal_belief(A, r, lam),
        )

    one, shared, own = evaluate(*(jnp.asarray(x) for x in (A, r, lam)))

    def check(belief, A, r, lam):
        cov = np.linalg.inv(np.eye(M) + A @ np.diag(lam) @ A.T)
        S = np.asarray(belief.scale_tril)
        assert_allclose(np.triu(S, 1), 0.0, atol=0.0)
        assert np.all(np.diag(S) > 0.0)
        assert_allclose(S @ S.T, cov, rtol=1e-10, atol=1e-12)
        assert_allclose(belief.mean, cov @ A @ (lam * r), rtol=1e-10, atol=1e-12)

    check(one, A[0], r[:, 0], lam[:, 0])
    for p in range(2):
        check(jax.tree.map(lambda x: x[p], shared), A[0], r[:, p], lam[:, p])  # noqa: B023
        check(jax.tree.map(lambda x: x[p], own), A[p], r[:, p], lam[:, p])  # noqa: B023


def test_from_precision_has_these_natural_parameters():
    root = np.random.default_rng(1).normal(size=(M, M))
    precision = np.eye(M) + root @ root.T
    linear = np.array([0.3, -1.2, 0.7, 2.1])
    belief = from_precision(jnp.asarray(precision), jnp.asarray(linear))
    S = np.asarray(belief.scale_tril)
    assert_allclose(S @ S.T, np.linalg.inv(precision), rtol=1e-11, atol=1e-13)
    assert_allclose(belief.mean, np.linalg.solve(precision, linear), rtol=1e-11)
    assert_allclose(np.triu(S, 1), 0.0, atol=0.0)


@pytest.mark.parametrize("kind", [Points, Data])
def test_with_inducing_points_at_the_data_regression_is_exact(regression, kind):
    X, y, X_new = regression
    mean, cov = exact_regression(rbf(1.4, 0.9), X, y, X_new, NOISE_VAR)

    @jax.jit
    def posterior(X, y, X_new):
        prior = SparsePrior.create((RBF(1.4, 0.9),), kind(X), Zero())
        q = optimal_belief(prior.project(X), y, jnp.full_like(y, 1.0 / NOISE_VAR))
        return conditional(prior, X_new, q, full_cov=True)

    f = posterior(jnp.asarray(X), jnp.asarray(y), jnp.asarray(X_new))
    assert_allclose(f.mean, mean, rtol=0.0, atol=1e-6)
    assert_allclose(f.row_cov, cov, rtol=0.0, atol=1e-6)


def test_collapsed_bound_is_the_dense_formula(regression):
    X, y, _ = regression
    for Z in (X[::4] + 0.05, X[::2], X):
        bound = bound_of(Matern32(1.4, 0.9), Z, X, y, NOISE_VAR)
        expected = dense_bound(matern32(1.4, 0.9), Z, X, y, NOISE_VAR)
        assert_allclose(bound, expected, rtol=1e-9)


def test_collapsed_bound_is_the_bound_of_the_optimal_belief(regression):
    # Evaluated as expected log likelihood less KL, in NumPy.
    X, y, _ = regression
    Z = X[::3] + 0.1
    k = matern32(1.4, 0.9)
    A = np.linalg.solve(np.linalg.cholesky(jittered(k(Z, Z))), k(Z, X))
    q = optimal_belief(jnp.asarray(A), jnp.asarray(y), jnp.full(12, 1.0 / NOISE_VAR))
    m, S = np.asarray(q.mean), np.asarray(q.scale_tril)
    S = S @ S.T
    f_var = np.diag(k(X, X) - A.T @ A + A.T @ S @ A)
    ell = scipy.stats.norm.logpdf(y, A.T @ m, NOISE_VAR**0.5) - f_var / (2 * NOISE_VAR)
    kl = 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])
    bound = bound_of(Matern32(1.4, 0.9), Z, X, y, NOISE_VAR)
    assert_allclose(bound, ell.sum() - kl, rtol=1e-10)


def test_collapsed_bound_rises_with_nested_inducing_points_to_the_evidence(regression):
    X, y, _ = regression
    cov = rbf(1.4, 0.9)(X, X) + NOISE_VAR * np.eye(12)
    evidence = scipy.stats.multivariate_normal(np.zeros(12), cov).logpdf(y)
    order = np.random.default_rng(3).permutation(12)
    bounds = [
        float(bound_of(RBF(1.4, 0.9), X[order[:m]], X, y, NOISE_VAR))
        for m in (2, 4, 7, 12)
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] < evidence - 0.1
    # The jitter, 1e-8 of the variance, costs about N 1e-8 / (2 noise) = 3e-7 nats.
    assert bounds[-1] <= evidence + 1e-8
    assert_allclose(bounds[-1], evidence, rtol=0.0, atol=1e-6)


def test_gradient_of_the_collapsed_bound_is_that_of_finite_differences(regression):
    X, y, _ = regression
    Z = X[::3, 0] + 0.1
    theta = np.array([1.4, 0.9, 0.3, *Z])

    @jax.jit
    @jax.value_and_grad
    def bound(theta):
        return collapsed_bound(
            Matern52(theta[0], theta[1]), Points(theta[3:, None]), jnp.asarray(X),
            jnp.asarray(y), noise_var=theta[2],
        )  # fmt: skip

    _, grad = bound(jnp.asarray(theta))
    step = 1e-5
    for i in range(len(theta)):
        e = step * np.eye(len(theta))[i]
        above, below = (float(bound(jnp.asarray(t))[0]) for t in (theta + e, theta - e))
        assert_allclose(grad[i], (above - below) / (2 * step), rtol=1e-6, atol=1e-7)


def test_collapsed_bound_keeps_its_digits_where_Kuu_is_ill_conditioned():
    golden = json.loads((GOLDEN / "collapsed_bound.json").read_text())
    X, Z = (jnp.asarray(golden[name])[:, None] for name in ("X", "Z"))
    y = jnp.asarray(golden["y"])
    for case in golden["cases"]:
        kernel = RBF(case["variance"], case["lengthscale"])
        bound = bound_of(kernel, Z, X, y, case["noise_var"])
        assert_allclose(bound, case["bound"], rtol=1e-9)


def test_exact_regression_agrees_with_tinygp(regression):
    tinygp = pytest.importorskip("tinygp")
    X, y, X_new = regression
    kernel = 1.4 * tinygp.kernels.Matern52(0.9)
    gp = tinygp.GaussianProcess(kernel, X[:, 0], diag=NOISE_VAR)
    log_likelihood, given = jax.jit(lambda: gp.condition(y, X_new[:, 0])[:2])()

    @jax.jit
    def ours(X, y, X_new):
        prior = SparsePrior.create((Matern52(1.4, 0.9),), Points(X), Zero())
        q = optimal_belief(prior.project(X), y, jnp.full_like(y, 1.0 / NOISE_VAR))
        bound = collapsed_bound(
            Matern52(1.4, 0.9), Points(X), X, y, noise_var=NOISE_VAR
        )
        return bound, conditional(prior, X_new, q)

    bound, f = ours(jnp.asarray(X), jnp.asarray(y), jnp.asarray(X_new))
    assert_allclose(bound, log_likelihood, atol=1e-6)
    assert_allclose(f.mean, given.loc, atol=1e-6)
    assert_allclose(f.var, given.variance, atol=1e-6)
