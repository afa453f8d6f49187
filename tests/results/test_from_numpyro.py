"""Fits from plain NumPyro: discrete sites, of which its own kernels have draws."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose
from numpyro.infer import MCMC, NUTS, SVI, DiscreteHMCGibbs, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam

import numpyro_gpx as gpx

X = np.linspace(-1.0, 1.0, 8)[:, None]
X_NEW = np.array([[-0.8], [0.15], [0.9]])
NOISE = np.array([0.2, 0.5])
KERNEL = gpx.kernels.RBF(variance=1.0, lengthscale=0.8)
Y = np.sin(2.0 * X[:, 0]) + 0.3 * np.array([1, -1, 1, 0.4, -1, 0.2, -0.6, 1])


def model(X, y=None):
    noisy = numpyro.sample("noisy", dist.Bernoulli(0.6))
    shift = numpyro.sample("shift", dist.Normal(0.3, 0.01))
    mean = gpx.means.Constant(shift)
    gpx.exact("y", KERNEL, X, jnp.asarray(NOISE)[noisy], obs=y, mean=mean)


def run(kernel, num_samples):
    options = dict(num_warmup=20, num_samples=num_samples, progress_bar=False)
    mcmc = MCMC(kernel, **options)
    mcmc.run(jr.key(3), jnp.asarray(X), jnp.asarray(Y))
    return mcmc


@pytest.fixture(scope="module")
def fit():
    return gpx.Fit.from_mcmc(run(DiscreteHMCGibbs(NUTS(model)), 400), X, Y)


def test_predictions_average_over_draws_of_discrete_sites(fit):
    noisy, shift = fit.draws()["noisy"], fit.draws()["shift"]
    K, Ks = np.asarray(KERNEL(X)), np.asarray(KERNEL(X_NEW, X))
    C = [K + sd**2 * np.eye(8) for sd in NOISE]
    # The share of each value is its probability: the evidences differ by known amounts.
    log_p = [scipy.stats.multivariate_normal(0.3 + 0 * Y, c).logpdf(Y) for c in C]
    odds = 0.6 / 0.4 * np.exp(log_p[1] - log_p[0])
    assert 0.25 < odds / (1 + odds) < 0.75
    assert abs(noisy.mean() - odds / (1 + odds)) < 0.13  # 5 standard errors
    solved = [np.linalg.solve(c, np.stack([Y, np.ones(8)], axis=1)) for c in C]
    means = [
        m + Ks @ (solved[k][:, 0] - m * solved[k][:, 1])
        for k, m in zip(noisy, shift, strict=True)
    ]
    assert_allclose(fit.predict(X_NEW).mean, np.mean(means, axis=0), rtol=1e-6)
    assert fit.structure.discrete == ("noisy",)
    assert fit.approximation == "asymptotically exact"


def test_fits_with_discrete_sites_are_saved_and_go_to_arviz(fit, tmp_path):
    fit.save(tmp_path / "fit")
    again = gpx.load(tmp_path / "fit", model)
    assert_allclose(again.predict(X_NEW).mean, fit.predict(X_NEW).mean, rtol=1e-12)
    assert again.draws()["noisy"].dtype == fit.draws()["noisy"].dtype
    assert fit.to_arviz().posterior["noisy"].shape == (1, 400)


def test_draws_that_are_missing_are_named(monkeypatch):
    """As where NumPyro has summed a site out, for which it needs funsor."""
    mcmc = run(DiscreteHMCGibbs(NUTS(model)), 5)
    draws = mcmc.get_samples(group_by_chain=True)
    kept = {"shift": draws["shift"]}
    monkeypatch.setattr(mcmc, "get_samples", lambda group_by_chain: kept)
    with pytest.raises(ValueError, match=r"no draws of \['noisy'\].*DiscreteHMCGibbs"):
        gpx.Fit.from_mcmc(mcmc, X, Y)


def smooth(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(X[:, 0], scale), obs=y)


def kinds(fit):
    return [note.kind for note in fit.check()]


def test_records_of_numpyros_chains_have_arvizs_names_and_are_read():
    mcmc = MCMC(
        NUTS(smooth, max_tree_depth=1), num_warmup=50, num_samples=400,
        progress_bar=False,
    )  # fmt: skip
    fields = ("num_steps", "potential_energy", "diverging")
    mcmc.run(jr.key(0), jnp.asarray(X), jnp.asarray(Y), extra_fields=fields)
    fit = gpx.Fit.from_mcmc(mcmc, X, Y)
    assert set(fit.sample_stats) == {"n_steps", "lp", "diverging"}
    assert "tree_depth" in kinds(fit)
    energy = mcmc.get_extra_fields()["potential_energy"]
    assert_allclose(fit.sample_stats["lp"][0], -energy)


def trained(num_steps, spoil=lambda x: x):
    guide = AutoNormal(smooth)
    svi = SVI(smooth, guide, Adam(0.05), Trace_ELBO())
    found = svi.run(
        jr.key(0), num_steps, jnp.asarray(X), jnp.asarray(Y), progress_bar=0
    )
    params = {name: spoil(x) for name, x in found.params.items()}
    losses = found.losses.at[-1].set(spoil(found.losses[-1]))
    return gpx.Fit.from_svi(svi, found._replace(params=params, losses=losses), X, Y)


def test_numpyros_training_is_doubted_like_ours():
    assert kinds(trained(10)) == ["not_converged"]
    assert kinds(trained(2000)) == []
    notes = trained(50, lambda x: x * jnp.nan).check()
    assert [(n.kind, n.severity) for n in notes] == [("not_finite", "wrong")] * 2
    assert "auto_loc" in notes[0].message and "step 49" in notes[1].message


def test_fits_of_discrete_sites_name_what_can_draw_them():
    with pytest.raises(ValueError, match="Site `noisy` is discrete.*Fit.from_mcmc"):
        gpx.fit_nuts(model, X, Y, key=jr.key(0), progress=False)
