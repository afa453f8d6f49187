"""Deep GPs, against one layer, composed GPs, quadrature and the evidence."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import optax
import pytest
import scipy.special
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.guides.parts.doubts import doubts_of
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import structure_of
from numpyro_gpx.sites.gp_calls import shared_replicates


def data(num_rows=12, num_columns=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, num_columns))
    y = np.sin(2.0 * X[:, 0]) + 0.2 * rng.normal(size=num_rows)
    return jnp.asarray(X), jnp.asarray(y)


def rbf(variance=1.3, lengthscale=0.9):
    return gpx.kernels.RBF(variance, lengthscale)


def test_one_layer_is_the_sparse_gp():
    X, y = data()
    Z, noise = X[:4], gpx.likelihoods.Gaussian(0.3)
    deep = gpx.models.deep_gp(gpx.inducing.Points(Z), kernel=rbf(), likelihood=noise)
    svgp = gpx.models.svgp(gpx.inducing.Points(Z), kernel=rbf(), likelihood=noise)
    rng = np.random.default_rng(1)
    loc, factor = rng.normal(size=4), np.tril(rng.normal(size=(4, 4)))
    factor = factor + 2.0 * np.eye(4)

    def bound(model, name):
        guide = gpx.guides.WhitenedGaussian(model)
        params = {f"{name}_auto_loc": loc, f"{name}_auto_scale_tril": factor}
        return -gpx.infer.ELBO().loss(jr.key(0), params, model, guide, X, y)

    assert_allclose(bound(deep, "f1"), bound(svgp, "f"), rtol=1e-9)


def test_deterministic_inner_layers_compose():
    """An inner layer with an inducing input at every row passes on known values."""
    X, y = data(6)
    Z = np.random.default_rng(5).normal(size=(4, 2))
    noise = gpx.likelihoods.Gaussian(0.3)
    deep = gpx.models.deep_gp(
        [gpx.inducing.Points(X), gpx.inducing.Points(Z)],
        widths=(2,),
        kernel=rbf(),
        likelihood=noise,
    )
    rng = np.random.default_rng(2)
    v1, v2 = jnp.asarray(rng.normal(size=(2, 6))), jnp.asarray(rng.normal(size=4))
    with gpx.jitter(1e-14):
        found = Target(Call(deep, (X, y))).log_density(
            {"f1": v1, "f2": v2}, key=jr.key(3)
        )
    # From the definition: u1 = Z + L v at the rows, then the sparse conditional.
    inner = X + (np.linalg.cholesky(np.asarray(rbf()(X))) @ np.asarray(v1).T)
    Kuu, Kuf = np.asarray(rbf()(Z)), np.asarray(rbf()(Z, inner))
    A = np.linalg.solve(np.linalg.cholesky(Kuu), Kuf)
    f_mean, f_var = A.T @ v2, 1.3 - (A**2).sum(0)
    ell = scipy.stats.norm(f_mean, 0.3).logpdf(y) - 0.5 * f_var / 0.09
    prior = scipy.stats.norm.logpdf(np.concatenate([v1.ravel(), v2])).sum()
    assert_allclose(found, prior + ell.sum(), rtol=1e-6)
    # Batches of one row, each with its own target: on average, all rows.
    batches = Target(Call(deep, (X, y), {"batch_size": 1}))
    with gpx.jitter(1e-14):
        each = jax.jit(jax.vmap(
            lambda i: batches.log_density(
                {"f1": v1, "f2": v2}, key=jr.key(3), batch={"data": i[None]}
            )
        ))(jnp.arange(6))  # fmt: skip
    assert_allclose(np.mean(each), found, rtol=1e-6)


def two_layers(Zs, num_latents):
    return gpx.models.deep_gp(
        [gpx.inducing.Points(Z) for Z in Zs], widths=(1,),
        kernel=[rbf(), rbf(0.8, 1.2)], num_latents=num_latents,
        likelihood=gpx.likelihoods.Gaussian(0.4),
    )  # fmt: skip


def toy(num_latents=0):
    """Two layers of width 1, two inducing inputs each: noise can be integrated."""
    X, y = data(5, 1, seed=3)
    Zs = [np.array([[-0.7], [0.9]]), np.array([[-0.5], [1.1]])]
    if num_latents:
        Zs[0] = np.concatenate([Zs[0], [[0.4], [-0.6]]], axis=1)
    model = two_layers(Zs, num_latents)
    rng = np.random.default_rng(4)
    factors = [np.tril(0.3 * rng.normal(size=(1, 2, 2))) + 0.6 * np.eye(2)]
    factors.append(np.tril(0.3 * rng.normal(size=(2, 2))) + 0.5 * np.eye(2))
    params = {
        "f1_auto_loc": rng.normal(size=(1, 2)),
        "f1_auto_scale_tril": factors[0],
        "f2_auto_loc": rng.normal(size=2),
        "f2_auto_scale_tril": factors[1],
    }
    return model, params, X, y, Zs


def test_bound_and_gradient_of_two_layers_are_unbiased():
    """Against Gauss-Hermite over each row's inner value; false alarms below 1e-4."""
    model, params, X, y, Zs = toy()
    guide = gpx.guides.WhitenedGaussian(model)
    loss = gpx.infer.ELBO()

    def moments(kernel, Z, X, loc, factor):
        L = jnp.linalg.cholesky(kernel(Z) + 1e-8 * kernel(Z)[0, 0] * jnp.eye(2))
        A = jnp.linalg.solve(L, kernel(Z, X))  # (2, N)
        spread = factor.T @ A
        var = kernel.diag(X) - (A**2).sum(0) + (spread**2).sum(0)
        return A.T @ loc, var

    def kl(loc, factor):
        trace = jnp.sum(factor**2) + loc @ loc - 2.0
        return 0.5 * trace - jnp.sum(jnp.log(jnp.diagonal(factor)))

    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def exact(params):
        loc1, factor1 = params["f1_auto_loc"][0], params["f1_auto_scale_tril"][0]
        loc2, factor2 = params["f2_auto_loc"], params["f2_auto_scale_tril"]
        mean, var = moments(rbf(), Zs[0], X, loc1, factor1)
        total = -kl(loc1, factor1) - kl(loc2, factor2)
        for node, weight in zip(nodes, weights, strict=True):
            h = (X[:, 0] + mean + jnp.sqrt(var) * node)[:, None]
            f_mean, f_var = moments(rbf(0.8, 1.2), Zs[1], h, loc2, factor2)
            ell = -0.5 * jnp.log(2 * jnp.pi * 0.16)
            ell = ell - ((y - f_mean) ** 2 + f_var) / 0.32
            total = total + weight * jnp.sum(ell)
        return total

    def estimate(params, key):
        return -loss.loss(key, params, model, guide, X, y)

    params = jax.tree.map(jnp.asarray, params)
    draws = jax.jit(jax.vmap(jax.value_and_grad(estimate), (None, 0)))(
        params, jr.split(jr.key(6), 4000)
    )
    value, slope = jax.jit(jax.value_and_grad(exact))(params)
    for drawn, truth in zip(
        jax.tree.leaves(draws), jax.tree.leaves((value, slope)), strict=True
    ):
        error = np.abs(np.mean(drawn, axis=0) - truth)
        standard_error = np.std(drawn, axis=0) / 4000**0.5
        assert np.all(error < 4.9 * standard_error + 1e-9)


def latent_bounds(num_replicates, model, params, X, y, num_draws):
    """Draws of the bound; of `ELBO` with no replicates."""
    guide = gpx.guides.UnscentedLatent(gpx.guides.WhitenedGaussian(model))
    guide.setup(X, y)
    loss = gpx.infer.ELBO(draw_latents=True)
    if num_replicates:
        loss = gpx.infer.ImportanceWeighted(num_replicates)

    @jax.jit
    def each(keys):
        def one(key):
            return -loss.loss(key, params, model, guide, X, y)

        return jax.lax.map(one, keys, batch_size=500)

    return np.asarray(each(jr.split(jr.key(num_replicates), num_draws)))


def mean_and_error(draws):
    return draws.mean(), draws.std() / len(draws) ** 0.5


def latent_evidence():
    """log p(y) of two layers with a latent input: draws of h and f1, f2 closed."""
    _, _, X, y, _ = toy(num_latents=1)
    rng = np.random.default_rng(11)
    total = []
    for _ in range(4000):
        inputs = np.concatenate([X, rng.normal(size=(5, 1))], axis=1)
        K1 = np.asarray(1.3 * np.exp(-0.5 * _squares(inputs) / 0.81))
        f1 = X[:, 0] + np.linalg.cholesky(K1 + 1e-10 * np.eye(5)) @ rng.normal(size=5)
        K2 = 0.8 * np.exp(-0.5 * _squares(f1[:, None]) / 1.44) + 0.16 * np.eye(5)
        total.append(scipy.stats.multivariate_normal(cov=K2).logpdf(y))
    total = np.array(total)
    weights = np.exp(total - total.max())
    error = weights.std() / weights.mean() / len(total) ** 0.5
    return np.log(weights.mean()) + total.max(), error


def _squares(X):
    return ((X[:, None] - X[None]) ** 2).sum(-1)


@pytest.mark.slow
def test_importance_weights_of_deep_gps_tighten_below_the_evidence():
    """At a trained guide, where little separates the bounds: 4.9 standard errors."""
    X, y = data(5, 1, seed=3)
    grid = np.stack(np.meshgrid(np.linspace(-1.5, 1.5, 4), [-1.2, 0.0, 1.2]), -1)
    Zs = [grid.reshape(-1, 2), np.linspace(-2.5, 2.5, 7)[:, None]]
    model = two_layers(Zs, 1)
    guide = gpx.guides.UnscentedLatent(gpx.guides.WhitenedGaussian(model))
    fit = gpx.fit_svi(
        model, guide, X, y, key=jr.key(0), num_steps=800, progress=False,
        loss=gpx.infer.ImportanceWeighted(5), optimizer=optax.adam(0.02),
    )  # fmt: skip
    found = {
        S: mean_and_error(latent_bounds(S, model, fit.params, X, y, 4000))
        for S in (0, 1, 25)
    }
    evidence, error = latent_evidence()
    assert error < 0.03
    gap = found[25][0] - found[1][0]
    assert gap > 4.9 * np.hypot(found[25][1], found[1][1])
    # Eq. 82 at S = 1 is eq. 80.
    gap = abs(found[0][0] - found[1][0])
    assert gap < 4.9 * np.hypot(found[0][1], found[1][1])
    assert found[25][0] < evidence + 4.9 * np.hypot(error, found[25][1])
    # Measured 3.9: layers and functions that are independent in the guide.
    assert found[25][0] > evidence - 5.0


def two_replicates(params, x, y, correlated):
    """The bound of one row with two replicates, by quadrature over h and f1."""
    Zs = toy(num_latents=1)[-1]
    nodes, weights = np.polynomial.hermite_e.hermegauss(14)
    weights = weights / weights.sum()
    e = np.stack(np.meshgrid(*[nodes] * 4, indexing="ij"), -1).reshape(-1, 4)
    w = np.prod(np.stack(np.meshgrid(*[weights] * 4, indexing="ij"), -1), -1).ravel()
    loc, scale = params["h1_auto_loc"].item(), params["h1_auto_scale"].item()
    h = loc + scale * e[:, :2]  # (Q, 2)
    log_weight = scipy.stats.norm.logpdf(h) - scipy.stats.norm(loc, scale).logpdf(h)

    def k(variance, lengthscale, a, b):
        squares = ((a[..., :, None, :] - b[..., None, :, :]) ** 2).sum(-1)
        return variance * np.exp(-0.5 * squares / lengthscale**2)

    def solved(kernel, Z, inputs):
        K = k(*kernel, Z, Z)
        L = np.linalg.cholesky(K + 1e-8 * kernel[0] * np.eye(2))
        return np.linalg.solve(L, k(*kernel, Z, inputs))  # (Q, 2, S)

    first, second = (1.3, 0.9), (0.8, 1.2)
    inputs = np.stack([np.full_like(h, x), h], axis=-1)  # (Q, S, 2)
    A = solved(first, Zs[0], inputs)
    loc1, F1 = params["f1_auto_loc"][0], params["f1_auto_scale_tril"][0]
    mean = x + np.einsum("qms,m->qs", A, loc1)
    FA = np.einsum("mn,qms->qns", F1, A)
    cov = k(*first, inputs, inputs) - np.swapaxes(A, 1, 2) @ A
    cov = cov + np.swapaxes(FA, 1, 2) @ FA
    rho = cov[:, 0, 1] if correlated else 0.0
    root = np.sqrt(cov[:, 0, 0])
    f_a = mean[:, 0] + root * e[:, 2]
    left = np.sqrt(np.maximum(cov[:, 1, 1] - (rho / root) ** 2, 0.0))
    f_b = mean[:, 1] + rho / root * e[:, 2] + left * e[:, 3]
    A2 = solved(second, Zs[1], np.stack([f_a, f_b], -1)[..., None])
    loc2, F2 = params["f2_auto_loc"], params["f2_auto_scale_tril"]
    FA = np.einsum("mn,qms->qns", F2, A2)
    var = 0.8 - (A2**2).sum(1) + (FA**2).sum(1)
    f = np.einsum("qms,m->qs", A2, loc2)
    ell = scipy.stats.norm(f, 0.4).logpdf(y) - 0.5 * var / 0.16
    inside = scipy.special.logsumexp(ell + log_weight, axis=1) - np.log(2.0)
    divergences = 0.0
    for loc, F in ((loc1, F1), (loc2, F2)):
        trace = np.sum(F**2) + loc @ loc - 2.0
        divergences += 0.5 * trace - np.sum(np.log(np.diagonal(F)))
    return w @ inside - divergences


def test_two_replicates_equal_quadrature_over_a_shared_function():
    """False alarms below 1e-4; a function of its own for each replicate is told."""
    model, params, *_ = toy(num_latents=1)
    params["h1_auto_loc"] = np.array([[0.4]])
    params["h1_auto_scale"] = np.array([[0.7]])
    X, y = jnp.asarray([[0.3]]), jnp.asarray([1.1])
    found, error = mean_and_error(latent_bounds(2, model, params, X, y, 40000))
    together, apart = (two_replicates(params, 0.3, 1.1, c) for c in (True, False))
    assert abs(found - together) < 4.0 * error
    assert abs(found - apart) > 8.0 * error


def test_rows_of_an_inner_layer_are_drawn_jointly_on_request():
    """Covariances of two near rows over draws of the noise: the GP's own, or none."""
    _, params, X, y, Zs = toy()
    X = jnp.asarray([[0.2], [0.35], [2.0]])

    def layer(full_cov):
        model = gpx.models.deep_gp(
            [gpx.inducing.Points(Z) for Z in Zs], widths=(1,), kernel=rbf(),
            full_cov=full_cov, likelihood=gpx.likelihoods.Gaussian(0.4),
        )  # fmt: skip
        known = {"f1": jnp.zeros((1, 2)), "f2": jnp.zeros(2)}

        def draw(key):
            return Call(model, (X,)).trace(known, key)["layer1"]["value"][:, 0]

        return np.asarray(jax.jit(jax.vmap(draw))(jr.split(jr.key(3), 20000)))

    K, Kuf = np.asarray(rbf()(X)), np.asarray(rbf()(Zs[0], X))
    cov = K - Kuf.T @ np.linalg.solve(np.asarray(rbf()(Zs[0])), Kuf)
    # Standard errors of at most 1.4 / sqrt(20000) times the variance 1.3.
    assert_allclose(np.cov(layer(True).T), cov, atol=0.06)
    assert_allclose(np.cov(layer(False).T), np.diag(np.diag(cov)), atol=0.06)


def test_three_layers_with_a_latent_input_in_the_middle_have_true_gradients():
    X, y = data(6)
    model = gpx.models.deep_gp(
        gpx.inducing.Points(X[:3], learn=True), widths=(2, 1), kernel=rbf(),
        num_latents=(0, 1, 0), likelihood=gpx.likelihoods.Gaussian(0.4),
    )  # fmt: skip
    guide = gpx.guides.UnscentedLatent(gpx.guides.WhitenedGaussian(model))
    guide.setup(X, y)
    loss = gpx.infer.ImportanceWeighted(3)

    @jax.jit
    def start(key):
        svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), loss)
        return svi.get_params(svi.init(key, X, y))

    params = start(jr.key(0))
    assert params["f2/Z"].shape == (3, 3) and params["f3/Z"].shape == (3, 1)
    along = {
        n: jnp.tril(jr.normal(jr.fold_in(jr.key(1), i), x.shape))
        if n.endswith("scale_tril")
        else jr.normal(jr.fold_in(jr.key(1), i), x.shape)
        for i, (n, x) in enumerate(params.items())
    }

    @jax.jit
    def value_and_slope(step):
        def bound(step):
            moved = {n: x + step * along[n] for n, x in params.items()}
            return loss.loss(jr.key(2), moved, model, guide, X, y)

        return jax.value_and_grad(bound)(step)

    # Inner layers start at a scale of 0.001: steps are far below it.
    above, below = (value_and_slope(step)[0] for step in (1e-6, -1e-6))
    assert_allclose(value_and_slope(0.0)[1], (above - below) / 2e-6, rtol=1e-4)


def test_replicates_share_one_function():
    """Covariance of an inner layer over draws is the GP's own across replicates."""
    kernel, Z = rbf(), np.array([[-0.7], [0.9]])
    belief_mean = jnp.array([[0.3, -0.5], [0.1, 0.2]])
    X = np.random.default_rng(9).normal(size=(3, 4, 1))  # 3 replicates of 4 rows

    def layer(x):
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z), num_outputs=2)
        with numpyro.plate("data", 4):
            return gpx.propagate("layer", f(x))

    def draw(key):
        def one(x):
            with shared_replicates(axis="replicates"):
                trace = Call(layer, (x,)).trace({"f": belief_mean}, key)
            return trace["layer"]["value"]

        return jax.vmap(one, axis_name="replicates")(X)

    draws = np.asarray(jax.jit(jax.vmap(draw))(jr.split(jr.key(1), 20000)))
    Kuu = np.asarray(kernel(Z)) + 1.3e-8 * np.eye(2)
    for row in range(4):
        x = X[:, row]
        A = np.linalg.solve(np.linalg.cholesky(Kuu), np.asarray(kernel(Z, x)))
        cov = np.asarray(kernel(x)) - A.T @ A
        for output in range(2):
            found = draws[:, :, row, output]
            assert_allclose(np.cov(found.T), cov, atol=0.05)
            assert_allclose(found.mean(0), A.T @ belief_mean[output], atol=0.05)
    between_rows = np.corrcoef(draws[:, 0, 0, 0], draws[:, 0, 1, 0])[0, 1]
    assert abs(between_rows) < 0.03


def test_inner_layers_start_nearly_deterministic():
    X, y = data()
    model = gpx.models.deep_gp(gpx.inducing.Points(X[:4]), widths=(2,))
    sites = structure_of(Call(model, (X, y))).latents
    assert sites["f1"].inner and not sites["f2"].inner
    fit = gpx.fit_svi(
        model, gpx.guides.WhitenedGaussian(model), X, y, key=jr.key(0), num_steps=1,
        progress=False,
    )  # fmt: skip
    assert np.all(np.abs(fit.params["f1_auto_scale_tril"]) < 0.05)
    assert np.all(np.diagonal(fit.params["f2_auto_scale_tril"]) > 0.9)


def test_layers_pass_their_inputs_on():
    X, _ = data(30, 3)
    shrunk = gpx.means.skip(X, 2)
    directions = np.linalg.svd(X)[2][:2].T
    assert_allclose(shrunk(X), X @ directions, atol=1e-12)
    assert_allclose(gpx.means.skip(X, 3)(X), X)
    grown = np.asarray(gpx.means.skip(X, 5)(X))
    assert_allclose(grown, np.concatenate([X, np.zeros((30, 2))], axis=1))


def test_convolutions_are_sums_over_windows():
    rng = np.random.default_rng(0)
    X, weights = rng.normal(size=(2, 2 * 4 * 5)), rng.normal(size=(3, 2, 3, 3))
    mean = gpx.means.Convolution((2, 4, 5), weights, stride=1)
    found = np.asarray(mean(X)).reshape(2, 3, 4, 5)
    padded = np.pad(X.reshape(2, 2, 4, 5), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for i in range(4):
        for j in range(5):
            window = padded[:, :, i : i + 3, j : j + 3]
            expected = np.einsum("ncij,kcij->nk", window, weights)
            assert_allclose(found[:, :, i, j], expected, atol=1e-12)
    strided = gpx.means.Convolution((2, 4, 5), weights, stride=2)(X)
    assert_allclose(strided, found[:, :, ::2, ::2].reshape(2, -1), atol=1e-12)
    with pytest.raises(ValueError, match="windows of odd height and width"):
        gpx.means.Convolution((2, 4, 5), weights[..., :2])
    with pytest.raises(ValueError, match="40 columns of images"):
        mean(X[:, :-1])


def test_images_pass_through_learnt_convolutions():
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(8, 36)), rng.integers(0, 3, 8)
    model = gpx.models.deep_gp(
        gpx.inducing.Points(X[:4], learn=True), widths=(18,), num_outputs=3,
        likelihood=gpx.likelihoods.RobustMax(3),
        mean=[
            gpx.models.priors.convolution((1, 6, 6), num_channels=2, stride=2),
            gpx.means.Zero(),
        ],
    )  # fmt: skip
    assert "f1/weights" in structure_of(Call(model, (X, y))).params
    guide = gpx.guides.WhitenedGaussian(model)
    fit = gpx.fit_svi(
        model, guide, X, y, key=jr.key(0), num_steps=3, batch_size=4, progress=False
    )
    assert fit.params["f1/weights"].shape == (2, 1, 3, 3)
    assert fit.predict(X[:2]).probabilities.shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": (2,), "kernel": [rbf()] * 3}, "one for each of the 2 layers"),
        ({"widths": (0,)}, r"`widths \(each\)` must be a whole number, at least 1"),
        ({"widths": (2,), "num_latents": (1, -1)}, "`num_latents`"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        gpx.models.deep_gp(gpx.inducing.Points(data()[0][:4]), **arguments)


def test_a_number_in_the_place_of_widths_is_named():
    with pytest.raises(TypeError, match=r"`widths` must be a sequence, `\(2,\)`"):
        gpx.models.deep_gp(gpx.inducing.Points(data()[0][:4]), widths=2)


def test_an_array_in_the_place_of_inducing_points_is_named():
    Z = data()[0][:4]
    words = r"`inducing` must be a Points, .*gpx.inducing.Points\(Z, learn=True\); got"
    for inducing in (Z, [gpx.inducing.Points(Z), Z]):
        with pytest.raises(TypeError, match=words):
            gpx.models.deep_gp(inducing, widths=(2,))
    with pytest.raises(ValueError, match="`inducing` must be .* each of the 3 layers"):
        gpx.models.deep_gp([gpx.inducing.Points(Z)] * 2, widths=(2, 2))


def test_later_layers_learn_their_inputs_if_the_first_does():
    X, y = data()

    def params(inducing):
        model = gpx.models.deep_gp(inducing, widths=(2, 2))
        return set(structure_of(Call(model, (X, y))).params)

    fixed, learnt = (gpx.inducing.Points(X[:4], learn=learn) for learn in (False, True))
    assert params(fixed) == set()
    assert params(learnt) == {"f1/Z", "f2/Z", "f3/Z"}
    assert params([fixed, learnt, fixed]) == {"f2/Z"}


def test_points_that_a_mean_function_takes_to_one_place_stand_there_once():
    Z = np.array([[0.1, 2.0], [0.1, -2.0], [0.7, 1.0]])
    model = gpx.models.deep_gp(
        gpx.inducing.Points(Z, learn=True), widths=(1,),
        mean=(gpx.means.Projection(jnp.array([[1.0], [0.0]])), gpx.means.Zero()),
    )  # fmt: skip
    X, y = data()
    with numpyro.handlers.seed(rng_seed=0):
        trace = numpyro.handlers.trace(model).get_trace(X, y)
    assert_allclose(trace["f2/Z"]["value"], [[0.1], [0.7]])


def test_inputs_that_do_not_fit_are_named():
    X, y = data()
    model = gpx.models.deep_gp(gpx.inducing.Points(X[:4]), widths=(2,))
    words = r"2 known columns of `inducing`; got shape \(12, 1\)"
    with pytest.raises(ValueError, match=words):
        structure_of(Call(model, (X[:, :1], y)))


def scalar_layers():
    """Two layers with one inducing variable each, and both targets on a grid.

    Returns the model, its data, and by target the means and standard deviations of
    `v1` and `v2`, from the definition with Gauss-Hermite over each row's noise.
    """
    X = np.array([[-0.8], [0.1], [0.9], [1.5]])
    y = np.array([0.4, -0.3, 0.8, 0.3])
    model = gpx.models.deep_gp(
        [gpx.inducing.Points([[0.3]]), gpx.inducing.Points([[0.5]])], widths=(1,),
        kernel=[rbf(0.8, 1.7), rbf(1.2, 0.9)],
        likelihood=gpx.likelihoods.Gaussian(0.25),
    )  # fmt: skip
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = (weights / weights.sum())[:, None, None]
    grid = np.linspace(-5.0, 5.0, 161)
    a1 = 0.8 * np.exp(-0.5 * ((X[:, 0] - 0.3) / 1.7) ** 2) / np.sqrt(0.8 * (1 + 1e-8))
    log_a, log_b = (np.zeros((161, 161)) for _ in range(2))
    for i, v1 in enumerate(grid):
        sd = np.sqrt(0.8 - a1**2)
        h = X[:, 0] + a1 * v1 + sd * nodes[:, None]  # (40, 4)
        a2 = 1.2 * np.exp(-0.5 * ((h - 0.5) / 0.9) ** 2) / np.sqrt(1.2 * (1 + 1e-8))
        mean, var = a2[:, :, None] * grid, (1.2 - a2**2)[:, :, None]
        ell = -0.5 * ((y[:, None] - mean) ** 2 + var) / 0.0625  # (40, 4, 161)
        prior = -0.5 * (v1**2 + grid**2)
        log_a[i] = np.sum(weights * ell, axis=(0, 1)) + prior
        log_b[i] = np.sum(np.log(np.sum(weights * np.exp(ell), axis=0)), axis=0) + prior
    return model, X, y, {"A": _moments(grid, log_a), "B": _moments(grid, log_b)}


def _moments(grid, log_p):
    p = np.exp(log_p - log_p.max())
    found = []
    for marginal in (p.sum(1) / p.sum(), p.sum(0) / p.sum()):
        mean = marginal @ grid
        found.append((mean, np.sqrt(marginal @ (grid - mean) ** 2)))
    return np.array(found)


@pytest.mark.slow
def test_samplers_find_the_target_that_they_say():
    """Means and sds within 10 % of the sd: over 4 standard errors of 8000 draws.

    The two targets differ by more than that, so that a mixed-up one would show.
    """
    model, X, y, targets = scalar_layers()
    options = dict(key=jr.key(1), progress=False, num_samples=4000)
    fits = {
        "nuts A": gpx.fit_nuts(model, X, y, noise_sets=64, **options),
        "nuts B": gpx.fit_nuts(model, X, y, noise_sets=None, **options),
        "sghmc A": gpx.fit_sghmc(
            model, X, y, step_size=0.1, num_integration_steps=40, **options
        ),
    }
    sds = targets["A"][:, 1], targets["B"][:, 1]
    assert np.max(np.abs(sds[0] / sds[1] - 1.0)) > 0.2
    for name, fit in fits.items():
        draws = fit.draws()
        found = np.array(
            [(x.mean(), x.std()) for x in (draws["f1"].ravel(), draws["f2"].ravel())]
        )
        truth = targets[name[-1]]
        assert np.all(np.abs(found - truth) < 0.1 * truth[:, 1:]), (name, found, truth)


def test_latent_inputs_that_would_become_points_are_named():
    X, y = data()
    model = gpx.models.deep_gp(gpx.inducing.Points(X[:3]), num_latents=1)
    guide = gpx.guides.WhitenedGaussian(model)
    (note,) = doubts_of(guide, Program.of(Call(model, (X, y))))
    assert note.kind == "row_points" and "Latent inputs ['h1']" in note.message
