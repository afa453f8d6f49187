"""Chains of HMC in a guide's coordinates: starts, warm-up, references, draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.diagnostics import effective_sample_size

from numpyro_gpx.engines.coordinates import Reference
from numpyro_gpx.engines.importance import Weighted
from numpyro_gpx.engines.rotation import BLOCK, Rotation, RotationState, rotations

__all__ = ["GuidedChains", "has_light_tails"]

# k-hat beyond which the guide is too narrow somewhere: one transition in five then goes
# through a weakened map.
_LIGHT_TAILS = 1.0
# Blocks of the warm-up, and after which of them positions get a new reference.
_WARM_UP, _REFERENCES = 5, (2, 3, 4)


class GuidedChains:
    """HMC from resampled draws: warm-up, references, draws."""

    def __init__(self, whole, weighted: Weighted, key):
        self.whole, self.engine = whole, whole.engine
        self.num_theta = whole.sizes[1]
        key_start, key_chain = jr.split(key)
        number = self.engine.num_chains
        x = weighted.resampled(key_start, number)
        # Weights may lie on a draw or two: chains have to start apart.
        x = x + 0.1 * np.asarray(jr.normal(key_chain, x.shape))
        worth = min(weighted.ess, 1000.0)
        self.reference = Reference.of_draws(
            weighted.resampled(key_chain, 4000), self.num_theta, worth
        )
        y = jax.vmap(self.reference.inverse)(jnp.asarray(x))
        self.state = RotationState.start(key_chain, y)
        self.can_weaken = whole.guide.can_weaken
        self.mixing = self.can_weaken and weighted.k_hat > _LIGHT_TAILS
        how = Rotation(self.reference, jnp.asarray(True), jnp.asarray(self.mixing))
        self.program = rotations(
            whole.make, self.state, how, whole.state, can_weaken=self.can_weaken
        )
        self.seen: list[np.ndarray] = []
        self.dropped = 0

    def run(self):
        """What draws reported, `(draws, chains, ...)`; the angle; draws left out."""
        warm_up = _WARM_UP * BLOCK
        total = warm_up + self.engine.num_samples
        self.last = self.state
        _, record = self.whole.watch.loop(
            f"guided, {self.engine.num_chains} chains", self._block, self.state, total,
            most=BLOCK, useless=warm_up + 1,
        )  # fmt: skip
        first = warm_up + self.dropped
        angle = float(jnp.exp(self.last.angles.average[0]))
        if record.num_steps <= first:
            return None, angle, self.dropped
        return {n: x[first:] for n, x in record.values.items()}, angle, self.dropped

    def _block(self, state: RotationState, first: int, number: int):
        if first % BLOCK == 0:
            state = self._between(state, first // BLOCK)
        adapt = jnp.asarray(first < _WARM_UP * BLOCK)
        how = Rotation(self.reference, adapt, jnp.asarray(self.mixing))
        state, reports = self.program(state, jnp.asarray(number), how, self.whole.state)
        self.seen.append(np.asarray(reports["x"])[:number])
        self.last = state
        return state, reports

    def _between(self, state: RotationState, done: int) -> RotationState:
        """What changes after so many blocks."""
        seen, self.seen = self.seen, []
        quarter = _WARM_UP + max(self.engine.num_samples // (4 * BLOCK), 1)
        if done in _REFERENCES:
            x = np.concatenate(seen).reshape(-1, self.whole.sizes[0])
            state = self._moved(
                state, Reference.of_draws(x, self.num_theta, len(x) / 2)
            )
        elif _WARM_UP < done < quarter:
            self.seen = seen  # draws, all of which are looked at then
        if done == _WARM_UP - 1:
            state = state._replace(angles=state.angles.again())
        if done == quarter and self.can_weaken and not self.mixing:
            if has_light_tails(np.concatenate(seen), self.num_theta):
                self.mixing = True
                self.dropped = (done - _WARM_UP) * BLOCK
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
    e = np.moveaxis(x[..., :num_theta], 0, 1)
    if not num_theta or e.shape[1] < BLOCK:
        return False
    bulk = effective_sample_size(e)
    low, high = np.quantile(e, [0.05, 0.95], axis=(0, 1))
    tails = [
        effective_sample_size(share.astype(float)) for share in (e <= low, e <= high)
    ]
    return bool(np.any(np.minimum(*tails) < bulk / 3.0))
