"""Variational fits: `fit_svi` (stochastic) and `fit_lbfgs` (deterministic)."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide

from numpyro_gpx import checks
from numpyro_gpx.fit import Fit
from numpyro_gpx.infer.data import (
    as_arrays,
    check_batched,
    check_data,
    inputs_first,
)
from numpyro_gpx.infer.elbo import ELBO, Loss
from numpyro_gpx.infer.posteriors import GuidePosterior
from numpyro_gpx.infer.progress import run_blocks
from numpyro_gpx.infer.retry import NotFinite, with_retry
from numpyro_gpx.infer.structure import abstract_trace, arrays_and_rest
from numpyro_gpx.infer.target import draw_batch
from numpyro_gpx.infer.threads import single_blas_thread

__all__ = ["fit_lbfgs", "fit_svi"]

# Draws of the bound that a fit with latent inputs reports.
_REPORTED_DRAWS = 1000
# Draws of an objective that has noise.
_OBJECTIVE_DRAWS = 100
# By how many nats a row the objective of a rule may exceed the bound without a word.
_TOLERATED_EXCESS = 0.1
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
    loss: Loss | None = None,
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
        loss: The bound: `gpx.infer.ELBO()` if left out, or
            `gpx.infer.ImportanceWeighted(10)` for latent inputs.
        tolerance: Stop when the mean loss of 100 steps has not fallen by this much for
            five looks in a row; `None` never stops early.
        init: Start from another fit: its parameters where the names and shapes agree,
            else its mean hyperparameters.
        progress: Whether to show a progress bar.
        kwargs: Further arguments of the model.

    Returns:
        A fit; `fit.info` holds `losses`, one a step, and `seconds_per_step`; with
        latent inputs also `elbo` and `elbo_standard_error`, of 1000 draws.
    """
    checks.at_least("num_steps", num_steps, 1)
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    problem = _Problem(
        model, guide, args, kwargs, key,
        optimizer=optimizer, loss=ELBO() if loss is None else loss, init=init,
        batch_size=batch_size,
    )  # fmt: skip
    return problem.solve(
        lambda: _run_svi(problem, num_steps, tolerance, progress), engine="svi"
    )


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
        guide: A guide for it.
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
    checks.at_least("max_steps", max_steps, 1)
    problem = _Problem(
        model, guide, args, kwargs, key,
        optimizer=optax.identity(), loss=ELBO(), init=init,
    )  # fmt: skip
    structure = problem.structure
    if structure.plates or structure.noise:
        raise ValueError(
            "`fit_lbfgs` needs a deterministic bound; the model subsamples "
            f"{sorted(structure.plates)} and draws noise at {sorted(structure.noise)}. "
            "Use `fit_svi`."
        )
    if not problem.posterior({}, key, None).deterministic_objective():
        raise ValueError(
            "`fit_lbfgs` needs a deterministic guide; "
            f"{type(guide).__name__} draws hyperparameters or latent inputs. Pass "
            "`theta='point'` and a rule with fixed points, or use `fit_svi`."
        )
    return problem.solve(
        lambda: _run_lbfgs(problem, max_steps, progress), engine="lbfgs"
    )


class _Problem:
    """What both fits share: checked arguments at the start, a `Fit` at the end."""

    def __init__(
        self, model, guide, args, kwargs, key, *, optimizer, loss, init,
        batch_size=None,
    ):  # fmt: skip
        self.started = time.perf_counter()
        checks.key(key)
        checks.guide(guide)
        self.key = key
        if init is not None:
            checks.instance("init", init, Fit, "such as an earlier fit of the model")
        self.args, self.kwargs = as_arrays(*inputs_first(model, args, kwargs))
        self.structure = check_data(model, self.args, self.kwargs)
        self.svi = SVI(model, guide, optimizer, loss)
        self.batch_size = batch_size
        self.batched = dict(self.kwargs)
        if batch_size is not None:
            self.batched["batch_size"] = batch_size
        self.batched_structure = check_batched(
            model, self.args, self.batched, self.structure, batch_size
        )
        guide_setup(guide, self.args, self.batched)
        self.start = _warm_start(init, model, guide, self.args, self.batched)

    def solve(self, run: Callable[[], _Result], *, engine: str) -> Fit:
        """Call `run`, once more with a larger jitter if need be; make it a fit."""

        def attempt(jitter):
            with single_blas_thread():
                return run(), jitter

        result, jitter = with_retry(
            attempt, self.svi.model, self.args, self.batched, None
        )
        fit = Fit(
            self.svi.model, self.args, self.kwargs,
            self.posterior(result.params, result.key, jitter),
            engine=engine, params=result.params, jitter=jitter,
            batch_size=self.batch_size, structure=self.structure,
            seconds=time.perf_counter() - self.started,
            info={"losses": result.losses, **result.info}, loss=self._known_loss,
        )  # fmt: skip
        if fit.integrates_latents:
            _report_bound(fit)
        return fit

    @property
    def _known_loss(self):
        loss = self.svi.loss
        return loss if isinstance(loss, Loss) else None

    def posterior(self, params: dict, key, jitter: float | None) -> GuidePosterior:
        """The guide with these parameters, on all rows."""
        return GuidePosterior(
            self.svi.guide, params, self.args, self.kwargs, key=key, jitter=jitter
        )


def _report_bound(fit: Fit) -> None:
    """Record a bound beside the objective, which with few points is none."""
    bound = fit.elbo(_REPORTED_DRAWS)
    fit.info["elbo"], fit.info["elbo_standard_error"] = bound
    objective = fit.objective(_OBJECTIVE_DRAWS)
    fit.info["objective"] = objective.value
    noise = bound.standard_error + objective.standard_error
    num_rows = sum(plate.size for plate in fit.structure.row_plates.values())
    excess = objective.value - bound.value
    if excess > 10.0 * noise and excess > _TOLERATED_EXCESS * num_rows:
        warnings.warn(
            f"The objective, {objective.value:.5g}, is far above the bound, "
            f"{bound.value:.5g} (standard error {bound.standard_error:.2g}): the fit "
            "exploits the few points of its rule. Use more of them, such as "
            "`gpx.cubature.GaussHermite(5)`, or `MonteCarlo` with `WhitenedGaussian`.",
            stacklevel=5,
        )


def guide_setup(guide, args, kwargs) -> None:
    """Let the guide learn the model's sites from concrete arguments."""
    from numpyro_gpx.guides.base import SiteGuide

    if isinstance(guide, SiteGuide):
        guide.setup(*args, **kwargs)
    elif isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        # NumPyro's guides keep the values of their first call, which must not be
        # tracers of a compiled `init`.
        with handlers.block(), handlers.seed(rng_seed=0):
            guide(*args, **kwargs)


def _warm_start(init: Fit | None, model, guide, args, kwargs) -> dict[str, Any] | None:
    """Parameters of another fit: the model's by name, the guide's if it is alike.

    A name means different things in different guides (`f_auto_loc` is a mean of `v` or
    a pseudo-target); of an unlike guide only its mean hyperparameters are taken.
    """
    if init is None:
        return None
    same = {}
    for function in (model, guide):
        for name, site in abstract_trace(function, args, kwargs).items():
            if site["type"] == "param" and name in init.params:
                ours = function is model or _means_the_same(init, guide, name)
                if ours and jnp.shape(site["value"]) == jnp.shape(init.params[name]):
                    same[name] = init.params[name]
    return {**_mean_theta(init, guide), **same}


def _means_the_same(init: Fit, guide, name: str) -> bool:
    """Whether a parameter means the same in the guide of another fit."""
    from numpyro_gpx.guides.base import SiteGuide

    other = getattr(init.posterior, "guide", None)
    if isinstance(guide, SiteGuide) and isinstance(other, SiteGuide):
        return guide.meaning(name) == other.meaning(name)
    return type(other) is type(guide)


def _mean_theta(init: Fit, guide) -> dict:
    """The start of a Gaussian guide's `q(theta)` at the mean of other draws."""
    from numpyro_gpx.guides.gaussian import GaussianGuide

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
    key: jax.Array  # for the draws of the fit
    info: dict[str, Any]


def _run_svi(problem, num_steps, tolerance, progress):
    svi, structure = problem.svi, problem.batched_structure
    dynamic, static = arrays_and_rest(problem.args, problem.batched)

    @_jit_once
    def initialise(key, dynamic, start):
        args, kwargs = eqx.combine(dynamic, static)
        key_init, key_steps, key_draws = jr.split(key, 3)
        state = svi.init(key_init, *args, init_params=start, **kwargs)
        return state, key_steps, key_draws

    @functools.partial(jax.jit, donate_argnums=0)
    def block(carry, number, offset, key_steps, dynamic):
        args, kwargs = eqx.combine(dynamic, static)

        def step(i, carry):
            state, losses = carry
            batch = draw_batch(jr.fold_in(key_steps, offset + i), structure)
            with handlers.substitute(data=batch):
                state, loss = svi.update(state, *args, **kwargs)
            return state, losses.at[i].set(loss)

        return jax.lax.fori_loop(0, number, step, carry)

    state, key_steps, key_draws = initialise(problem.key, dynamic, problem.start)
    empty = np.zeros(_BLOCK)
    losses: list[np.ndarray] = []
    times: list[float] = []
    stop = _Stopper(tolerance)

    def step_block(state, number):
        offset = sum(len(x) for x in losses)
        before = time.perf_counter()
        carry = (state, jnp.asarray(empty))
        state, latest = block(carry, number, offset, key_steps, dynamic)
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
    every = np.concatenate(losses)
    info = {"num_steps": len(every), "seconds_per_step": seconds_per_step}
    return _Result(params, every, key_draws, info)


def _run_lbfgs(problem, max_steps, progress):
    import scipy.optimize

    svi = problem.svi
    key, key_draws = jr.split(problem.key)
    dynamic, static = arrays_and_rest(problem.args, problem.kwargs)

    @_jit_once
    def initialise(dynamic, start):
        args, kwargs = eqx.combine(dynamic, static)
        state = svi.init(key, *args, init_params=start, **kwargs)
        return svi.optim.get_params(state.optim_state)

    flat, unravel = ravel_pytree(initialise(dynamic, problem.start))

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
    info = {
        "num_steps": int(found.nit),
        "converged": bool(found.success),
        "message": str(found.message),
    }
    return _Result(params, np.asarray(losses), key_draws, info)


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
