"""Hamiltonian Monte Carlo on the target density: `NUTS`, `HMC`."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.random as jr
import numpy as np
import numpyro.infer

from numpyro_gpx import checks
from numpyro_gpx.engines.chains import (
    Chains,
    Length,
    sample_chains,
    starting_points,
    target_starts,
)
from numpyro_gpx.engines.engine import Engine, Outcome
from numpyro_gpx.engines.sampling import constrained, known_params
from numpyro_gpx.engines.through import Through, no_map
from numpyro_gpx.program.data_checks import no_slope
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.layer_noise import as_latent_noise, noise_sets
from numpyro_gpx.results.chain_notes import hamiltonian_notes
from numpyro_gpx.results.facts import EXACT, Facts
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import ChainPosterior

__all__ = ["HMC", "NUTS"]


class _Hamiltonian(Engine):
    """What the two share: the target, its noise, chains and their statistics."""

    approximation: ClassVar[str] = EXACT

    _: dataclasses.KW_ONLY
    num_warmup: int = 500
    num_samples: int = 1000
    num_chains: int = 2
    target_accept_prob: float = 0.8
    dense_mass: Any = False
    thinning: int = 1
    chain_method: str = "sequential"
    init_strategy: Callable | None = None
    step_size: float = 1.0
    adapt_step_size: bool = True
    adapt_mass_matrix: bool = True
    regularize_mass_matrix: bool = True
    find_heuristic_step_size: bool = False
    noise_sets: int | None = 16
    params: Any = None

    def __check_init__(self):
        Length.of(self)
        checks.number("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        checks.number("step_size", self.step_size, 0.0)
        if self.noise_sets is not None:
            checks.at_least("noise_sets", self.noise_sets, 1)

    @abc.abstractmethod
    def _kernel(self, potential) -> numpyro.infer.HMC:
        """NumPyro's kernel with these settings."""

    # Of the trees, where trajectories are any.
    _depth: ClassVar[Any] = None

    @property
    def _most_leaps(self) -> int | None:
        """Gradients of the longest trajectory, where they differ in length."""
        return None if self._depth is None else 2 ** int(np.max(self._depth)) - 1

    @property
    def _options(self) -> dict[str, Any]:
        """What both kernels take."""
        names = (
            "step_size", "adapt_step_size", "adapt_mass_matrix", "dense_mass",
            "target_accept_prob", "find_heuristic_step_size", "regularize_mass_matrix",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def objection(self, program):
        return no_slope(program.trace, self.name)

    def run(self, program, key, *, start, watch) -> Outcome:
        structure = program.structure
        params = known_params(self.params, start, structure)
        num_sets = self.noise_sets if structure.noise else None
        sampled = bool(structure.noise) and num_sets is None
        key_run, key_init = jr.split(key)
        key_noise, key_start, key_run = jr.split(key_run, 3)
        length = Length.of(self)

        def target_of(inputs):
            call, noise, params = inputs
            known = None if sampled else structure
            return Target(call, params=params, noise=noise, structure=known)

        def make(inputs):
            target = target_of(inputs)
            # A potential instead of the model, which NumPyro would set up anew; under
            # `jit` the model is run once for all of its uses in a program.
            return self._kernel(jax.jit(lambda z: -target.log_density(z)))

        call = as_latent_noise(program.call) if sampled else program.call
        noise = None
        if num_sets is not None:
            noise = noise_sets(key_noise, structure, num_sets)
        inputs = call, noise, {name: params[name] for name in structure.params}
        target = target_of(inputs)
        known = starting_points(key_init, start, structure, length.num_chains)
        starts = target_starts(
            key_start, target, known, length.num_chains, self.init_strategy
        )
        each = [
            {name: x[i] for name, x in starts.items()} for i in range(length.num_chains)
        ]
        label = f"{self.name}, {length.num_chains} chains"
        chains = sample_chains(
            make, inputs, key_run, each, length, watch, label, self._most_leaps
        )
        info = _info(chains, length)
        if structure.noise:
            info["noise"] = "B" if sampled else f"A, {num_sets} noise sets"
        posterior = ChainPosterior(constrained(target, chains.z))
        notes = hamiltonian_notes(chains.every, self._depth)
        return Outcome(posterior, params, info, chains.stats, notes)


class NUTS(_Hamiltonian):
    """Samples the target density with NumPyro's NUTS, whose options these are.

    Attributes:
        num_warmup: Warm-up steps of each chain.
        num_samples: Steps after these, of each chain.
        num_chains: Chains.
        target_accept_prob: Of the step-size adaptation.
        dense_mass: Whether to adapt a full mass matrix, or for which sites together.
        max_tree_depth: Longest trajectory is `2**max_tree_depth` steps; a pair says
            how long it is in warm-up and after it.
        thinning: Of so many draws after warm-up one is kept.
        chain_method: `"sequential"`, or `"vectorized"`: all chains in one program, for
            accelerators (on a CPU it is no faster; where jaxlib hangs on batches of
            matrices they move one after the other).
        init_strategy: Where chains start (`numpyro.infer.init_to_median()`, ...); by
            default about the prior's median. `init=` of the fit goes before it.
        step_size: Where its adaptation starts.
        adapt_step_size: Whether it is adapted.
        adapt_mass_matrix: Whether the mass matrix is.
        regularize_mass_matrix: Whether its estimate is shrunk.
        find_heuristic_step_size: Whether to look for a step size before warm-up.
        noise_sets: For models with noise between layers (`gpx.propagate`): average the
            density over so many fixed quasi-random noise sets (target A of the README);
            `None` samples the noise along with everything else (target B).
        params: Values of `numpyro.param`s: a variational fit or a dict; those that it
            does not have are taken from `init`.
        through: A fit of a Gaussian guide or of a `Flow`, by this very model: chains
            move in its coordinates, where the posterior is nearly standard normal, and
            start at draws of it. `Guided` is cheaper; this finds its own length.

    Its fits have in `fit.info` the `step_size` of each chain, the number of
    `divergences`, `acceptance_rate`, `num_gradients`, `num_warmup` and
    `seconds_per_step`.
    """

    name: ClassVar[str] = "nuts"

    max_tree_depth: Any = 10
    through: Fit | None = None

    def __check_init__(self):
        if self.through is not None:
            checks.instance("through", self.through, Fit, "such as `gpx.fit_svi(...)`")
        given = self.max_tree_depth
        for depth in given if isinstance(given, tuple | list) else (given,):
            checks.at_least("max_tree_depth", depth, 1)

    @property
    def facts(self):
        settings = dict(super().facts.settings)
        if self.through is not None:
            settings["through"] = self.through.facts.name
        return Facts(self.name, self.approximation, settings)

    @property
    def _depth(self):  # type: ignore[override]
        return self.max_tree_depth

    def objection(self, program):
        found = super().objection(program)
        if found is not None or self.through is None:
            return found
        settled = [n for n in ("params", "init_strategy") if getattr(self, n)]
        if settled:
            return f"The fit `through` says already what `{settled[0]}` is to say."
        if program.structure.noise and self.noise_sets is None:
            return "Guides have no map for noise: leave `noise_sets` or `through` out."
        return no_map(program, self.through, "through")

    def run(self, program, key, *, start, watch) -> Outcome:
        if self.through is None:
            return super().run(program, key, start=start, watch=watch)
        if start.values or start.fit:
            raise ValueError(
                "`init` and `through` both say where chains start; leave one out."
            )
        key_noise, key_start, key_run = jr.split(key, 3)
        there = Through(program, self.through, key_noise, self.noise_sets or 1)
        length = Length.of(self)

        def make(state):
            here = there.make(state)
            return self._kernel(jax.jit(lambda z: here.energy(z["x"])))

        x = jr.normal(key_start, (length.num_chains, there.size))
        label = f"nuts through a guide, {length.num_chains} chains"
        chains = sample_chains(
            make, there.state, key_run, [{"x": one} for one in x], length, watch,
            label, self._most_leaps,
        )  # fmt: skip
        info = _info(chains, length)
        if program.structure.noise:
            info["noise"] = f"A, {self.noise_sets} noise sets"
        posterior = ChainPosterior(there.values(chains.z["x"]))
        params = {n: self.through.params[n] for n in program.structure.params}
        notes = hamiltonian_notes(chains.every, self._depth)
        return Outcome(posterior, params, info, chains.stats, notes)

    def _kernel(self, potential):
        return numpyro.infer.NUTS(
            potential_fn=potential, max_tree_depth=self.max_tree_depth, **self._options
        )


class HMC(_Hamiltonian):
    """Samples the target density with NumPyro's HMC: trajectories of one length.

    Attributes:
        trajectory_length: Of each trajectory; `None` with `num_steps`.
        num_steps: Steps of each trajectory; `None` to take them from its length.
        num_warmup: Warm-up steps of each chain.
        num_samples: Steps after these, of each chain.
        num_chains: Chains.
        target_accept_prob: Of the step-size adaptation.
        dense_mass: As in `NUTS`, as are all others.
    """

    name: ClassVar[str] = "hmc"

    trajectory_length: float | None = 2.0 * math.pi
    num_steps: int | None = None

    def __check_init__(self):
        if self.num_steps is not None:
            checks.at_least("num_steps", self.num_steps, 1)
        elif self.trajectory_length is not None:
            checks.number("trajectory_length", self.trajectory_length, 0.0)
        else:
            raise ValueError("`trajectory_length` or `num_steps` must be given.")

    def _kernel(self, potential):
        length = None if self.num_steps else self.trajectory_length
        return numpyro.infer.HMC(
            potential_fn=potential, trajectory_length=length, num_steps=self.num_steps,
            **self._options,
        )  # fmt: skip


def _info(chains: Chains, length: Length) -> dict[str, Any]:
    """What NumPyro found out about its steps."""
    adapted = [np.atleast_1d(s.adapt_state.step_size) for s in chains.states]
    return {
        "num_warmup": length.num_warmup,
        "step_size": np.concatenate(adapted),
        "divergences": int(np.sum(chains.every["diverging"])),
        "acceptance_rate": float(np.mean(chains.stats["acceptance_rate"])),
        "num_gradients": int(np.sum(chains.every["n_steps"])),
        "seconds_per_step": chains.seconds_per_step,
    }
