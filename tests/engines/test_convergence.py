"""Whether a note says that a loss still falls, and only then."""

import numpy as np
import pytest

from numpyro_gpx.engines.convergence import falling


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
    found = [falling(100.0 + noise(rng, 2000, correlation)) for _ in range(500)]
    assert sum(map(bool, found)) <= 3


@pytest.mark.parametrize("losses", [
    300.0 + 1e3 * np.exp(-np.arange(2000) / 600.0),
    np.linspace(20.0, 0.0, 300),
    np.linspace(20.0, 0.0, 2000) + np.random.default_rng(0).normal(size=2000),
], ids=["decay", "short", "noisy"])  # fmt: skip
def test_a_loss_that_falls_is_told_with_the_rate(losses):
    (note,) = falling(losses)
    assert (note.kind, note.severity) == ("not_converged", "doubt")
    window = len(losses) // 10
    fall = losses[-2 * window : -window].mean() - losses[-window:].mean()
    np.testing.assert_allclose(note.evidence["fall"], fall)
    assert f"by {100 * fall / window:.2g} per 100 steps" in note.message


@pytest.mark.parametrize("losses", [
    300.0 + 1e3 * np.exp(-np.arange(2000) / 100.0),
    np.linspace(0.0, 20.0, 2000),
    300.0 + 0.01 * np.exp(-np.arange(2000) / 1500.0),
], ids=["at rest", "rising", "falls by nothing that matters"])  # fmt: skip
def test_a_loss_at_rest_is_not(losses):
    assert falling(losses) == []


def test_a_few_steps_say_nothing():
    (note,) = falling(np.ones(19))
    assert "too few" in note.message
    assert falling(np.ones(20)) == []
