r"""Fits of guides without a density, by best responses (thesis 4.3, figure 4.1).

.. math:: \textbf{Discriminator:}\quad & \max_\Psi\
    \mathbb E_r[\log(1 - \sigma(T_\Psi))] + \mathbb E_{q_\Phi}[\log \sigma(T_\Psi)] \\
    \textbf{Generator:}\quad & \max_{\theta, \Phi}\ \mathbb E_{q_\Phi}[\mathrm{ELL}
    + \log p - \log r - T_\Psi]

(eq. 4.6, where the contrast `r` is the prior `p`). The first learns the log density
ratio of the draws to the contrast, the second takes it for the truth.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from numpyro_gpx import checks
from numpyro_gpx.engines.engine import Engine, Outcome
from numpyro_gpx.engines.implicit_steps import Rules, Steps, discriminator_loss
from numpyro_gpx.engines.tempering import check_temperature
from numpyro_gpx.engines.training import Training, guide_of
from numpyro_gpx.engines.watch import BLOCK, Record
from numpyro_gpx.guides.implicit import Implicit as Guide
from numpyro_gpx.notes import Note
from numpyro_gpx.program.compile_cache import compiled, once
from numpyro_gpx.program.elbo import ELBO
from numpyro_gpx.results.facts import VARIATIONAL

__all__ = ["Implicit", "doubts_about"]

# Fresh draws that the discriminator is tested on after training.
_TEST_DRAWS = 2048
# Rounds after the last in which only the discriminator moves: its best response, for
# the estimate of the bound.
_LAST_ROUNDS = 100
# Beyond this accuracy the draws hardly overlap: on 2048 + 2048 draws a ratio between
# them rests on some 40.
_TOO_GOOD = 0.99
# Chance gives a cut of 0.52, and the best of 1000 coordinates 0.54.
_CLEAR_CUT = 0.6
# A discriminator should reach this share of what the cut knows.
_OF_THE_CUT = 1.0 / 3.0


class Implicit(Engine):
    """Fits an implicit guide by best-response dynamics.

    A round is some steps of the discriminator, then one of the generator and the
    hyperparameters, all by Adam.

    Attributes:
        guide: `gpx.guides.Implicit(model)`, or the class alone.
        num_rounds: Rounds.
        batch_size: Rows of a minibatch, as in `SVI`.
        num_particles: Draws at which the generator's step evaluates the model.
        num_draws: Draws of the generator, and as many of the contrast, that a step of
            the discriminator sees; no model is evaluated at them. If left out 256, or
            fewer, down to 32, where a draw has more than 64 numbers.
        discriminator_steps: Steps of the discriminator in a round.
        discriminator_rate: Learning rate of the discriminator, the same throughout.
        generator_rate: Learning rate of the generator; falls to 1/20 of it.
        theta_rate: Learning rate of the hyperparameters and the model's parameters;
            falls likewise.
        temperature: The log joint density is divided by this at the start; it falls
            geometrically to 1 over the first half of the rounds. Above 1 (20, say) the
            generator spreads over several modes before it narrows to them.

    `init=` another fit: that of a `WhitenedGaussian` with full covariance gives the
    generator's affine part, and hyperparameters that are points.

    Its fits have in `fit.info` the `losses` (the generator's) and
    `discriminator_losses`, one a round (with a temperature, in the first half those of
    the tempered model); `discriminator_accuracy`, the share of fresh draws it tells
    from the contrast's; and `elbo_kind`, which says that `fit.elbo()` is an estimate. A
    note says if the discriminator has collapsed, so that the ratio it gives says
    nothing.

    References:
        Yu et al. (2019), "Implicit posterior variational inference for deep GPs";
        thesis figure 4.1. Its learning rates are 0.05 (discriminator), 0.001
        (generator) and 0.025 (hyperparameters).
    """

    name: ClassVar[str] = "implicit"
    approximation: ClassVar[str] = VARIATIONAL

    guide: Any = Guide
    _: dataclasses.KW_ONLY
    num_rounds: int = 5000
    batch_size: int | None = None
    num_particles: int = 16
    num_draws: int | None = None
    discriminator_steps: int = 5
    discriminator_rate: float = 5e-3
    generator_rate: float = 3e-3
    theta_rate: float = 1e-2
    temperature: float = 1.0

    def __check_init__(self):
        for name in ("num_rounds", "num_particles", "discriminator_steps", "num_draws"):
            value = getattr(self, name)
            if value is not None:
                checks.at_least(name, value, 1)
        for name in ("discriminator_rate", "generator_rate", "theta_rate"):
            checks.number(name, getattr(self, name), 0.0)
        check_temperature(self.temperature)

    def objection(self, program):
        guide = guide_of(self.guide, program)
        checks.instance("guide", guide, Guide, "as in `gpx.guides.Implicit(model)`")
        return None

    def run(self, program, key, *, start, watch) -> Outcome:
        training = Training(
            program, self.guide, optax.identity(), ELBO(self.num_particles), start
        )
        rates = {
            "discriminator": self.discriminator_rate,
            "generator": self.generator_rate,
            "theta": self.theta_rate,
        }
        rules = Rules(
            self.num_rounds, self.num_draws, self.discriminator_steps, rates,
            self.temperature,
        )  # fmt: skip
        return _Rounds(training, rules).run(key, watch)


class _Rounds:
    """The compiled parts of the training, and their order."""

    def __init__(self, training: Training, rules: Rules):
        self.training, self.rules = training, rules
        self.call = training.program.batched
        self.contrast = training.guide.contrast

    def steps(self, call) -> Steps:
        structure = self.training.program.batched_structure
        return Steps(self.training.svi, structure, self.rules, call)

    def run(self, key, watch) -> Outcome:
        key_init, key_rounds, key_last, key_contrast = jr.split(key, 4)
        call, rules = self.call, self.rules

        def initialise(key, call, start):
            return self.steps(call).start(key, start)

        state = once(initialise)(key_init, call, self.training.params)
        rounds = self._rounds(state, key_rounds)
        state, record = watch.loop(
            "implicit", lambda *args: rounds(*args, True), state, rules.num_rounds,
            names=("generator's loss", "discriminator's loss"), say=_line,
        )  # fmt: skip
        info: dict[str, Any] = {
            "losses": record.values[:, 0],
            "discriminator_losses": record.values[:, 1],
            "temperature": rules.temperature,
            "elbo_kind": "estimate: its divergence is the discriminator's guess",
            "num_rounds": record.num_steps,
            "seconds_per_step": record.seconds_per_step,
        }
        if watch.stopped:  # what follows takes seconds
            watch.cut = watch.stopped
            constrain = self.training.svi.constrain_fn
            params = once(lambda state: constrain(state.unconstrained))(state)
            return self.training.outcome(params, key_last, info, [], watch)
        if self.contrast == "gaussian":
            state = once(lambda *x: self.steps(x[2]).refresh_contrast(*x[:2]))(
                state, key_contrast, call
            )
        state, _ = rounds(state, rules.num_rounds, _LAST_ROUNDS, False)
        params, draws, logits, key_draws = once(self._look)(state, key_last, call)
        info["discriminator_accuracy"], notes = doubts_about(
            *map(_flat, draws), *map(np.asarray, logits), kind=self.contrast
        )
        return self.training.outcome(params, key_draws, info, notes, watch)

    def _rounds(self, state, key):
        """Rounds as one compiled program."""

        def block(carry, number, offset, moving, key, call):
            steps = self.steps(call)

            def step(i, carry):
                state, losses = carry
                key_round = jr.fold_in(key, offset + i)
                state, both = steps.round(state, key_round, offset + i, moving)
                return state, losses.at[i].set(jnp.stack(both))

            return jax.lax.fori_loop(0, number, step, carry)

        empty = jnp.zeros((BLOCK, 2), self.training.guide.dtype)
        whole, true = jnp.asarray(0), jnp.asarray(True)
        program = compiled(
            block, (state, empty), whole, whole, true, key, self.call, donate=(0,)
        )

        def rounds(state, first, number, moving):
            carry = (state, jnp.copy(empty))
            numbers = jnp.asarray(number), jnp.asarray(first), jnp.asarray(moving)
            return program(carry, *numbers, key, self.call)

        return rounds

    def _look(self, state, key, call):
        """Parameters, draws of guide and contrast, and the logits of these."""
        steps = self.steps(call)
        key_noise, key_prior, key_draws = jr.split(key, 3)
        noise = steps.noise(key_noise, (_TEST_DRAWS,))
        draws = steps.draws(state, noise, key_prior)
        logits = steps.logits(state, state.discriminator, draws)
        constrain = self.training.svi.constrain_fn
        return constrain(state.unconstrained), draws, logits, key_draws


def _line(record: Record) -> str:
    second, first = record.latest.mean(axis=0)
    return f"loss {second:.5g}, discriminator {first:.4f}"


def _flat(draws: dict) -> np.ndarray:
    return np.concatenate(
        [np.asarray(x).reshape(len(x), -1) for x in draws.values()], 1
    )


def doubts_about(
    guide, contrast, logits_guide, logits_contrast, *, kind: str
) -> tuple[float, list[Note]]:
    """The discriminator's accuracy on fresh draws, and a note if it has collapsed.

    Args:
        guide: Standardised draws of the guide, `(S, K)`.
        contrast: As many of the contrast.
        logits_guide: `T` at the former, `(S,)`.
        logits_contrast: `T` at the latter, `(S,)`.
        kind: Which contrast it is, `"gaussian"` or `"prior"`.
    """
    accuracy = 0.5 * float(np.mean(logits_guide > 0.0) + np.mean(logits_contrast < 0.0))
    gain = 2.0 * np.log(2.0) - float(discriminator_loss(logits_guide, logits_contrast))
    # The best cut through one coordinate tells the two apart with this accuracy.
    cut = 0.5 + 0.5 * _largest_gap(guide, contrast)
    evidence = {"accuracy": accuracy, "gain": gain, "cut": cut}
    if accuracy > _TOO_GOOD:
        nearer = "`contrast='gaussian'`, " if kind == "prior" else ""
        note = Note(
            "discriminator", "wrong",
            f"The discriminator tells {100 * accuracy:.1f} % of draws from the "
            "contrast: the two hardly overlap, so that their density ratio, and "
            "`fit.elbo()`, say nothing.",
            f"Use {nearer}more `num_draws`, a smaller `generator_rate`, or start from "
            "a Gaussian fit (`init=`).",
            evidence,
        )  # fmt: skip
        return accuracy, [note]
    if cut > _CLEAR_CUT and gain < _OF_THE_CUT * _gain_of(cut):
        note = Note(
            "discriminator", "wrong",
            f"The discriminator has collapsed: it knows less ({gain:.2g} nats) than a "
            f"cut through one coordinate, right on {100 * cut:.0f} % of draws "
            f"({_gain_of(cut):.2g} nats). The generator was trained as if it matched "
            "the contrast.",
            "Raise `discriminator_steps`, or change `discriminator_rate` (lower if its "
            "loss is above 1.39).",
            evidence,
        )  # fmt: skip
        return accuracy, [note]
    return accuracy, []


def _gain_of(accuracy):
    """Cross-entropy gained by an answer that is right this often, and knows it."""
    entropy = -accuracy * np.log(accuracy) - (1 - accuracy) * np.log1p(-accuracy)
    return 2.0 * (np.log(2.0) - entropy)


def _largest_gap(a, b) -> float:
    """Largest Kolmogorov-Smirnov distance of a coordinate between `(S, K)` and `b`."""
    both = np.concatenate([a, b])
    order = np.argsort(both, axis=0, kind="stable")
    steps = np.where(order < len(a), 1.0 / len(a), -1.0 / len(b))
    return float(np.max(np.abs(np.cumsum(steps, axis=0))))
