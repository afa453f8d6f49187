"""Any kernel of NumPyro's kind, and blackjax's algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.infer.mcmc import MCMCKernel

from numpyro_gpx.engines.blackjax_kernel import Blackjax as BlackjaxKernel
from numpyro_gpx.engines.blackjax_kernel import algorithm_name, approximation_of
from numpyro_gpx.engines.chains import Length, sample_kernel, starting_points
from numpyro_gpx.engines.engine import Engine, Outcome, Start
from numpyro_gpx.engines.sampling import known_params
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import once, run
from numpyro_gpx.program.data_checks import no_slope
from numpyro_gpx.program.density import Target, require_params
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.chain_notes import kernel_notes
from numpyro_gpx.results.facts import Facts, kernel_facts, kernel_params
from numpyro_gpx.results.posteriors import ChainPosterior

__all__ = ["MCMC", "Blackjax"]

# Samplers that need no gradient.
_WITHOUT_SLOPE = ("elliptical_slice", "random_walk", "slice", "sa", "ess", "aies")


class MCMC(Engine):
    """Samples with any kernel of NumPyro's kind: `HMC`, `BarkerMH`, Gibbs, your own.

    Attributes:
        kernel: A kernel built on the very model that is fitted, or what builds one from
            it: a class such as `numpyro.infer.BarkerMH`, or a function of the model.
        batch_size: Rows of a minibatch, for kernels that take them.
        num_warmup: Warm-up steps of each chain.
        num_samples: Steps after these, of each chain.
        num_chains: Chains.
        thinning: Of so many draws after warm-up one is kept.
        chain_method: `"sequential"`, or `"vectorized"` for kernels that can.
        label: Name of the engine in reports; by default that of the kernel.
    """

    kernel: MCMCKernel | Callable[[Callable], MCMCKernel]
    _: dataclasses.KW_ONLY
    batch_size: int | None = None
    num_warmup: int = 500
    num_samples: int = 1000
    num_chains: int = 2
    thinning: int = 1
    chain_method: str = "sequential"
    label: str | None = None

    def __check_init__(self):
        Length.of(self)
        if not (isinstance(self.kernel, MCMCKernel) or callable(self.kernel)):
            raise TypeError(
                "`kernel` must be a kernel such as `numpyro.infer.BarkerMH(model)`, or "
                f"what makes one from a model; got {type(self.kernel).__name__}."
            )

    @property
    def facts(self):
        if not isinstance(self.kernel, MCMCKernel):
            return super().facts
        found = kernel_facts(self.kernel)
        settings = {**super().facts.settings, **found.settings}
        return Facts(self.label or found.name, found.approximation, settings)

    def objection(self, program):
        kernel = self._on(program.model)
        name = kernel_facts(kernel).name
        return None if name in _WITHOUT_SLOPE else no_slope(program.trace, name)

    def run(self, program, key, *, start, watch) -> Outcome:
        kernel = self._on(program.model)
        params = kernel_params(kernel)
        require_params(program.structure, params)
        facts = dataclasses.replace(self, kernel=kernel).facts
        return sampled(
            kernel, program, key, start, Length.of(self), watch, params, facts
        )

    def _on(self, model) -> MCMCKernel:
        kernel = self.kernel
        if not isinstance(kernel, MCMCKernel):
            return kernel(model)
        if kernel.model != model:
            raise ValueError(
                "`kernel` was built on another model. Build it on this one, or pass "
                f"what builds it: `MCMC(kernel=numpyro.infer.{type(kernel).__name__})`."
            )
        return kernel


class Blackjax(Engine):
    """Samples the target density with an algorithm of blackjax's.

    Attributes:
        algorithm: Such as `blackjax.hmc`, `blackjax.elliptical_slice`, `blackjax.sgld`.
        parameters: Its parameters by name; what `blackjax.window_adaptation` can tune
            may be left out (see `gpx.infer.Blackjax`).
        batch_size: Rows of a minibatch, for stochastic-gradient algorithms.
        num_warmup: Warm-up steps of each chain.
        num_samples: Steps after these, of each chain.
        num_chains: Chains.
        thinning: Of so many draws after warm-up one is kept.
        params: Values of `numpyro.param`s: a variational fit or a dict.
    """

    algorithm: Any
    _: dataclasses.KW_ONLY
    parameters: dict[str, Any] | None = None
    batch_size: int | None = None
    num_warmup: int = 500
    num_samples: int = 1000
    num_chains: int = 2
    thinning: int = 1
    params: Any = None

    def __check_init__(self):
        Length.of(self)
        if isinstance(self.algorithm, str):
            raise TypeError(
                "`algorithm` must be one of blackjax's, such as "
                f"`blackjax.{self.algorithm}`; got the text {self.algorithm!r}."
            )

    @property
    def facts(self):
        name = algorithm_name(self.algorithm)
        return Facts(name, approximation_of(self.algorithm), super().facts.settings)

    def objection(self, program):
        name = algorithm_name(self.algorithm)
        return None if name in _WITHOUT_SLOPE else no_slope(program.trace, name)

    def run(self, program, key, *, start, watch) -> Outcome:
        params = known_params(self.params, start, program.structure)
        kernel = BlackjaxKernel(
            program.model, self.algorithm, parameters=self.parameters,
            params=params,
        )  # fmt: skip
        length = Length.of(self)
        return sampled(kernel, program, key, start, length, watch, params, self.facts)


def sampled(
    kernel: MCMCKernel, program: Program, key, start: Start, length: Length,
    watch: Watch, params: dict, facts: Facts,
) -> Outcome:  # fmt: skip
    """What the chains of a kernel come to.

    Args:
        kernel: The kernel, on the program's model.
        program: The model with its data.
        key: Random key.
        start: Where chains start, as far as that is known.
        length: Of the chains.
        watch: Runs the blocks.
        params: Values of `numpyro.param`s that the kernel has.
        facts: What the kernel is.
    """
    key_run, key_init = jr.split(key)
    call = program.batched
    points = starting_points(key_init, start, program.structure, length.num_chains)
    if points is not None and set(points) != set(program.structure.latents):
        points = _completed(key_init, call, params, points)
    label = f"{facts.name}, {length.num_chains} chains"
    chains = sample_kernel(kernel, call, key_run, points, length, watch, label)
    names = tuple(program.structure.latents)
    draws = _on_supports(kernel, call, chains.z, names)
    info = {
        "num_warmup": length.num_warmup,
        "seconds_per_step": chains.seconds_per_step,
    }
    notes = kernel_notes(kernel, chains.every, call.batch_size)
    return Outcome(
        ChainPosterior(draws), params, info, chains.stats, notes, facts=facts
    )


def _completed(key, call: Call, params: dict, points: dict) -> dict:
    """Starts of all sites: those that are not known about the prior's median."""
    target = Target(call, params=params)
    number = len(next(iter(points.values())))
    spread = once(lambda keys: jax.lax.map(target.initial, keys))(jr.split(key, number))
    return {**spread, **points}


def _on_supports(kernel, call: Call, z: dict, names: tuple[str, ...]) -> dict:
    """Draws `(chains, draws, ...)` of the latent sites on their supports."""
    number = next(iter(z.values())).shape[:2]

    def all_draws(flat, call):
        finish = kernel.postprocess_fn(call.args, call.kwargs)

        def one(z):
            found = finish(z)
            return {name: found[name] for name in names}

        return jax.lax.map(one, flat)  # without `vmap`: tests/test_hang.py

    flat = {name: jnp.asarray(x.reshape(-1, *x.shape[2:])) for name, x in z.items()}
    drawn = run(all_draws, flat, call)
    return {n: np.asarray(x).reshape(number + x.shape[1:]) for n, x in drawn.items()}
