"""Chains of HMC in a guide's coordinates: starts, warm-up, references, draws."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from numpyro_gpx.engines.coordinates import Reference
from numpyro_gpx.engines.importance import Weighted
from numpyro_gpx.engines.rotation import BLOCK, Rotation, RotationState, rotations
from numpyro_gpx.engines.through import Through
from numpyro_gpx.engines.watch import Watch

__all__ = ["GuidedChains", "Worth", "has_light_tails", "worth_of"]

# k-hat beyond which the guide is too narrow somewhere: one transition in five then goes
# through a weakened map.
_LIGHT_TAILS = 1.0
# Blocks of the warm-up, and after which of them positions get a new reference.
_WARM_UP, _REFERENCES = 5, (2, 3, 4)


class Worth(NamedTuple):
    """What draws of the hyperparameters are worth, the worst of each.

    Attributes:
        r_hat: Of split chains.
        bulk_ess: Of the values.
        tail_ess: Of being in either twentieth at the ends.
    """

    r_hat: float
    bulk_ess: float
    tail_ess: float


class GuidedChains:
    """HMC from resampled draws: warm-up, references, draws.

    Args:
        engine: Says how many chains and draws.
        through: Model and guide.
        watch: Runs the blocks.
        weighted: Draws by importance sampling.
        key: Random key.
    """

    def __init__(self, engine, through: Through, watch: Watch, weighted: Weighted, key):
        self.engine, self.through, self.watch = engine, through, watch
        key_start, key_apart, key_reference, key_chain = jr.split(key, 4)
        x = weighted.resampled(key_start, engine.num_chains)
        # Weights may lie on a draw or two: chains have to start apart.
        x = x + 0.1 * np.asarray(jr.normal(key_apart, x.shape))
        worth = min(weighted.ess, 1000.0)
        self.reference = Reference.of_draws(
            weighted.resampled(key_reference, 4000), through.num_theta, worth
        )
        y = jax.vmap(self.reference.inverse)(jnp.asarray(x))
        self.state = RotationState.start(key_chain, y)
        self.can_weaken = through.guide.can_weaken
        self.mixing = self.can_weaken and weighted.k_hat > _LIGHT_TAILS
        how = Rotation(self.reference, jnp.asarray(True), jnp.asarray(self.mixing))
        self.program = rotations(
            through.make, self.state, how, through.state, can_weaken=self.can_weaken
        )
        self.seen: list[np.ndarray] = []
        # Blocks that are no result: the warm-up, and what is dropped behind it.
        self.useless = _WARM_UP

    @property
    def dropped(self) -> int:
        """Draws behind the warm-up that are left out."""
        return (self.useless - _WARM_UP) * BLOCK

    def run(self):
        """What draws reported, `(draws, chains, ...)`, and the angle."""
        warm_up = _WARM_UP * BLOCK
        total = warm_up + self.engine.num_samples
        self.last = self.state
        _, record = self.watch.loop(
            f"guided, {self.engine.num_chains} chains", self._block, self.state, total,
            most=BLOCK, useless=warm_up + 1,
        )  # fmt: skip
        first = warm_up + self.dropped
        angle = float(jnp.exp(self.last.angles.average[0]))
        if record.num_steps <= first:
            return None, angle
        return {n: x[first:] for n, x in record.values.items()}, angle

    def _block(self, state: RotationState, first: int, number: int):
        if first % BLOCK == 0:
            state = self._between(state, first // BLOCK)
        adapt = jnp.asarray(first < self.useless * BLOCK)
        how = Rotation(self.reference, adapt, jnp.asarray(self.mixing))
        arrays = self.through.state
        state, reports = self.program(state, jnp.asarray(number), how, arrays)
        self.seen.append(np.asarray(reports["x"])[:number])
        self.last = state
        return state, reports

    def _between(self, state: RotationState, done: int) -> RotationState:
        """What changes after so many blocks."""
        seen, self.seen = self.seen, []
        quarter = _WARM_UP + max(self.engine.num_samples // (4 * BLOCK), 1)
        num_theta = self.through.num_theta
        if done in _REFERENCES:
            x = np.concatenate(seen).reshape(-1, self.through.size)
            state = self._moved(state, Reference.of_draws(x, num_theta, len(x) / 2))
        elif _WARM_UP < done < quarter:
            self.seen = seen  # draws, all of which are looked at then
        if done == _WARM_UP - 1:
            state = state._replace(angles=state.angles.again())
        if done == quarter and self.can_weaken and not self.mixing:
            if has_light_tails(np.concatenate(seen), num_theta):
                self.mixing = True
                # One block more, in which the weakened map finds its angle.
                self.useless = done + 1
                state = state._replace(angles=state.angles.again())
        return state

    def _moved(self, state: RotationState, new: Reference) -> RotationState:
        x = jax.vmap(self.reference.forward)(state.y)
        self.reference = new
        fresh = jnp.asarray(True)
        return state._replace(y=jax.vmap(new.inverse)(x), fresh=fresh)


def has_light_tails(x: np.ndarray, num_theta: int) -> bool:
    """Whether tails of the hyperparameters mix far worse than their middles.

    Args:
        x: Draws so far, `(draws, chains, K)`.
        num_theta: Number of hyperparameters.
    """
    if not num_theta or len(x) < BLOCK:
        return False
    bulk, tail = _effective(np.moveaxis(x[..., :num_theta], 0, 1))
    return bool(np.any(tail < bulk / 3.0))


def worth_of(x: np.ndarray, num_theta: int) -> Worth:
    """What draws are worth, by their hyperparameters; by all if there are none.

    Args:
        x: Coordinates `(chains, draws, K)`.
        num_theta: Number of hyperparameters.
    """
    e = x[..., :num_theta] if num_theta else x
    if e.shape[1] < 4:
        return Worth(np.nan, np.nan, np.nan)
    bulk, tail = _effective(e)
    r_hat = float(np.max(split_gelman_rubin(e)))
    return Worth(r_hat, float(np.min(bulk)), float(np.min(tail)))


def _effective(e: np.ndarray):
    """ESS of the middle and of the worse tail of each entry of `(C, S, T)`."""
    low, high = np.quantile(e, [0.05, 0.95], axis=(0, 1))
    tails = [
        effective_sample_size(share.astype(float)) for share in (e <= low, e >= high)
    ]
    return effective_sample_size(e), np.minimum(*tails)
