"""Likelihoods inside models: several latent functions, every engine, predictions."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior
from numpyro_gpx.sites.expected_likelihood import ExpectedLikelihood

_rng = np.random.default_rng(2)
N = 14
X = np.sort(_rng.uniform(-2.0, 2.0, N))[:, None]
Z = gpx.inducing.Points(np.linspace(-2.0, 2.0, 4)[:, None])
KERNEL = gpx.kernels.RBF(variance=1.2, lengthscale=0.8)
REALS = np.sin(X[:, 0]) + 0.3 * _rng.normal(size=N)
COUNTS, CLASSES = _rng.poisson(2.0, N).astype(float), np.arange(N) % 3 * 1.0
POSITIVE, SHARES = np.exp(REALS), 1.0 / (1.0 + np.exp(-REALS))
L = gpx.likelihoods

# Every likelihood, with targets it can have.
ENGINES = {
    "gaussian": (L.Gaussian(0.4), REALS),
    "gaussian-piecewise": (
        L.Gaussian(0.4, gpx.links.PiecewiseConstant.of("identity", num_pieces=9)),
        REALS,
    ),
    "heteroscedastic": (L.HeteroscedasticGaussian(), REALS),
    "heteroscedastic-softplus": (L.HeteroscedasticGaussian(link="softplus"), REALS),
    "student_t": (L.StudentT(3.0, 0.4), REALS),
    "laplace": (L.Laplace(0.4), REALS),
    "bernoulli": (L.Bernoulli(), (REALS > 0) * 1.0),
    "bernoulli-robust": (L.Bernoulli(link="robust"), (REALS > 0) * 1.0),
    "binomial": (L.Binomial(9), np.minimum(COUNTS, 9.0)),
    "poisson": (L.Poisson(), COUNTS),
    "poisson-softplus": (L.Poisson(link="softplus"), COUNTS),
    "negative_binomial": (L.NegativeBinomial(2.0), COUNTS),
    "gamma": (L.Gamma(2.0), POSITIVE),
    "exponential": (L.Exponential(), POSITIVE),
    "beta": (L.Beta(5.0), SHARES),
    "ordinal": (L.Ordinal([-0.5, 0.6]), CLASSES),
    "categorical": (L.Categorical(3), CLASSES),
    "robust_max": (L.RobustMax(3), CLASSES),
    "per_output": (
        L.PerOutput((L.Gaussian(0.3), L.Poisson())), np.stack([REALS, COUNTS], 1)
    ),
    "from": (L.From(lambda f: dist.Cauchy(f, 0.4)), REALS),
    "from-two": (
        # A Gumbel here has no expected log density: its tail is an exponential of one.
        L.From(lambda f: dist.StudentT(4, f[..., 0], jnp.exp(f[..., 1])), num_latent=2),
        REALS,
    ),
}  # fmt: skip


def make_model(likelihood, inducing=Z):
    outputs = None if likelihood.num_latent == 1 else likelihood.num_latent

    def model(inputs, y=None, *, batch_size=None):
        f = gpx.gp("f", KERNEL, inducing=inducing, num_outputs=outputs)
        with numpyro.plate("data", inputs.shape[0], subsample_size=batch_size) as i:
            gpx.observe("y", f(inputs[i]), likelihood, obs=y, rows=i)

    return model


@pytest.mark.parametrize("name", list(ENGINES))
def test_every_likelihood_has_finite_gradients_under_every_engine(name):
    """The bound (SVI), the density (NUTS) and its minibatch estimate (SGHMC).

    One compilation for all three; the estimates average to the density.
    """
    likelihood, y = ENGINES[name]
    model, data = make_model(likelihood), (jnp.asarray(X), jnp.asarray(y))
    guide = gpx.guides.WhitenedGaussian(model)
    guide.setup(*data)
    target, batched = (
        Target(Call(model, data)),
        Target(Call(model, data, {"batch_size": 7})),
    )
    shape = target.structure.latents["f"].shape
    v = {"f": 0.5 * jr.normal(jr.key(0), shape)}
    halves = jnp.stack([jnp.arange(7), jnp.arange(7, 14)])

    @jax.jit
    def gradients(v):
        def bound(loc):
            scale = jnp.broadcast_to(0.3 * jnp.eye(4), (*shape, 4))
            params = {"f_auto_loc": loc, "f_auto_scale_tril": scale}
            return -gpx.infer.ELBO().loss(jr.key(1), params, model, guide, *data)

        def half(rows):
            return batched.log_density(v, batch={"data": rows})

        return (
            jax.value_and_grad(bound)(v["f"]),
            jax.value_and_grad(target.log_density)(v),
            jax.vmap(half)(halves),
        )

    svi, nuts, estimates = gradients(v)
    for leaf in jax.tree.leaves((svi, nuts)):
        assert np.all(np.isfinite(leaf))
    assert np.any(np.abs(svi[1]) > 1e-3) and np.any(np.abs(nuts[1]["f"]) > 1e-3)
    assert_allclose(np.mean(estimates), nuts[0], rtol=1e-9)


def fit_of(likelihood, y, draws):
    posterior = ChainPosterior({"f": draws})
    return gpx.Fit(
        Program.unchecked(Call(make_model(likelihood), (X, y))),
        posterior,
        facts=gpx.engines.NUTS().facts,
    )


def test_quantiles_invert_the_predictive_distribution():
    """Of a mixture over draws of `v`; against 20000 draws, 5 standard errors (6e-7)."""
    draws = 0.4 * np.random.default_rng(0).normal(size=(1, 30, 4))
    prediction = fit_of(L.Gaussian(0.4), REALS, draws).predict(X)
    q = prediction.quantile([0.1, 0.5, 0.9])
    assert q.shape == (3, N)
    sample = prediction.sample(jr.key(1), 21_000)
    for level, values in zip((0.1, 0.5, 0.9), q, strict=True):
        below = np.mean(sample <= values, axis=0)
        error = 5.0 * np.sqrt(level * (1.0 - level) / 21_000)
        assert_allclose(below, level, atol=error)
    shifted = prediction.rescaled(3.0, 2.0).quantile(0.9)
    assert_allclose(shifted, 3.0 + 2.0 * q[2], rtol=1e-10)
    with pytest.raises(ValueError, match="`scale` must be positive; got -1.0"):
        prediction.rescaled(0.0, -1.0)
    with pytest.raises(ValueError, match="`q` must lie between 0 and 1; got 1.5"):
        prediction.quantile(1.5)


def fitted(model, *args):
    guide = gpx.guides.WhitenedGaussian(model)
    options = dict(key=jr.key(0), num_steps=3, progress=False)
    return gpx.fit_svi(model, guide, X, *args, **options)


def test_supports_may_depend_on_arguments_and_samples_of_the_model():
    """They are checked before anything is compiled, with concrete values."""

    def trials(inputs, y=None, n=None):
        f = gpx.gp("f", KERNEL, inducing=Z)
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), L.Binomial(n), obs=y)

    n = 6.0 + np.arange(N) % 3
    y = np.minimum(COUNTS, n)
    fit = fitted(trials, y, n)
    prediction = fit.predict(X[:11], n=n[:11])  # padded to 16 rows
    log_p = prediction.log_prob(y[:11])
    assert_allclose(log_p, fit.predict(X, n=n).log_prob(y)[:11], rtol=1e-9)
    with pytest.raises(ValueError, match="from 0 to `total_count`"):
        fitted(trials, y + 5.0, n)

    def sampled(inputs, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = gpx.gp("f", KERNEL, inducing=Z)
        likelihood = L.From(lambda f, s: dist.LogNormal(f, 2.0 * s), scale)
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), likelihood, obs=y)

    fit = fitted(sampled, POSITIVE)
    low, high = fit.predict(X).quantile([0.05, 0.95])
    assert np.all(low > 0.0) and np.all(high > low)
    with pytest.raises(ValueError, match="must hold values in the support"):
        fitted(sampled, -POSITIVE)


def test_parameters_of_rows_follow_rows_or_are_refused():
    rng = np.random.default_rng(1)
    a, m, v = jnp.asarray(rng.uniform(1.0, 3.0, 5)), jnp.zeros(5), jnp.ones(5)
    link = gpx.links.PiecewiseConstant.of("exp", num_pieces=7)
    together = L.Gamma(a, link=link).predictive_moments(m, v)
    alone = [L.Gamma(one, link=link).predictive_moments(m[0], v[0]) for one in a]
    assert_allclose(together.var, [moments.var for moments in alone], rtol=1e-10)
    with pytest.raises(ValueError, match=r"scalar parameters; got .*\['scale'\]"):
        L.Gaussian(a).predictive(m, v)
    with numpyro.handlers.seed(rng_seed=0):
        f = gpx.gp("f", KERNEL, inducing=Z)(X)
    column = L.Gaussian(np.full((N, 1), 0.4))
    fn = ExpectedLikelihood(f, column)
    with pytest.raises(ValueError, match=r"have shape \(14, 14\)"):
        fn.log_prob(jnp.asarray(REALS))


def test_far_outliers_of_a_student_t_keep_their_log_density():
    """Where `f` is nearly known the expectation is the log density."""
    y = np.array([1e2, 1e3, 1e4, 1e5])
    ours = L.StudentT(3.0, 0.01).expected_log_prob(
        jnp.asarray(y), jnp.zeros(4), jnp.full(4, 1e-8)
    )
    assert_allclose(ours, scipy.stats.t.logpdf(y, 3.0, scale=0.01), atol=1e-6)


def test_quantiles_of_counts_are_the_least_counts_that_reach_the_level():
    v = np.zeros((1, 1, 4))
    fit = fit_of(L.Poisson(exposure=5.0), COUNTS, v)
    far = np.array([[40.0]])  # where the prior is N(0, 1.2)
    rates = 5.0 * np.exp(
        np.sqrt(1.2) * scipy.stats.norm.ppf((np.arange(20000) + 0.5) / 2e4)
    )
    for level in (0.05, 0.5, 0.95):
        found = float(fit.predict(far).quantile(level)[0])
        assert found == int(found)
        cdf = scipy.stats.poisson.cdf([found - 1, found], rates[:, None]).mean(axis=0)
        # 1000 draws: 5 standard errors of their level are at most 0.08.
        assert cdf[0] < level + 0.08 and cdf[1] > level - 0.08


def test_distributions_without_a_distribution_function_use_draws():
    likelihood = L.From(lambda f: dist.VonMises(f, 2.0))
    draws = 0.4 * np.random.default_rng(0).normal(size=(1, 5, 4))
    prediction = fit_of(likelihood, np.clip(REALS, -3.0, 3.0), draws).predict(X)
    assert_allclose(
        prediction.quantile(0.3), np.quantile(prediction.draws, 0.3, axis=0)
    )


def test_probabilities_of_labels_average_over_draws():
    draws = np.random.default_rng(0).normal(size=(1, 40, 3, 4))
    prediction = fit_of(L.Categorical(3), CLASSES, draws).predict(X)
    p = prediction.probabilities
    assert p.shape == (N, 3)
    assert_allclose(p.sum(axis=1), 1.0, rtol=1e-10)
    log_p = prediction.log_prob(CLASSES)
    assert_allclose(log_p, np.log(p[np.arange(N), CLASSES.astype(int)]), rtol=1e-10)
    with pytest.raises(ValueError, match="`y` must hold classes 0, ..., 2"):
        prediction.log_prob(CLASSES + 1.0)


def test_classes_are_compared_by_their_error_rate():
    fits = {
        name: fit_of(L.Categorical(3), CLASSES, scale * np.ones((1, 4, 3, 4)))
        for name, scale in (("a", 1.0), ("b", 0.0))
    }
    table = gpx.compare(fits, X, CLASSES).fits
    p = fits["a"].predict(X).probabilities
    assert_allclose(table["error_rate"]["a"], np.mean(np.argmax(p, 1) != CLASSES))


def two_gps(X, y=None):
    f = gpx.gp("f", KERNEL, inducing=Z)
    g = gpx.gp("g", gpx.kernels.Matern32(0.5, 1.4), inducing=gpx.inducing.Points(X[:3]))
    with numpyro.plate("data", X.shape[0]):
        latent = gpx.stack(f(X) + 0.2, g(X))
        gpx.observe("y", latent, L.HeteroscedasticGaussian(), obs=y)


def test_stacked_gps_are_the_columns_of_one_latent():
    f, g = jnp.asarray([0.3, -0.4, 0.8, 0.1]), jnp.asarray([0.5, -0.2, 0.4])
    values = {"f": f, "g": g}
    seeded = numpyro.handlers.seed(two_gps, 0)
    trace = numpyro.handlers.trace(
        numpyro.handlers.substitute(seeded, data=values)
    ).get_trace(jnp.asarray(X), jnp.asarray(REALS))
    latent = trace["y"]["fn"].latent
    assert latent.shape == (N, 2)
    assert latent.sites == {"f", "g"}
    for j, (kernel, points, name) in enumerate(
        ((KERNEL, Z.Z, "f"), (gpx.kernels.Matern32(0.5, 1.4), X[:3], "g"))
    ):
        Kuu = np.asarray(kernel(points))
        Kuu = Kuu + 1e-8 * np.mean(np.diag(Kuu)) * np.eye(len(Kuu))
        A = np.linalg.solve(np.linalg.cholesky(Kuu), np.asarray(kernel(points, X)))
        shift = 0.2 if name == "f" else 0.0
        assert_allclose(latent.mean[:, j], A.T @ values[name] + shift, rtol=1e-7)
        var = np.diag(np.asarray(kernel(X))) - np.sum(A**2, axis=0)
        assert_allclose(latent.var[:, j], var, rtol=1e-6, atol=1e-7)
    assert trace["y"]["fn"].batch_shape == (N,)
    assert trace["y"]["fn"].event_shape == ()


def test_latents_that_cannot_be_stacked_are_refused():
    with numpyro.handlers.seed(rng_seed=0):
        f = gpx.gp("f", KERNEL, inducing=Z)
        g = gpx.gp("g", KERNEL, inducing=Z)
        with pytest.raises(ValueError, match=r"sites; several use \['f'\]"):
            gpx.stack(f(X), 2.0 * f(X))
        with pytest.raises(TypeError, match="Product, a product"):
            gpx.stack(f(X) * g(X), f(X))
        with pytest.raises(ValueError, match=r"needs 2 latent functions.*got \(14,\)"):
            gpx.observe("y", f(X), L.HeteroscedasticGaussian(), obs=REALS)
        with pytest.raises(ValueError, match=r"`offset` .* must have shape \(14, 2"):
            latent = gpx.stack(f(X), g(X))
            likelihood = L.HeteroscedasticGaussian()
            gpx.observe("y", latent, likelihood, obs=REALS, offset=np.zeros(N))


def test_nan_is_missing_only_when_asked_for():
    y = np.stack([REALS, REALS[::-1]], axis=1)
    y[3, 0] = y[5] = np.nan

    def model(inputs, y=None, *, missing=False):
        f = gpx.gp("f", KERNEL, inducing=Z, num_outputs=2)
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), L.Gaussian(0.4), obs=y, missing=missing)

    guide = gpx.guides.OptimalGaussian(model)
    with pytest.raises(ValueError, match=r"must be finite; got nan at index \(3, 0\)"):
        gpx.fit_lbfgs(model, guide, X, y, key=jr.key(0), progress=False)
    fit = gpx.fit_lbfgs(model, guide, X, y, key=jr.key(0), progress=False, missing=True)
    alone = gpx.models.svgp(Z, kernel=KERNEL, likelihood=L.Gaussian(0.4))
    for j in (0, 1):
        keep = np.isfinite(y[:, j])
        one = gpx.fit_lbfgs(
            alone, gpx.guides.OptimalGaussian(alone), X[keep], y[keep, j],
            key=jr.key(0), progress=False,
        )  # fmt: skip
        assert_allclose(fit.predict(X).mean[:, j], one.predict(X).mean, rtol=1e-8)
        assert_allclose(fit.predict(X).var[:, j], one.predict(X).var, rtol=1e-8)
    assert gpx.loo(fit)["n_data_points"] == N - 1  # row 5 has nothing


def test_values_of_the_model_must_be_handed_to_a_distribution():
    def hidden(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = gpx.gp("f", KERNEL, inducing=Z)
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), L.From(lambda f: dist.Cauchy(f, scale)), obs=y)

    words = r"`fn` uses `scale`.*From\(lambda f, scale: ..., scale\)"
    with pytest.raises(ValueError, match=words):
        gpx.fit_nuts(hidden, X, REALS, key=jr.key(0), progress=False)


def test_a_distribution_with_a_sampled_parameter_predicts():
    def model(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = gpx.gp("f", KERNEL, inducing=Z)
        likelihood = L.From(lambda f, scale: dist.Normal(f, scale), scale)
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), likelihood, obs=y)

    def plain(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = gpx.gp("f", KERNEL, inducing=Z)
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), L.Gaussian(scale), obs=y)

    draws = ChainPosterior(
        {"scale": np.linspace(0.5, 0.9, 6)[None], "f": np.full((1, 6, 4), 0.3)}
    )
    ours, reference = (
        gpx.Fit(
            Program.unchecked(Call(one, (X, REALS))),
            draws,
            facts=gpx.engines.NUTS().facts,
        ).predict(X)
        for one in (model, plain)
    )
    assert_allclose(ours.mean, reference.mean, rtol=1e-10)
    assert_allclose(ours.var, reference.var, rtol=1e-10)
    assert_allclose(ours.log_prob(REALS), reference.log_prob(REALS), atol=1e-5)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: L.From(lambda f: 3.0).distribution(jnp.ones(2)), "got float"),
        (
            lambda: L.From(lambda f: dist.Normal(f, 1.0).to_event(1)).distribution(
                jnp.ones(2)
            ),
            r"got events of shape \(2,\)",
        ),
        (lambda: L.From(dist.Normal, num_latent=4), "`num_latent` must be 1, 2 or 3"),
        (lambda: L.Categorical(1), "`num_classes` must be a whole number, at least 2"),
        (lambda: L.Ordinal(0.3), "`cutpoints` must be a vector"),
        (lambda: L.Ordinal([0.1], link="exp"), "'probit' or 'logit'; got Exp"),
        (lambda: L.Ordinal([1.0, -1.0]), "`cutpoints` must rise"),
        (lambda: L.Gamma(2.0, link="identity"), "positive numbers; got Identity"),
        (lambda: L.Poisson(link="probit"), "positive numbers; got Probit"),
        (lambda: L.Beta(3.0, link="exp"), "map to a probability; got Exp"),
        (lambda: L.Beta(3.0).check(np.array([0.5, 40.0])), "divide by 100"),
        (lambda: L.Beta(3.0).check(np.array([0.0])), "strictly between 0 and 1"),
        (
            lambda: L.Gamma(2.0).check(np.array([1.0, 0.0])),
            "positive .*got 0.0",
        ),
        (lambda: L.Binomial(5).check(np.array([6.0])), "from 0 to `total_count`"),
        (lambda: L.Binomial(5).check(np.array([0.5])), "numbers of successes"),
        (lambda: L.Categorical(3).check(np.array([1, 2, 3])), "pass `y - 1`"),
        (lambda: L.Ordinal([0.0, 1.0]).check(np.array([1, 3, 2])), "pass `y - 1`"),
        (lambda: L.NegativeBinomial(1.0).check(np.array([-1.0])), "not negative"),
    ],
)
def test_wrong_arguments_and_targets_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
