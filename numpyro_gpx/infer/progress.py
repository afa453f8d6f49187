"""A progress bar that costs nothing: steps run in compiled blocks between updates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tqdm

from numpyro_gpx.infer.retry import NotFinite

__all__ = ["BLOCK", "Record", "run_blocks"]

# Steps between looks at the losses.
BLOCK = 100


class Record:
    """What the steps of a training reported, and how long they took.

    Args:
        names: What each step reports, for the message if it is not finite.
    """

    def __init__(self, *names: str):
        self.names = names
        self._blocks: list[np.ndarray] = []
        self._times: list[float] = []

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return sum(len(block) for block in self._blocks)

    @property
    def values(self) -> np.ndarray:
        """What was reported, `(steps,)` or `(steps, names)`."""
        return np.concatenate(self._blocks)

    @property
    def seconds_per_step(self) -> float:
        """The median over blocks, without the first, which compiles."""
        return float(np.median(self._times[1:] or self._times))

    def block(self, run: Callable[[int], tuple[Any, Any]], number: int):
        """Call `run(first step)` for a state and the reports of `number` steps.

        Raises:
            NotFinite: If a report is not finite.
        """
        first, before = self.num_steps, time.perf_counter()
        state, reports = run(first)
        latest = np.asarray(reports)[:number]
        self._blocks.append(latest)
        self._times.append((time.perf_counter() - before) / number)
        bad = np.argwhere(~np.isfinite(latest.reshape(number, -1)))
        if len(bad):
            step, column = bad[0]
            value = latest.reshape(number, -1)[step, column]
            raise NotFinite(
                f"The {self.names[column]} became {value} at step {first + step}."
            )
        return state, latest


def run_blocks(
    step_block: Callable[[Any, int], tuple[Any, str | None]],
    state: Any,
    num_steps: int,
    *,
    block: int = BLOCK,
    progress: bool,
    label: str,
) -> Any:
    """Run `step_block(state, n)` until `num_steps` are done or it says stop.

    Args:
        step_block: Takes the state and a number of steps; returns the new state and a
            line for the bar, or `None` to stop early.
        state: The starting state.
        num_steps: Steps in all.
        block: Steps between updates.
        progress: Whether to show the bar.
        label: What is running.
    """
    with tqdm.tqdm(total=num_steps, desc=label, disable=not progress) as bar:
        done = 0
        while done < num_steps:
            number = min(block, num_steps - done)
            state, line = step_block(state, number)
            done += number
            bar.update(number)
            if line is None:
                break
            bar.set_postfix_str(line, refresh=False)
    return state
