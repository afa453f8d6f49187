"""SGHMC through a guide: what it needs, its control variates, its chains."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from numpyro_gpx.engines.chains import Chains, Length, sample_chains, starting_points
from numpyro_gpx.engines.control_variates import Rows, RowSites, row_calls
from numpyro_gpx.engines.coordinates import Coordinates, GuideState
from numpyro_gpx.engines.curvature import root_at_point
from numpyro_gpx.engines.engine import Outcome, Start
from numpyro_gpx.engines.gradient_noise import (
    NUM_POINTS,
    check_noise,
    gradient_variance,
)
from numpyro_gpx.engines.guide_sites import chunks, guide_sites
from numpyro_gpx.engines.guided_sghmc import GuidedKernel, minibatch_gradient
from numpyro_gpx.engines.minibatch_energy import MinibatchEnergy
from numpyro_gpx.engines.through import no_map, values_at
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.guides.parts.base import SiteGuide
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.notes import Note
from numpyro_gpx.program.compile_cache import compiled
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.chain_notes import heat_notes
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import ChainPosterior, GuidePosterior

__all__ = ["ThroughGuide", "objection_to"]

# Standard deviations and means of the coordinates in which the guide is near enough.
_SD, _MEAN = (0.5, 2.0), 1.0
# So many pieces of the data are looked at before a compiler has made haste.
_FEW_PIECES = 20
# More functions at a row than this, and their matrices are too large to keep.
_MOST_FUNCTIONS = 16


def objection_to(guide: Fit, program: Program) -> str | None:
    """Why SGHMC cannot go through this guide, in words; `None` if it can."""
    found = no_map(program, guide, "guide")
    if found is not None:
        return found
    structure = program.batched_structure
    instead = "Leave `guide` out, or use `fit_guided`."
    kind = _guide_of(guide)
    if not isinstance(kind, GaussianGuide):
        return (
            f"The fit `guide` is of {type(kind).__name__}, which has no Gaussian "
            "beliefs to take control variates from. Use a fit of "
            "`gpx.guides.ConditionalGaussian`."
        )
    if structure.noise:
        return (
            f"The model draws noise at {sorted(structure.noise)}, between layers, "
            f"which no control variate follows. {instead}"
        )
    if not structure.plates:
        return None
    if len(structure.plates) > 1:
        return f"Plates {list(structure.plates)} subsample, not one alone. {instead}"
    calls = row_calls(program)
    if not calls:
        return (
            "No GP is called at the rows of the minibatch, `f(X[i])`, so that there "
            f"are no sites to take as control variates. {instead}"
        )
    outputs = [structure.latents[call.site].shape[:-1] for call in calls]
    number = int(sum(np.prod(shape) for shape in outputs))
    if number > _MOST_FUNCTIONS:
        return (
            f"Each row sees {number} functions; control variates are for "
            f"{_MOST_FUNCTIONS} at most. {instead}"
        )
    return None


def _guide_of(fit: Fit) -> SiteGuide:
    assert isinstance(fit.posterior, GuidePosterior)  # else it has objected
    return fit.posterior.guide


class _Arrays(NamedTuple):
    """What programs read: the guide and the model, control variates, noise."""

    state: GuideState
    sites: RowSites | None
    variance: Any


class ThroughGuide:
    """One run.

    Args:
        engine: The engine with its settings.
        guide: The fit of the guide.
        program: The model with its data.
        watch: Runs the blocks.
    """

    def __init__(self, engine, guide: Fit, program: Program, watch: Watch):
        self.engine, self.fit, self.program = engine, guide, program
        self.guide, self.watch = _guide_of(guide), watch
        self.structure = program.batched_structure
        # Empty where each gradient has all rows.
        self.plate = next(iter(self.structure.plates), "")
        self.calls = row_calls(program) if self.plate else ()

    def outcome(self, key, start: Start) -> Outcome:
        key_root, key_noise, key_start, key_run = jr.split(key, 4)
        root = root_at_point(self.guide, self.fit, key_root)
        state = GuideState(self.program.batched, self.fit.params, root)
        sites = self._sites(state)
        variance = self._variance(_Arrays(state, sites, None), key_noise)
        if self.plate:
            num_rows, batch_size = self.structure.plates[self.plate]
            check_noise(
                variance, self.engine.step_size, self.engine.damping, batch_size,
                num_rows,
            )  # fmt: skip
        arrays = _Arrays(state, sites, jnp.asarray(variance))
        chains = self._chains(arrays, key_start, key_run, start)
        draws = values_at(self._coordinates, state, chains.z["x"])
        return self._told(chains, draws, variance)

    def _coordinates(self, state: GuideState) -> Coordinates:
        return Coordinates(self.guide, self.structure, state)

    def _rows(self, call) -> Rows:
        params = {name: self.fit.params[name] for name in self.structure.params}
        return Rows(call, self.structure, params, self.plate, self.calls)

    def _energy(self, arrays: _Arrays) -> MinibatchEnergy:
        here = self._coordinates(arrays.state)
        if arrays.sites is None:
            return MinibatchEnergy(here)
        return MinibatchEnergy(here, self._rows(arrays.state.call), arrays.sites)

    def _sites(self, state: GuideState) -> RowSites | None:
        """The control variates of all rows; none where each gradient has them all."""
        if not self.plate:
            return None
        num_rows = self.structure.plates[self.plate].size
        pieces = jnp.asarray(chunks(num_rows))
        whole = state._replace(call=state.call.batched(pieces.shape[1]))

        def look(state, pieces):
            here = self._coordinates(state)
            return guide_sites(here, self._rows(state.call), pieces, num_rows)

        # Few pieces do not pay for fast code.
        slowly = len(pieces) <= _FEW_PIECES
        return compiled(look, whole, pieces, optimise=not slowly)(whole, pieces)

    def _variance(self, arrays: _Arrays, key) -> np.ndarray:
        """Of the gradient at draws of the guide."""
        size = self._coordinates(arrays.state).transport.size
        if not self.plate:
            return np.zeros(size)

        def measure(arrays, key):
            key_points, key_batches = jr.split(key)
            gradient = minibatch_gradient(self._energy(arrays), self.structure)
            points = jr.normal(key_points, (NUM_POINTS, size))
            return gradient_variance(gradient, points, key_batches)

        return np.asarray(compiled(measure, arrays, key)(arrays, key))

    def _chains(self, arrays: _Arrays, key_start, key_run, start: Start) -> Chains:
        length = Length.of(self.engine)
        points = self._starts(arrays.state, key_start, start, length.num_chains)

        def make(arrays):
            return GuidedKernel(
                self._energy(arrays), self.structure, arrays.variance,
                step_size=self.engine.step_size, friction=self.engine.damping,
                num_integration_steps=self.engine.num_steps_of_a_draw,
            )  # fmt: skip

        label = f"sghmc, {length.num_chains} chains"
        starts = [{"x": x} for x in points]
        return sample_chains(make, arrays, key_run, starts, length, self.watch, label)

    def _starts(self, state: GuideState, key, start: Start, num_chains: int):
        """Draws of the guide, with what `start` knows of them put in."""
        key_points, key_known = jr.split(key)
        transport = self._coordinates(state).transport
        x = jr.normal(key_points, (num_chains, transport.size))
        known = starting_points(key_known, start, self.structure, num_chains)
        if known is None:
            return x

        def moved(state, x, known):
            transport = self._coordinates(state).transport

            def one(pair):
                x, z = pair
                return transport.inverse({**transport.forward(x).z, **z})

            return jax.lax.map(one, (x, known))

        return compiled(moved, state, x, known)(state, x, known)

    def _told(self, chains: Chains, draws: dict, variance: np.ndarray) -> Outcome:
        x, stats = chains.z["x"], chains.stats
        mean = float(np.abs(x.mean(axis=(0, 1))).max())
        sd = x.std(axis=(0, 1))
        steps = self.engine.num_steps_of_a_draw
        batch_size = self.program.batched.batch_size
        info = {
            "gradient_variance": float(np.max(variance)),
            "step_size": self.engine.step_size,
            "batch_size": batch_size,
            "num_warmup": self.engine.num_warmup,
            "num_integration_steps": steps,
            "num_gradients": steps * x.shape[0] * x.shape[1],
            "temperature": float(np.mean(stats["temperature"])),
            "x_mean": mean,
            "x_sd": (float(sd.min()), float(sd.max())),
            "seconds_per_step": chains.seconds_per_step,
        }
        notes = heat_notes(stats["temperature"], batch_size)
        if mean > _MEAN or sd.min() < _SD[0] or sd.max() > _SD[1]:
            notes += (_far(mean, sd),)
        params = {name: self.fit.params[name] for name in self.structure.params}
        return Outcome(ChainPosterior(draws), params, info, stats, notes)


def _far(mean: float, sd: np.ndarray) -> Note:
    return Note(
        "guide", "doubt",
        f"The guide fits poorly: in its coordinates the posterior has means up to "
        f"{mean:.2f} and standard deviations from {sd.min():.2f} to {sd.max():.2f}, "
        "where 0 and 1 would be right; its control variates leave more noise there "
        "than was measured.",
        "Train the guide longer, or use `fit_guided`, which corrects for it.",
        {"x_mean": mean, "x_sd": (float(sd.min()), float(sd.max()))},
    )  # fmt: skip
