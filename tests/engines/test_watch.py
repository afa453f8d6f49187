"""The one loop: how long its blocks are, when it ends, what it leaves behind."""

import numpy as np
import pytest

from numpyro_gpx.engines import watch as module
from numpyro_gpx.engines.watch import Watch


class Clock:
    """A clock that blocks move."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def run(watch, clock, seconds, num_steps, **options):
    """Steps that take `seconds(step)` each; the sizes of the blocks, in seconds."""
    taken = []

    def block(state, first, number):
        taken.append(sum(seconds(step) for step in range(first, first + number)))
        clock.now += taken[-1]
        return state, np.zeros(number)

    _, record = watch.loop("steps", block, None, num_steps, **options)
    return np.array(taken), record


def test_blocks_take_half_a_second_whatever_a_step_takes(clock):
    for each in (1e-4, 0.01, 0.3, 4.0):
        taken, record = run(Watch("fit"), clock, lambda step, each=each: each, 500)
        assert record.num_steps == 500
        assert np.max(taken) <= max(0.5, 1.01 * each)
    assert record.seconds_per_step == pytest.approx(4.0)


def test_blocks_grow_by_steps(clock):
    """What the first one says of the others is a guess."""
    taken, _ = run(Watch("fit"), clock, lambda step: 1e-5, 500)
    np.testing.assert_allclose(taken[:3], [1e-5, 4e-5, 20e-5])


def test_steps_that_become_dearer_make_the_next_blocks_shorter(clock):
    """A hundred times dearer from step 1500 on: one block is long, and no other."""
    taken, _ = run(Watch("fit"), clock, lambda step: 1e-3 if step < 1500 else 0.1, 2000)
    assert np.sum(taken > 0.6) <= 1


def test_the_dearest_steps_a_block_may_have_are_allowed_for(clock):
    """Trees of 10 gradients for long, then of 1000: within the two seconds."""
    leaps = np.where(np.arange(2000) < 900, 10, 1000)
    at = {"step": 0}

    def dearer(latest):
        at["step"] += len(latest)
        return 1000.0 / leaps[at["step"] - 1]

    taken, _ = run(
        Watch("fit"), clock, lambda step: 1e-3 * leaps[step], 2000, dearer=dearer
    )
    assert np.max(taken) < 2.1
    taken, _ = run(Watch("fit"), clock, lambda step: 1e-3 * leaps[step], 2000)
    assert np.max(taken) > 10.0  # without it


def test_a_limit_ends_a_phase_and_is_told_from_one_that_was_over(clock):
    watch = Watch("fit", time_limit=3.0)
    _, record = run(watch, clock, lambda step: 0.1, 10)
    clock.now += 60.0  # spent on what comes after
    assert record.num_steps == 10 and watch.stopped and watch.cut is None
    watch = Watch("fit", time_limit=3.0)
    _, record = run(watch, clock, lambda step: 0.1, 1000)
    assert 25 <= record.num_steps <= 35 and watch.cut == "stopped by `time_limit`"


@pytest.mark.parametrize("useless", [5])
def test_before_the_first_result_there_is_nothing_to_return(clock, useless):
    watch = Watch("fit", time_limit=0.1 * useless - 0.05)
    # Blocks of 1 and 4 steps: exactly those that make no result.
    words = r"before the first step or draw of `fit` \(after 5 of 5 before it\)"
    with pytest.raises(TimeoutError, match=words):
        run(watch, clock, lambda step: 0.1, 9, useless=useless)
    # One more than is useless is a result.
    watch = Watch("fit", time_limit=0.1 * useless - 0.05)
    _, record = run(watch, clock, lambda step: 0.1, 9, useless=useless - 1)
    assert record.num_steps == useless


def test_a_second_attempt_has_nothing_to_keep_yet(clock):
    watch = Watch("fit", time_limit=5.0)
    run(watch, clock, lambda step: 0.1, 10)
    watch.begin_again()
    clock.now += 10.0
    with pytest.raises(TimeoutError, match="before the first step"):
        run(watch, clock, lambda step: 0.1, 10)
    watch = Watch("fit")
    run(watch, clock, lambda step: 0.1, 10)
    watch._on_interrupt(None, None)
    watch.begin_again()
    with pytest.raises(KeyboardInterrupt, match="before its first step"):
        run(watch, clock, lambda step: 0.1, 10)
