"""What engines say of their fits: each doubt where it is due, and nowhere else."""

import types
import warnings

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.engines.lbfgs import _Minimiser
from numpyro_gpx.notes import FitWarning, Note, as_text, warn
from numpyro_gpx.results.chain_notes import heat_notes

_rng = np.random.default_rng(5)
X = np.linspace(-2.0, 2.0, 16)[:, None]
Y = np.sin(2.0 * X[:, 0]) + 0.2 * _rng.normal(size=16)
Z = X[::4]
QUICK = dict(key=jr.key(0), progress=False)
GUIDE = gpx.guides.WhitenedGaussian


def model(X, y=None, *, batch_size=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z.astype(X.dtype)))
    with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(0.2), obs=y, rows=i)


def product(X, y=None):
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
    g = gpx.gp("g", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X) * g(X), gpx.likelihoods.Gaussian(0.2), obs=y)


def schools(y=None):
    """Eight schools, centred: a funnel that NUTS cannot enter."""
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        noise = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
        numpyro.sample("y", dist.Normal(theta, noise), obs=y)


EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])


def kinds(fit):
    return [note.kind for note in fit.check()]


def test_a_fit_without_doubts_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = gpx.fit_lbfgs(model, GUIDE, X, Y, **QUICK)
    assert fit.check() == [] and fit.info["converged"]
    assert repr(fit) == "Fit(lbfgs, sparse target; sites: f)"


def test_doubts_are_warned_of_once_printed_and_listed():
    with pytest.warns(FitWarning, match="Notes on this fit by `fit_svi`") as caught:
        fit = gpx.fit_svi(model, GUIDE, X, Y, num_steps=60, **QUICK)
    assert len(caught) == 1 and caught[0].filename == __file__
    (note,) = fit.check()
    assert note.kind == "not_converged" and note.advice in str(
        caught[0].message
    ).replace("\n    ", " ")
    assert "The loss still falls" in repr(fit)


def test_a_training_that_has_come_to_rest_is_not_doubted():
    optimizer = optax.adam(optax.exponential_decay(0.05, 500, 0.1))
    fit = gpx.fit_svi(model, GUIDE, X, Y, num_steps=2000, optimizer=optimizer, **QUICK)
    assert kinds(fit) == [] and fit.info["converged"]


def test_minibatches_of_sghmc_are_hot_whoever_runs_it():
    options = dict(num_warmup=50, num_samples=200, batch_size=2, **QUICK)
    fit = gpx.fit_mcmc(gpx.infer.SGHMC(model), X, Y, **options)
    (note,) = [note for note in fit.check() if note.kind == "heat"]
    assert "minibatches" in note.message


def test_lbfgs_that_says_it_is_done_is_not_believed(monkeypatch):
    """SciPy calls it success when float32 stops the line search far from the end."""
    minimise = _Minimiser.minimise

    def early(self, max_steps, tick):
        found = minimise(self, 1, tick)
        found.success = True
        return found

    monkeypatch.setattr(_Minimiser, "minimise", early)
    fit = gpx.fit_lbfgs(model, GUIDE, X, Y, **QUICK)
    (note,) = fit.check()
    assert note.kind == "not_converged" and not fit.info["converged"]
    assert note.evidence["promised"] > 0.01


def test_lbfgs_returns_the_lowest_it_has_seen(monkeypatch):
    evaluate = _Minimiser._objective
    seen = []

    def with_a_bad_end(self, x):
        value, slope = evaluate(self, x)
        seen.append(value)
        return value, slope

    monkeypatch.setattr(_Minimiser, "_objective", with_a_bad_end)
    fit = gpx.fit_lbfgs(model, GUIDE, X, Y, **QUICK)
    np.testing.assert_allclose(-fit.elbo().value, min(seen), rtol=1e-9)


def test_lbfgs_in_single_precision_says_so():
    """Beside float64, where nothing is to be said."""
    coarse = np.float32(X), np.float32(Y)
    fit = gpx.fit_lbfgs(model, GUIDE, *coarse, **QUICK)
    fine = gpx.fit_lbfgs(model, GUIDE, X, Y, **QUICK)
    short = fine.elbo().value - fit.elbo().value
    if short > 0.05:  # it may get there by luck
        assert kinds(fit) == ["not_converged"]
    if kinds(fit):
        assert "float32" in fit.check()[0].message


def test_gps_that_have_not_moved_are_named():
    fit = gpx.fit_svi(product, GUIDE, X, Y, num_steps=20, **QUICK)
    assert "unmoved" in kinds(fit)
    fit = gpx.fit_svi(model, GUIDE, X, Y, num_steps=20, **QUICK)
    assert "unmoved" not in kinds(fit)


def test_divergences_are_told_and_recorded():
    options = dict(num_warmup=200, num_samples=300, **QUICK)
    fit = gpx.fit_nuts(schools, EFFECTS, target_accept_prob=0.5, **options)
    (note,) = [n for n in fit.check() if n.kind == "divergences"]
    number = int(fit.sample_stats["diverging"].sum())
    assert number > 0 and note.evidence["divergences"] == number
    assert fit.info["divergences"] == number
    apart = numpyro.infer.reparam.LocScaleReparam(0)
    easy = numpyro.handlers.reparam(schools, config={"theta": apart})
    fit = gpx.fit_nuts(easy, EFFECTS, target_accept_prob=0.95, **options)
    assert "divergences" not in kinds(fit)
    # The site that NumPyro has taken apart is there, made of its parts.
    draws = fit.draws()
    made = draws["mu"][:, None] + draws["tau"][:, None] * draws["theta_decentered"]
    np.testing.assert_allclose(draws["theta"], made, rtol=1e-6)
    assert "theta" in fit.to_arviz(log_likelihood=False).posterior


def temperatures(heat, *, size=8, draws=1000, seed=0):
    """Mean squares of momenta of so many numbers, `(2, draws)`."""
    p = np.random.default_rng(seed).normal(size=(2, draws, size))
    return heat * np.mean(p**2, axis=-1)


def test_heat_is_told_beyond_noise():
    """None of 200 cold chains: a mean of 2000 lies 10 % off with probability 1e-16."""
    assert not any(heat_notes(temperatures(1.0, seed=s), None) for s in range(200))
    assert not heat_notes(temperatures(1.05), None)
    (note,) = heat_notes(temperatures(1.4), 10)
    assert "minibatches" in note.message and "18 %" in note.message
    (note,) = heat_notes(temperatures(1.4), None)
    assert "too large" in note.message and "minibatches" not in note.advice


def test_a_few_wild_draws_are_heat_too():
    wild = temperatures(1.0)
    wild[0, 3] = 1e5
    assert len(heat_notes(wild, None)) == 1


def test_minibatches_of_sghmc_are_hot_and_all_rows_are_not():
    options = dict(num_warmup=100, num_samples=300, **QUICK)
    quiet = gpx.fit_sghmc(model, X, Y, **options)
    assert not {"heat", "gradient_noise"} & set(kinds(quiet))
    loud = gpx.fit_sghmc(model, X, Y, batch_size=2, **options)
    assert {"heat", "gradient_noise"} <= set(kinds(loud))
    # 1 at most: the mass is the mean square of the same gradient.
    assert 0.5 < loud.info["gradient_variance"] < 1.5 and loud.info["inflation"] > 1.05
    (note,) = [note for note in loud.notes if note.kind == "gradient_noise"]
    assert note.advice.startswith("Use `fit_guided`, exact and cheap here")


@pytest.mark.slow
def test_twenty_rows_of_two_hundred_are_too_noisy_for_sghmc():
    """It was silent once, at R-hat 3.36."""
    rows = np.linspace(-2.0, 2.0, 200)[:, None]
    y = np.sin(2.0 * rows[:, 0]) + 0.2 * _rng.normal(size=200)
    options = dict(num_warmup=100, num_samples=300, **QUICK)
    assert "gradient_noise" in kinds(
        gpx.fit_sghmc(model, rows, y, batch_size=20, **options)
    )
    assert "gradient_noise" not in kinds(gpx.fit_sghmc(model, rows, y, **options))


def test_notes_read_as_sentences():
    note = Note("r_hat", "doubt", "The chains have not met.", "Draw more.", {"r": 2.0})
    assert str(note) == "doubt: The chains have not met. Draw more."
    assert as_text([note, note]).count("\n") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn(types.SimpleNamespace(notes=()), of="`fit`", stacklevel=1)


def test_a_doubted_fit_is_not_lost_where_warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FitWarning)
        with pytest.raises(FitWarning) as raised:
            gpx.fit_svi(model, GUIDE, X, Y, num_steps=19, **QUICK)
    assert raised.value.fit.check()[0].kind == "not_converged"
