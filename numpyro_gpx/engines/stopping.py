"""When a training by steps may end early, and what is said of one that did not."""

from __future__ import annotations

import numpy as np

from numpyro_gpx.engines.schedule import Schedule
from numpyro_gpx.engines.watch import BLOCK, Record
from numpyro_gpx.notes import Note
from numpyro_gpx.results.loss_notes import loss_notes

__all__ = ["Stopper"]

_PATIENCE = 5


class Stopper:
    """Says stop when the loss has not fallen for five looks in a row.

    Args:
        tolerance: By how much it must fall; `None` never stops.
        schedule: Of the learning rate, if it is the default one: while that is high the
            loss falls as the rate does, so only its last fifth is looked at.
        num_steps: Steps of the whole training.
        warm: Steps at the start in which the loss changes whatever the guide does.
    """

    def __init__(
        self, tolerance: float | None, schedule: Schedule | None, num_steps: int,
        warm: int,
    ):  # fmt: skip
        self.tolerance, self.schedule = tolerance, schedule
        self.num_steps, self.warm = num_steps, warm
        self.best, self.waited, self.looks = np.inf, 0, 0

    def __call__(self, record: Record) -> bool:
        first = record.num_steps - BLOCK
        if self.tolerance is None or record.num_steps % BLOCK or first < self.warm:
            return False
        if self.schedule is not None and not self.schedule.is_late(first):
            return False
        return self.look(record.values[-BLOCK:].mean())

    def look(self, loss: float) -> bool:
        """Look at the mean loss of a block."""
        self.looks += 1
        if loss < self.best - (self.tolerance or 0.0):
            self.best, self.waited = float(loss), 0
        else:
            self.waited += 1
        return self.done

    @property
    def done(self) -> bool:
        """Whether it has said so."""
        return self.waited >= _PATIENCE

    def notes(self, losses: np.ndarray) -> list[Note]:
        """What is to be doubted of all these steps, if it has not said stop."""
        if self.done:
            return []
        # With fewer looks it could not have stopped, however flat the loss.
        if self.tolerance is not None and (
            self.schedule is None or self.looks > _PATIENCE
        ):
            return [self._falling(losses)]
        if self.schedule is None:
            return loss_notes(losses[self.warm :])
        rates = self.schedule.rates(len(losses))
        return loss_notes(losses[self.warm :], rates[self.warm :])

    def _falling(self, losses) -> Note:
        return Note(
            "not_converged", "doubt",
            f"The loss was still falling by more than {self.tolerance:g} in 500 steps "
            f"when the {len(losses)} steps were over.",
            "Raise `num_steps`, or go on from here: `init=fit`.",
            {"best": self.best, "last": float(np.mean(losses[-BLOCK:]))},
        )  # fmt: skip
