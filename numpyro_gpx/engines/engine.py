"""What an engine is: an algorithm as a value, and what it comes to."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import Any, ClassVar, NamedTuple

import equinox as eqx

from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.notes import Note
from numpyro_gpx.program.elbo import Loss
from numpyro_gpx.program.options import meant_by
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.facts import UNKNOWN, Facts
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import Posterior

__all__ = ["Engine", "Outcome", "Start"]


class Start(NamedTuple):
    """Where a fit starts; what is not said here the engine chooses.

    Attributes:
        values: Values of latent sites by name, on their supports.
        fit: An earlier fit of the model, or of a like one.
    """

    values: dict[str, Any] = {}
    fit: Fit | None = None


class Outcome(NamedTuple):
    """What a run comes to.

    Attributes:
        posterior: Draws, or a guide with its parameters.
        params: Values of `numpyro.param`s, those of the guide included.
        info: What was recorded: losses, step sizes, whether it converged.
        stats: Records of each draw, `(chains, draws)`, for ArviZ.
        notes: What the reader of the fit must know.
        loss: What was minimised, if it was a loss of this library.
        facts: What the engine has turned out to be; `None` for what it said before.
    """

    posterior: Posterior
    params: dict[str, Any] = {}
    info: dict[str, Any] = {}
    stats: dict[str, Any] = {}
    notes: tuple[Note, ...] = ()
    loss: Loss | None = None
    facts: Facts | None = None


class Engine(eqx.Module):
    """An algorithm as a value: `gpx.fit(model, engine, X, y, key=key)` runs it.

    A new one is a subclass with fields for its settings, a `name`, an `approximation`
    and `run`; `gpx.testing.check_engine` says whether it keeps the rules.
    """

    name: ClassVar[str] = ""
    approximation: ClassVar[str] = UNKNOWN

    def __new__(cls, *args, **kwargs):
        # Before `__init__`, whose words for a misspelt setting name no other.
        taken = inspect.signature(cls.__init__).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        settings = [name for name in taken if name not in ("self", "_")]
        for name in kwargs:
            if name not in settings and not anything:
                raise TypeError(
                    f"`{name}` is not a setting of `{cls.__name__}`, which takes "
                    f"{settings}.{meant_by(name, settings)}"
                )
        return super().__new__(cls)

    @property
    def facts(self) -> Facts:
        """What it is, in plain values."""
        settings = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }
        return Facts(self.name or type(self).__name__, self.approximation, settings)

    @property
    def takes_batches(self) -> bool:
        """Whether minibatches are one of its settings, called `batch_size`."""
        return "batch_size" in {field.name for field in dataclasses.fields(self)}

    @property
    def batch(self) -> int | None:
        """Rows of a minibatch; `None` if all are used."""
        return getattr(self, "batch_size", None)

    def objection(self, program: Program) -> str | None:
        """Why it cannot fit this model, in words; `None` if it can."""
        return None

    @abc.abstractmethod
    def run(self, program: Program, key, *, start: Start, watch: Watch) -> Outcome:
        """Fit the model.

        Args:
            program: The model with its data, checked; `program.batched` is the call on
                minibatches if there are any.
            key: Random key.
            start: Where to start.
            watch: Runs loops in compiled blocks, and ends them early: all that takes
                long goes through it.

        Raises:
            NotFinite: If NaN or infinity was met; the fit is then tried once more with
                a larger jitter.
        """


def _plain(value):
    """A setting as a plain value that can be saved."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(x) for x in value]
    if isinstance(value, dict):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, type):
        return value.__name__
    return type(value).__name__
