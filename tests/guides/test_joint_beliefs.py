"""Sites that a guide holds together: the joint posterior of a sum is exact."""

import dataclasses

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.processes.conditional import conditional
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.processes.prior import SparsePrior
from numpyro_gpx.program.call import Call
from numpyro_gpx.results.arviz import observed_rows

rng = np.random.default_rng(8)
X = np.sort(rng.uniform(-2.0, 2.0, 9))[:, None]
Y = np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=9)
NOISE = 0.4
KERNELS = gpx.kernels.RBF(1.3, 1.1), gpx.kernels.Matern32(0.7, 0.6)
MEAN = gpx.means.Constant(jnp.asarray(0.3))


def total(X_, y=None, *, whiten=True, rows=None):
    """A GP less twice another; `rows` are those of `Data` unless given."""
    own = gpx.inducing.Data(X) if rows is None else gpx.inducing.Points(rows)
    f = gpx.gp("f", KERNELS[0], inducing=own, mean=MEAN, whiten=whiten)
    g = gpx.gp("g", KERNELS[1], inducing=own, whiten=whiten)
    with numpyro.plate("data", len(X_)):
        likelihood = gpx.likelihoods.Gaussian(NOISE)
        gpx.observe("y", f(X_) - 2.0 * g(X_), likelihood, obs=y)


class Known(GaussianGuide):
    """States one Gaussian for both sites."""

    def __init__(self, model, mean, root):
        super().__init__(model, theta="point")
        self.known = mean, root

    def beliefs(self, theta, call):
        mean, root = self.known
        sizes = [self.structure.latents[n].shape[0] for n in ("f", "g")]
        split = {"f": mean[: sizes[0]], "g": mean[sizes[0] :]}
        return (Group.joint(split, root),)


def factors(points):
    jitter = 1e-8 * np.eye(len(points))
    return [
        np.linalg.cholesky(np.asarray(k(points)) + k.variance * jitter) for k in KERNELS
    ]


def exact_posterior():
    """Mean and covariance of both `v`, from the linear model, in NumPy."""
    Lf, Lg = factors(X)
    design = np.concatenate([Lf, -2.0 * Lg], axis=1)  # (N, 2N)
    precision = np.eye(18) + design.T @ design / NOISE**2
    cov = np.linalg.inv(precision)
    mean = cov @ design.T @ (Y - 0.3) / NOISE**2
    evidence = scipy.stats.multivariate_normal(
        0.3 * np.ones(9), design @ design.T + NOISE**2 * np.eye(9)
    ).logpdf(Y)
    return mean, cov, design, evidence


def made(mean, root, model=total, **options):
    guide = Known(model, jnp.asarray(mean), jnp.asarray(root))
    svi = numpyro.infer.SVI(model, guide, optax.identity(), gpx.infer.ELBO())
    guide.setup(X, Y, **options)
    return gpx.Fit.from_svi(svi, {}, X, Y, key=jr.key(0), **options)


def test_the_joint_posterior_of_a_sum_attains_the_evidence():
    mean, cov, design, evidence = exact_posterior()
    fit = made(mean, np.linalg.cholesky(cov))
    assert_allclose(fit.elbo().value, evidence, atol=1e-5)
    latent = fit.predict(X, of="latent")
    assert_allclose(latent.mean, 0.3 + design @ mean, atol=1e-5)
    assert_allclose(latent.var, np.diag(design @ cov @ design.T), atol=1e-5)
    alone = fit.predict(X, of="f")
    Lf = factors(X)[0]
    assert_allclose(alone.var, np.diag(Lf @ cov[:9, :9] @ Lf.T), atol=1e-5)


def test_held_apart_the_same_marginals_are_far_below_and_too_wide():
    mean, cov, design, evidence = exact_posterior()
    blocks = np.block(
        [[cov[:9, :9], np.zeros((9, 9))], [np.zeros((9, 9)), cov[9:, 9:]]]
    )
    fit = made(mean, np.linalg.cholesky(blocks))
    assert fit.elbo().value < evidence - 1.0
    assert np.all(
        fit.predict(X, of="latent").var > 1.5 * np.diag(design @ cov @ design.T)
    )


def test_unwhitened_sites_and_wide_roots_say_the_same():
    mean, cov, _, evidence = exact_posterior()
    Lf, Lg = factors(X)
    zeros = np.zeros((9, 9))
    scale = np.block([[Lf, zeros], [zeros, Lg]])
    root = scale @ np.linalg.cholesky(cov)
    half = np.concatenate([root, root], axis=1) / np.sqrt(2.0)  # more columns than rows
    shift = np.concatenate([0.3 * np.ones(9), np.zeros(9)])
    fit = made(shift + scale @ mean, half, whiten=False)
    assert_allclose(fit.elbo().value, evidence, atol=1e-5)


def test_draws_are_joint_and_their_density_is_known():
    """20000 draws: entries of the covariance within 5 standard errors (1e-4)."""
    mean, cov, _, evidence = exact_posterior()
    fit = made(mean, np.linalg.cholesky(cov))
    draws = fit.draws(20000)
    both = np.concatenate([draws["f"], draws["g"]], axis=1)
    spread = np.sqrt((np.outer(np.diag(cov), np.diag(cov)) + cov**2) / 20000)
    assert np.all(np.abs(np.cov(both.T) - cov) < 5.0 * spread)
    # Under the exact posterior all draws weigh the same: joint over density.
    drawn, log_q = fit.posterior.weighted(20)
    rows = observed_rows(fit, drawn, "y")
    # To what the jitter leaves of the variance at the rows of `Data`.
    assert_allclose(rows.log_joint - np.asarray(log_q), evidence, atol=1e-3)


def test_sparse_sums_agree_with_many_draws():
    """Marginals of f - 2 g given a joint belief: 40000 draws, 5 standard errors."""
    points = np.array([[-1.0], [0.1], [1.2]])
    mean = rng.normal(size=6)
    root = 0.5 * rng.normal(size=(6, 6))
    fit = made(mean, root, rows=points)
    latent = fit.predict(X, of="latent", rows=points)
    e = rng.normal(size=(40000, 6))
    v = mean + e @ root.T
    value = np.full((40000, 9), 0.3)
    var = np.zeros(9)
    for k, L, scale, part in zip(
        KERNELS, factors(points), (1.0, -2.0), (v[:, :3], v[:, 3:]), strict=True
    ):
        A = np.linalg.solve(L, np.asarray(k(points, X)))
        value += scale * part @ A
        var += scale**2 * (np.diag(np.asarray(k(X))) - np.sum(A**2, axis=0))
    drawn = value.var(axis=0) + var
    error = 5.0 * np.sqrt(value.var(axis=0).max() / 4e4)
    assert_allclose(latent.mean, value.mean(axis=0), atol=error)
    assert_allclose(latent.var, drawn, rtol=5.0 * np.sqrt(2.0 / 4e4))


def joint_outputs(seed):
    """A latent of three outputs that share a root, with its dense covariance."""
    local = np.random.default_rng(seed)
    root = local.normal(size=(4, 3, 2))
    own = local.uniform(0.1, 1.0, (4, 3))
    cov = root @ np.swapaxes(root, 1, 2) + own[:, :, None] * np.eye(3)
    latent = Gaussian(
        jnp.zeros((4, 3)), jnp.asarray(np.einsum("npp->np", cov)),
        between=jnp.asarray(cov), roots={"g": jnp.asarray(root)},
    )  # fmt: skip
    return latent, root, cov


def test_mixing_and_columns_keep_what_is_shared():
    """By the covariance of the sum, written out densely."""
    first, root1, cov1 = joint_outputs(1)
    second, root2, cov2 = joint_outputs(2)
    second = Gaussian(
        second.mean, second.var, between=second.between, roots=second.roots,
        sites=frozenset(["other"]),
    )  # fmt: skip
    A = np.array([[1.0, -0.5, 0.2], [0.3, 0.9, -1.1]])
    B = np.array([[0.4, 0.1, 1.2], [-0.7, 0.6, 0.5]])
    cross = root1 @ np.swapaxes(root2, 1, 2)
    expected = A @ cov1 @ A.T + B @ cov2 @ B.T
    mixed = A @ cross @ B.T
    expected = expected + mixed + np.swapaxes(mixed, 1, 2)
    found = (A @ first) + (B @ second)
    assert_allclose(found.output_cov(), expected, rtol=1e-12)
    assert_allclose(found.var, np.einsum("npp->np", expected), rtol=1e-12)
    column = found[:, 1] + 0.5
    assert_allclose(column.var, expected[:, 1, 1], rtol=1e-12)
    group = np.array([0, 1, 1, 0])
    taken = first.take(group % 3) + second.take(group)
    rows = np.arange(4)
    expected = (
        cov1[rows, group, group] + cov2[rows, group, group]
        + 2.0 * cross[rows, group, group]
    )  # fmt: skip
    assert_allclose(taken.var, expected, rtol=1e-12)


def test_products_of_what_is_held_together_are_refused():
    first, *_ = joint_outputs(1)
    other = Gaussian(
        first.mean, first.var, roots=first.roots, sites=frozenset(["other"])
    )
    with pytest.raises(ValueError, match="holds .* together.*holds them apart"):
        first * other
    with pytest.raises(ValueError, match="`stack` joins independent functions"):
        gpx.stack(first, other)


def test_a_root_of_the_wrong_length_is_named():
    with pytest.raises(ValueError, match=r"a row for each of the 5 numbers of \['f'"):
        Group.joint({"f": jnp.zeros(3), "g": jnp.zeros(2)}, jnp.eye(4))


def test_conditional_traces_the_model_once_for_all_sites():
    count = []

    def model(X, y=None):
        count.append(1)
        total(X, y)

    guide = gpx.guides.ConditionalGaussian(model)
    guide.setup(X, Y)
    count.clear()
    Call(model, (X, Y)).abstract_trace(guide)
    assert len(count) == 1


def dense_outputs(points, S):
    """Mean 0 and covariance of two outputs of one kernel at `X`, output by output."""
    (L, _), k = factors(points), KERNELS[0]
    A = np.linalg.solve(L, np.asarray(k(points, X)))  # (M, N)
    rest = np.asarray(k(X)) - A.T @ A
    both = np.kron(np.eye(2), A)
    return np.kron(np.eye(2), rest) + both.T @ S @ S.T @ both, A


def test_outputs_held_together_have_the_covariance_of_the_dense_model():
    """With fewer inducing points than rows, mixed, in columns, and jointly by row."""
    points = np.array([[-1.0], [0.1], [1.2]])
    S = rng.normal(size=(8, 8))
    group = Group.joint({"f": jnp.zeros((2, 3)), "h": jnp.zeros(2)}, jnp.asarray(S))
    cov, A = dense_outputs(points, S[:6])
    prior = SparsePrior.create(KERNELS[:1], gpx.inducing.Points(points), MEAN)
    f = conditional(prior, jnp.asarray(X), group.beliefs["f"])
    n = np.arange(9)
    expected = np.stack([cov[np.ix_([i, 9 + i], [i, 9 + i])] for i in n])
    assert_allclose(f.output_cov(), expected, rtol=1e-6)
    mixing = np.array([[1.0, -0.4], [0.3, 0.8], [0.5, 0.5]])
    assert_allclose((mixing @ f).output_cov(), mixing @ expected @ mixing.T, rtol=1e-6)
    joint = conditional(prior, jnp.asarray(X), group.beliefs["f"], full_cov=True)
    columns = n % 2
    taken = joint.take(columns).row_cov
    assert_allclose(taken, cov[np.ix_(9 * columns + n, 9 * columns + n)], atol=1e-6)
    # Another site of the group: a column of `f` plus `h`, whose two numbers are known
    # functions of the rows.
    rows = np.stack([np.ones(9), X[:, 0]])  # (2, N)
    root = jnp.asarray((S[6:].T @ rows).T)  # (N, R)
    h = Gaussian(
        jnp.zeros(9), jnp.sum(root**2, axis=1), row_cov=root @ root.T,
        roots={"f/h": root}, sites=frozenset(["h"]),
    )  # fmt: skip
    spread = S[:3].T @ A + S[6:].T @ rows  # (R, N)
    rest = cov[:9, :9] - A.T @ S[:3] @ S[:3].T @ A
    total = rest + spread.T @ spread
    assert_allclose((joint[:, 0] + h).row_cov, total, atol=1e-6)
    h = dataclasses.replace(h, row_cov=None)
    assert_allclose((f[:, 0] + h).var, np.diag(total), rtol=1e-6)


def test_divergence_to_priors_that_are_not_standard():
    """Several sites at once, one of them held by itself."""
    root = np.tril(rng.normal(size=(5, 5))) + 2.0 * np.eye(5)
    group = Group.joint({"a": jnp.ones(3), "b": jnp.zeros(2)}, jnp.asarray(root))
    alone = GaussianBelief(jnp.asarray([0.3]), jnp.asarray([[0.6]]))
    group = Group({**group.beliefs, "c": alone})
    loc, scale = np.array([0.5, -1.0, 2.0]), np.array([1.5, 0.4, 0.8])
    L = np.array([[1.2, 0.0], [0.5, 0.7]])
    priors = {
        "a": dist.Normal(loc, scale).to_event(1),
        "b": dist.MultivariateNormal(jnp.asarray([0.2, 0.1]), scale_tril=L),
        "c": dist.Normal(jnp.asarray([-0.4]), 1.3).to_event(1),
    }
    m = np.array([1.0, 1.0, 1.0, 0.0, 0.0]) - np.concatenate([loc, [0.2, 0.1]])
    zeros = np.zeros((3, 2))
    prior = np.block([[np.diag(scale**2), zeros], [zeros.T, L @ L.T]])
    inverse, C = np.linalg.inv(prior), root @ root.T
    dets = np.linalg.slogdet(prior)[1] - np.linalg.slogdet(C)[1]
    expected = 0.5 * (np.trace(inverse @ C) + m @ inverse @ m - 5 + dets)
    one = 0.5 * ((0.36 + 0.49) / 1.69 - 1.0 + np.log(1.69 / 0.36))
    assert_allclose(group.kl(priors), expected + one, rtol=1e-9)


def test_a_mixed_product_of_what_is_held_together_is_refused():
    first, *_ = joint_outputs(1)
    plain = Gaussian(first.mean, first.var, sites=frozenset(["k"]))
    with pytest.raises(ValueError, match="has no closed moments beside them"):
        np.eye(3) @ (first * plain)
