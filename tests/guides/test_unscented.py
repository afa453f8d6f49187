"""Latent inputs: bounds against brute force, every rule, free and amortised."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_gpx as gpx
from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.cubature import (
    Analytic,
    GaussHermite,
    MonteCarlo,
    SphericalRadial,
    Unscented,
)
from numpyro_gpx.guides import (
    Encoder,
    OptimalGaussian,
    UnscentedLatent,
    WhitenedGaussian,
)
from numpyro_gpx.infer import ELBO, ImportanceWeighted
from numpyro_gpx.processes.conditional import conditional
from numpyro_gpx.processes.prior import SparsePrior
from numpyro_gpx.program.latent_inputs import LatentInput
from numpyro_gpx.sites.marks import find, held_beliefs

NOISE = 1.0
PLACES = jnp.array([[0.2, 0.1], [0.8, -0.4], [0.5, 1.0], [0.1, -1.2]])
KERNEL = gpx.kernels.RBF(variance=1.3, lengthscale=0.8)


def toy(num_latents=1, num_outputs=2, **options):
    """A GPLVM with known hyperparameters and inducing inputs."""
    Z = np.random.default_rng(3).normal(size=(4, num_latents))
    options.setdefault("kernel", KERNEL)
    return gpx.models.gplvm(
        gpx.inducing.Points(Z), num_outputs=num_outputs,
        likelihood=gpx.likelihoods.Gaussian(NOISE), **options,
    )  # fmt: skip


def data(num_rows=2, num_outputs=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num_rows, num_outputs)))


def random_params(seed, num_rows=2, num_latents=1, num_outputs=2, num_inducing=4):
    """Parameters of q(h) and q(v), anywhere."""
    rng = np.random.default_rng(seed)
    shape = (num_outputs, num_inducing)
    factor = np.tril(0.3 * rng.normal(size=(*shape, num_inducing)), -1)
    diagonal = np.exp(0.5 * rng.normal(size=shape) - 0.5)
    return {
        "h_auto_loc": jnp.asarray(rng.normal(size=(num_rows, num_latents))),
        "h_auto_scale": jnp.asarray(np.exp(rng.normal(size=(num_rows, num_latents)))),
        "f_auto_loc": jnp.asarray(rng.normal(size=shape)),
        "f_auto_scale_tril": jnp.asarray(
            factor + diagonal[..., None] * np.eye(num_inducing)
        ),
    }


def log_evidence(y):
    """The log evidence of two rows, by a grid over both latent inputs."""
    grid = np.linspace(-5.0, 5.0, 161)
    width = grid[1] - grid[0]
    first, second = np.meshgrid(grid, grid, indexing="ij")
    distance = first - second
    k = 1.3 * np.exp(-0.5 * (distance / 0.8) ** 2)
    a = 1.3 + NOISE**2
    determinant = a**2 - k**2
    y = np.asarray(y)
    quadratic = a * np.sum(y**2) - 2.0 * k * np.sum(y[0] * y[1])
    num_outputs = y.shape[1]
    log_p = -0.5 * quadratic / determinant - num_outputs * (
        0.5 * np.log(determinant) + np.log(2.0 * np.pi)
    )
    log_prior = -0.5 * (first**2 + second**2) - np.log(2.0 * np.pi)
    return float(np.log(np.sum(np.exp(log_p + log_prior))) + 2.0 * np.log(width))


def by_hand(model_data, params, num_grid=2001):
    """The bound of the toy, its expectations over h taken on a dense grid."""
    y = np.asarray(model_data)
    Z = np.random.default_rng(3).normal(size=(4, 1))
    Kuu = np.asarray(KERNEL(Z)) + 1e-8 * 1.3 * np.eye(4)
    L = np.linalg.cholesky(Kuu)
    means, factors = (np.asarray(params[f"f_auto_{n}"]) for n in ("loc", "scale_tril"))
    grid = np.linspace(-9.0, 9.0, num_grid)
    total = 0.0
    for n in range(len(y)):
        m, s = float(params["h_auto_loc"][n, 0]), float(params["h_auto_scale"][n, 0])
        h = m + s * grid
        weights = np.exp(-0.5 * grid**2)
        weights /= weights.sum()
        A = np.linalg.solve(L, np.asarray(KERNEL(Z, h[:, None])))  # (M, G)
        for p in range(y.shape[1]):
            mean = A.T @ means[p]
            var = 1.3 - np.sum(A**2, 0) + np.sum((factors[p].T @ A) ** 2, 0)
            ell = -0.5 * np.log(2 * np.pi * NOISE**2)
            ell = ell - 0.5 * ((y[n, p] - mean) ** 2 + var) / NOISE**2
            total += weights @ ell
        total -= 0.5 * (s**2 + m**2 - 1.0) - np.log(s)
    for p in range(y.shape[1]):
        logdet = 2.0 * np.sum(np.log(np.abs(np.diag(factors[p]))))
        trace = np.sum(factors[p] ** 2)
        total -= 0.5 * (trace + np.sum(means[p] ** 2) - 4 - logdet)
    return total


def value(loss, guide, params, y, key=None, **options):
    """The bound, compiled as a whole."""

    @jax.jit
    def run(params, y, key):
        return -loss.loss(key, params, guide.model, guide, y, **options)

    return run(params, y, jr.key(0) if key is None else key)


@pytest.mark.parametrize("rule", [Analytic(), GaussHermite(60)], ids=["analytic", "gh"])
def test_the_uncollapsed_bound_is_that_of_a_dense_grid(rule):
    y, params = data(), random_params(1)
    params["h_auto_scale"] = 0.5 * params["h_auto_scale"]
    guide = UnscentedLatent(WhitenedGaussian(toy()), rule=rule)
    np.testing.assert_allclose(
        value(ELBO(), guide, params, y), by_hand(y, params), rtol=1e-9
    )


def collapsed_toy(rule, kernel=KERNEL):
    """A larger toy: 7 rows, 3 outputs, 2 latents."""
    model = toy(num_latents=2, num_outputs=3, kernel=kernel)
    return UnscentedLatent(OptimalGaussian(model), rule=rule), data(7, 3)


RULES = {
    "analytic": Analytic(),
    "unscented": Unscented(),
    "centre": Unscented(0.3),
    "gauss-hermite": GaussHermite(3),
    "spherical-radial": SphericalRadial(5),
    "monte carlo": MonteCarlo(5),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_collapsed_bound_is_the_uncollapsed_one_at_its_belief(rule):
    guide, y = collapsed_toy(rule)
    params = random_params(2, 7, 2, 3)
    params = {name: params[name] for name in ("h_auto_loc", "h_auto_scale")}

    def both(params):
        collapsed = value(ELBO(), guide, params, y)
        key = jr.split(jr.key(0))[0]
        traced = numpyro.handlers.substitute(numpyro.handlers.seed(guide, key), params)
        trace = numpyro.handlers.trace(traced).get_trace(y)
        belief = held_beliefs(trace)["f"]
        points = find(trace["h"], LatentInput)
        # The same q(v), and the same points, without the shortcut.
        plain = UnscentedLatent(WhitenedGaussian(guide.model), rule=_Fixed(points))
        if isinstance(rule, Analytic):
            plain = UnscentedLatent(WhitenedGaussian(guide.model), rule=rule)
        factor = jnp.broadcast_to(belief.scale_tril, (3, 4, 4))
        rest = {"f_auto_loc": belief.mean, "f_auto_scale_tril": factor}
        return collapsed, value(ELBO(), plain, {**params, **rest}, y)

    collapsed, uncollapsed = jax.jit(both)(params)
    np.testing.assert_allclose(collapsed, uncollapsed, rtol=1e-10)


class _Fixed(gpx.cubature.Rule):
    """A rule with points that were made before."""

    latent: object

    def num_points(self, num_dims):
        raise NotImplementedError

    standard = num_points

    def nodes(self, belief, key=None):
        return gpx.cubature.Nodes(self.latent.points, self.latent.weights)


def test_the_collapsed_bound_is_that_of_the_model_asked_about():
    """A handler around the model changes the bound, not only what the guide saw."""
    guide, y = collapsed_toy(Unscented())
    params = random_params(2, 7, 2, 3)
    params = {name: params[name] for name in ("h_auto_loc", "h_auto_scale")}
    halved = numpyro.handlers.scale(guide.model, 0.5)
    whole = value(ELBO(), guide, params, y)
    part = -jax.jit(lambda p: ELBO().loss(jr.key(0), p, halved, guide, y))(params)
    np.testing.assert_allclose(part, 0.5 * whole, rtol=1e-10)


@pytest.mark.parametrize("missing", [False, True])
def test_the_optimal_belief_is_a_stationary_point(missing):
    """Also where weights are negative (degree 5, six dimensions), entry by entry."""
    y = data(9, 3)
    y = y.at[0, 1].set(jnp.nan) if missing else y
    model = toy(num_latents=6, num_outputs=3, missing=missing)
    rule = SphericalRadial(5)
    assert rule.has_negative_weights(6)
    guide = UnscentedLatent(OptimalGaussian(model), rule=rule)
    plain = UnscentedLatent(WhitenedGaussian(model), rule=rule)
    latent = {
        "h_auto_loc": random_params(3, 9, 6)["h_auto_loc"],
        "h_auto_scale": jnp.full((9, 6), 0.3),
    }

    @jax.jit
    def slope(latent):
        seeded = numpyro.handlers.seed(guide, jr.key(0))
        traced = numpyro.handlers.substitute(seeded, latent)
        trace = numpyro.handlers.trace(traced).get_trace(y)
        belief = held_beliefs(trace)["f"]
        factor = jnp.broadcast_to(belief.scale_tril, (3, 4, 4))

        def bound(mean):
            rest = {"f_auto_loc": mean, "f_auto_scale_tril": factor}
            return value(ELBO(), plain, {**latent, **rest}, y)

        return jax.grad(bound)(belief.mean)

    assert np.max(np.abs(slope(latent))) < 1e-10


def test_minibatches_are_unbiased_without_a_closed_divergence():
    y, params = data(4, 2), random_params(7, num_rows=4)
    prior = dist.StudentT(5.0, jnp.zeros(1), 1.0).to_event(1)
    guide = UnscentedLatent(WhitenedGaussian(toy(prior=prior)))
    whole = value(ELBO(), guide, params, y)
    single = jax.vmap(
        lambda i: value(ELBO(), guide, {**params, "data": i[None]}, y, batch_size=1)
    )(jnp.arange(4))
    np.testing.assert_allclose(single.mean(), whole, rtol=1e-12)


def test_no_belief_does_better_than_the_optimal_one():
    guide, y = collapsed_toy(Unscented())
    params = random_params(2, 7, 2, 3)
    latent = {name: params[name] for name in ("h_auto_loc", "h_auto_scale")}
    plain = UnscentedLatent(WhitenedGaussian(guide.model))
    best = value(ELBO(), guide, latent, y)
    run = jax.jit(lambda params: value(ELBO(), plain, params, y))
    for seed in range(5):
        other = {**random_params(seed, 7, 2, 3), **latent}
        assert run(other) < best


def test_bounds_stay_below_the_evidence_for_random_beliefs():
    y = data(seed=4)
    evidence = log_evidence(y)
    for rule in (Analytic(), GaussHermite(40)):
        free = UnscentedLatent(WhitenedGaussian(toy()), rule=rule)
        optimal = UnscentedLatent(OptimalGaussian(toy()), rule=rule)

        def both(params, free=free, optimal=optimal):
            latent = {n: x for n, x in params.items() if n.startswith("h")}
            return value(ELBO(), free, params, y), value(ELBO(), optimal, latent, y)

        stacked = [random_params(seed) for seed in range(50)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *stacked)
        found = np.asarray(jax.jit(jax.vmap(both))(stacked))
        assert np.all(found < evidence)
        # And not all of them by far, so that the comparison says something.
        assert found.max() > evidence - 2.0


def test_a_low_order_rule_is_no_bound():
    """Two peaks: the sigma points sit on them, and the objective passes the bound."""
    kernel = gpx.kernels.RBF(variance=25.0, lengthscale=0.5)
    model = toy(num_outputs=1, kernel=kernel)
    guide = UnscentedLatent(OptimalGaussian(model))
    y = jnp.array([[2.0], [2.0]])
    params = {
        "h_auto_loc": jnp.zeros((2, 1)),
        "h_auto_scale": jnp.full((2, 1), 2.0),
    }
    objective = value(ELBO(), guide, params, y)
    draws = ELBO(num_particles=500, draw_latents=True)
    assert objective > value(draws, guide, params, y) + 5.0


def test_gradients_agree_with_differences():
    guide, y = collapsed_toy(Unscented(), kernel=gpx.kernels.Matern32())
    params = random_params(5, 7, 2, 3)
    params = {name: params[name] for name in ("h_auto_loc", "h_auto_scale")}
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    run = jax.jit(lambda x: value(ELBO(), guide, unravel(x), y))
    slope = jax.jit(jax.grad(run))(flat)
    for i in (0, 5, 13, 20):
        step = 1e-5 * jnp.eye(len(flat))[i]
        difference = (run(flat + step) - run(flat - step)) / 2e-5
        np.testing.assert_allclose(slope[i], difference, rtol=1e-6, atol=1e-7)


def test_drawn_latents_estimate_the_bound():
    """1000 draws agree with the analytic bound; false alarms below 1e-6."""
    y, params = data(seed=2), random_params(3)
    guide = UnscentedLatent(WhitenedGaussian(toy()))
    run = jax.jit(
        jax.vmap(
            lambda key: (
                -ELBO(draw_latents=True).loss(key, params, guide.model, guide, y)
            )
        )
    )
    values = np.asarray(run(jr.split(jr.key(0), 1000)))
    error = values.std() / np.sqrt(1000)
    assert abs(values.mean() - by_hand(y, params)) < 5.0 * error


@pytest.fixture(scope="module")
def importance():
    """Importance-weighted bounds of 200 random q(h) with 1, 5 and 25 replicates."""
    y = jnp.array([[1.5, -0.5], [-1.5, 0.5]])  # anti-correlated rows
    guide = UnscentedLatent(OptimalGaussian(toy()), rule=GaussHermite(20))
    latent = [random_params(seed) for seed in range(200)]
    latent = [{n: x for n, x in p.items() if n.startswith("h")} for p in latent]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *latent)
    bounds = {}
    for replicates in (1, 5, 25):
        loss = ImportanceWeighted(replicates, num_particles=400)
        each = jax.vmap(lambda p, loss=loss: value(loss, guide, p, y))
        bounds[replicates] = np.asarray(jax.jit(each)(stacked))
    plain = jax.jit(jax.vmap(lambda p: value(ELBO(), guide, p, y)))(stacked)
    return log_evidence(y), bounds, np.asarray(plain)


def test_importance_weighted_bounds_stay_below_the_evidence(importance):
    # The largest is 1.6 below, where the standard error of 400 particles is 0.05.
    evidence, bounds, _ = importance
    for found in bounds.values():
        assert np.all(found < evidence)
    assert bounds[25].max() > evidence - 2.0


def test_importance_weighted_bounds_tighten(importance):
    _, bounds, plain = importance
    means = {s: x.mean() for s, x in bounds.items()}
    assert means[1] < means[5] - 0.1 < means[25] - 0.2
    assert np.mean(bounds[25] > bounds[1]) > 0.95
    # One replicate is the plain bound, here with 400 draws each.
    assert abs(np.median((bounds[1] - plain) / np.abs(plain))) < 0.01


def test_minibatches_are_unbiased():
    """The mean over all pairs of rows is the bound of the whole data."""
    y = data(4, 2)
    params = random_params(7, num_rows=4)
    guide = UnscentedLatent(WhitenedGaussian(toy()))
    importance = ImportanceWeighted(2)

    def batch(loss, rows):
        return value(loss, guide, {**params, "data": rows}, y, batch_size=2)

    whole = value(ELBO(), guide, params, y)
    every = jnp.array([[i, j] for i in range(4) for j in range(4)])
    pairs = jax.vmap(lambda rows: batch(ELBO(), rows))(every)
    np.testing.assert_allclose(pairs.mean(), whole, rtol=1e-12)
    # Keys are not tied to rows, so this one is unbiased in expectation only.
    many = jax.jit(
        jax.vmap(lambda key: -importance.loss(key, params, guide.model, guide, y))
    )(jr.split(jr.key(0), 2000))
    part = jax.jit(
        jax.vmap(
            lambda key, rows: (
                -importance.loss(
                    key, {**params, "data": rows}, guide.model, guide, y, batch_size=2
                )
            )
        )
    )(jr.split(jr.key(1), 2000), jr.randint(jr.key(2), (2000, 2), 0, 4))
    error = np.hypot(many.std(), part.std()) / np.sqrt(2000)
    assert abs(many.mean() - part.mean()) < 5.0 * error  # false alarms below 1e-6


def test_importance_weighting_needs_latent_inputs():
    model = gpx.models.svgp(gpx.inducing.Points(jnp.zeros((1, 1))))
    with pytest.raises(ValueError, match="the guide has none"):
        guide, X = WhitenedGaussian(model), jnp.zeros((3, 1))
        ImportanceWeighted(2).loss(jr.key(0), {}, model, guide, X, jnp.zeros(3))


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_amortised_beliefs_start_at_the_principal_components(covariance):
    y = data(9, 3)
    model = toy(num_latents=2, num_outputs=3)
    guide = UnscentedLatent(
        WhitenedGaussian(model), encoder=Encoder((5,)), covariance=covariance
    )
    svi = SVI(model, guide, optax.adam(0.1), ELBO())
    params = svi.get_params(jax.jit(svi.init)(jr.key(0), y))
    start = guide.row_beliefs(params, y)["h"]
    np.testing.assert_allclose(start.mean, gpx.latent_space.pca(y, 2), atol=1e-12)
    np.testing.assert_allclose(start.var, 0.1, rtol=1e-9)
    moved = {**params, "h_auto_encoder": params["h_auto_encoder"] + 0.1}
    belief = guide.row_beliefs(moved, y)["h"]
    assert np.all(np.asarray(belief.mean) != np.asarray(start.mean))
    # The belief of a row is a function of that row, and minibatches pick it out.
    alone = guide.row_beliefs(moved, y[:2])["h"]
    np.testing.assert_allclose(alone.mean, belief.mean[:2], rtol=1e-10)
    whole = value(ELBO(), guide, moved, y)
    single = jax.vmap(
        lambda i: value(ELBO(), guide, {**moved, "data": i[None]}, y, batch_size=1)
    )(jnp.arange(9))
    np.testing.assert_allclose(single.mean(), whole, rtol=1e-12)


def test_full_covariances_reduce_to_diagonal_ones():
    y, params = data(5, 2), random_params(1, 5, 2)
    model = toy(num_latents=2)
    diagonal = UnscentedLatent(WhitenedGaussian(model))
    full = UnscentedLatent(WhitenedGaussian(model), covariance="full")
    factors = jax.vmap(jnp.diag)(params["h_auto_scale"])
    expected = value(ELBO(), diagonal, params, y)
    found = value(ELBO(), full, {**params, "h_auto_scale_tril": factors}, y)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def bounded_model(y, batch_size=None):
    """A latent angle between 0 and 1 beside a latent number: two sites."""
    f = gpx.gp(
        "f", KERNEL, inducing=gpx.inducing.Points(PLACES),
        num_outputs=2,
    )  # fmt: skip
    with numpyro.plate("data", y.shape[0], subsample_size=batch_size) as i:
        angle = numpyro.sample("angle", dist.Uniform(0.0, 1.0))
        number = numpyro.sample("number", dist.Normal(0.5, 2.0))
        H = jnp.stack([angle, number], axis=-1)
        gpx.observe("y", f(H), gpx.likelihoods.Gaussian(NOISE), obs=y[i])


def test_several_sites_and_bounded_supports():
    """Against a two-dimensional grid over the real line, one row."""
    y = data(1, 2)
    guide = UnscentedLatent(WhitenedGaussian(bounded_model), rule=GaussHermite(40))
    rng = np.random.default_rng(0)
    params = {
        "angle_auto_loc": jnp.array([[0.4]]),
        "angle_auto_scale": jnp.array([[0.7]]),
        "number_auto_loc": jnp.array([[-0.3]]),
        "number_auto_scale": jnp.array([[0.5]]),
        "f_auto_loc": jnp.asarray(rng.normal(size=(2, 4))),
        "f_auto_scale_tril": jnp.broadcast_to(0.4 * jnp.eye(4), (2, 4, 4)),
    }
    grid = np.linspace(-7.0, 7.0, 201)
    a, b = (g.ravel() for g in np.meshgrid(grid, grid, indexing="ij"))
    weights = np.exp(-0.5 * (a**2 + b**2))
    weights /= weights.sum()
    z, number = 0.4 + 0.7 * a, -0.3 + 0.5 * b
    angle = 1.0 / (1.0 + np.exp(-z))
    prior = SparsePrior.create((KERNEL,), gpx.inducing.Points(PLACES), gpx.means.Zero())
    belief = GaussianBelief(params["f_auto_loc"], params["f_auto_scale_tril"])
    at = conditional(prior, jnp.c_[angle, number], belief)
    ell = gpx.likelihoods.Gaussian(NOISE).expected_log_prob(y, at.mean, at.var).sum(-1)
    log_prior = -0.5 * ((number - 0.5) / 2.0) ** 2 - np.log(2.0 * np.sqrt(2.0 * np.pi))
    log_jacobian = np.log(angle) + np.log1p(-angle)  # from the real line to (0, 1)
    entropy = np.log(0.7 * 0.5) + np.log(2.0 * np.pi * np.e)
    kl = sum(
        float(dist.kl_divergence(
            dist.MultivariateNormal(m, scale_tril=L),
            dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4)),
        ))
        for m, L in zip(belief.mean, belief.scale_tril, strict=True)
    )  # fmt: skip
    expected = weights @ np.asarray(ell + log_prior + log_jacobian) + entropy - kl
    np.testing.assert_allclose(value(ELBO(), guide, params, y), expected, rtol=1e-7)


def test_words():
    model = toy()
    inner = WhitenedGaussian(model)
    with pytest.raises(TypeError, match="`inner` must be"):
        UnscentedLatent(model)
    with pytest.raises(TypeError, match="`rule` must be"):
        UnscentedLatent(inner, rule="unscented")
    with pytest.raises(ValueError, match="needs `covariance='diagonal'`"):
        UnscentedLatent(inner, rule=Analytic(), covariance="full")
    with pytest.raises(ValueError, match="`init` must be 'pca', 'targets', 'random'"):
        UnscentedLatent(inner, init="zeros")
    svgp = gpx.models.svgp(gpx.inducing.Points(jnp.zeros((1, 1))))
    with pytest.raises(ValueError, match="no latent input of its rows"):
        UnscentedLatent(WhitenedGaussian(svgp)).setup(jnp.zeros((2, 1)), jnp.zeros(2))
    with pytest.raises(
        ValueError, match="needs targets with at least 2 rows and columns"
    ):
        guide = UnscentedLatent(WhitenedGaussian(toy(2, 1)), init="pca")
        value(ELBO(), guide, {}, data(3, 1))
    with pytest.raises(ValueError, match=r"`init` must have shape \(2, 1\)"):
        value(ELBO(), UnscentedLatent(inner, init=jnp.zeros((3, 1))), {}, data())
    with pytest.raises(ValueError, match="beliefs about 2 rows of `h`; got 3 rows"):
        value(ELBO(), UnscentedLatent(inner), random_params(0), data(3))
    matern = toy(kernel=gpx.kernels.Matern32())
    with pytest.raises(ValueError, match="Matern32"):
        analytic = UnscentedLatent(OptimalGaussian(matern), rule=Analytic())
        value(ELBO(), analytic, {}, data())
    count = gpx.models.gplvm(
        gpx.inducing.Points(jnp.zeros((1, 1))), num_outputs=2,
        likelihood=gpx.likelihoods.Poisson(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="suffice for a Gaussian likelihood"):
        analytic = UnscentedLatent(WhitenedGaussian(count), rule=Analytic())
        value(ELBO(), analytic, {}, jnp.ones((3, 2)))
