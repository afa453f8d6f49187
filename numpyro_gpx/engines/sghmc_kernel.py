r"""Stochastic-gradient Hamiltonian Monte Carlo, scale-adapted.

Underdamped Langevin dynamics of a model's target density,

.. math:: d\theta = M^{-1} p\,dt, \qquad
    dp = -\nabla U\,dt - \gamma p\,dt + \sqrt{2\gamma M}\,dW,

with a fresh minibatch, and fresh noise between layers, at every gradient. The masses
are the second moments of the gradient, :math:`M_i = \mathbb E[g_i^2]`, found in warm-up
and then frozen (Springenberg et al. 2016 use their square root). In these units the
step size has no dimension. A Gaussian of independent coordinates moves by one radian in
unit time, so that steps below 2 are stable; where K coordinates are correlated, the
limit is :math:`2 / \sqrt{\lambda}` for the largest eigenvalue of the Hessian in these
units, at worst :math:`2 / \sqrt K`: gradients that grow in warm-up then raise the
masses. The minibatch noise heats the chain by a factor of at most
:math:`1 + h / 2\gamma`. With all rows the splitting is exact for a Gaussian; with
minibatches the bias shrinks in proportion to the step size.

(Taking the noise's variance off the injected noise, entry by entry, was tried in these
coordinates, with these masses, and cools the directions that have little of it:
standard deviations on GP regression fell to 0.75 of the truth where they now are within
0.06 of it. Here the noise is most of the squared gradient, and its directions are those
of the posterior, not the entries'. In the coordinates of a guide, with control variates
that leave little noise, it is right: `guided_sghmc`.)
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_gpx import checks
from numpyro_gpx.engines.gradient_noise import gradient_variance
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.starts import init_to_prior_median
from numpyro_gpx.results.facts import BIASED, Facts, kernel_facts, kernel_params

__all__ = ["SGHMC", "SGHMCState", "check_steps"]

# Weight of the newest gradient in the running moments during the first half of warm-up:
# a memory of about 50 gradients, short enough to forget the way to the typical set.
_FORGETTING = 0.02


# Beyond this step size even independent coordinates are unstable.
_UNSTABLE = 2.0


def check_steps(step_size, friction) -> None:
    """Raise unless steps are stable where coordinates are independent."""
    if not 0.0 < step_size < _UNSTABLE:
        raise ValueError(
            "`step_size` must be positive and below 2, where the dynamics become "
            f"unstable; got {step_size}."
        )
    if not friction > 0.0:
        raise ValueError(f"`friction` must be positive; got {friction}.")


class SGHMCState(NamedTuple):
    """State of one chain.

    Attributes:
        z: Unconstrained values by site.
        momentum: Flat momentum, `(K,)`.
        grad_square: Running mean of the squared gradient, the mass, `(K,)`.
        steps: Gradient steps so far.
        temperature: Mean squared momentum in units of the mass, 1 if nothing heats the
            chain.
        key: Random key.
    """

    z: dict
    momentum: Float[Array, " K"]
    grad_square: Float[Array, " K"]
    steps: Array
    temperature: Array
    key: Array


class SGHMC(MCMCKernel):
    """Sampler for `numpyro.infer.MCMC`, with minibatches.

    Call `MCMC(SGHMC(model), ...).run(key, X, y, batch_size=64)`, or `gpx.fit_sghmc`.
    Biased at any finite step size; reports say so.

    Args:
        model: A NumPyro function.
        step_size: Step `h`; stable below 2 if coordinates are independent, below a
            smaller limit if they are strongly correlated (module docstring).
        friction: Friction times unit time; larger damps more.
        num_integration_steps: Gradient steps for each recorded draw.
        init_strategy: Where chains start (a NumPyro init strategy).
        init_values: Starting values by site, on their supports; with a leading axis
            over chains if there are several.
        params: Values of the model's `numpyro.param`s.

    References:
        Chen, Fox & Guestrin (2014); Springenberg et al. (2016); Havasi, Hernandez-
        Lobato & Murillo-Fuentes (2018); the symmetric splitting is that of Leimkuhler
        & Matthews (2013).
    """

    def __init__(
        self, model, *, step_size: float = 0.2, friction: float = 0.3,
        num_integration_steps: int = 20, init_strategy=init_to_prior_median,
        init_values=None, params=None,
    ):  # fmt: skip
        check_steps(step_size, friction)
        checks.at_least("num_integration_steps", num_integration_steps, 1)
        self.model = model
        self.step_size, self.friction = step_size, friction
        self.num_integration_steps = num_integration_steps
        self.init_strategy = init_strategy
        self.init_values = init_values or {}
        self.params = params
        self._num_warmup = 0
        self._call: Call | None = None

    sample_field = "z"

    def at(self, call: Call) -> SGHMC:
        """This kernel on a call that it then has, and is not given at each step."""
        other = copy.copy(self)
        other._call = call
        return other

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        self._num_warmup = num_warmup * self.num_integration_steps
        target = self._target(Call(self.model, model_args, model_kwargs or {}))

        def one(key, values, z):
            key_init, key_chain = jr.split(key)
            start = target.initial(key_init, self.init_strategy, values)
            start = {**start, **z}
            zeros = jnp.zeros_like(ravel_pytree(start)[0])
            # Unit masses, as whitened sites have under their prior alone.
            return SGHMCState(
                start, zeros, jnp.ones_like(zeros), jnp.zeros((), int),
                jnp.zeros((), zeros.dtype), key_chain,
            )  # fmt: skip

        z = init_params or {}
        if is_prng_key(rng_key):
            return jax.jit(one)(rng_key, self.init_values, z)
        return jax.jit(jax.vmap(one))(rng_key, self.init_values, z)

    def sample(self, state, model_args, model_kwargs):
        target = self._target(Call(self.model, model_args, model_kwargs or {}))

        def draw(state):
            return jax.lax.fori_loop(
                0, self.num_integration_steps, lambda _, s: self.step(target, s), state
            )

        return draw(state) if is_prng_key(state.key) else jax.vmap(draw)(state)

    def postprocess_fn(self, model_args, model_kwargs):
        call = Call(self.model, model_args, model_kwargs or {})
        return self._target(call).constrain

    def _target(self, call: Call) -> Target:
        return Target(call if self._call is None else self._call, params=self.params)

    def get_diagnostics_str(self, state):
        number = self.num_integration_steps
        return f"step size {self.step_size:g}, {number} gradients for each draw"

    def noise(self, z: dict, mass: Float[Array, " K"], key) -> Float[Array, " K"]:
        """Variance of the gradient over minibatches, in units of the mass.

        0 where rows move that are in the minibatch alone.

        Args:
            z: Unconstrained values by site at some points, `(S, ...)`.
            mass: The masses.
            key: Random key.
        """
        assert self._call is not None  # the engine's kernels have one
        target = self._target(self._call)
        local = {
            name: jnp.full(x.shape[1:], bool(target.structure.latents[name].plates))
            for name, x in z.items()
        }
        found = gradient_variance(lambda z, key: _gradient(target, z, key)[0], z, key)
        return jnp.where(ravel_pytree(local)[0], 0.0, found / mass)

    def step(self, target: Target, state: SGHMCState) -> SGHMCState:
        """One gradient: kick, half drift, friction and noise, half drift (BAOAB)."""
        key, key_grad, key_noise = jr.split(state.key, 3)
        flat, unravel = ravel_pytree(state.z)
        grad, moves = _gradient(target, state.z, key_grad)
        state = self._adapt(state, grad, moves)
        mass = state.grad_square
        h = self.step_size
        keep = jnp.exp(-self.friction * h)
        noise = jnp.sqrt(mass) * jr.normal(key_noise, flat.shape, flat.dtype)
        p = state.momentum + h * grad
        half = flat + 0.5 * h * p / mass
        p_new = keep * p + jnp.sqrt(1.0 - keep**2) * noise
        new = half + 0.5 * h * p_new / mass
        # Rows of local sites that are not in the minibatch rest.
        new = jnp.where(moves, new, flat)
        p_new = jnp.where(moves, p_new, state.momentum)
        heat = jnp.mean(p_new**2 / mass)
        return state._replace(z=unravel(new), momentum=p_new, temperature=heat, key=key)

    def _adapt(self, state, grad, moves) -> SGHMCState:
        """Running second moment of the gradient, until warm-up ends."""
        steps = state.steps
        half = self._num_warmup // 2
        # First half: forget fast. Second half: a plain mean, which settles.
        settling = 1.0 / jnp.maximum(steps - half + 1.0 / _FORGETTING, 1.0)
        weight = jnp.where(steps < half, _FORGETTING, settling)
        blended = state.grad_square + weight * (grad**2 - state.grad_square)
        blended = jnp.where(steps == 0, jnp.maximum(grad**2, 1.0), blended)
        warming = moves & (steps < self._num_warmup)
        return state._replace(
            grad_square=jnp.where(warming, blended, state.grad_square),
            steps=steps + 1,
        )


def _gradient(target: Target, z: dict, key):
    """Flat gradient of the log density on a fresh minibatch, and which entries move.

    The rows of a local site that are in the batch get their own terms once, not scaled
    up to the whole data as the global sites do.
    """
    key_batch, key_noise = jr.split(key)
    batch = draw_batch(key_batch, target.structure)
    grad = jax.grad(lambda z: target.log_density(z, key=key_noise, batch=batch))(z)
    moves = {}
    for name, g in grad.items():
        mask = jnp.ones(g.shape, bool)
        for plate, axis in target.structure.latents[name].plates.items():
            size, subsample_size = target.structure.plates[plate]
            counts = jnp.zeros(size, g.dtype).at[batch[plate]].add(1.0)
            shape = tuple(size if a == axis else 1 for a in range(g.ndim))
            counts = counts.reshape(shape)
            # A row drawn twice counts twice in the scaled sum; once is its own term.
            g = g * (subsample_size / size) / jnp.maximum(counts, 1.0)
            mask = mask & (counts > 0)
        grad[name], moves[name] = g, mask
    return ravel_pytree(grad)[0], ravel_pytree(moves)[0]


@kernel_params.register
def _(kernel: SGHMC) -> dict:
    return dict(kernel.params or {})


@kernel_facts.register
def _(kernel: SGHMC) -> Facts:
    names = ("step_size", "friction", "num_integration_steps")
    return Facts("sghmc", BIASED, {name: getattr(kernel, name) for name in names})
