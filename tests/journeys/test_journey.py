"""What a user does with a fit, by every engine and every guide.

Fit, press Ctrl-C, read the notes, predict, save, load in the place of the old, compare.
"""

import signal

import blackjax
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_gpx as gpx
from numpyro_gpx.engines import run
from numpyro_gpx.engines.taking import ENGINES
from numpyro_gpx.engines.watch import Watch

E, G = gpx.engines, gpx.guides
X = np.linspace(-1.0, 1.0, 10)[:, None]
Y = np.sin(3.0 * X[:, 0])
Z = X[::4]


def regression(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    f = gpx.gp("f", gpx.kernels.RBF(1.0, 0.7), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(scale), obs=y)


def latent(y=None, *, num_rows=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", num_rows if y is None else len(y)):
        h = numpyro.sample("h", dist.Normal(np.zeros(1), 1.0).to_event(1))
        gpx.observe("y", f(h), gpx.likelihoods.Gaussian(0.3), obs=y)


SHORT = {"num_warmup": 2, "num_samples": 200, "num_chains": 2}
SMALL = {"widths": (2,), "discriminator_widths": (2,), "noise_dim": 1}


def svi(guide):
    return E.SVI(guide, num_steps=400)


ENGINE_CASES = {
    "SVI": lambda: svi(G.WhitenedGaussian),
    "LBFGS": lambda: E.LBFGS(G.WhitenedGaussian),
    "Implicit": lambda: E.Implicit(
        G.Implicit(regression, **SMALL), num_rounds=400, num_draws=8
    ),
    "NUTS": lambda: E.NUTS(max_tree_depth=3, **SHORT),
    "HMC": lambda: E.HMC(num_steps=2, **SHORT),
    "Sites": lambda: E.Sites(),
    "Guided": lambda: E.Guided(num_samples=50, num_chains=2),
    "SGHMC": lambda: E.SGHMC(num_integration_steps=2, **SHORT),
    "MCMC": lambda: E.MCMC(numpyro.infer.BarkerMH, **SHORT),
    "Blackjax": lambda: E.Blackjax(blackjax.nuts, **SHORT),
}
GUIDE_CASES = {
    "ConditionalGaussian": lambda: svi(G.ConditionalGaussian),
    "OptimalGaussian": lambda: svi(G.OptimalGaussian),
    "Flow": lambda: svi(G.Flow),
    "UnscentedLatent": lambda: svi(G.UnscentedLatent(G.WhitenedGaussian(latent))),
    "AutoNormal": lambda: svi(AutoNormal),
    "AutoMultivariateNormal": lambda: svi(AutoMultivariateNormal),
}


class Pressed(Watch):
    """A watch during which somebody presses Ctrl-C, after the first result."""

    def loop(self, phase, block, state, num_steps, *, useless=0, **options):
        def then_press(state, first, number):
            found = block(state, first, number)
            if first > useless and not (self.stopped or self.is_preparing):
                signal.raise_signal(signal.SIGINT)
            return found

        return super().loop(
            phase, then_press, state, num_steps, useless=useless, **options
        )

    def whole(self, phase, fn, total):
        def pressed(tick):
            def line(text):
                tick(text)
                signal.raise_signal(signal.SIGINT)

            return fn(line)

        return super().whole(phase, pressed, total)


def test_every_engine_and_every_guide_goes_on_this_journey():
    assert set(ENGINE_CASES) == set(ENGINES)
    trained_elsewhere = {"WhitenedGaussian", "Implicit"}  # by SVI, by Implicit
    ours = {name for name in G.__all__ if isinstance(getattr(G, name), type)}
    abstract = {"GaussianGuide", "SiteGuide", "Encoder"}
    assert ours - abstract - trained_elsewhere <= set(GUIDE_CASES)


@pytest.mark.parametrize("name", [*ENGINE_CASES, *GUIDE_CASES])
def test_a_fit_from_its_start_to_a_comparison(name, tmp_path, monkeypatch):
    engine = {**ENGINE_CASES, **GUIDE_CASES}[name]()
    model, data = (latent, (Y,)) if name == "UnscentedLatent" else (regression, (X, Y))
    monkeypatch.setattr(run, "Watch", Pressed)
    with pytest.warns(gpx.FitWarning, match="interrupted"):
        fit = gpx.fit(model, engine, *data, key=jr.key(0), progress=False)
    assert fit.info["interrupted"] and fit.check()[0].kind == "interrupted"

    path = tmp_path / "fit.npz"
    path.write_text("an older file")
    fit.save(path)
    again = gpx.load(path, model)
    assert (again.facts, again.notes) == (fit.facts, fit.notes)
    for site, x in fit.draws(40).items():
        np.testing.assert_array_equal(again.draws(40)[site], x)
    expected = fit.replicate()
    found = again.replicate()
    np.testing.assert_array_equal(found.mean, expected.mean)
    np.testing.assert_array_equal(found.var, expected.var)
    assert found.mean.shape == (10,) and np.all(found.var > 0.0)

    comparison = gpx.compare({"fit": fit, "again": again})
    if fit.draws(2)["f"].std() > 0.0:  # not one that has hardly begun
        assert np.nanmax(comparison.sites["distance"]) < 1e-9
    assert sum("interrupted" in note for note in comparison.notes) == 2
