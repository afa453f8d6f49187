"""Ctrl-C returns the fit so far, of every engine; before there is one, it says so.

A thread presses the key at a random moment after the first step or draw. Without the
handler of `Watch` a fit would be lost in a `KeyboardInterrupt`; one that looked at it
too seldom would come back late.
"""

import os
import signal
import threading
import time

import blackjax
import jax.random as jr
import numpy as np
import numpyro
import numpyro.infer
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.engines import run
from numpyro_gpx.engines.taking import ENGINES
from numpyro_gpx.engines.watch import Watch

E, G = gpx.engines, gpx.guides
X = np.linspace(-1.0, 1.0, 12)[:, None]
Y = np.sin(3.0 * X[:, 0])
Z = X[::3]
LONG = {"num_warmup": 1, "num_samples": 2_000_000, "num_chains": 2}
# Each would run for hours.
ENDLESS = {
    "SVI": lambda: E.SVI(G.WhitenedGaussian, num_steps=10**9),
    "LBFGS": lambda: E.LBFGS(G.ConditionalGaussian, max_steps=10**6),
    "Implicit": lambda: E.Implicit(num_rounds=10**8, num_draws=16),
    "NUTS": lambda: E.NUTS(**LONG),
    "HMC": lambda: E.HMC(**LONG),
    "Guided": lambda: E.Guided(method="hmc", num_samples=10**7),
    "SGHMC": lambda: E.SGHMC(**LONG),
    "MCMC": lambda: E.MCMC(numpyro.infer.BarkerMH, **LONG),
    "Blackjax": lambda: E.Blackjax(blackjax.nuts, **LONG),
}


def model(X, y=None):
    f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(), obs=y)


class Presser(Watch):
    """A watch that knows when the key was pressed: `delay` after the first result."""

    delay = 0.0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.pressed, self.whole_at_once = np.nan, False
        type(self).last = self
        threading.Thread(target=self._press, daemon=True).start()

    def whole(self, phase, fn, total):
        """What may end any moment is interrupted from within, at a random step."""

        def interrupted(tick):
            left = [int(10 * self.delay)]

            def then_press(line):
                tick(line)
                left[0] -= 1
                if left[0] == -1:
                    self.pressed = time.perf_counter()
                    signal.raise_signal(signal.SIGINT)

            return fn(then_press)

        self.whole_at_once = True
        return super().whole(phase, interrupted, total)

    def _press(self):
        while not self._worth_keeping:
            time.sleep(0.001)
        if self.whole_at_once:
            return
        time.sleep(self.delay)
        self.pressed = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)


def interrupted(monkeypatch, name, delay, seed=0):
    """A fit that was interrupted, and how long it took to come back."""
    monkeypatch.setattr(run, "Watch", Presser)
    monkeypatch.setattr(Presser, "delay", delay)
    labels = (Y > 0.0).astype(float)
    fit = gpx.fit(model, ENDLESS[name](), X, labels, key=jr.key(seed), progress=False)
    return fit, time.perf_counter() - Presser.last.pressed


def test_every_engine_is_here():
    # `Sites` is done before anybody could press a key; tests/journeys interrupts it.
    assert set(ENDLESS) == set(ENGINES) - {"Sites"}


@pytest.mark.parametrize("name", ["SVI", "LBFGS", "NUTS"])
def test_an_interrupt_returns_the_fit_so_far(name, monkeypatch):
    fit, _ = interrupted(monkeypatch, name, 0.0)
    check(fit)
    assert not fit.info.get("converged", False)


def check(fit):
    assert fit.info["interrupted"] and fit.check()[0].kind == "interrupted"
    assert np.all(np.isfinite(fit.draws()["f"]))
    assert "interrupted before its end" in repr(fit)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_seventy_two_interrupts_are_as_many_fits(name, monkeypatch):
    """Eight of each engine, at random moments; within 2 s but where one compiles."""
    delays = np.random.default_rng(len(name)).uniform(0.0, 1.5, 8)
    late = []
    for seed, delay in enumerate(delays):
        fit, seconds = interrupted(monkeypatch, name, delay, seed)
        check(fit)
        late.append(seconds)
    print(name, "came back after", np.round(late, 2))
    assert np.max(late[1:]) < 2.0


def test_an_interrupt_before_the_first_step_says_that_there_is_no_fit(monkeypatch):
    class Early(Watch):
        def loop(self, *args, **options):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "Watch", Early)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="before its first step or draw"):
        gpx.fit(model, ENDLESS["SVI"](), X, Y > 0.0, key=jr.key(0), progress=False)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_it_at_once():
    watch = Watch("fit")
    with watch.listening():
        watch._worth_keeping = True
        signal.raise_signal(signal.SIGINT)
        assert watch.stopped == "interrupted"
        with pytest.raises(KeyboardInterrupt, match="interrupted twice"):
            signal.raise_signal(signal.SIGINT)


def test_a_time_limit_returns_the_fit_so_far_or_says_that_it_was_too_short():
    fit = gpx.fit(
        model, ENDLESS["SVI"](), X, Y > 0.0, key=jr.key(0), progress=False,
        time_limit=0.5 + gpx.fit_svi(
            model, G.WhitenedGaussian, X, Y > 0.0, key=jr.key(0), num_steps=1,
            progress=False,
        ).seconds,
    )  # fmt: skip
    assert "stopped by `time_limit`" in fit.check()[0].message
    with pytest.raises(TimeoutError, match="before the first step"):
        gpx.fit(
            model, ENDLESS["SVI"](), X, Y > 0.0, key=jr.key(0), progress=False,
            time_limit=1e-9,
        )  # fmt: skip
    for limit in (0.0, "5"):
        with pytest.raises(ValueError, match="`time_limit` must be a number above 0"):
            gpx.fit(model, ENDLESS["SVI"](), X, Y, key=jr.key(0), time_limit=limit)


def test_other_threads_do_not_hear_interrupts_and_fit_all_the_same():
    found = []

    def work():
        with Watch("fit").listening():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
