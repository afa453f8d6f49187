"""A progress bar that costs nothing: steps run in compiled blocks between updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tqdm

__all__ = ["run_blocks"]


def run_blocks(
    step_block: Callable[[Any, int], tuple[Any, str | None]],
    state: Any,
    num_steps: int,
    *,
    block: int,
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
