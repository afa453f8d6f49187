"""What a fit holds, and what can be read off it at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.random as jr

from numpyro_gpx.notes import Note, as_text
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.elbo import ELBO, Loss
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.results.facts import PRIOR, Facts
from numpyro_gpx.results.posteriors import Posterior

__all__ = ["FitContents"]


class FitContents:
    """What a `Fit` is made of.

    Args:
        program: The model with its training arguments, and what was found there.
        posterior: Draws, or a guide with its parameters.
        facts: What the engine is: its name, approximation, settings.
        params: Values of `numpyro.param`s in the model.
        seconds: Wall-clock time of the fit, compilation included.
        seconds_compiling: How much of it went into tracing and compiling.
        info: What the engine recorded: losses, divergences, step sizes.
        batch_size: Rows of a minibatch, if the fit used any.
        sample_stats: Per-draw records `(chains, draws)`, for ArviZ.
        loss: What a variational fit minimised; `gpx.infer.ELBO()` if left out.
        notes: What may be doubted; see `check`.
    """

    def __init__(
        self,
        program: Program,
        posterior: Posterior,
        *,
        facts: Facts,
        params: dict | None = None,
        seconds: float = float("nan"),
        seconds_compiling: float = float("nan"),
        info: dict[str, Any] | None = None,
        batch_size: int | None = None,
        sample_stats: dict | None = None,
        loss: Loss | None = None,
        notes: tuple[Note, ...] = (),
    ):
        self.program = program
        self.posterior = posterior
        self.facts = facts
        self.params = params or {}
        self.seconds, self.seconds_compiling = seconds, seconds_compiling
        self.info = info or {}
        self.batch_size = batch_size
        self.sample_stats = sample_stats or {}
        self.loss = ELBO() if loss is None else loss
        self.notes = tuple(notes)
        # What predictions average over, once it is known.
        self._components: dict[tuple[int | None, bool], Any] = {}

    def __repr__(self) -> str:
        sites = ", ".join(self.structure.latents)
        head = f"Fit({self.engine}, {self.target} target; sites: {sites})"
        return "\n".join([head, *([as_text(self.notes)] if self.notes else [])])

    def check(self) -> list[Note]:
        """What may be doubted of this fit: severity, evidence, and what to do next.

        Empty if nothing was found; that is no proof.
        """
        return list(self.notes)

    @property
    def engine(self) -> str:
        """Name of the engine: `"svi"`, `"lbfgs"`, `"nuts"`, `"sghmc"`, ..."""
        return self.facts.name

    @property
    def model(self) -> Callable:
        """The NumPyro function."""
        return self.program.model

    @property
    def call(self) -> Call:
        """The model with its training arguments."""
        return self.program.call

    @property
    def structure(self) -> Structure:
        """The model's sites."""
        return self.program.structure

    @property
    def jitter(self) -> float | None:
        """Relative jitter that was used; `None` for the default."""
        return self.program.call.jitter

    @property
    def target(self) -> str:
        """What the model's density is: `"exact"`, or the `"sparse"` approximation.

        The engine adds an approximation of its own (`approximation`).
        """
        return self.program.target

    @property
    def approximation(self) -> str:
        """How the draws relate to the target density."""
        return self.facts.approximation

    @property
    def is_mcmc(self) -> bool:
        """Whether the draws form Markov chains."""
        return not self.posterior.independent

    @property
    def is_prior(self) -> bool:
        """Whether it is of the prior, and knows of no data."""
        return self.approximation == PRIOR

    @property
    def key(self):
        """The key of what must not change from call to call, nor after loading."""
        return jr.key(0)
