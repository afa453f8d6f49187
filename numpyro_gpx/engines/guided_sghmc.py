r"""SGHMC in the coordinates of a guide, with its sites as control variates.

The dynamics of `sghmc_kernel` with unit masses, on the estimate `U_B` of
`minibatch_energy`, the variance `V` of whose gradient was measured beforehand:

.. math:: p \leftarrow p - h \nabla U_B, \quad x \leftarrow x + \tfrac h2 p, \quad
    p \leftarrow c\,p + \sqrt{\max(0,\, 1 - c^2 - c^2 h^2 V)}\;\varepsilon, \quad
    x \leftarrow x + \tfrac h2 p,

:math:`c = e^{-\gamma h}`: what noise the gradient brings is taken off what is injected.
The posterior is nearly standard normal here, so that steps have no scale to find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float
from numpyro.infer.mcmc import MCMCKernel

from numpyro_gpx.engines.minibatch_energy import MinibatchEnergy
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.structure import Structure

__all__ = ["GuidedKernel", "GuidedKernelState", "minibatch_gradient"]


class GuidedKernelState(NamedTuple):
    """State of one chain.

    Attributes:
        z: The coordinates, `{"x": (K,)}`.
        momentum: `(K,)`.
        temperature: Mean squared momentum, 1 if nothing heats the chain.
        key: Random key.
    """

    z: dict[str, Array]
    momentum: Float[Array, " K"]
    temperature: Array
    key: Array


class GuidedKernel(MCMCKernel):
    """Of NumPyro's kind, for `sample_chains`; made anew inside each program.

    Args:
        energy: The estimate of the energy.
        structure: The sites on minibatches.
        variance: Of the gradient, `(K,)`.
        step_size: Step size.
        friction: Friction.
        num_integration_steps: Gradients for each draw.
    """

    sample_field = "z"

    def __init__(
        self, energy: MinibatchEnergy, structure: Structure, variance: Array, *,
        step_size: float, friction: float, num_integration_steps: int,
    ):  # fmt: skip
        self.gradient = minibatch_gradient(energy, structure)
        self.step_size, self.number = step_size, num_integration_steps
        self.keep = jnp.exp(-friction * step_size)
        injected = 1.0 - self.keep**2 * (1.0 + step_size**2 * variance)
        self.noise_scale = jnp.sqrt(jnp.maximum(injected, 0.0))

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        key, key_momentum = jr.split(rng_key)
        x = init_params["x"]
        p = jr.normal(key_momentum, x.shape, x.dtype)
        return GuidedKernelState({"x": x}, p, jnp.mean(p**2), key)

    def sample(self, state, model_args, model_kwargs):
        return jax.lax.fori_loop(0, self.number, lambda _, s: self.step(s), state)

    def step(self, state: GuidedKernelState) -> GuidedKernelState:
        """One gradient: kick, half drift, friction and noise, half drift."""
        key, key_batch, key_noise = jr.split(state.key, 3)
        x, h = state.z["x"], self.step_size
        p = state.momentum - h * self.gradient(x, key_batch)
        x = x + 0.5 * h * p
        p = self.keep * p + self.noise_scale * jr.normal(key_noise, x.shape, x.dtype)
        x = x + 0.5 * h * p
        return GuidedKernelState({"x": x}, p, jnp.mean(p**2), key)


def minibatch_gradient(
    energy: MinibatchEnergy, structure: Structure
) -> Callable[[Any, Any], Array]:
    """Gradient of the energy at `x` on the minibatch that a key draws."""

    def gradient(x, key):
        return jax.grad(energy)(x, draw_batch(key, structure))

    return gradient
