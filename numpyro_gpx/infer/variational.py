"""Variational fits: `fit_svi` (stochastic) and `fit_lbfgs` (deterministic)."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import scipy.optimize
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_gpx.fit import Fit
from numpyro_gpx.infer.data import as_arrays, check_batched, check_data
from numpyro_gpx.infer.elbo import ELBO
from numpyro_gpx.infer.posteriors import GuidePosterior
from numpyro_gpx.infer.progress import run_blocks
from numpyro_gpx.infer.retry import NotFinite, with_retry
from numpyro_gpx.infer.structure import abstract_trace, arrays_and_rest
from numpyro_gpx.infer.target import draw_batch
from numpyro_gpx.infer.threads import single_blas_thread

__all__ = ["fit_lbfgs", "fit_svi"]

# Steps between looks at the losses.
_BLOCK = 100


def fit_svi(
    model,
    guide,
    *args,
    key,
    num_steps: int = 2000,
    batch_size: int | None = None,
    optimizer=None,
    loss: ELBO | None = None,
    tolerance: float | None = None,
    init: Fit | None = None,
    progress: bool = True,
    **kwargs,
) -> Fit:
    """Fit a guide by stochastic gradient ascent on the bound.

    Args:
        model: A NumPyro function; see the README for its shape.
        guide: A guide for it, such as `gpx.guides.WhitenedGaussian(model)`.
        args: Arguments of the model: inputs, targets.
        key: Random key.
        num_steps: Number of steps.
        batch_size: Rows of a minibatch; handed to the model as `batch_size=`, which
            must pass it to its plate. `None` uses all rows.
        optimizer: An optax optimiser; Adam at 0.01 if left out.
        loss: The bound; `gpx.infer.ELBO()` if left out.
        tolerance: Stop when the mean loss of 100 steps has not fallen by this much for
            five looks in a row; `None` never stops early.
        init: Start from another fit: its parameters where the names and shapes agree,
            else its mean hyperparameters.
        progress: Whether to show a progress bar.
        kwargs: Further arguments of the model.

    Returns:
        A fit; `fit.info` holds `losses`, one a step, and `seconds_per_step`.
    """
    started = time.perf_counter()
    args, kwargs = as_arrays(args, kwargs)
    structure = check_data(model, args, kwargs)
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    svi = SVI(model, guide, optimizer, ELBO() if loss is None else loss)
    batched = kwargs if batch_size is None else {**kwargs, "batch_size": batch_size}
    batched_structure = check_batched(model, args, batched, structure, batch_size)
    guide_setup(guide, args, batched)
    start = _warm_start(init, model, guide, args, batched)

    def run(jitter):
        with single_blas_thread():
            return _run_svi(
                svi, batched_structure, args, batched, key, num_steps, tolerance,
                start, progress,
            ), jitter  # fmt: skip

    result, jitter = with_retry(run, model, args, batched, None)
    posterior = GuidePosterior(
        guide, result.params, args, kwargs, key=jr.fold_in(key, 1), jitter=jitter
    )
    return Fit(
        model, args, kwargs, posterior,
        engine="svi", params=result.params, jitter=jitter, batch_size=batch_size,
        structure=structure, seconds=time.perf_counter() - started,
        info={
            "losses": result.losses,
            "num_steps": len(result.losses),
            "seconds_per_step": result.seconds_per_step,
        },
    )  # fmt: skip


def fit_lbfgs(
    model,
    guide,
    *args,
    key,
    max_steps: int = 500,
    init: Fit | None = None,
    progress: bool = True,
    **kwargs,
) -> Fit:
    """Fit a deterministic guide with L-BFGS.

    For guides whose bound has no Monte Carlo noise: hyperparameters as points, as in
    `OptimalGaussian(model)` and `WhitenedGaussian(model)`.

    Args:
        model: A NumPyro function.
        guide: A guide for it.
        args: Arguments of the model.
        key: Random key, for the starting values.
        max_steps: Iterations at most.
        init: Start from another fit.
        progress: Whether to show a progress bar.
        kwargs: Further arguments of the model.
    """
    started = time.perf_counter()
    args, kwargs = as_arrays(args, kwargs)
    structure = check_data(model, args, kwargs)
    if structure.plates or structure.noise:
        raise ValueError(
            "`fit_lbfgs` needs a deterministic bound; the model subsamples "
            f"{sorted(structure.plates)} and draws noise at {sorted(structure.noise)}. "
            "Use `fit_svi`."
        )
    svi = SVI(model, guide, optax.identity(), ELBO())
    guide_setup(guide, args, kwargs)
    start = _warm_start(init, model, guide, args, kwargs)
    untrained = GuidePosterior(guide, {}, args, kwargs, key=key)
    if not untrained.deterministic_given_beliefs():
        raise ValueError(
            "`fit_lbfgs` needs a deterministic guide; "
            f"{type(guide).__name__} draws hyperparameters. Pass `theta='point'`, or "
            "use `fit_svi`."
        )

    def run(jitter):
        with single_blas_thread():
            return _run_lbfgs(
                svi, args, kwargs, key, max_steps, start, progress
            ), jitter

    result, jitter = with_retry(run, model, args, kwargs, None)
    posterior = GuidePosterior(
        guide, result.params, args, kwargs, key=jr.fold_in(key, 1), jitter=jitter
    )
    return Fit(
        model, args, kwargs, posterior,
        engine="lbfgs", params=result.params, jitter=jitter, structure=structure,
        seconds=time.perf_counter() - started,
        info={"losses": result.losses, "num_steps": len(result.losses)},
    )  # fmt: skip


def guide_setup(guide, args, kwargs) -> None:
    """Let the guide learn the model's sites from concrete arguments."""
    from numpyro_gpx.guides.base import GaussianGuide

    if isinstance(guide, GaussianGuide):
        guide.setup(*args, **kwargs)


def _warm_start(init: Fit | None, model, guide, args, kwargs) -> dict[str, Any] | None:
    """Parameters of another fit, where names and shapes agree; else its mean θ."""
    if init is None:
        return None
    shapes = {}
    for function in (model, guide):
        for name, site in abstract_trace(function, args, kwargs).items():
            if site["type"] == "param":
                shapes[name] = jnp.shape(site["value"])
    same = {n: x for n, x in init.params.items() if jnp.shape(x) == shapes.get(n)}
    return {**_mean_theta(init, guide), **same}


def _mean_theta(init: Fit, guide) -> dict:
    """The start of a Gaussian guide's `q(theta)` at the mean of other draws."""
    from numpyro_gpx.guides.base import GaussianGuide

    if not isinstance(guide, GaussianGuide):
        return {}
    draws, sites = init.draws(), guide.structure.latents
    names = guide.structure.hyperparameters
    if not names or not all(
        n in draws and draws[n].shape[1:] == sites[n].shape for n in names
    ):
        return {}
    means = {n: jnp.asarray(draws[n].mean(axis=0)) for n in names}
    return {guide.theta_name: ravel_pytree(guide.structure.unconstrain(means))[0]}


# For what runs once: compiling fast matters, running fast does not.
_jit_once = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


class _Result(NamedTuple):
    params: dict
    losses: np.ndarray
    seconds_per_step: float


def _run_svi(svi, structure, args, kwargs, key, num_steps, tolerance, start, progress):
    dynamic, static = arrays_and_rest(args, kwargs)
    key_init, key_steps = jr.split(key)

    @_jit_once
    def initialise(dynamic, start):
        args, kwargs = eqx.combine(dynamic, static)
        return svi.init(key_init, *args, init_params=start, **kwargs)

    @functools.partial(jax.jit, donate_argnums=0)
    def block(carry, number, offset, dynamic):
        args, kwargs = eqx.combine(dynamic, static)

        def step(i, carry):
            state, losses = carry
            batch = draw_batch(jr.fold_in(key_steps, offset + i), structure)
            with handlers.substitute(data=batch):
                state, loss = svi.update(state, *args, **kwargs)
            return state, losses.at[i].set(loss)

        return jax.lax.fori_loop(0, number, step, carry)

    state = initialise(dynamic, start)
    empty = np.zeros(_BLOCK)
    losses: list[np.ndarray] = []
    times: list[float] = []
    stop = _Stopper(tolerance)

    def step_block(state, number):
        offset = sum(len(x) for x in losses)
        before = time.perf_counter()
        state, latest = block((state, jnp.asarray(empty)), number, offset, dynamic)
        latest = np.asarray(latest)[:number]
        losses.append(latest)
        times.append((time.perf_counter() - before) / number)
        if not np.all(np.isfinite(latest)):
            bad = offset + int(np.argmin(np.isfinite(latest)))
            raise NotFinite(f"The loss became {latest[bad - offset]} at step {bad}.")
        mean = float(latest.mean())
        return state, None if stop(mean) else f"loss {mean:.5g}"

    state = run_blocks(
        step_block, state, num_steps, block=_BLOCK, progress=progress, label="svi"
    )
    # The first block compiles.
    seconds_per_step = float(np.median(times[1:] or times))
    params = _jit_once(svi.get_params)(state)
    return _Result(params, np.concatenate(losses), seconds_per_step)


def _run_lbfgs(svi, args, kwargs, key, max_steps, start, progress):
    dynamic, static = arrays_and_rest(args, kwargs)

    @_jit_once
    def initialise(dynamic, start):
        args, kwargs = eqx.combine(dynamic, static)
        state = svi.init(key, *args, init_params=start, **kwargs)
        return svi.optim.get_params(state.optim_state)

    flat, unravel = ravel_pytree(initialise(dynamic, start))

    @jax.jit
    def value_and_grad(flat, dynamic):
        args, kwargs = eqx.combine(dynamic, static)

        def loss(flat):
            params = svi.constrain_fn(unravel(flat))
            return svi.loss.loss(key, params, svi.model, svi.guide, *args, **kwargs)

        return jax.value_and_grad(loss)(flat)

    losses: list[float] = []

    def objective(x):
        value, grad = value_and_grad(jnp.asarray(x, flat.dtype), dynamic)
        value = float(value)
        if not losses and not np.isfinite(value):
            raise NotFinite(f"The loss is {value} at the starting values.")
        losses.append(value)
        # A line search that meets NaN must step back, not stop.
        if not np.isfinite(value):
            return 1e300, np.zeros_like(x)
        return value, np.asarray(grad, np.float64)

    def solve(state, number):
        found = scipy.optimize.minimize(
            objective, np.asarray(flat, np.float64), jac=True, method="L-BFGS-B",
            options={"maxiter": max_steps, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-6},
        )  # fmt: skip
        return found, None

    found = run_blocks(
        solve, None, max_steps, block=max_steps, progress=progress, label="lbfgs"
    )
    params = _jit_once(lambda flat: svi.constrain_fn(unravel(flat)))(found.x)
    return _Result(params, np.asarray(losses), float("nan"))


class _Stopper:
    """Says stop when the loss has not fallen for five looks in a row."""

    def __init__(self, tolerance: float | None, patience: int = 5):
        self.tolerance, self.patience = tolerance, patience
        self.best, self.waited = np.inf, 0

    def __call__(self, loss: float) -> bool:
        if self.tolerance is None:
            return False
        if loss < self.best - self.tolerance:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience
