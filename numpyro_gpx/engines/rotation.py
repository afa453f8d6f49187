r"""Hamiltonian Monte Carlo in the coordinates of a guide, its Gaussian rotated exactly.

With :math:`\Phi(y) = U(x(y)) - |y|^2 / 2`, constant if the guide is exact, the
Hamiltonian is :math:`|p|^2/2 + |y|^2/2 + \Phi(y)`. One kick of angle :math:`a` is

.. math:: p \leftarrow p - \tfrac a2 \nabla\Phi, \quad (y, p) \leftarrow
    (y \cos a + p \sin a,\; p \cos a - y \sin a), \quad
    p \leftarrow p - \tfrac a2 \nabla\Phi.

The rotation is the exact flow of the Gaussian part: with a good guide the angle may be
near a right one, where a draw forgets the last. Metropolis's rule makes it exact
whatever the guide.

The density occurs once in the program: a first kick of angle 0 gives the gradient
wherever the coordinates are new.

References:
    Shahbaba, Lan, Johnson & Neal (2014), "Split Hamiltonian Monte Carlo".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from numpyro_gpx.engines.coordinates import Coordinates, GuideState, Reference
from numpyro_gpx.program.compile_cache import compiled

__all__ = ["BLOCK", "Rotation", "RotationState", "rotations"]

# Transitions of a compiled block at most.
BLOCK = 50
# Length of a trajectory in radians, times a factor from 0.8 to 1.2.
_TOTAL = 1.8
_JITTER = 0.2
# Kicks of a trajectory at most, and the largest angle of one.
_MOST_KICKS = 64
_MOST_ANGLE = 1.8
# What dual averaging aims at.
_ACCEPTANCE = 0.85
# Every so many transitions go through the weakened map, where there is one.
_EVERY = 5
# Strength of its pseudo-observations: tails of the prior, nearly.
_WEAK = 0.1


class RotationState(NamedTuple):
    """Where the chains are.

    Attributes:
        y: Positions `(C, K)`, relative to the reference.
        energy: `Phi` there, `(C,)`.
        slope: Its gradients, `(C, K)`.
        fresh: Whether both are yet to be computed.
        weak: Whether the positions are those of the weakened map.
        key: Random key.
        number: Transitions so far.
        angles: Dual averaging of the log angle of either map, `(2,)` each.
    """

    y: Array
    energy: Array
    slope: Array
    fresh: Array
    weak: Array
    key: Array
    number: Array
    angles: Angles

    @classmethod
    def start(cls, key, y: Array, angle: float = 0.6) -> RotationState:
        zeros = jnp.zeros(y.shape[0], y.dtype)
        no, first = jnp.asarray(False), jnp.asarray(0)
        angles = Angles.start(angle)
        return cls(y, zeros, jnp.zeros_like(y), ~no, no, key, first, angles)


class Angles(NamedTuple):
    """Dual averaging (Hoffman & Gelman 2014, 3.2) of two log angles."""

    log_angle: Array
    average: Array
    gap: Array
    centre: Array
    steps: Array

    @classmethod
    def start(cls, angle: float) -> Angles:
        log_angle = jnp.full(2, jnp.log(angle))
        return cls(
            log_angle, log_angle, jnp.zeros(2), log_angle + jnp.log(2.0), jnp.zeros(2)
        )

    def again(self) -> Angles:
        """Afresh, from where it is."""
        zeros = jnp.zeros(2)
        return Angles(
            self.log_angle, self.log_angle, zeros, self.log_angle + jnp.log(2.0), zeros
        )

    def updated(self, which, acceptance) -> Angles:
        t = self.steps[which] + 1.0
        share = 1.0 / (t + 10.0)
        gap = (1.0 - share) * self.gap[which] + share * (_ACCEPTANCE - acceptance)
        log_angle = self.centre[which] - jnp.sqrt(t) / 0.05 * gap
        log_angle = jnp.clip(log_angle, jnp.log(1e-3), jnp.log(_MOST_ANGLE))
        weight = t**-0.75
        average = weight * log_angle + (1.0 - weight) * self.average[which]
        found = (log_angle, average, gap, self.centre[which], t)
        return Angles(
            *(old.at[which].set(x) for old, x in zip(self, found, strict=True))
        )


class Rotation(NamedTuple):
    """How transitions are made; passes through `jit` as an argument.

    Attributes:
        reference: What positions are relative to.
        adapt: Whether the angle is adapted; afterwards it is its average.
        mixing: Whether every fifth transition goes through the weakened map.
    """

    reference: Reference
    adapt: Array
    mixing: Array


def rotations(
    make: Callable[..., Coordinates], state: RotationState, how: Rotation,
    arrays: GuideState, *, can_weaken: bool,
) -> Callable:  # fmt: skip
    """Some transitions of all chains, as one compiled program.

    Args:
        make: The target in the guide's coordinates, from its arrays and the strength
            that the guide has.
        state: Chains, for their shapes.
        how: How they move.
        arrays: What `make` takes.
        can_weaken: Whether the guide can have another strength than 1.

    Returns:
        A function of `(state, number, how, arrays)`: the state after `number`
        transitions, and what each reported: `x` `(BLOCK, C, K)`, acceptance
        probabilities, kicks, energies.
    """

    def block(state, number, how, arrays):
        chains = _Chains(lambda strength: make(arrays, strength), how, can_weaken)

        def step(i, carry):
            state, kept = carry
            state, seen = chains.transition(state)
            return state, jax.tree.map(lambda a, x: a.at[i].set(x), kept, seen)

        shapes = jax.eval_shape(lambda s: chains.transition(s)[1], state)
        kept = jax.tree.map(lambda x: jnp.zeros((BLOCK, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(0, number, step, (state, kept))

    return compiled(block, state, jnp.asarray(0), how, arrays)


class _Chains:
    """Transitions of all chains at once; they share angle and length."""

    def __init__(self, make: Callable, how: Rotation, can_weaken: bool):
        self.make, self.how, self.can_weaken = make, how, can_weaken

    def _map(self, weak) -> Coordinates:
        return self.make(jnp.where(weak, _WEAK, 1.0) if self.can_weaken else 1.0)

    def transition(self, state: RotationState) -> tuple[RotationState, dict[str, Any]]:
        key, key_p, key_length, key_accept = jr.split(state.key, 4)
        state = self._through(state)
        which = state.weak.astype(int)
        log_angle = jnp.where(
            self.how.adapt, state.angles.log_angle, state.angles.average
        )[which]
        most = jnp.exp(log_angle)
        low, high = 1.0 - _JITTER, 1.0 + _JITTER
        total = _TOTAL * jr.uniform(key_length, minval=low, maxval=high)
        number = jnp.clip(jnp.ceil(total / most), 1, _MOST_KICKS).astype(int)
        angle = jnp.minimum(total / number, most)
        p = jr.normal(key_p, state.y.shape, state.y.dtype)
        moved, before = self._trajectory(state, p, number, angle)
        y, p, energy, slope = moved
        log_ratio = before.total - _total(y, p, energy)
        probability = jnp.where(
            jnp.isfinite(log_ratio), jnp.exp(jnp.minimum(log_ratio, 0.0)), 0.0
        )
        take = jr.uniform(key_accept, probability.shape) < probability
        new = RotationState(
            jnp.where(take[:, None], y, state.y),
            jnp.where(take, energy, before.energy),
            jnp.where(take[:, None], slope, before.slope),
            jnp.asarray(False), state.weak, key, state.number + 1,
            jax.tree.map(
                lambda new, old: jnp.where(self.how.adapt, new, old),
                state.angles.updated(which, jnp.mean(probability)), state.angles,
            ),
        )  # fmt: skip
        x = jax.vmap(self.how.reference.forward)(new.y)
        seen = {
            "x": self._common(x, new.weak),
            "acceptance_rate": probability,
            "n_steps": jnp.broadcast_to(number, probability.shape),
            "energy": _total(new.y, 0.0 * p, new.energy),
            "diverging": ~jnp.isfinite(log_ratio),
        }
        return new, seen

    def _through(self, state: RotationState) -> RotationState:
        """The state in the coordinates of the map that this transition goes through."""
        if not self.can_weaken:
            return state
        weak = self.how.mixing & (state.number % _EVERY == _EVERY - 1)

        def change(y):
            x = jax.vmap(self.how.reference.forward)(y)
            x = self._converted(x, state.weak, weak)
            return jax.vmap(self.how.reference.inverse)(x)

        changes = weak != state.weak
        y = jax.lax.cond(changes, change, lambda y: y, state.y)
        return state._replace(y=y, weak=weak, fresh=state.fresh | changes)

    def _converted(self, x, old, new):
        """Positions of one map as those of the other."""

        before, after = self._map(old).transport, self._map(new).transport
        return jax.lax.map(lambda x: after.inverse(before.forward(x).z), x)

    def _common(self, x, weak):
        """Positions in the coordinates of the guide itself."""
        if not self.can_weaken:
            return x
        plain = jnp.asarray(False)
        convert = lambda x: self._converted(x, weak, plain)  # noqa: E731
        return jax.lax.cond(weak, convert, lambda x: x, x)

    def _trajectory(self, state: RotationState, p, number, angle):
        """The end of a trajectory, and the energies of its start."""
        start = _Start(_total(state.y, p, state.energy), state.energy, state.slope)

        def kick(i, carry):
            y, p, energy, slope, start = carry
            first = state.fresh & (i == 0)
            a = jnp.where(first, 0.0, angle)
            p = p - 0.5 * a * slope
            y, p = y * jnp.cos(a) + p * jnp.sin(a), p * jnp.cos(a) - y * jnp.sin(a)
            energy, slope = self._value_and_slope(y, state.weak)
            p = p - 0.5 * a * slope
            here = _Start(_total(y, p, energy), energy, slope)
            start = jax.tree.map(
                lambda new, old: jnp.where(first, new, old), here, start
            )
            return y, p, energy, slope, start

        carry = (state.y, p, state.energy, state.slope, start)
        steps = number + state.fresh.astype(int)
        *moved, start = jax.lax.fori_loop(0, steps, kick, carry)
        return moved, start

    def _value_and_slope(self, y, weak):
        """`Phi` and its gradient at positions `(C, K)`."""
        reference, there = self.how.reference, self._map(weak)

        def one(y):
            return there.energy(reference.forward(y)) - 0.5 * jnp.sum(y**2)

        return jax.lax.map(jax.value_and_grad(one), y)  # tests/test_hang.py


class _Start(NamedTuple):
    total: Array
    energy: Array
    slope: Array


def _total(y, p, energy):
    return energy + 0.5 * (jnp.sum(y**2, axis=-1) + jnp.sum(p**2, axis=-1))
