"""Whether notes say that a loss still falls, or has left its best, and only then."""

import numpy as np
import pytest

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
