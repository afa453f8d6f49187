"""Whether notes say that a loss still falls, or has left its best, and only then."""

import numpy as np
import pytest
import scipy.signal

from numpyro_gpx.results.loss_notes import loss_notes


def noise(rng, steps, correlation):
    """A stationary first-order autoregression of variance 1."""
    x = np.empty(steps)
    x[0] = rng.normal()
    for t in range(1, steps):
        x[t] = correlation * x[t - 1] + np.sqrt(1 - correlation**2) * rng.normal()
    return x


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_noise_around_a_level_is_not_doubted(correlation):
    """At most 3 of 500: a rate of 0.001 gives more with probability 0.002."""
    rng = np.random.default_rng(4)
    found = [loss_notes(100.0 + noise(rng, 2000, correlation)) for _ in range(500)]
    assert sum(map(bool, found)) <= 3


@pytest.mark.parametrize("losses", [
    300.0 + 1e3 * np.exp(-np.arange(2000) / 600.0),
    300.0 + 5.0 * np.exp(-np.arange(2000) / 600.0),
    np.linspace(20.0, 0.0, 300),
    np.linspace(20.0, 0.0, 2000) + np.random.default_rng(0).normal(size=2000),
], ids=["decay", "a tenth of a nat", "short", "noisy"])  # fmt: skip
def test_a_loss_that_falls_is_told_with_the_rate(losses):
    (note,) = loss_notes(losses)
    assert (note.kind, note.severity) == ("not_converged", "doubt")
    window = len(losses) // 10
    fall = losses[-2 * window : -window].mean() - losses[-window:].mean()
    np.testing.assert_allclose(note.evidence["fall"], fall)
    assert f"by {100 * fall / window:.2g} per 100 steps" in note.message


def up_and_noisy(rise, rng):
    """Falls at first, and then rises."""
    steps = np.arange(2000)
    level = 1e3 * np.exp(-steps / 60.0) + rise * np.maximum(steps - 1000, 0) / 1000
    return level + noise(rng, 2000, 0.5)


@pytest.mark.parametrize("losses", [
    np.linspace(0.0, 20.0, 2000),
    up_and_noisy(5.0, np.random.default_rng(1)),
    np.where(np.arange(2000) < 900, 40.0, 215.0) + np.sin(np.arange(2000)),
], ids=["rising", "noisy", "thrown out"])  # fmt: skip
def test_a_loss_that_has_left_its_best_is_told_by_how_much(losses):
    (note,) = loss_notes(losses)
    assert (note.kind, note.severity) == ("diverged", "doubt")
    tenths = losses.reshape(10, -1).mean(axis=1)
    np.testing.assert_allclose(note.evidence["rise"], tenths[-1] - tenths.min())


def test_a_loss_that_was_nan_is_wrong():
    losses = np.ones(500)
    losses[321] = np.nan
    (note,) = loss_notes(losses)
    assert note.severity == "wrong" and "nan at step 321" in note.message


@pytest.mark.parametrize("losses", [
    300.0 + 1e3 * np.exp(-np.arange(2000) / 100.0),
    300.0 + 0.01 * np.exp(-np.arange(2000) / 1500.0),
], ids=["at rest", "falls by nothing that matters"])  # fmt: skip
def test_a_loss_at_rest_is_not(losses):
    assert loss_notes(losses) == []


def test_a_few_steps_say_nothing():
    (note,) = loss_notes(np.ones(19))
    assert "too few" in note.message
    assert loss_notes(np.ones(20)) == []


def cosine(peak, steps):
    return peak * (0.505 + 0.495 * np.cos(np.pi * np.arange(steps) / steps))


def descent(rates, time, height=1e3):
    """A loss that falls in units of the rate's sum: gradient flow."""
    return 300.0 + height * np.exp(-np.cumsum(rates) / time)


@pytest.mark.parametrize("steps", [100, 400, 2000])
def test_a_rate_that_has_fallen_does_not_hide_that_the_loss_still_falls(steps):
    """What falls by a tenth of a nat in the last tenth at 0.01 is told at any rate."""
    rates = cosine(0.1, steps)
    window = steps // 10
    time = 2.0 * rates.sum()
    # The height at which a tenth of the steps at 0.01 would gain 0.1 nats at the end.
    height = 0.1 / (np.exp(-0.5) * -np.expm1(-0.01 * window / time))
    losses = descent(rates, time, height)
    assert loss_notes(losses) == []  # the fall itself is below what matters
    (note,) = loss_notes(losses, rates)
    assert note.kind == "not_converged" and "times as high" in note.message
    assert loss_notes(300.0 + 0.25 * (losses - 300.0), rates) == []
    assert loss_notes(losses, np.full(steps, 0.1)) == []  # nothing has slowed down


def test_a_loss_at_rest_under_a_schedule_is_not_doubted():
    """At most 3 of 500, as without: noise of one nat, correlated like the steps."""
    rates = cosine(0.1, 2000)
    rng = np.random.default_rng(4)
    level = descent(rates, 5.0)
    shocks = np.sqrt(0.75) * rng.normal(size=(500, 2000))
    noisy = level + scipy.signal.lfilter([1.0], [1.0, -0.5], shocks)
    found = [loss_notes(losses, rates) for losses in noisy]
    assert sum(map(bool, found)) <= 3
