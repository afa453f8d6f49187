"""Stochastic gradient ascent on the bound."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import jax
import jax.random as jr
import numpy as np
import optax
from numpyro import handlers
from numpyro.optim import optax_to_numpyro

from numpyro_gpx import checks
from numpyro_gpx.engines.engine import Engine, Outcome
from numpyro_gpx.engines.natural import Natural, natural_notes
from numpyro_gpx.engines.retry import NotFinite
from numpyro_gpx.engines.schedule import (
    LOWER_RATE,
    Schedule,
    adam_at,
    restarted,
    schedule_of,
)
from numpyro_gpx.engines.stopping import Stopper
from numpyro_gpx.engines.tempering import check_temperature, tempered
from numpyro_gpx.engines.training import Training, guide_of, without_density
from numpyro_gpx.engines.watch import BLOCK, Record
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.compile_cache import compiled, once
from numpyro_gpx.program.elbo import ELBO, Loss
from numpyro_gpx.program.numpy_values import placed
from numpyro_gpx.results.facts import VARIATIONAL
from numpyro_gpx.results.posteriors import GuidePosterior

__all__ = ["SVI"]


class SVI(Engine):
    """Fits a guide by stochastic gradient ascent on the bound.

    Attributes:
        guide: A guide for the model, such as `gpx.guides.WhitenedGaussian(model)`, or
            the class alone.
        num_steps: Number of steps.
        batch_size: Rows of a minibatch; handed to the model as `batch_size=`, which
            must pass it to its plate. `None` uses all rows.
        optimizer: An optax optimiser, or `gpx.optimizers.natural()`. If left out Adam
            with a schedule: its learning rate falls along a cosine over `num_steps`,
            from the guide's `learning_rate` (0.1 for Gaussian beliefs about GPs; 0.03
            where a guide says nothing, as NumPyro's) to a hundredth of it. If the
            loss becomes NaN under way, one that began higher starts again from 0.03,
            and says so. A fit that goes on from one that was interrupted (`init=`,
            same model and data, same guide) goes on from the rate that one had
            reached, and is at the end of the curve after its own `num_steps`.
        loss: The bound: `gpx.infer.ELBO()` if left out, or
            `gpx.infer.ImportanceWeighted(10)` for latent inputs.
        temperature: The log joint density is divided by this at the start; it falls
            geometrically to 1 over the first half of the steps. Above 1 (200, say),
            with a wide start and a small learning rate (`gpx.guides.Flow` says how), a
            guide that can hold several modes spreads over them before it narrows. For
            guides that draw all sites.
        tolerance: Stop when the mean loss of 100 steps has not fallen by this much for
            five looks in a row, at a temperature of 1; `None` never stops early. With
            the default optimiser it looks only in the last fifth of the steps, where
            the rate is low: fits of fewer than 3000 steps then never stop early.

    Its fits have in `fit.info` the `losses`, one a step (with a temperature, in the
    first half those of the tempered model), `num_steps`, `seconds_per_step` and whether
    it `converged`; with the default optimiser `learning_rate`, where that starts, and
    `schedule_place`, the share of the curve that is done; with natural gradients
    `natural_updates` and `natural_skipped`; with latent inputs also `elbo` and
    `elbo_standard_error`, of 1000 draws.
    """

    name: ClassVar[str] = "svi"
    approximation: ClassVar[str] = VARIATIONAL

    guide: Any
    _: dataclasses.KW_ONLY
    num_steps: int = 2000
    batch_size: int | None = None
    optimizer: Any = None
    loss: Loss | None = None
    temperature: float = 1.0
    tolerance: float | None = None

    def __check_init__(self):
        checks.at_least("num_steps", self.num_steps, 1)
        check_temperature(self.temperature)
        checks.loss(self.loss)
        checks.optimizer(self.optimizer)
        if self.tolerance is not None:
            checks.number("tolerance", self.tolerance, -np.finfo(float).tiny)

    def objection(self, program):
        return without_density(guide_of(self.guide, program))

    def run(self, program, key, *, start, watch) -> Outcome:
        guide = guide_of(self.guide, program)
        schedule = None
        if _has_schedule(self.optimizer):
            schedule = schedule_of(guide, program, start.fit, self.num_steps)
        try:
            return self._run(program, guide, schedule, key, start, watch)
        except NotFinite as reason:
            # Before its first step the rate has no part in it.
            if schedule is None or not reason.step or schedule.peak <= LOWER_RATE:
                raise
            watch.begin_again()
            lower = schedule._replace(peak=LOWER_RATE)
            found = self._run(program, guide, lower, key, start, watch)
            note = restarted(reason, float(schedule.peak), LOWER_RATE)
            return found._replace(notes=(*found.notes, note))

    def _run(self, program, guide, schedule, key, start, watch) -> Outcome:
        loss = ELBO() if self.loss is None else self.loss
        optimizer = self.optimizer or optax.identity()  # its rates are still to come
        training = Training(program, guide, optimizer, loss, start)
        rule = _Rule(self.optimizer, training)
        training.svi.optim = rule.at(0.0)
        if self.temperature > 1.0:
            _check_all_drawn(training, key)
        svi, call = training.svi, training.program.batched

        def initialise(key, call, params):
            key_init, key_steps, key_draws = jr.split(key, 3)
            state = svi.init(key_init, *call.args, init_params=params, **call.kwargs)
            return state, key_steps, key_draws

        state, key_steps, key_draws = once(initialise)(key, call, training.params)
        # While the model cools down, its loss changes whatever the guide does.
        warm = 0 if self.temperature == 1.0 else self.num_steps // 2
        stopper = Stopper(self.tolerance, schedule, self.num_steps, warm)

        def say(record: Record) -> str | None:
            line = f"loss {float(record.latest.mean()):.5g}"
            return None if stopper(record) else line

        state, record = watch.loop(
            "svi", self._block(training, rule, schedule, state, key_steps), state,
            self.num_steps, names=("loss",), say=say, explain=_Explain(training),
        )  # fmt: skip
        params = once(svi.get_params)(state)
        notes = [] if watch.cut else stopper.notes(record.values)
        info = self._info(record, schedule)
        info["converged"] = not notes and not watch.cut
        if isinstance(self.optimizer, Natural):
            _, (_, steps) = state.optim_state
            info["natural_updates"] = int(steps.updates)
            info["natural_skipped"] = int(steps.skipped)
            notes = [*natural_notes(info), *notes]
        return training.outcome(params, key_draws, info, notes, watch)

    def _info(self, record: Record, schedule: Schedule | None) -> dict[str, Any]:
        info: dict[str, Any] = {
            "losses": record.values,
            "num_steps": record.num_steps,
            "seconds_per_step": record.seconds_per_step,
        }
        if schedule is not None:
            info["learning_rate"] = float(schedule.peak)
            info["schedule_place"] = float(schedule.place(record.num_steps))
        if self.temperature > 1.0:
            info["temperature"] = self.temperature  # in the first half of the losses
        return info

    def _block(self, training, rule, schedule, state, key_steps):
        """Steps as one compiled program, whatever their number."""
        svi, structure = training.svi, training.program.batched_structure
        call = training.program.batched
        planned = schedule or Schedule(0.0, 0.0, self.num_steps)

        def block(carry, number, offset, plan, key_steps, call):
            def step(i, carry):
                state, losses = carry
                batch = draw_batch(jr.fold_in(key_steps, offset + i), structure)
                here = copy.copy(svi)
                here.optim = rule.at(plan.rate(offset + i))
                here.model = tempered(
                    svi.model, self.temperature, (offset + i) / plan.num_steps
                )
                with handlers.substitute(data=batch):
                    state, loss = here.update(state, *call.args, **call.kwargs)
                return state, losses.at[i].set(loss)

            return jax.lax.fori_loop(0, number, step, carry)

        whole, plan = placed(0), planned.as_arrays()
        # The state's memory is given away at each block.
        program = compiled(
            block, (state, _no_losses()), whole, whole, plan, key_steps, call,
            donate=(0,),
        )  # fmt: skip

        def run(state, first, number):
            carry = (state, _no_losses())
            return program(carry, placed(number), placed(first), plan, key_steps, call)

        return run


def _has_schedule(optimizer) -> bool:
    """Whether the default schedule moves the parameters, or those not natural."""
    return optimizer is None or (
        isinstance(optimizer, Natural) and optimizer.rest is None
    )


class _Rule:
    """The optimiser of one step, as one of NumPyro's, given the schedule's rate.

    Its state does not depend on the rate.
    """

    def __init__(self, optimizer, training: Training):
        self.optimizer, self.given = optimizer, training.svi.optim
        self.guide = training.guide

    def at(self, rate):
        if self.optimizer is None:
            return optax_to_numpyro(adam_at(rate))
        if isinstance(self.optimizer, Natural):
            rest = self.optimizer.rest or adam_at(rate)
            return optax_to_numpyro(self.optimizer.of(self.guide, rest))
        return self.given


def _no_losses():
    return placed(np.zeros(BLOCK))


class _Explain:
    """Says which parameter or site a loss that is not finite comes from."""

    def __init__(self, training: Training):
        self.training = training

    def __call__(self, state, step: int) -> str:
        params = self.training.svi.get_params(state)
        return self.training.where_not_finite(params)


def _check_all_drawn(training: Training, key) -> None:
    posterior: GuidePosterior = training.posterior({}, key)
    if posterior.integrates():
        raise ValueError(
            "`temperature` above 1 needs a guide that draws all sites, such as "
            f"`gpx.guides.Flow(model)`; {type(training.guide).__name__} integrates "
            "over some."
        )
