"""Chains of a kernel, side by side, in compiled blocks that later fits find again."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.infer.mcmc import MCMCKernel

from numpyro_gpx import checks
from numpyro_gpx.engines.engine import Start
from numpyro_gpx.engines.retry import NotFinite, finding_a_start
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.numerics.threads import over_chains
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import compiled, once
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.starts import init_to_prior_median
from numpyro_gpx.results.chain_notes import ARVIZ_NAMES, arviz_names

__all__ = [
    "Chains",
    "Length",
    "sample_chains",
    "sample_kernel",
    "starting_points",
    "target_starts",
]

# Transitions between looks at the chains, at most.
_BLOCK = 50


class Length(NamedTuple):
    """How long chains are, and how many.

    Attributes:
        num_warmup: Warm-up steps of each chain.
        num_samples: Steps after these, of each chain.
        num_chains: Chains.
        thinning: Every so many steps one is kept.
        vectorized: Whether all chains move in one vectorised program.
    """

    num_warmup: int
    num_samples: int
    num_chains: int
    thinning: int = 1
    vectorized: bool = False

    @classmethod
    def of(cls, engine) -> Length:
        """The length that an engine asks for, checked."""
        checks.at_least("num_warmup", engine.num_warmup, 0)
        checks.at_least("num_samples", engine.num_samples, 1)
        checks.at_least("num_chains", engine.num_chains, 1)
        thinning = getattr(engine, "thinning", 1)
        checks.at_least("thinning", thinning, 1)
        if thinning > engine.num_samples:
            raise ValueError(
                f"`thinning` must not exceed `num_samples={engine.num_samples}`; got "
                f"{thinning}."
            )
        method = getattr(engine, "chain_method", "sequential")
        if method == "parallel":
            raise ValueError(
                "`chain_method='parallel'` needs a device for each chain, which is not "
                "supported here; use 'vectorized' or 'sequential'."
            )
        checks.one_of("chain_method", method, ("sequential", "vectorized"))
        return cls(
            int(engine.num_warmup), int(engine.num_samples), int(engine.num_chains),
            int(thinning), method == "vectorized",
        )  # fmt: skip


class Chains(NamedTuple):
    """What chains have left behind.

    Attributes:
        z: Values by site as the kernel has them, `(chains, draws, ...)`.
        stats: Records of each draw, `(chains, draws)`, by ArviZ's names.
        every: The same of all steps after warm-up, those that thinning leaves out too.
        states: The last states: one a chain, or one of all.
        seconds_per_step: Of one transition of all chains.
    """

    z: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]
    every: dict[str, np.ndarray]
    states: list
    seconds_per_step: float


def sample_chains(
    make: Callable[[Any], MCMCKernel], inputs, key, starts: list[dict], length: Length,
    watch: Watch, label: str, most_leaps: int | None = None,
) -> Chains:  # fmt: skip
    """Draws on the real line.

    Args:
        make: The kernel from `inputs`, which are traced: another model's arrays of the
            same shapes are sampled by the same program.
        inputs: All that the kernel's density reads.
        key: Random key.
        starts: For each chain where sites start, on the real line.
        length: Of the chains.
        watch: Runs the blocks.
        label: What is running.
        most_leaps: Gradients of the longest trajectory, where they differ in length.
    """

    def begin(key, start, inputs):
        return make(inputs).init(key, length.num_warmup, start, (), {})

    def advance(state, number, inputs):
        kernel = make(inputs)
        # NumPyro's kernels are set up by `init`; its values are not used, and XLA
        # leaves their computation out.
        z = jax.tree.map(lambda x: x[0], state.z) if length.vectorized else state.z
        kernel.init(jr.key(0), length.num_warmup, z, (), {})

        def transition(state):
            return kernel.sample(state, (), {})

        if length.vectorized:
            transition = over_chains(transition)
        return _transitions(transition, state, number, _seen)

    keys = jr.split(key, length.num_chains)
    if length.vectorized:
        together = jax.tree.map(lambda *x: jnp.stack(x), *starts)

        def begin_all(keys, starts, inputs):
            return over_chains(lambda x: begin(x[0], x[1], inputs))((keys, starts))

        starter = compiled(begin_all, keys, together, inputs, optimise=False)
        states = [starter(keys, together, inputs)]
    else:
        starter = compiled(begin, keys[0], starts[0], inputs, optimise=False)
        states = [starter(k, z, inputs) for k, z in zip(keys, starts, strict=True)]
    program = compiled(advance, states[0], jnp.asarray(0), inputs)
    return _run(
        lambda state, number: program(state, number, inputs),
        states, length, watch, label, most_leaps,
    )  # fmt: skip


def sample_kernel(
    kernel: MCMCKernel, call: Call, key, start: dict | None, length: Length,
    watch: Watch, label: str,
) -> Chains:  # fmt: skip
    """Draws of somebody's kernel, as its states have them.

    Args:
        kernel: A kernel of NumPyro's kind, built on a model.
        call: The model with its arguments.
        key: Random key.
        start: Where chains start on the real line, `(chains, ...)` by site.
        length: Of the chains.
        watch: Runs the blocks.
        label: What is running.
    """
    number = length.num_chains
    keys = jr.split(key, number) if number > 1 else key[None]

    def begin(key, start):
        state = kernel.init(key, length.num_warmup, start, call.args, call.kwargs)
        # Plain numbers at the start are arrays after the first transition.
        return jax.tree.map(lambda x: x if eqx.is_array(x) else jnp.asarray(x), state)

    def advance(state, number, call):
        def transition(state):
            return kernel.sample(state, call.args, call.kwargs)

        return _transitions(transition, state, number, seen)

    def seen(state):
        z = operator.attrgetter(kernel.sample_field)(state)
        return {**_seen(state), "z": z}

    with finding_a_start():
        if length.vectorized:
            states = [begin(keys, start)]
        else:
            each = [
                None if start is None else {n: x[i] for n, x in start.items()}
                for i in range(number)
            ]
            states = [begin(k, z) for k, z in zip(keys, each, strict=True)]
    program = compiled(advance, states[0], jnp.asarray(0), call)
    return _run(
        lambda state, number: program(state, number, call),
        states, length, watch, label,
    )  # fmt: skip


def _transitions(transition, state, number, seen):
    """`number` transitions as a loop, with what is kept of each."""

    def step(i, carry):
        state, kept = carry
        state = transition(state)
        return state, jax.tree.map(lambda a, x: a.at[i].set(x), kept, seen(state))

    shapes = jax.eval_shape(seen, state)
    kept = jax.tree.map(lambda x: jnp.zeros((_BLOCK, *x.shape), x.dtype), shapes)
    return jax.lax.fori_loop(0, number, step, (state, kept))


def _run(
    program, states: list, length: Length, watch: Watch, label: str,
    most_leaps: int | None = None,
) -> Chains:  # fmt: skip
    """All chains at once, block by block, so that they end together."""

    def block(states, first, number):
        pairs = [program(state, jnp.asarray(number)) for state in states]
        kept = [jax.tree.map(np.asarray, latest) for _, latest in pairs]
        # One axis over chains behind that over steps, which a vectorised state has.
        if not length.vectorized:
            kept = [jax.tree.map(lambda *x: np.stack(x, axis=1), *kept)]
        return [state for state, _ in pairs], kept[0]

    def check(latest, first):
        for name, x in latest["z"].items():
            bad = np.argwhere(~np.isfinite(np.asarray(x, float)))
            if len(bad):
                step, chain = bad[0][:2]
                raise NotFinite(
                    f"Site `{name}` became {x[tuple(bad[0])]} at step {first + step} "
                    f"of chain {chain + 1}."
                )

    def dearer(latest):
        if most_leaps is None:
            return 1.0
        return most_leaps / max(np.mean(latest["num_steps"]), 1.0)

    states, record = watch.loop(
        label, block, states, length.num_warmup + length.num_samples, most=_BLOCK,
        useless=length.num_warmup + length.thinning - 1, check=check, dearer=dearer,
    )  # fmt: skip
    values = record.values
    drawn = {n: _draws(x, length, length.thinning) for n, x in values["z"].items()}
    every = arviz_names({n: _draws(x, length) for n, x in values.items() if n != "z"})
    stats = arviz_names(
        {n: _draws(x, length, length.thinning) for n, x in values.items() if n != "z"}
    )
    return Chains(drawn, stats, every, states, record.seconds_per_step)


def _draws(x: np.ndarray, length: Length, thinning: int = 1) -> np.ndarray:
    """Draws `(chains, draws, ...)` of steps `(steps, chains, ...)`."""
    x = x[length.num_warmup :]
    x = x[len(x) % thinning :][thinning - 1 :: thinning]
    return np.moveaxis(x, 0, 1)


def _seen(state) -> dict:
    """What is kept of a state: the values, and statistics if it has them."""
    fields = getattr(state, "_fields", ())
    stats = {name: getattr(state, name) for name in ARVIZ_NAMES if name in fields}
    return {"z": state.z, **stats} if "z" in fields else stats


def starting_points(key, start: Start, structure, num_chains: int) -> dict | None:
    """Unconstrained starts `(chains, ...)` of the sites that `start` knows.

    Draws of an earlier fit, each chain its own; `None` if nothing is known.
    """
    found: dict[str, Any] = {}
    if start.fit is not None:
        draws = start.fit.posterior.chains(1000)
        flat = {n: x.reshape(-1, *x.shape[2:])[:1000] for n, x in draws.items()}
        shapes = {name: site.shape for name, site in structure.latents.items()}
        missing = sorted(
            n for n in shapes if n not in flat or flat[n].shape[1:] != shapes[n]
        )
        if missing:
            raise ValueError(
                f"`init` must be a fit of the same model; it has no draws of {missing} "
                "with the right shapes."
            )
        length = next(iter(flat.values())).shape[0]
        index = jr.choice(key, length, (num_chains,), replace=num_chains > length)
        values = {name: jnp.asarray(flat[name])[index] for name in shapes}
        found = jax.vmap(structure.unconstrain)(values)
    for name, x in structure.unconstrain(start.values).items():
        found[name] = jnp.broadcast_to(x, (num_chains, *jnp.shape(x)))
    return found or None


def target_starts(
    key, target: Target, start: dict | None, num_chains: int, init_strategy=None
) -> dict:
    """Starts `(chains, ...)`, apart from each other and with a finite density."""
    keys = jr.split(key, num_chains)
    strategy = init_to_prior_median if init_strategy is None else init_strategy
    # One after the other: jaxlib 0.10 hangs on batches (tests/test_hang.py).
    spread = once(
        lambda keys: jax.lax.map(lambda key: target.initial(key, strategy), keys)
    )(keys)
    # Noise sites of target B have no other start.
    spread = {**spread, **(start or {})}
    densities = once(lambda z: jax.lax.map(target.log_density, z))(spread)
    values = np.asarray(densities)
    if not np.all(np.isfinite(values)):
        raise NotFinite(f"The log density is {values} at the starting points.")
    return spread
