"""ArviZ on every engine, and leave-one-out scores against brute force."""

import warnings

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import pytest
import scipy.special
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior

NOISE = 0.4
KERNEL = gpx.kernels.RBF(variance=1.1, lengthscale=0.8)
_rng = np.random.default_rng(2)
X = np.sort(_rng.uniform(-2.0, 2.0, 16))[:, None]
Y = np.sin(2.0 * X[:, 0]) + NOISE * _rng.normal(size=16)


def make_model(inducing, noise=NOISE):
    def model(inputs, y=None):
        f = gpx.gp("f", KERNEL, inducing=inducing)
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(noise), obs=y)

    return model


FULL = make_model(gpx.inducing.Data(X))
SURE = make_model(gpx.inducing.Data(X), noise=30.0)
COARSE = make_model(gpx.inducing.Points(np.array([[-1.5], [0.1], [1.7]])))


def optimal(model, inputs, y):
    guide = gpx.guides.OptimalGaussian(model)
    return gpx.fit_lbfgs(model, guide, inputs, y, key=jr.key(0), progress=False)


@pytest.fixture(scope="module")
def fits():
    nuts = gpx.fit_nuts(FULL, X, Y, key=jr.key(0), num_samples=1000, progress=False)
    return {"nuts": nuts, "svi": optimal(FULL, X, Y)}


def exact_loo():
    """Refits without each row, in NumPy."""
    scores = []
    for n in range(len(X)):
        rest = np.arange(len(X)) != n
        K = np.asarray(KERNEL(X[rest])) + NOISE**2 * np.eye(len(X) - 1)
        k = np.asarray(KERNEL(X[n : n + 1], X[rest]))[0]
        mean = k @ np.linalg.solve(K, Y[rest])
        var = 1.1 - k @ np.linalg.solve(K, k) + NOISE**2
        scores.append(scipy.stats.norm(mean, np.sqrt(var)).logpdf(Y[n]))
    return np.array(scores)


@pytest.mark.parametrize("engine", ["nuts", "svi"])
def test_loo_of_the_full_gp_agrees_with_refits(fits, engine):
    """Importance sampling on 2000 draws, judged by the spread over ten parts of them.

    5 standard errors on 16 rows and their sum, with a floor for the smallest: false
    alarms below 1e-3 for the heavy tails of importance weights.
    """
    rows = gpx.loo(fits[engine], num_draws=2000)["loo_i"].values
    parts = _loo_of_parts(fits[engine])
    error = parts.std(axis=0) / np.sqrt(len(parts)) + 0.01
    assert np.all(np.abs(rows - exact_loo()) < 5.0 * error)
    total_error = parts.sum(axis=1).std() / np.sqrt(len(parts)) + 0.02
    assert abs(rows.sum() - exact_loo().sum()) < 5.0 * total_error
    assert total_error < 0.3  # the comparison means something


def _loo_of_parts(fit):
    """Leave-one-out scores from ten disjoint sets of draws, `(10, N)`."""
    draws = fit.draws(2000)["f"]
    scores = []
    for part in np.split(draws, 10):
        one = ChainPosterior({"f": part[None]})
        again = gpx.Fit(
            Program.unchecked(Call(FULL, (X, Y))), one, facts=gpx.engines.NUTS().facts
        )
        scores.append(gpx.loo(again, num_draws=200)["loo_i"].values)
    return np.array(scores)


def test_loo_of_a_coarse_sparse_gp_agrees_with_refits():
    """The target without a row is that row's *expected* term short of the whole."""
    refits = []
    for n in range(len(X)):
        rest = np.arange(len(X)) != n
        A, mean, cov = _posterior_of_v(X[rest], Y[rest])
        a = _project(X[n : n + 1])[:, 0]
        f_var = 1.1 - a @ a + a @ cov @ a
        score = scipy.stats.norm(a @ mean, np.sqrt(f_var + NOISE**2)).logpdf(Y[n])
        refits.append(score)
    result = gpx.loo(optimal(COARSE, X, Y), num_draws=4000)
    assert_allclose(result["loo_i"].values, refits, atol=0.1)
    # The site's own log density in both places is something else.
    naive = _naive_loo(optimal(COARSE, X, Y))
    assert abs(naive - np.sum(refits)) > 1.0


def test_loo_weighs_the_draws_of_a_wrong_guide_towards_the_target():
    """A guide off by half a standard deviation and 1.3 times too wide."""
    from numpyro_gpx.results.posteriors import GuidePosterior

    _, mean, cov = _posterior_of_v(X, Y)
    scale_tril = np.linalg.cholesky(cov)
    params = {
        "f_auto_loc": jnp.asarray(mean + 0.5 * np.sqrt(np.diag(cov))),
        "f_auto_scale_tril": jnp.asarray(1.3 * scale_tril),
    }
    data = (jnp.asarray(X), jnp.asarray(Y))
    guide = gpx.guides.WhitenedGaussian(COARSE)
    posterior = GuidePosterior(guide, params, Call(COARSE, data), key=jr.key(3))
    wrong = gpx.Fit(
        Program.unchecked(Call(COARSE, data)),
        posterior,
        facts=gpx.engines.Facts("svi", "variational"),
        params=params,
    )
    right = gpx.loo(optimal(COARSE, X, Y), num_draws=4000)["loo_i"].values
    # Seen over keys 0 to 9: rows within 0.03, far tails of importance weights aside.
    assert_allclose(gpx.loo(wrong, num_draws=4000)["loo_i"].values, right, atol=0.1)
    # The same draws, taken for draws of the target, are somewhere else.
    chain = ChainPosterior({"f": wrong.draws(4000)["f"][None]})
    unweighed = gpx.loo(
        gpx.Fit(
            Program.unchecked(Call(COARSE, data)), chain, facts=gpx.engines.NUTS().facts
        ),
        num_draws=4000,
    )["loo_i"].values
    assert np.abs(unweighed - right).max() > 0.3


def test_rows_that_are_masked_are_no_data():
    def masked(inputs, y=None, mask=None):
        f = gpx.gp("f", KERNEL, inducing=gpx.inducing.Points(X[::5]))
        with numpyro.plate("data", inputs.shape[0]):
            likelihood = gpx.likelihoods.Gaussian(NOISE)
            gpx.observe("y", f(inputs), likelihood, obs=y, mask=mask)

    keep = np.arange(16) % 5 != 2
    draws = ChainPosterior({"f": np.random.default_rng(4).normal(size=(1, 200, 4))})
    gaps = np.where(keep, Y, np.nan)
    with_mask = gpx.Fit(
        Program.unchecked(Call(masked, (X, gaps, keep))),
        draws,
        facts=gpx.engines.NUTS().facts,
    )
    without = gpx.Fit(
        Program.unchecked(Call(masked, (X[keep], Y[keep]))),
        draws,
        facts=gpx.engines.NUTS().facts,
    )
    one, other = gpx.loo(with_mask), gpx.loo(without)
    assert one["n_data_points"] == other["n_data_points"] == keep.sum()
    assert_allclose(one["loo_i"], other["loo_i"], rtol=1e-10)
    assert_allclose(one["se"], other["se"], rtol=1e-10)


def _project(inputs):
    Z = np.array([[-1.5], [0.1], [1.7]])
    L = np.linalg.cholesky(np.asarray(KERNEL(Z)) + 1.1e-8 * np.eye(3))
    return np.linalg.solve(L, np.asarray(KERNEL(Z, inputs)))


def _posterior_of_v(inputs, y):
    A = _project(inputs)
    cov = np.linalg.inv(np.eye(3) + A @ A.T / NOISE**2)
    return A, cov @ A @ y / NOISE**2, cov


def _naive_loo(fit):
    ell = fit.to_arviz(posterior_predictive=False).expected_log_likelihood["y"].values
    ell = ell.reshape(-1, ell.shape[-1])
    return np.sum(-np.log(np.mean(np.exp(-ell), axis=0)))


def test_exact_regression_has_loo_given_the_hyperparameters():
    model = gpx.models.exact_gp(kernel=KERNEL)
    draws = ChainPosterior({"noise": np.full((1, 100), NOISE)})
    fit = gpx.Fit(
        Program.unchecked(Call(model, (X, Y))), draws, facts=gpx.engines.NUTS().facts
    )
    rows = fit.to_arviz(posterior_predictive=False).log_likelihood["y"].values
    assert_allclose(rows[0, 0], exact_loo(), rtol=1e-8)


def test_loo_of_exact_regression_leaves_a_row_out_of_the_hyperparameters_too():
    """One outlier, which the noise level without it does not expect.

    Against integration over the noise level on a grid; 4000 draws by its quantiles.
    """
    y = Y.copy()
    y[7] += 1.5
    K = np.asarray(KERNEL(X))
    grid = np.linspace(0.05, 3.0, 600)
    prior = scipy.stats.halfnorm.logpdf(grid)

    def log_evidence(rows):
        cov = K[np.ix_(rows, rows)]
        zeros = np.zeros(len(rows))
        return np.array(
            [
                scipy.stats.multivariate_normal.logpdf(
                    y[rows], zeros, cov + s**2 * np.eye(len(rows))
                )
                for s in grid
            ]
        )

    whole = log_evidence(np.arange(16))
    refits, weights = [], np.exp(prior + whole - np.max(prior + whole))
    for n in (7, 3):
        part = log_evidence(np.delete(np.arange(16), n))
        posterior = np.exp(prior + part - np.max(prior + part))
        density = np.sum(posterior * np.exp(whole - part)) / posterior.sum()
        refits.append(np.log(density))
    levels = (np.arange(4000) + 0.5) / 4000
    draws = np.interp(levels, np.cumsum(weights) / weights.sum(), grid)
    fit = gpx.Fit(
        Program.unchecked(Call(gpx.models.exact_gp(kernel=KERNEL), (X, y))),
        ChainPosterior({"noise": draws[None]}), facts=gpx.engines.NUTS().facts,
    )  # fmt: skip
    rows = gpx.loo(fit, num_draws=4000)["loo_i"].values
    assert_allclose(rows[[7, 3]], refits, atol=0.05)
    rows_given_all = fit.to_arviz(posterior_predictive=False).log_likelihood["y"]
    unweighed = scipy.special.logsumexp(rows_given_all[0], axis=0) - np.log(4000)
    assert unweighed[7] - refits[0] > 0.3


@pytest.mark.parametrize("engine", ["nuts", "svi"])
def test_arviz_runs_on_every_engine(fits, engine, tmp_path):
    import arviz as az
    import matplotlib

    matplotlib.use("Agg")
    idata = fits[engine].to_arviz()
    groups = {"posterior", "posterior_predictive", "observed_data"}
    assert groups | {"expected_log_likelihood"} <= set(idata.groups())
    assert idata.observed_data["y"].shape == (16,)
    assert idata.expected_log_likelihood["y"].shape[2] == 16
    summary = az.summary(idata, var_names=["f"])
    assert np.all(np.isfinite(summary["mean"]))
    assert np.all(summary["r_hat"] < 1.05)
    az.plot_trace(idata, var_names=["f"], compact=True)
    az.plot_ppc(idata, num_pp_samples=20)
    idata.to_netcdf(tmp_path / "fit.nc")
    again = az.from_netcdf(tmp_path / "fit.nc")
    assert_allclose(again.posterior["f"], idata.posterior["f"])
    matplotlib.pyplot.close("all")


def test_log_likelihood_is_the_density_and_not_the_expectation(fits):
    """At a full GP `f` is known given `v`: both agree; at a coarse one they differ."""
    idata = fits["svi"].to_arviz(posterior_predictive=False)
    f_var_term = 1e-6
    assert_allclose(
        idata.log_predictive_density["y"], idata.expected_log_likelihood["y"],
        atol=f_var_term,
    )  # fmt: skip
    coarse = optimal(COARSE, X, Y).to_arviz(posterior_predictive=False)
    gap = coarse.log_predictive_density["y"] - coarse.expected_log_likelihood["y"]
    assert np.all(gap > -1e-9)  # Jensen
    assert float(gap.max()) > 0.1


def test_arviz_compares_fits(fits):
    import arviz as az

    table = az.compare({name: gpx.loo(fit) for name, fit in fits.items()})
    assert set(table.index) == {"nuts", "svi"}


def chain_of(model, length):
    size = 3 if model is COARSE else 16
    draws = np.random.default_rng(5).normal(size=(1, length, size))
    program = Program.unchecked(Call(model, (X, Y)))
    facts = gpx.engines.NUTS().facts
    return gpx.Fit(program, ChainPosterior({"f": draws}), facts=facts)


def test_arvizs_own_loo_takes_chains_of_exact_targets_and_nothing_else(fits):
    """Elsewhere one density would stand for two, or draws for those of the target."""
    import arviz as az

    with warnings.catch_warnings():
        # It sees a few influential rows and says so.
        warnings.filterwarnings("ignore", message="Estimated shape parameter")
        theirs = az.loo(fits["nuts"].to_arviz(), reff=1.0)
    ours = gpx.loo(fits["nuts"], num_draws=2000)
    assert_allclose(theirs["elpd_loo"], ours["elpd_loo"], atol=1e-4)
    for fit in (fits["svi"], chain_of(COARSE, 50)):
        idata = fit.to_arviz(posterior_predictive=False)
        assert "log_predictive_density" in idata.groups()
        with pytest.raises(TypeError, match="log likelihood not found"):
            az.loo(idata)


def test_weights_that_are_too_uneven_are_told_and_others_are_not(fits):
    """Draws that know nothing of the data; and long chains of a smooth posterior."""
    with pytest.warns(gpx.FitWarning, match=r"Pareto k above 0.57 on \d+ of 16 rows"):
        gpx.loo(chain_of(FULL, 200), num_draws=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpx.loo(chain_of(SURE, 2000), num_draws=2000)
