"""The one loop over compiled blocks: progress, time, NaN, Ctrl-C.

An engine hands over a compiled block of steps; the loop decides how many steps each
call does, so that Python looks at what came back about twice a second and steps cost
what they would without it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm

from numpyro_gpx.engines.retry import NotFinite

__all__ = ["BLOCK", "Record", "Stopped", "Watch"]

# Steps of a block at most. Engines decide things (when to stop) at multiples of it
# only, so that results do not depend on how fast the machine is.
BLOCK = 100
# Seconds that a block should take, and may take if all its steps are the dearest.
_SECONDS, _MOST_SECONDS = 0.5, 2.0


_COMPILING = " (most of the time may have gone into compiling)"


class Stopped(Exception):
    """Raised inside what cannot be cut, to end it."""


class Record:
    """What the steps of a phase reported, and how long they took."""

    def __init__(self):
        self._blocks: list[Any] = []
        self._times: list[float] = []
        self.num_steps = 0

    def add(self, latest, number: int, seconds: float) -> None:
        self._blocks.append(latest)
        self._times.append(seconds / number)
        self.num_steps += number

    @property
    def values(self):
        """What was reported, leaves `(steps, ...)`; of at least one step."""
        return jax.tree.map(lambda *x: np.concatenate(x), *self._blocks)

    @property
    def latest(self):
        """What the last block reported."""
        return self._blocks[-1]

    @property
    def seconds_per_step(self) -> float:
        """The median over blocks, without the first, which warms up."""
        return float(np.median(self._times[1:] or self._times or [np.nan]))

    @property
    def last_seconds_per_step(self) -> float:
        """That of the last block."""
        return self._times[-1]


class Watch:
    """Runs the phases of a fit and knows when to end it early.

    Args:
        of: Whose fit it is, for messages.
        progress: Whether to show progress bars.
        time_limit: Seconds after which the fit so far is returned; `None` for no limit.
    """

    def __init__(
        self, of: str, *, progress: bool = False, time_limit: float | None = None
    ):
        self.of, self.progress, self.time_limit = of, progress, time_limit
        self._started = time.perf_counter()
        self._interrupted = False
        self._worth_keeping = False
        # Whether what runs is no result yet, however far it comes: `preparing`.
        self.is_preparing = False
        self._done = ""  # how far what makes no result has come
        # Why a phase was ended before its end, in words; `None` if none was.
        self.cut: str | None = None

    @contextlib.contextmanager
    def preparing(self):
        """What runs inside is not yet worth keeping, however far it comes."""
        before, self.is_preparing = self.is_preparing, True
        try:
            yield
        finally:
            self.is_preparing = before

    def begin_again(self) -> None:
        """Forget what there was to keep: the fit starts anew."""
        self._worth_keeping, self._done = False, ""

    @property
    def stopped(self) -> str | None:
        """Why the fit should end now, in words; `None` if it should go on.

        What comes after the last step is to hurry then; whether steps are missing says
        `cut`.
        """
        if self._interrupted:
            return "interrupted"
        limit = self.time_limit
        if limit is not None and time.perf_counter() - self._started > limit:
            return "stopped by `time_limit`"
        return None

    @contextlib.contextmanager
    def listening(self):
        """Take Ctrl-C as the wish for the fit so far, once there is one.

        Only the main thread hears signals. A second Ctrl-C ends the fit at once.
        """
        ignored = (signal.SIG_IGN, None)
        heard = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT)
        if not heard or before in ignored:
            yield
            return
        signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, signum, frame):
        if self._interrupted:
            raise KeyboardInterrupt(f"`{self.of}` was interrupted twice.")
        self._interrupted = True
        if not self._worth_keeping:
            raise KeyboardInterrupt(self._nothing_yet)

    @property
    def _nothing_yet(self) -> str:
        return (
            f"`{self.of}` was interrupted before its first step or draw{self._done}: "
            "there is no fit to return."
        )

    def loop(
        self,
        phase: str,
        block: Callable[[Any, int, int], tuple[Any, Any]],
        state: Any,
        num_steps: int,
        *,
        names: tuple[str, ...] = (),
        most: int = BLOCK,
        useless: int = 0,
        say: Callable[[Record], str | None] = lambda record: "",
        check: Callable[[Any, int], None] | None = None,
        explain: Callable[[Any, int], str] | None = None,
        dearer: Callable[[Any], float] = lambda latest: 1.0,
    ) -> tuple[Any, Record]:
        """Run `num_steps` steps, or fewer if the fit is to end; the last state.

        Args:
            phase: What is running, for the progress bar.
            block: `block(state, first, number)` does `number` steps, the first of which
                is number `first` of the phase; returns the new state and reports, whose
                leaves have at least `number` rows.
            state: The starting state.
            num_steps: Steps in all.
            names: What each step reports, `(steps,)` or `(steps, names)`; these must be
                finite.
            most: Steps of a block at most.
            useless: Steps at the start that make no result, such as a warm-up.
            say: A line for the bar from what was reported so far; `None` ends the
                phase. Asked at each block; blocks end at multiples of `most`.
            check: `check(latest, first)` raises `NotFinite` if reports are not.
            explain: `explain(state, step)`: where the first number that is not finite
                comes from, given the state before that step.
            dearer: How many times as long as the steps of the last block one can take
                at most, such as a tree that has its full depth.

        Raises:
            NotFinite: If a report is not finite.
            TimeoutError: If `time_limit` is over before there is anything to return.
        """
        record = Record()
        number = 1
        bar = tqdm.tqdm(total=num_steps, desc=phase, disable=not self.progress)
        with bar:
            while record.num_steps < num_steps and not self._must_end():
                first = record.num_steps
                number = min(number, num_steps - first)
                # Blocks may write over the memory of the state they are given.
                kept = None if explain is None else jax.tree.map(_copied, state)
                before = time.perf_counter()
                state, reports = block(state, first, number)
                latest = jax.tree.map(lambda x, n=number: np.asarray(x)[:n], reports)
                record.add(latest, number, time.perf_counter() - before)
                if names:
                    again = _Again(block, kept, first, explain)
                    _check_finite(latest, names, first, again)
                if check is not None:
                    check(latest, first)
                self._worth_keeping |= (
                    record.num_steps > useless and not self.is_preparing
                )
                if useless and not self._worth_keeping:
                    self._done = f" (after {record.num_steps} of {useless} before it)"
                bar.update(number)
                line = say(record)
                if line is None:
                    break
                bar.set_postfix_str(line, refresh=False)
                number = _size(record, most, dearer(latest))
        return state, record

    def whole(self, phase: str, fn: Callable[[Callable[[str], None]], Any], total: int):
        """Run what cannot be cut: `fn(tick)` calls `tick(line)` now and then.

        `tick` raises `Stopped` when the fit is to end.
        """
        bar = tqdm.tqdm(total=total, desc=phase, disable=not self.progress)

        def tick(line: str) -> None:
            self._worth_keeping |= not self.is_preparing
            bar.update(1)
            bar.set_postfix_str(line, refresh=False)
            if self._must_end():
                raise Stopped

        with bar:
            return fn(tick)

    def _must_end(self) -> bool:
        if self.stopped and not self._worth_keeping:
            if self._interrupted:
                raise KeyboardInterrupt(self._nothing_yet)
            raise TimeoutError(
                f"`time_limit={self.time_limit}` seconds were over before the first "
                f"step or draw of `{self.of}`{self._done or _COMPILING}: there is no "
                "fit to return."
            )
        self.cut = self.stopped
        return self.cut is not None


def _copied(x):
    """The same in memory of its own; `jnp.copy` compiles a program for each shape."""
    return jax.device_put(x, may_alias=False)


def _size(record: Record, most: int, dearer: float) -> int:
    """Steps of the next block: half a second's worth, up to a multiple of `most`."""
    left = most - record.num_steps % most
    # The last block may know of steps that have become dearer.
    seconds = max(record.seconds_per_step, record.last_seconds_per_step, 1e-9)
    wanted = min(_SECONDS, _MOST_SECONDS / dearer) / seconds
    # What one block says of the next is a guess: grow by steps.
    return max(1, int(min(left, wanted, 4 * record.num_steps)))


class _Again:
    """Goes back to the step that failed, to say why."""

    def __init__(self, block, state, first: int, explain):
        self.block, self.state, self.first, self.explain = block, state, first, explain

    def reason(self, step: int) -> str:
        if self.explain is None:
            return ""
        state = self.state
        if step > self.first:
            state, _ = self.block(state, self.first, step - self.first)
        return self.explain(state, step)


def _check_finite(latest, names, first: int, again: _Again) -> None:
    rows = latest.reshape(len(latest), -1)
    bad = np.argwhere(~np.isfinite(rows))
    if len(bad):
        row, column = bad[0]
        step = first + int(row)
        raise NotFinite(
            f"The {names[column]} became {rows[row, column]} at step {step}"
            f"{again.reason(step)}.",
            step,
        )
