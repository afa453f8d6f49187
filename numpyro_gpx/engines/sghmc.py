"""Stochastic-gradient HMC on the target density, with minibatches."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro import handlers

from numpyro_gpx import checks
from numpyro_gpx.engines.chains import Chains, Length, sample_chains, starting_points
from numpyro_gpx.engines.engine import Engine, Outcome, Start
from numpyro_gpx.engines.gradient_noise import (
    NUM_POINTS,
    inflation,
    noise_notes,
)
from numpyro_gpx.engines.guided import Guided
from numpyro_gpx.engines.monte_carlo_em import (
    MonteCarloEM,
    known_start,
    move_hyperparameters,
)
from numpyro_gpx.engines.sampling import constrained, known_params
from numpyro_gpx.engines.sghmc_kernel import SGHMC as Kernel
from numpyro_gpx.engines.sghmc_kernel import check_steps
from numpyro_gpx.engines.sghmc_through_guide import ThroughGuide, objection_to
from numpyro_gpx.guides.parts.doubts import collapsing_scales
from numpyro_gpx.notes import Note
from numpyro_gpx.program.compile_cache import compiled
from numpyro_gpx.program.data_checks import no_slope
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.chain_notes import heat_notes
from numpyro_gpx.results.facts import BIASED, Facts
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import ChainPosterior

__all__ = ["SGHMC"]

# Rows times inducing variables up to which a gradient over all rows takes some 50 ms.
_CHEAP = 1_000_000


class SGHMC(Engine):
    """Samples the target density with SGHMC on minibatches; see `gpx.infer.SGHMC`.

    With a `guide` the chains run in its coordinates, where the posterior is nearly
    standard normal, with its sites as control variates, and with the measured noise of
    the minibatches taken off the injected one. Where a gradient over all rows is cheap
    (rows times inducing variables below a million, say), `fit_guided` has no bias at
    all: try it first.

    Attributes:
        guide: A fit of a Gaussian guide by this very model, such as
            `gpx.fit_svi(model, gpx.guides.ConditionalGaussian, ...)`; `None` to sample
            the model's own sites.
        batch_size: Rows of a minibatch; `None` uses all rows.
        num_warmup: Warm-up draws of each chain, of `num_integration_steps` gradients
            each.
        num_samples: Draws of each chain.
        num_chains: Chains.
        step_size: Step size, below 2; the bias shrinks with it.
        friction: Friction; `None` for 0.3, or 1 with a guide.
        num_integration_steps: Gradients for each draw; `None` for 20, or 5 with a
            guide.
        em: Move hyperparameters and `numpyro.param`s to a point by Monte Carlo EM
            (`gpx.infer.MonteCarloEM()`) and sample the rest; `None` samples the
            hyperparameters as well.
        params: Values of `numpyro.param`s: a variational fit or a dict; those that it
            does not have are taken from `init`. With a guide they are the guide's.
        chain_method: `"sequential"`, or `"vectorized"`: all chains in one program.

    Its fits have in `fit.info` the `temperature` of the chains: the mean squared
    momentum, 1 if nothing heats them. Noise of minibatches does, and widens what it
    moves: standard deviations grow by about its square root. Also there:
    `gradient_variance`, the largest variance of an entry of the gradient in units of
    its mass, and without a guide `inflation`, the factor by which that widens the
    standard deviation which it widens most; `batch_size`, `num_gradients` (of the
    draws), and with a guide `x_mean` and `x_sd` as of `Guided`.
    """

    name: ClassVar[str] = "sghmc"
    approximation: ClassVar[str] = BIASED

    guide: Fit | None = None
    _: dataclasses.KW_ONLY
    batch_size: int | None = None
    num_warmup: int = 500
    num_samples: int = 1000
    num_chains: int = 2
    step_size: float = 0.2
    friction: float | None = None
    num_integration_steps: int | None = None
    em: MonteCarloEM | None = None
    params: Any = None
    chain_method: str = "sequential"

    def __check_init__(self):
        Length.of(self)
        checks.at_least("num_warmup", self.num_warmup, 1)  # which finds the scales
        check_steps(self.step_size, self.damping)
        checks.at_least("num_integration_steps", self.num_steps_of_a_draw, 1)
        if self.em is not None:
            hint = "such as `gpx.infer.MonteCarloEM()`"
            checks.instance("em", self.em, MonteCarloEM, hint)
        if self.guide is not None:
            checks.instance("guide", self.guide, Fit, "such as `gpx.fit_svi(...)`")
            for name in ("em", "params"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"`{name}` must be left out where there is a `guide`, whose "
                        "coordinates are of all sites, at its own parameters."
                    )

    @property
    def damping(self) -> float:
        """The friction, whoever chose it."""
        chosen = 0.3 if self.guide is None else 1.0
        return chosen if self.friction is None else self.friction

    @property
    def num_steps_of_a_draw(self) -> int:
        """Gradients for each draw, whoever chose their number."""
        number = self.num_integration_steps
        # In the guide's coordinates a unit of time forgets where the chain was.
        return (20 if self.guide is None else 5) if number is None else number

    @property
    def facts(self):
        settings = dict(super().facts.settings)
        settings["friction"] = self.damping
        settings["num_integration_steps"] = self.num_steps_of_a_draw
        if self.guide is not None:
            settings["guide"] = self.guide.facts.name
        return Facts(self.name, self.approximation, settings)

    def objection(self, program):
        flat = no_slope(program.trace, self.name)
        if flat is not None or self.guide is None:
            return flat
        return objection_to(self.guide, program)

    def run(self, program, key, *, start, watch) -> Outcome:
        if self.guide is not None:
            return ThroughGuide(self, self.guide, program, watch).outcome(key, start)
        params = known_params(
            self.params, start, program.structure, required=self.em is None
        )
        if self.em is None:
            return self._sample(program, key, params, start, watch)
        key_init, key_em, key_run = jr.split(key, 3)
        point = known_start(key_init, start, program.structure)
        moved = move_hyperparameters(
            self.em, self._kernel(program.model, params), program.batched,
            key=key_em, start=point, watch=watch,
        )  # fmt: skip
        given = handlers.condition(program.model, data=moved.values)
        size = program.batched.batch_size
        rest = Program.of(program.call.with_model(given), size)
        window = ChainPosterior({name: x[None] for name, x in moved.draws.items()})
        last = Fit(rest, window, facts=self.facts, params=moved.params)
        found = self._sample(rest, key_run, moved.params, Start(fit=last), watch)
        found = self._with_point(found, moved)
        collapse = collapsing_scales(program, tuple(moved.values))
        return found._replace(notes=(*collapse, *found.notes))

    def _sample(self, program, key, params, start: Start, watch) -> Outcome:
        """Sample all sites."""
        key_run, key_init = jr.split(key)
        key_noise = jr.fold_in(key_run, 1)
        known = {name: params[name] for name in program.structure.params}
        length = Length.of(self)

        def make(inputs):
            call, params = inputs
            return self._kernel(call.model, params).at(call)

        points = starting_points(key_init, start, program.structure, length.num_chains)
        starts = [
            {name: x[i] for name, x in (points or {}).items()}
            for i in range(length.num_chains)
        ]
        inputs = program.batched, known
        label = f"sghmc, {length.num_chains} chains"
        chains = sample_chains(make, inputs, key_run, starts, length, watch, label)
        draws = constrained(Target(program.batched, params=known), chains.z)
        info = {
            "num_warmup": length.num_warmup,
            "step_size": self.step_size,
            "num_integration_steps": self.num_steps_of_a_draw,
            "temperature": float(np.mean(chains.stats["temperature"])),
            "seconds_per_step": chains.seconds_per_step,
            "batch_size": program.batched.batch_size,
            "num_gradients": self.num_steps_of_a_draw
            * length.num_samples
            * length.num_chains,
        }
        notes = heat_notes(chains.stats["temperature"], program.batched.batch_size)
        plates = program.batched_structure.plates
        if plates and watch.stopped is None:
            variance = _noise(make, inputs, chains, key_noise, length.vectorized)
            info["gradient_variance"] = float(np.max(variance))
            info["inflation"] = inflation(variance, self.step_size, self.damping)
            num_rows, batch_size = max(plates.values())
            notes += noise_notes(
                variance, self.step_size, self.damping, batch_size, num_rows,
                first=_first(program),
            )  # fmt: skip
        return Outcome(ChainPosterior(draws), params, info, chains.stats, notes)

    def _kernel(self, model, params) -> Kernel:
        return Kernel(
            model, step_size=self.step_size, friction=self.damping,
            num_integration_steps=self.num_steps_of_a_draw, params=params,
        )  # fmt: skip

    def _with_point(self, found: Outcome, moved) -> Outcome:
        """The draws together with the hyperparameters that they were drawn given."""
        draws = found.posterior.chains()
        shape = next(iter(draws.values())).shape[:2]
        point = {
            name: np.broadcast_to(x, shape + x.shape)
            for name, x in moved.values.items()
        }
        info = {
            **found.info, "em": repr(self.em), "log_densities": moved.log_densities,
        }  # fmt: skip
        note = Note(
            "points", "remark",
            f"{sorted(point)} are points, moved by Monte Carlo EM; only the other "
            "sites are sampled.",
            "Leave `em` out to sample them too.",
        )  # fmt: skip
        return found._replace(
            posterior=ChainPosterior({**draws, **point}, fixed=tuple(point)),
            info=info, notes=(*found.notes, note),
        )  # fmt: skip


def _noise(make, inputs, chains: Chains, key, vectorized: bool) -> np.ndarray:
    """Variance of the gradient in units of the mass, at draws of the first chain."""
    mass = chains.states[0].grad_square
    mass = mass[0] if vectorized else mass
    drawn = {name: x[0] for name, x in chains.z.items()}
    number = len(next(iter(drawn.values())))
    index = np.linspace(0, number - 1, NUM_POINTS).astype(int)
    points = {name: jnp.asarray(x[index]) for name, x in drawn.items()}

    def measure(inputs, points, mass, key):
        return make(inputs).noise(points, mass, key)

    return np.asarray(
        compiled(measure, inputs, points, mass, key)(inputs, points, mass, key)
    )


def _first(program: Program) -> str:
    """What to try before other settings: a guide, or all rows where they are cheap."""
    structure = program.structure
    if structure.noise or Guided().objection(program) is not None:
        return "Use a larger minibatch"
    sizes = [structure.latents[name].shape[-1] for name in structure.gps]
    rows = max(plate.size for plate in program.batched_structure.plates.values())
    if rows * max(sizes, default=1) <= _CHEAP:
        return (
            "Use `fit_guided`, exact and cheap here, or pass `guide=`, a fit of a "
            "Gaussian guide; else a larger minibatch"
        )
    return "Pass `guide=`, a fit of a Gaussian guide; else use a larger minibatch"
