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

from numpyro_gpx import checks
from numpyro_gpx.engines.engine import Engine, Outcome
from numpyro_gpx.engines.tempering import check_temperature, tempered
from numpyro_gpx.engines.training import Training, guide_of, without_density
from numpyro_gpx.engines.watch import BLOCK, Record
from numpyro_gpx.notes import Note
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.compile_cache import compiled, once
from numpyro_gpx.program.elbo import ELBO, Loss
from numpyro_gpx.program.numpy_values import placed
from numpyro_gpx.results.facts import VARIATIONAL
from numpyro_gpx.results.loss_notes import loss_notes
from numpyro_gpx.results.posteriors import GuidePosterior

__all__ = ["SVI"]

# One object: a new one would be a new program.
_ADAM = optax.adam(1e-2)


class SVI(Engine):
    """Fits a guide by stochastic gradient ascent on the bound.

    Attributes:
        guide: A guide for the model, such as `gpx.guides.WhitenedGaussian(model)`, or
            the class alone.
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

    Its fits have in `fit.info` the `losses`, one a step (with a temperature, in the
    first half those of the tempered model), `num_steps`, `seconds_per_step` and whether
    it `converged`; with latent inputs also `elbo` and `elbo_standard_error`, of 1000
    draws.
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
        optimizer = _ADAM if self.optimizer is None else self.optimizer
        loss = ELBO() if self.loss is None else self.loss
        training = Training(program, self.guide, optimizer, loss, start)
        if self.temperature > 1.0:
            _check_all_drawn(training, key)
        svi, call = training.svi, training.program.batched

        def initialise(key, call, params):
            key_init, key_steps, key_draws = jr.split(key, 3)
            state = svi.init(key_init, *call.args, init_params=params, **call.kwargs)
            return state, key_steps, key_draws

        state, key_steps, key_draws = once(initialise)(key, call, training.params)
        stopper = _Stopper(self.tolerance)

        def say(record: Record) -> str | None:
            loss = float(record.latest.mean())
            # While the model cools down, its loss changes whatever the guide does.
            cold = self.temperature == 1.0 or (
                2 * (record.num_steps - BLOCK) >= self.num_steps
            )
            whole = record.num_steps % BLOCK == 0
            if whole and cold and stopper(record.values[-BLOCK:].mean()):
                return None
            return f"loss {loss:.5g}"

        state, record = watch.loop(
            "svi", self._block(training, state, key_steps), state, self.num_steps,
            names=("loss",), say=say, explain=_Explain(training),
        )  # fmt: skip
        params = once(svi.get_params)(state)
        losses = record.values
        notes = self._notes(losses, stopper, cut=watch.cut is not None)
        info = {
            "losses": losses,
            "num_steps": record.num_steps,
            "seconds_per_step": record.seconds_per_step,
            "converged": not notes and not watch.cut,
        }
        if self.temperature > 1.0:
            info["temperature"] = self.temperature  # in the first half of the losses
        return training.outcome(params, key_draws, info, notes, watch)

    def _block(self, training, state, key_steps):
        """Steps as one compiled program."""
        svi, structure = training.svi, training.program.batched_structure
        call = training.program.batched

        def block(carry, number, offset, key_steps, call):
            def step(i, carry):
                state, losses = carry
                batch = draw_batch(jr.fold_in(key_steps, offset + i), structure)
                warm = copy.copy(svi)
                if self.temperature > 1.0:  # else `num_steps` is no part of the program
                    done = (offset + i) / self.num_steps
                    warm.model = tempered(svi.model, self.temperature, done)
                with handlers.substitute(data=batch):
                    state, loss = warm.update(state, *call.args, **call.kwargs)
                return state, losses.at[i].set(loss)

            return jax.lax.fori_loop(0, number, step, carry)

        whole = placed(0)
        # The state's memory is given away at each block.
        program = compiled(
            block, (state, _no_losses()), whole, whole, key_steps, call,
            donate=(0,),
        )  # fmt: skip

        def run(state, first, number):
            carry = (state, _no_losses())
            return program(carry, placed(number), placed(first), key_steps, call)

        return run

    def _notes(self, losses, stopper: _Stopper, *, cut: bool) -> list[Note]:
        if cut or stopper.done:
            return []
        if self.tolerance is not None:
            best, last = stopper.best, float(np.mean(losses[-BLOCK:]))
            return [
                Note(
                    "not_converged", "doubt",
                    f"The loss was still falling by more than {self.tolerance:g} in "
                    f"500 steps when the {len(losses)} steps were over.",
                    "Raise `num_steps`, or go on from here: `init=fit`.",
                    {"best": best, "last": last},
                )
            ]  # fmt: skip
        # While the model cooled down, its loss changed whatever the guide did.
        cold = losses if self.temperature == 1.0 else losses[self.num_steps // 2 :]
        return loss_notes(cold)


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


class _Stopper:
    """Says stop when the loss has not fallen for five looks in a row."""

    def __init__(self, tolerance: float | None, patience: int = 5):
        self.tolerance, self.patience = tolerance, patience
        self.best, self.waited = np.inf, 0

    def __call__(self, loss: float) -> bool:
        if self.tolerance is None:
            return False
        if loss < self.best - self.tolerance:
            self.best, self.waited = float(loss), 0
        else:
            self.waited += 1
        return self.done

    @property
    def done(self) -> bool:
        """Whether it has said so."""
        return self.waited >= self.patience
