"""Sampling fits: `fit_nuts`, `fit_sghmc`, and `fit_mcmc` for any kernel."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro import handlers
from numpyro.infer import NUTS
from numpyro.infer.mcmc import MCMCKernel

from numpyro_gpx import checks
from numpyro_gpx.infer.chains import (
    Length,
    chain_starts,
    run_mcmc,
    sample_chains,
    target_starts,
)
from numpyro_gpx.infer.monte_carlo_em import MonteCarloEM, move_hyperparameters
from numpyro_gpx.infer.retry import NotFinite, with_retry
from numpyro_gpx.infer.sghmc import SGHMC
from numpyro_gpx.numerics.threads import single_blas_thread
from numpyro_gpx.program.batches import refuse_batches
from numpyro_gpx.program.call import Call, takes_options
from numpyro_gpx.program.compile_cache import run as run_compiled
from numpyro_gpx.program.data_checks import check_slopes
from numpyro_gpx.program.density import Target, require_params
from numpyro_gpx.program.layer_noise import as_latent_noise
from numpyro_gpx.program.layer_noise import noise_sets as make_noise_sets
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import ChainPosterior
from numpyro_gpx.results.samplers import engine_name, kernel_params

__all__ = ["fit_mcmc", "fit_nuts", "fit_sghmc"]


@takes_options
def fit_nuts(
    model,
    *args,
    key,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 2,
    target_accept_prob: float = 0.8,
    dense_mass: bool = False,
    max_tree_depth: int = 10,
    noise_sets: int | None = 16,
    params: Fit | dict | None = None,
    init: Fit | None = None,
    progress: bool = True,
    **kwargs,
) -> Fit:
    """Sample the target density with NUTS.

    Args:
        model: A NumPyro function.
        args: Arguments of the model: inputs, targets.
        key: Random key.
        num_warmup: Warm-up steps of each chain.
        num_samples: Draws of each chain.
        num_chains: Chains, run one after the other.
        target_accept_prob: Of the step-size adaptation.
        dense_mass: Whether to adapt a full mass matrix.
        max_tree_depth: Longest trajectory is `2**max_tree_depth` steps.
        noise_sets: For models with noise between layers (`gpx.propagate`): average the
            density over so many fixed quasi-random noise sets (target A of the README);
            `None` samples the noise along with everything else (target B).
        params: Values of `numpyro.param`s: a variational fit or a dict; those that it
            does not have are taken from `init`.
        init: Start chains from draws of another fit.
        progress: Whether to show progress bars.
        kwargs: Further arguments of the model.
    """
    call = Call.create(model, args, kwargs, function="fit_nuts")
    refuse_batches(call, "fit_nuts", "fit_sghmc")
    program = Program.of(call)
    structure = program.structure
    params = _params(params, init, structure)
    require_params(structure, params)
    num_sets = noise_sets if structure.noise else None
    sampled = bool(structure.noise) and num_sets is None
    length = _length(key, num_warmup, num_samples, num_chains, progress)

    def target_of(inputs):
        call, noise, params = inputs
        known = None if sampled else structure
        return Target(call, params=params, noise=noise, structure=known)

    def make(inputs):
        target = target_of(inputs)
        # A potential instead of the model, which NumPyro would set up anew; under `jit`
        # the model is run once for all of its uses in a program.
        return NUTS(
            potential_fn=jax.jit(lambda z: -target.log_density(z)),
            target_accept_prob=target_accept_prob,
            dense_mass=dense_mass,
            max_tree_depth=max_tree_depth,
        )

    def sample(key, program, start):
        key_noise, key_start, key_run = jr.split(key, 3)
        call = as_latent_noise(program.call) if sampled else program.call
        noise = None
        if num_sets is not None:
            noise = make_noise_sets(key_noise, structure, num_sets)
        inputs = call, noise, {name: params[name] for name in structure.params}
        target = target_of(inputs)
        starts = target_starts(key_start, target, start, num_chains)
        z, stats = sample_chains(make, inputs, key_run, _each(starts, length), length)
        return _constrained(target, z), stats

    fit = _fit(sample, program, key, length, params=params, init=init, engine="nuts")
    if structure.noise:
        fit.info["noise"] = "B" if sampled else f"A, {num_sets} noise sets"
    return fit


@takes_options
def fit_sghmc(
    model,
    *args,
    key,
    batch_size: int | None = None,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 2,
    step_size: float = 0.2,
    friction: float = 0.3,
    num_integration_steps: int = 20,
    em: MonteCarloEM | None = None,
    params: Fit | dict | None = None,
    init: Fit | None = None,
    progress: bool = True,
    **kwargs,
) -> Fit:
    """Sample the target density with SGHMC on minibatches; see `gpx.infer.SGHMC`.

    Args:
        model: A NumPyro function.
        args: Arguments of the model: inputs, targets.
        key: Random key.
        batch_size: Rows of a minibatch; `None` uses all rows.
        num_warmup: Warm-up draws of each chain, of `num_integration_steps` gradients
            each.
        num_samples: Draws of each chain.
        num_chains: Chains.
        step_size: Step size; the bias shrinks with it.
        friction: Friction.
        num_integration_steps: Gradients for each draw.
        em: Move hyperparameters and `numpyro.param`s to a point by Monte Carlo EM
            (`gpx.infer.MonteCarloEM()`) and sample the rest; `None` samples the
            hyperparameters as well.
        params: Values of `numpyro.param`s: a variational fit or a dict; those that it
            does not have are taken from `init`.
        init: Start chains from draws of another fit; with `em` its point as well.
        progress: Whether to show progress bars.
        kwargs: Further arguments of the model.
    """
    program = Program.of(
        Call.create(model, args, kwargs, function="fit_sghmc"), batch_size
    )
    params = _params(params, init, program.structure)
    make_kernel = functools.partial(
        SGHMC,
        step_size=step_size,
        friction=friction,
        num_integration_steps=num_integration_steps,
    )
    length = _length(key, num_warmup, num_samples, num_chains, progress)
    if em is None:
        fit = _fit_sghmc(make_kernel, program, key, length, params=params, init=init)
    else:
        checks.instance("em", em, MonteCarloEM, "such as `gpx.infer.MonteCarloEM()`")
        fit = _fit_with_em(em, make_kernel, program, key, length, params, init)
    fit.info.update(step_size=step_size, num_integration_steps=num_integration_steps)
    return fit


def _fit_sghmc(make_kernel, program, key, length: Length, *, params, init) -> Fit:
    """Sample all sites with SGHMC."""
    require_params(program.structure, params)
    known = {name: params[name] for name in program.structure.params}

    def make(inputs):
        call, params = inputs
        return make_kernel(call.model, params=params).at(call)

    def sample(key, program, start):
        starts = [{}] * length.num_chains if start is None else _each(start, length)
        inputs = program.batched, known
        z, stats = sample_chains(make, inputs, key, starts, length)
        return _constrained(Target(program.batched, params=known), z), stats

    return _fit(sample, program, key, length, params=params, init=init, engine="sghmc")


def _fit_with_em(em, make_kernel, program, key, length, params, init) -> Fit:
    """Move the hyperparameters, then sample everything else given them."""
    started = time.perf_counter()
    key_init, key_em, key_run = jr.split(key, 3)
    check_slopes(program.trace, "sghmc")
    start = None
    if init is not None:
        checks.instance("init", init, Fit, "such as an earlier fit of the model")
        start = chain_starts(key_init, init, program.structure, 1)
        start = {name: x[0] for name, x in start.items()}
    kernel = make_kernel(program.model, params=params)

    def move(jitter):
        call = program.batched.with_jitter(jitter)
        with single_blas_thread():
            return move_hyperparameters(
                em, kernel, call, key=key_em, start=start, progress=length.progress
            )

    moved = with_retry(move, program.batched, params)
    given = handlers.condition(program.model, data=moved.values)
    rest = Program.of(program.call.with_model(given), program.batched.batch_size)
    window = ChainPosterior({name: x[None] for name, x in moved.draws.items()})
    starts = Fit(rest, window, engine="sghmc", params=moved.params)
    fit = _fit_sghmc(
        make_kernel, rest, key_run, length, params=moved.params, init=starts
    )
    draws = fit.chains()
    shape = next(iter(draws.values())).shape[:2]
    fixed = {n: np.broadcast_to(x, shape + x.shape) for n, x in moved.values.items()}
    return Fit(
        program.with_jitter(fit.jitter), ChainPosterior({**draws, **fixed}),
        engine="sghmc", params=moved.params,
        batch_size=fit.batch_size, seconds=time.perf_counter() - started,
        info={**fit.info, "em": repr(em), "log_densities": moved.log_densities},
    )  # fmt: skip


@takes_options
def fit_mcmc(
    kernel: MCMCKernel,
    *args,
    key,
    batch_size: int | None = None,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 2,
    params: Fit | dict | None = None,
    init: Fit | None = None,
    progress: bool = True,
    engine: str | None = None,
    **kwargs,
) -> Fit:
    """Sample with any NumPyro kernel: HMC, `gpx.infer.Blackjax`, Gibbs, ...

    Args:
        kernel: The kernel, built on the model.
        args: Arguments of the model.
        key: Random key.
        batch_size: Rows of a minibatch, for kernels that take them.
        num_warmup: Warm-up steps of each chain.
        num_samples: Draws of each chain.
        num_chains: Chains, run one after the other.
        params: Not here; give them to the kernel.
        init: Start chains from draws of another fit.
        progress: Whether to show progress bars.
        engine: Name of the engine in reports.
        kwargs: Further arguments of the model.
    """
    call = Call.create(kernel.model, args, kwargs, function="fit_mcmc")
    if params is not None:
        raise ValueError(
            "`params` must be given to the kernel, which evaluates the model: "
            "`SGHMC(model, params=...)`, `Blackjax(model, ..., params=...)`, or "
            "`HMC(numpyro.handlers.substitute(model, data=params))`."
        )
    params = kernel_params(kernel)
    length = _length(key, num_warmup, num_samples, num_chains, progress)

    def sample(key, program, start):
        if start is not None and num_chains == 1:
            start = {name: x[0] for name, x in start.items()}
        return run_mcmc(kernel, program.batched, key, start, length)

    return _fit(
        sample, Program.of(call, batch_size), key, length,
        params=params, init=init, engine=engine or engine_name(kernel),
    )  # fmt: skip


def _fit(sample, program: Program, key, length: Length, *, params, init, engine) -> Fit:
    """Call `sample(key, program, starts)`, once more with more jitter if need be."""
    started = time.perf_counter()
    if init is not None:
        checks.instance("init", init, Fit, "such as an earlier fit of the model")
    if engine != "elliptical_slice":
        check_slopes(program.trace, engine)
    require_params(program.structure, params)
    key_run, key_init = jr.split(key)

    def run(jitter):
        here = program.with_jitter(jitter)
        start = None
        if init is not None:
            start = chain_starts(key_init, init, program.structure, length.num_chains)
        with single_blas_thread():
            draws, stats = sample(key_run, here, start)
        for name, x in draws.items():
            if not np.all(np.isfinite(np.asarray(x))):
                raise NotFinite(f"Draws of site `{name}` are not finite.")
        return draws, stats, here

    draws, stats, program = with_retry(run, program.batched, params)
    return Fit(
        program, ChainPosterior(draws),
        engine=engine, params=params, batch_size=program.batched.batch_size,
        seconds=time.perf_counter() - started, sample_stats=stats,
        info={"num_warmup": length.num_warmup},
    )  # fmt: skip


def _length(key, num_warmup, num_samples, num_chains, progress) -> Length:
    checks.key(key)
    checks.at_least("num_warmup", num_warmup, 0)
    checks.at_least("num_samples", num_samples, 1)
    checks.at_least("num_chains", num_chains, 1)
    return Length(num_warmup, num_samples, num_chains, progress)


def _each(starts: dict, length: Length) -> list[dict]:
    """Starts of each chain, from `(chains, ...)`."""
    return [
        {name: x[i] for name, x in starts.items()} for i in range(length.num_chains)
    ]


def _constrained(target: Target, z: dict) -> dict:
    """Draws `(chains, draws, ...)` on the sites' supports."""
    both = jax.vmap(jax.vmap(target.constrain))
    return run_compiled(both, jax.tree.map(jnp.asarray, z))


def _params(params: Fit | dict | None, init, structure) -> dict[str, Any]:
    """Values of `numpyro.param`s; a fit has those of its guide as well."""
    known = init.params if isinstance(init, Fit) else {}
    known = {name: known[name] for name in structure.params if name in known}
    if isinstance(params, Fit):
        return {**known, **params.params}
    if params is not None and not isinstance(params, dict):
        raise TypeError(
            "`params` must be a fit or a dictionary of values by name; got "
            f"{type(params).__name__}."
        )
    unknown = sorted(set(params or {}) - set(structure.params))
    if unknown:
        raise ValueError(
            f"`params` must name `numpyro.param`s of the model, which are "
            f"{list(structure.params)}; got {unknown} as well."
        )
    return {**known, **(params or {})}
