"""NUTS and blackjax on models with known posteriors; what `fit_*` refuses."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

import numpyro_gpx as gpx
from numpyro_gpx.engines.chains import Length, sample_chains
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.infer import Blackjax
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.layer_noise import noise_sets
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import structure_of

NOISE = 0.35


@pytest.fixture(scope="module")
def full_gp():
    """A full GP regression on 12 rows, with the posterior of `f` in closed form."""
    rng = np.random.default_rng(8)
    X = np.sort(rng.uniform(-2.0, 2.0, 12))[:, None]
    y = np.cos(2.0 * X[:, 0]) + NOISE * rng.normal(size=12)
    kernel = gpx.kernels.Matern52(variance=1.2, lengthscale=0.8)

    def model(X, y=None, *, batch_size=None):
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Data(train))
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            likelihood = gpx.likelihoods.Gaussian(NOISE)
            gpx.observe("y", f(X[i]), likelihood, obs=y, rows=i)

    train = X.copy()
    K = np.asarray(kernel(X))
    gain = K @ np.linalg.inv(K + NOISE**2 * np.eye(12))
    return model, X, y, gain @ y, np.diag(K - gain @ K)


def latent_moments(fit, X):
    """Mean and variance of `f` over draws, with standard errors."""
    L = np.linalg.cholesky(
        np.asarray(gpx.kernels.Matern52(variance=1.2, lengthscale=0.8)(X))
        + 1.2e-8 * np.eye(len(X))
    )
    f = fit.chains()["f"] @ L.T
    mean, var = f.mean(axis=(0, 1)), f.var(axis=(0, 1))
    # HMC's draws alternate about the mean: squares have an ESS of their own.
    squares = (f - mean) ** 2
    errors = [
        x.std(axis=(0, 1))
        / np.sqrt(np.clip(effective_sample_size(x), 10.0, x[..., 0].size))
        for x in (f, squares)
    ]
    return mean, var, *errors


def assert_agrees(fit, X, mean, var, bound=4.5):
    """4.5 standard errors on 24 numbers: false alarms below 2e-4."""
    m, v, m_error, v_error = latent_moments(fit, X)
    assert np.all(np.abs(m - mean) < bound * m_error)
    assert np.all(np.abs(v - var) < bound * v_error)


def test_nuts_finds_the_closed_form_posterior(full_gp):
    model, X, y, mean, var = full_gp
    fit = gpx.fit_nuts(model, X, y, key=jr.key(0), num_samples=800, progress=False)
    assert fit.target == "exact"
    assert fit.approximation == "asymptotically exact"
    assert_agrees(fit, X, mean, var)
    assert fit.sample_stats["diverging"].shape == (2, 800)


def test_warm_starts_and_chains_of_different_draws(full_gp):
    model, X, y, mean, var = full_gp
    svi = gpx.fit_lbfgs(
        model, gpx.guides.OptimalGaussian(model), X, y, key=jr.key(0), progress=False
    )
    fit = gpx.fit_nuts(
        model, X, y, key=jr.key(1), num_warmup=200, num_samples=400, init=svi,
        progress=False,
    )  # fmt: skip
    assert_agrees(fit, X, mean, var)


def test_a_warm_start_from_another_model_names_the_sites(full_gp):
    model, X, y, _, _ = full_gp
    svi = gpx.fit_lbfgs(
        model, gpx.guides.OptimalGaussian(model), X, y, key=jr.key(0), progress=False
    )
    other = gpx.models.svgp(gpx.inducing.Points(X[:5]))
    with pytest.raises(
        ValueError, match=r"`init` must be a fit of the same model.*'f'"
    ):
        gpx.fit_nuts(other, X, y, key=jr.key(0), init=svi, progress=False)


@pytest.mark.parametrize("name", ["hmc", "nuts", "elliptical_slice"])
def test_blackjax_samplers_find_the_closed_form_posterior(full_gp, name):
    import blackjax

    model, X, y, mean, var = full_gp
    parameters = {"hmc": {"num_integration_steps": 10}}.get(name)
    kernel = Blackjax(
        model, getattr(blackjax, name), parameters=parameters,
        thinning=10 if name == "elliptical_slice" else 1,
    )  # fmt: skip
    fit = gpx.fit_mcmc(
        kernel, X, y, key=jr.key(4), num_warmup=300, num_samples=1500, num_chains=1,
        progress=False, engine=name,
    )  # fmt: skip
    assert fit.engine == name
    assert_agrees(fit, X, mean, var)


def test_blackjax_takes_minibatches_for_gradient_estimators(full_gp):
    """SGLD is biased and slow: only its mean, to half a standard deviation."""
    import blackjax

    model, X, y, mean, var = full_gp
    kernel = Blackjax(
        model, blackjax.sgld, parameters={"step_size": 3e-3}, thinning=100
    )
    fit = gpx.fit_mcmc(
        kernel, X, y, key=jr.key(4), batch_size=6, num_warmup=50, num_samples=500,
        num_chains=1, progress=False, engine="sgld",
    )  # fmt: skip
    assert fit.approximation == "biased by the step size"
    m, _, _, _ = latent_moments(fit, X)
    assert np.all(np.abs(m - mean) < 0.5 * np.sqrt(var))


def test_blackjax_refuses_what_it_cannot_do(full_gp):
    import blackjax

    model, X, y, _, _ = full_gp
    with pytest.raises(ValueError, match="Only stochastic-gradient algorithms take"):
        gpx.fit_mcmc(
            Blackjax(model, blackjax.nuts), X, y, key=jr.key(0), batch_size=4,
            progress=False,
        )  # fmt: skip
    with pytest.raises(ValueError, match="built from a log density.*arguments are"):
        Blackjax(model, lambda x: x)
    sampled = gpx.models.svgp(gpx.inducing.Points(X[:4]))
    kernel = Blackjax(sampled, blackjax.elliptical_slice)
    with pytest.raises(ValueError, match=r"also has \['variance', 'lengthscale'"):
        gpx.fit_mcmc(kernel, X, y, key=jr.key(0), num_chains=1, progress=False)
    points = gpx.inducing.Points(X[:4])
    noise = gpx.likelihoods.Gaussian(NOISE)
    unwhitened = gpx.models.svgp(
        points, kernel=gpx.kernels.RBF(), likelihood=noise, whiten=False
    )
    kernel = Blackjax(unwhitened, blackjax.elliptical_slice)
    with pytest.raises(ValueError, match=r"whitened GP sites only.*\['f'\]"):
        gpx.fit_mcmc(kernel, X, y, key=jr.key(0), num_chains=1, progress=False)


def noisy_model(X, y=None):
    """Two layers with one inducing variable each: the first is drawn, then squared."""
    Z = np.array([[0.3]])
    kernel = gpx.kernels.RBF(variance=0.8, lengthscale=1.7)
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", X.shape[0]):
        h = gpx.propagate("h", f(X))
        gpx.observe("y", h**2, gpx.likelihoods.Gaussian(0.4), obs=y)


def test_fixed_noise_sets_average_the_likelihood_and_not_its_exponential():
    """Target A at several `v` against Gauss-Hermite over the noise of each row."""
    X = jnp.array([[-0.5], [0.9], [1.6]])
    y = jnp.array([0.5, 1.1, 0.2])
    structure = structure_of(Call(noisy_model, (X, y)))
    assert set(structure.noise) == {"h/noise"}
    noise = noise_sets(jr.key(0), structure, 4096)
    target = Target(Call(noisy_model, (X, y)), noise=noise)
    log_density = jax.jit(target.log_density)
    k = lambda a, b: 0.8 * np.exp(-0.5 * (a - b) ** 2 / 1.7**2)  # noqa: E731
    a = k(0.3, np.asarray(X)[:, 0]) / np.sqrt(0.8 * (1 + 1e-8))
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    for v in (-1.3, 0.2, 0.9):
        sd = np.sqrt(0.8 - a**2)
        h = a * v + sd * nodes[:, None]
        log_lik = -0.5 * ((np.asarray(y) - h**2) / 0.4) ** 2 - np.log(
            0.4 * np.sqrt(2 * np.pi)
        )
        expected = (weights / weights.sum()) @ log_lik
        exact = expected.sum() - 0.5 * v**2 - 0.5 * np.log(2 * np.pi)
        value = log_density({"f": jnp.array([v])})
        # 4096 shifted Sobol points: errors of order 1e-3 of a sum of order 10.
        assert_allclose(value, exact, atol=0.02)


@pytest.mark.slow
def test_nuts_on_noise_between_layers_samples_what_was_asked_for():
    """Target A and target B on a grid of `v`; 10 % of sd is over 4 standard errors."""
    X = jnp.array([[-0.5], [0.9], [1.6]])
    y = jnp.array([0.5, 1.1, 0.2])
    k = lambda a, b: 0.8 * np.exp(-0.5 * (a - b) ** 2 / 1.7**2)  # noqa: E731
    a = k(0.3, np.asarray(X)[:, 0]) / np.sqrt(0.8 * (1 + 1e-8))
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    log_weights = np.log(weights / weights.sum())[:, None]
    grid = np.linspace(-5.0, 5.0, 2001)
    log_a, log_b = [], []
    for v in grid:
        h = a * v + np.sqrt(0.8 - a**2) * nodes[:, None]
        log_lik = -0.5 * ((np.asarray(y) - h**2) / 0.4) ** 2
        log_a.append((np.exp(log_weights) * log_lik).sum() - 0.5 * v**2)
        rows = np.log(np.exp(log_weights + log_lik).sum(axis=0))
        log_b.append(rows.sum() - 0.5 * v**2)

    def sd(log_p):
        p = np.exp(np.array(log_p) - np.max(log_p))
        return np.sqrt(np.sum(p * grid**2) / p.sum())  # symmetric about 0

    assert abs(sd(log_a) / sd(log_b) - 1.0) > 0.2  # the two differ
    for sets, log_p, label in ((64, log_a, "A, 64 noise sets"), (None, log_b, "B")):
        fit = gpx.fit_nuts(
            noisy_model, X, y, key=jr.key(1), noise_sets=sets, num_samples=4000,
            progress=False,
        )  # fmt: skip
        assert fit.info["noise"] == label
        draws = fit.draws()["f"]
        assert_allclose(np.sqrt(np.mean(draws**2)), sd(log_p), rtol=0.1)


def learnt_points(X, y=None):
    Z = numpyro.param("Z", np.linspace(-1.0, 1.0, 3)[:, None])
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(NOISE), obs=y)


def test_parameters_without_a_value_are_named(full_gp):
    _, X, y, _, _ = full_gp
    words = r"parameters without a value: \['Z'\].*`params=svi_fit`"
    for fit in (gpx.fit_nuts, gpx.fit_sghmc):
        with pytest.raises(ValueError, match=words):
            fit(learnt_points, X, y, key=jr.key(0), progress=False)


def test_parameters_come_from_a_variational_fit(full_gp):
    _, X, y, _, _ = full_gp
    svi = gpx.fit_lbfgs(
        learnt_points, gpx.guides.OptimalGaussian(learnt_points), X, y, key=jr.key(0),
        progress=False,
    )  # fmt: skip
    assert not np.allclose(svi.params["Z"][:, 0], [-1.0, 0.0, 1.0])
    fit = gpx.fit_nuts(
        learnt_points, X, y, key=jr.key(0), params=svi, num_warmup=100,
        num_samples=500, num_chains=1, progress=False,
    )  # fmt: skip
    assert_allclose(fit.predict(X, of="f").mean, svi.predict(X, of="f").mean, atol=0.1)


def test_parameters_are_given_to_the_kernel_that_uses_them(full_gp):
    from numpyro.handlers import substitute
    from numpyro.infer import HMC

    _, X, y, _, _ = full_gp
    params = {"Z": jnp.array([[-1.5], [0.2], [1.4]])}
    with pytest.raises(ValueError, match="must be given to the kernel"):
        gpx.fit_mcmc(HMC(learnt_points), X, y, key=jr.key(0), params=params)
    fixed = HMC(substitute(learnt_points, data=params))
    options = dict(num_warmup=20, num_samples=20, num_chains=1, progress=False)
    fit = gpx.fit_mcmc(fixed, X, y, key=jr.key(0), **options)
    assert_allclose(fit.params["Z"], params["Z"])


def test_chains_start_apart_and_target_b_starts_its_noise():
    X, y = jnp.array([[-0.5], [0.9], [1.6]]), jnp.array([0.5, 1.1, 0.2])
    options = dict(num_warmup=1, num_samples=2, progress=False)
    first = gpx.fit_nuts(noisy_model, X, y, key=jr.key(0), **options)
    assert not np.allclose(*first.chains()["f"])
    again = gpx.fit_nuts(
        noisy_model, X, y, key=jr.key(1), init=first, noise_sets=None, **options
    )
    assert again.info["noise"] == "B"
    assert "h/noise" in again.posterior.draws


def test_nuts_refuses_minibatches(full_gp):
    model, X, y, _, _ = full_gp
    with pytest.raises(ValueError, match=r"needs all rows.*`batch_size=4`"):
        gpx.fit_nuts(model, X, y, key=jr.key(0), batch_size=4, progress=False)


def test_hmc_runs_on_the_same_function(full_gp):
    from numpyro.infer import HMC

    model, X, y, mean, var = full_gp
    fit = gpx.fit_mcmc(
        HMC(model), X, y, key=jr.key(7), num_samples=800, num_chains=1, progress=False
    )
    assert fit.engine == "hmc"
    assert_agrees(fit, X, mean, var)


def test_discrete_sites_and_moving_supports_are_refused():
    def discrete(X, y=None):
        numpyro.sample("k", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    def moving(X, y=None):
        a = numpyro.sample("a", dist.HalfNormal(1.0))
        numpyro.sample("b", dist.Uniform(0.0, a))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    X, y = np.zeros((3, 1)), np.zeros(3)
    with pytest.raises(ValueError, match="Site `k` is discrete"):
        gpx.fit_nuts(discrete, X, y, key=jr.key(0), progress=False)
    with pytest.raises(ValueError, match="support of site `b` depends on other sites"):
        gpx.fit_nuts(moving, X, y, key=jr.key(0), progress=False)


def two_numbers(x):
    a = numpyro.sample("a", dist.Normal(1.0, 2.0))
    b = numpyro.sample("b", dist.LogNormal(0.0, 0.5))
    numpyro.sample("y", dist.Normal(a * b, 0.5), obs=x)


def test_blocks_of_nuts_are_numpyros_chain():
    """Same key, same start, same draws: warm-up dropped, statistics in their place."""
    x = jnp.asarray(1.7)
    program = Program.of(Call.create(two_numbers, (x,), {}))
    target = Target(program.call)
    start = {"a": jnp.asarray(0.3), "b": jnp.asarray(-0.2)}

    def make(call):
        return NUTS(potential_fn=lambda z: -Target(call).log_density(z))

    length = Length(num_warmup=70, num_samples=37, num_chains=1)
    found = sample_chains(
        make, program.call, jr.key(3), [start], length, Watch("test"), "nuts"
    )
    z, stats = found.z, found.stats
    (key,) = jr.split(jr.key(3), 1)
    mcmc = MCMC(
        NUTS(potential_fn=lambda z: -target.log_density(z)), num_warmup=70,
        num_samples=37, progress_bar=False,
    )  # fmt: skip
    mcmc.run(key, init_params=start, extra_fields=("num_steps", "accept_prob"))
    expected = mcmc.get_samples()
    for name in ("a", "b"):
        assert_allclose(z[name][0], expected[name], rtol=1e-6)
    extra = mcmc.get_extra_fields()
    assert_allclose(stats["n_steps"][0], extra["num_steps"])
    assert_allclose(stats["acceptance_rate"][0], extra["accept_prob"], rtol=1e-5)


def test_chains_from_one_start_have_keys_of_their_own():
    x = jnp.asarray(1.7)
    program = Program.of(Call.create(two_numbers, (x,), {}))
    start = {"a": jnp.asarray(0.3), "b": jnp.asarray(-0.2)}

    def make(call):
        return NUTS(potential_fn=lambda z: -Target(call).log_density(z))

    length = Length(num_warmup=5, num_samples=8, num_chains=2)
    starts = [start, start]
    z = sample_chains(
        make, program.call, jr.key(3), starts, length, Watch("test"), "nuts"
    ).z
    assert np.abs(z["a"][0] - z["a"][1]).max() > 1e-3
