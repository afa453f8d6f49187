"""Chains of a kernel, in compiled blocks that later fits find again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel

from numpyro_gpx.infer.progress import run_blocks
from numpyro_gpx.infer.retry import NotFinite
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import compiled, once
from numpyro_gpx.program.density import Target
from numpyro_gpx.results.fit import Fit

__all__ = ["Length", "chain_starts", "run_mcmc", "sample_chains", "target_starts"]

# Transitions between looks at the chain.
_BLOCK = 50

# What NumPyro's states call it, and what ArviZ does.
_STATS = {
    "diverging": "diverging",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}


class Length(NamedTuple):
    """How long chains are, how many, and whether they show progress."""

    num_warmup: int
    num_samples: int
    num_chains: int
    progress: bool


def sample_chains(
    make: Callable[[Any], MCMCKernel], inputs, key, starts: list[dict], length: Length
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws on the real line by site, and statistics, both `(chains, draws, ...)`.

    Args:
        make: The kernel from `inputs`, which are traced: another model's arrays of the
            same shapes are sampled by the same program.
        inputs: All that the kernel's density reads.
        key: Random key.
        starts: For each chain where sites start, on the real line.
        length: Of the chains.
    """

    def begin(key, start, inputs):
        return make(inputs).init(key, length.num_warmup, start, (), {})

    def block(state, number, inputs):
        kernel = make(inputs)
        # NumPyro's kernels are set up by `init`; its values are not used, and XLA
        # leaves their computation out.
        kernel.init(jr.key(0), length.num_warmup, state.z, (), {})

        def step(i, carry):
            state, kept = carry
            state = kernel.sample(state, (), {})
            return state, jax.tree.map(lambda a, x: a.at[i].set(x), kept, _seen(state))

        kept = jax.tree.map(lambda x: jnp.zeros((_BLOCK, *x.shape), x.dtype), seen)
        return jax.lax.fori_loop(0, number, step, (state, kept))

    keys = jr.split(key, length.num_chains)
    starter = compiled(begin, keys[0], starts[0], inputs, optimise=False)
    states = [starter(k, z, inputs) for k, z in zip(keys, starts, strict=True)]
    seen = jax.eval_shape(_seen, states[0])
    program = compiled(block, states[0], jnp.asarray(0), inputs)
    found = [
        _run_chain(program, state, inputs, length, f"chain {i} of {length.num_chains}")
        for i, state in enumerate(states, start=1)
    ]
    stacked = jax.tree.map(lambda *x: np.stack(x), *found)
    return stacked["z"], {_STATS[n]: x for n, x in stacked.items() if n != "z"}


def _run_chain(program, state, inputs, length: Length, label: str):
    total = length.num_warmup + length.num_samples
    kept: list[Any] = []

    def step_block(state, number):
        state, latest = program(state, jnp.asarray(number), inputs)
        kept.append(jax.tree.map(lambda x: np.asarray(x)[:number], latest))
        return state, ""

    run_blocks(
        step_block, state, total, block=_BLOCK, progress=length.progress, label=label
    )
    first = length.num_warmup
    return jax.tree.map(lambda *x: np.concatenate(x)[first:], *kept)


def _seen(state) -> dict:
    """What is kept of a state: the values, and statistics if it has them."""
    stats = {name: getattr(state, name) for name in _STATS if name in state._fields}
    return {"z": state.z, **stats}


def run_mcmc(
    kernel: MCMCKernel, call: Call, key, start: dict | None, length: Length
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws of somebody's kernel by NumPyro's own `MCMC`, on the sites' supports."""
    mcmc = MCMC(
        kernel, num_warmup=length.num_warmup, num_samples=length.num_samples,
        num_chains=length.num_chains, chain_method="sequential",
        progress_bar=length.progress,
    )  # fmt: skip
    fields = tuple(_STATS) if isinstance(kernel, NUTS) else ()
    try:
        mcmc.run(key, *call.args, extra_fields=fields, init_params=start, **call.kwargs)
    except RuntimeError as error:
        if "valid initial parameters" not in str(error):
            raise
        raise NotFinite("No starting point with a finite density was found.") from None
    extra = mcmc.get_extra_fields(group_by_chain=True)
    stats = {_STATS[n]: np.asarray(x) for n, x in extra.items() if n in _STATS}
    return mcmc.get_samples(group_by_chain=True), stats


def chain_starts(key, init: Fit, structure, num_chains: int) -> dict:
    """Unconstrained starts `(chains, ...)` at draws of another fit."""
    draws = init.draws(1000)
    length = next(iter(draws.values())).shape[0]
    index = jr.choice(key, length, (num_chains,), replace=num_chains > length)
    shapes = {name: site.shape for name, site in structure.latents.items()}
    missing = sorted(
        n for n in shapes if n not in draws or draws[n].shape[1:] != shapes[n]
    )
    if missing:
        raise ValueError(
            f"`init` must be a fit of the same model; it has no draws of {missing} "
            "with the right shapes."
        )
    values = {name: jnp.asarray(draws[name])[index] for name in shapes}
    return jax.vmap(structure.unconstrain)(values)


def target_starts(key, target: Target, start: dict | None, num_chains: int) -> dict:
    """Starts `(chains, ...)`, apart from each other and with a finite density."""
    keys = jr.split(key, num_chains)
    # One after the other: jaxlib 0.10 hangs on batches (tests/test_hang.py).
    spread = once(lambda keys: jax.lax.map(target.initial, keys))(keys)
    # Noise sites of target B have no other start.
    spread = {**spread, **(start or {})}
    densities = once(lambda z: jax.lax.map(target.log_density, z))(spread)
    values = np.asarray(densities)
    if not np.all(np.isfinite(values)):
        raise NotFinite(f"The log density is {values} at the starting points.")
    return spread
