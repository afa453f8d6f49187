"""Variational fits: `fit_svi` (stochastic) and `fit_lbfgs` (deterministic)."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from numpyro import handlers

from numpyro_gpx import checks
from numpyro_gpx.infer.problem import Result, VariationalProblem
from numpyro_gpx.infer.progress import BLOCK, Record, run_blocks
from numpyro_gpx.infer.retry import NotFinite
from numpyro_gpx.infer.tempering import check_temperature, tempered
from numpyro_gpx.program.batches import draw_batch, refuse_batches
from numpyro_gpx.program.call import Call, takes_options
from numpyro_gpx.program.compile_cache import compiled, once
from numpyro_gpx.program.elbo import ELBO, Loss
from numpyro_gpx.results.fit import Fit

__all__ = ["fit_lbfgs", "fit_svi"]

# One object: a new one would be a new program.
_ADAM = optax.adam(1e-2)


@takes_options
def fit_svi(
    model,
    guide,
    *args,
    key,
    num_steps: int = 2000,
    batch_size: int | None = None,
    optimizer=None,
    loss: Loss | None = None,
    temperature: float = 1.0,
    tolerance: float | None = None,
    init: Fit | None = None,
    progress: bool = True,
    **kwargs,
) -> Fit:
    """Fit a guide by stochastic gradient ascent on the bound.

    Args:
        model: A NumPyro function; see the README for its shape.
        guide: A guide for it, such as `gpx.guides.WhitenedGaussian(model)`, or the
            class alone.
        args: Arguments of the model: inputs, targets.
        key: Random key.
        num_steps: Number of steps.
        batch_size: Rows of a minibatch; handed to the model as `batch_size=`, which
            must pass it to its plate. `None` uses all rows.
        optimizer: An optax optimiser; Adam at 0.01 if left out.
        loss: The bound: `gpx.infer.ELBO()` if left out, or
            `gpx.infer.ImportanceWeighted(10)` for latent inputs.
        temperature: The log joint density is divided by this at the start; it falls
            geometrically to 1 over the first half of the steps. Above 1 (200, say),
            with a wide start and a small learning rate (`gpx.guides.Flow` says how), a
            guide that can hold several modes spreads over them before it narrows. For
            guides that draw all sites.
        tolerance: Stop when the mean loss of 100 steps has not fallen by this much for
            five looks in a row, at a temperature of 1; `None` never stops early.
        init: Start from another fit: its parameters where the names and shapes agree,
            else its mean hyperparameters.
        progress: Whether to show a progress bar.
        kwargs: Further arguments of the model.

    Returns:
        A fit; `fit.info` holds `losses`, one a step (with a temperature, in the first
        half those of the tempered model), and `seconds_per_step`; with latent inputs
        also `elbo` and `elbo_standard_error`, of 1000 draws.
    """
    guide = checks.guide(guide, model)
    checks.at_least("num_steps", num_steps, 1)
    check_temperature(temperature)
    _check_density(guide, "fit_svi")
    problem = VariationalProblem(
        Call.create(model, args, kwargs, function="fit_svi"), guide, key,
        optimizer=_ADAM if optimizer is None else optimizer,
        loss=ELBO() if loss is None else loss, init=init, batch_size=batch_size,
    )  # fmt: skip
    if temperature > 1.0:
        _check_all_drawn(problem)
    run = functools.partial(_run_svi, problem, num_steps, temperature, tolerance)
    return problem.solve(lambda: run(progress), engine="svi")


@takes_options
def fit_lbfgs(
    model,
    guide,
    *args,
    key,
    max_steps: int = 2000,
    init: Fit | None = None,
    progress: bool = True,
    **kwargs,
) -> Fit:
    """Fit a deterministic guide with L-BFGS.

    For guides whose bound has no Monte Carlo noise: hyperparameters as points, as in
    `OptimalGaussian(model)` and `WhitenedGaussian(model)`.

    Args:
        model: A NumPyro function.
        guide: A guide for it, or its class.
        args: Arguments of the model.
        key: Random key, for the starting values.
        max_steps: Iterations at most.
        init: Start from another fit.
        progress: Whether to show a progress bar.
        kwargs: Further arguments of the model.

    Returns:
        A fit; `fit.info` holds `losses`, one an evaluation, `num_steps`, whether it
        `converged`, and SciPy's `message`; with latent inputs also `elbo` and
        `elbo_standard_error`, of 1000 draws.
    """
    guide = checks.guide(guide, model)
    checks.at_least("max_steps", max_steps, 1)
    _check_density(guide, "fit_lbfgs")
    call = Call.create(model, args, kwargs, function="fit_lbfgs")
    refuse_batches(call, "fit_lbfgs", "fit_svi")
    problem = VariationalProblem(
        call, guide, key,
        optimizer=optax.identity(), loss=ELBO(), init=init,
    )  # fmt: skip
    structure = problem.program.structure
    if structure.plates or structure.noise:
        does = {
            "subsamples": sorted(structure.plates),
            "draws noise at": sorted(structure.noise),
        }
        found = [f"{verb} {names}" for verb, names in does.items() if names]
        raise ValueError(
            "`fit_lbfgs` needs a deterministic bound; the model "
            f"{' and '.join(found)}. Use `fit_svi`."
        )
    if not problem.posterior({}, key).deterministic_objective():
        raise ValueError(
            "`fit_lbfgs` needs a deterministic guide; "
            f"{type(guide).__name__} draws hyperparameters or latent inputs. Pass "
            "`theta='point'` and a rule with fixed points, or use `fit_svi`."
        )
    return problem.solve(
        lambda: _run_lbfgs(problem, max_steps, progress), engine="lbfgs"
    )


def _check_density(guide, function: str) -> None:
    if not getattr(guide, "has_density", True):
        raise TypeError(
            f"`{function}` would never train the discriminator of "
            f"{type(guide).__name__}; use `gpx.fit_implicit`."
        )


def _check_all_drawn(problem) -> None:
    guide = problem.svi.guide
    if problem.posterior({}, problem.key).integrates():
        raise ValueError(
            "`temperature` above 1 needs a guide that draws all sites, such as "
            f"`gpx.guides.Flow(model)`; {type(guide).__name__} integrates over some."
        )


def _run_svi(problem, num_steps, temperature, tolerance, progress):
    svi, structure = problem.svi, problem.program.batched_structure
    call = problem.program.batched

    def initialise(key, call, start):
        key_init, key_steps, key_draws = jr.split(key, 3)
        state = svi.init(key_init, *call.args, init_params=start, **call.kwargs)
        return state, key_steps, key_draws

    def block(carry, number, offset, key_steps, call):
        def step(i, carry):
            state, losses = carry
            batch = draw_batch(jr.fold_in(key_steps, offset + i), structure)
            warm = copy.copy(svi)
            warm.model = tempered(svi.model, temperature, (offset + i) / num_steps)
            with handlers.substitute(data=batch):
                state, loss = warm.update(state, *call.args, **call.kwargs)
            return state, losses.at[i].set(loss)

        return jax.lax.fori_loop(0, number, step, carry)

    state, key_steps, key_draws = once(initialise)(problem.key, call, problem.start)
    fresh = jnp.zeros(BLOCK)
    whole = jnp.asarray(0)
    # Its own copy: the state's memory is given away at each block.
    run_block = compiled(
        block, (state, fresh), whole, whole, key_steps, call, donate=(0,)
    )
    record = Record("loss")
    stop = _Stopper(tolerance)

    def step_block(state, number):
        carry = (state, jnp.zeros(BLOCK))
        first = record.num_steps
        state, latest = record.block(
            lambda first: run_block(
                carry, jnp.asarray(number), jnp.asarray(first), key_steps, call
            ),
            number,
        )
        mean = float(latest.mean())
        # While the model cools down, its loss changes whatever the guide does.
        cold = temperature == 1.0 or 2 * first >= num_steps
        return state, None if cold and stop(mean) else f"loss {mean:.5g}"

    state = run_blocks(step_block, state, num_steps, progress=progress, label="svi")
    params = once(svi.get_params)(state)
    info = {
        "num_steps": record.num_steps,
        "seconds_per_step": record.seconds_per_step,
    }
    if temperature > 1.0:
        info["temperature"] = temperature  # losses of the first half are tempered
    return Result(params, record.values, key_draws, info)


def _run_lbfgs(problem, max_steps, progress):
    import scipy.optimize

    svi = problem.svi
    key, key_draws = jr.split(problem.key)
    call = problem.program.call

    def initialise(key, call, start):
        state = svi.init(key, *call.args, init_params=start, **call.kwargs)
        return svi.optim.get_params(state.optim_state)

    flat, unravel = ravel_pytree(once(initialise)(key, call, problem.start))

    def value_and_grad(flat, key, call):
        def loss(flat):
            params = svi.constrain_fn(unravel(flat))
            return -svi.loss.mean(key, params, svi.guide, call)

        return jax.value_and_grad(loss)(flat)

    evaluate = compiled(value_and_grad, flat, key, call)
    losses: list[float] = []

    def objective(x):
        value, grad = evaluate(jnp.asarray(x, flat.dtype), key, call)
        value, grad = float(value), np.asarray(grad, np.float64)
        finite = np.isfinite(value) and np.all(np.isfinite(grad))
        if not losses and not finite:
            raise NotFinite(
                f"The loss is {value} at the starting values, with a gradient of which "
                f"{np.count_nonzero(~np.isfinite(grad))} entries are not finite."
            )
        losses.append(value)
        # A line search that meets NaN must step back, not stop. So must one that meets
        # it in the gradient alone, as where a lengthscale overflows: the loss is finite
        # there, and the next point would be NaN.
        return (value, grad) if finite else (1e300, np.zeros_like(x))

    def solve(state, number):
        found = scipy.optimize.minimize(
            objective, np.asarray(flat, np.float64), jac=True, method="L-BFGS-B",
            options={"maxiter": max_steps, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-6},
        )  # fmt: skip
        return found, None

    found = run_blocks(
        solve, None, max_steps, block=max_steps, progress=progress, label="lbfgs"
    )
    best = jnp.asarray(found.x, flat.dtype)
    params = once(lambda flat: svi.constrain_fn(unravel(flat)))(best)
    info = {
        "num_steps": int(found.nit),
        "converged": bool(found.success),
        "message": str(found.message),
    }
    return Result(params, np.asarray(losses), key_draws, info)


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
