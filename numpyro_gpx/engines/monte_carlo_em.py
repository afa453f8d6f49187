r"""Hyperparameters moved by Monte Carlo EM while SGHMC samples everything else.

Each round takes a few steps of SGHMC over the inducing variables at the present
hyperparameters, keeps the newest draw in a window of the last ones, and takes one step
of Adam on :math:`\log\pi(v, \theta)` in :math:`\theta` at a draw picked from the
window: an M-step on an average over the window, at the cost of one gradient. What comes
out is a point, a maximum on the support as under `theta="point"` guides; chains then
run with it fixed.

References:
    Havasi, Hernandez-Lobato & Murillo-Fuentes (2018), section 3.1 and algorithm 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

from numpyro_gpx import checks
from numpyro_gpx.engines.chains import starting_points
from numpyro_gpx.engines.engine import Start
from numpyro_gpx.engines.sghmc_kernel import SGHMC
from numpyro_gpx.engines.watch import BLOCK, Watch
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import compiled, run
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.starts import initial_values
from numpyro_gpx.program.structure import Structure, structure_of

__all__ = ["MonteCarloEM", "Moved", "known_start", "move_hyperparameters"]


class MonteCarloEM(eqx.Module):
    """How hyperparameters move: `gpx.fit_sghmc(..., em=gpx.infer.MonteCarloEM())`.

    Attributes:
        num_rounds: Rounds, with one step of the hyperparameters each.
        learning_rate: Of Adam, on the real line.
        window: How many of the last draws the steps are taken at.
        num_integration_steps: Gradient steps of SGHMC in each round.
    """

    num_rounds: int = eqx.field(static=True, default=2000)
    learning_rate: float = eqx.field(static=True, default=0.01)
    window: int = eqx.field(static=True, default=300)
    num_integration_steps: int = eqx.field(static=True, default=5)

    def __check_init__(self):
        for name in ("num_rounds", "window", "num_integration_steps"):
            checks.at_least(name, getattr(self, name), 1)
        if not self.learning_rate > 0.0:
            raise ValueError(
                f"`learning_rate` must be positive; got {self.learning_rate}."
            )


class Moved(NamedTuple):
    """Where the hyperparameters came to rest.

    Attributes:
        values: Hyperparameters on their supports, by site.
        params: Values of the model's `numpyro.param`s.
        draws: The last draws of the other sites, on their supports, `(W, ...)`.
        log_densities: At the draw that each round picked from the window, estimated on
            its minibatch, `(rounds,)`.
    """

    values: dict
    params: dict
    draws: dict
    log_densities: np.ndarray


def move_hyperparameters(
    em: MonteCarloEM, kernel: SGHMC, call: Call, *, key, start=None, watch: Watch
) -> Moved:
    """Run the rounds.

    Args:
        em: How they move.
        kernel: The sampler; values of its `params` are a start.
        call: The model with its arguments, `batch_size` among them.
        key: Random key.
        start: Where all sites start on the real line, by site; `None` starts the
            hyperparameters at their prior's median.
        watch: Runs the rounds. Without the chains that come after them they are no fit,
            so that they cannot be cut short.
    """
    at_point = _AtPoint(call)
    key_point, key_chain, key_rounds = jr.split(key, 3)
    point = run(lambda k: at_point.start(k, kernel.params or {}), key_point)
    others = None
    if start is not None:
        point = {name: start[name] for name in at_point.sites}, point[1]
        others = {name: x for name, x in start.items() if name not in at_point.sites}
    target = at_point.target(point)
    # All rounds are warm-up to the sampler: it follows the moving hyperparameters.
    sampler = SGHMC(
        target.call.model, step_size=kernel.step_size, friction=kernel.friction,
        num_integration_steps=em.num_integration_steps, params=target.params,
    )  # fmt: skip
    state = sampler.init(key_chain, em.num_rounds, others, call.args, call.kwargs)
    flat, unravel = ravel_pytree(state.z)
    optimiser = optax.adam(em.learning_rate)
    window = jnp.zeros((em.window, flat.size), flat.dtype)
    carry = (state, point, optimiser.init(point), window)

    def block(carry, first, number, call):
        here = _AtPoint(call)

        def one(i, carry):
            carry, kept = carry
            key = jr.fold_in(key_rounds, first + i)
            carry, value = _round(
                em, sampler, here, optimiser, unravel, first + i, carry, key
            )
            return carry, kept.at[i].set(value)

        kept = jnp.zeros(BLOCK, flat.dtype)
        return jax.lax.fori_loop(0, number, one, (carry, kept))

    whole = jnp.asarray(0)
    program = compiled(block, carry, whole, whole, call)
    (_, point, _, window), record = watch.loop(
        "em",
        lambda carry, first, number: program(
            carry, jnp.asarray(first), jnp.asarray(number), call
        ),
        carry, em.num_rounds, names=("log density",), useless=em.num_rounds,
        say=lambda record: f"log density {record.latest.mean():.5g}",
    )  # fmt: skip
    kept = jax.vmap(unravel)(window[: em.num_rounds])
    draws = jax.vmap(target.constrain)(kept)
    return Moved(*at_point.on_supports(point), draws, record.values)


def known_start(key, start: Start, structure: Structure) -> dict | None:
    """Where all sites start on the real line, by site; `None` if that is not known."""
    points = starting_points(key, start, structure, 1)
    if points is None:
        return None
    if set(points) != set(structure.latents):
        raise ValueError(
            "`init` with `em` must be an earlier fit, or have values of all sites, "
            f"{list(structure.latents)}; got {sorted(points)}."
        )
    return {name: x[0] for name, x in points.items()}


def _round(em, sampler, at_point, optimiser, unravel, number, carry, key):
    """Draw, remember, and move the hyperparameters once."""
    state, point, opt_state, window = carry
    key_pick, key_batch, key_noise = jr.split(key, 3)
    target = at_point.target(point)
    state = jax.lax.fori_loop(
        0, em.num_integration_steps, lambda _, s: sampler.step(target, s), state
    )
    window = window.at[number % em.window].set(ravel_pytree(state.z)[0])
    filled = jnp.minimum(number + 1, em.window)
    z = unravel(window[jr.randint(key_pick, (), 0, filled)])
    batch = draw_batch(key_batch, target.structure)

    def negative(point):
        found = at_point.target(point).log_density(z, key=key_noise, batch=batch)
        return -found

    value, slope = jax.value_and_grad(negative)(point)
    updates, opt_state = optimiser.update(slope, opt_state)
    point = optax.apply_updates(point, updates)
    return (state, point, opt_state, window), -value


class _AtPoint:
    """A model whose hyperparameters and `numpyro.param`s are a point on the real line.

    A point is a pair of dictionaries: sites, and parameters.
    """

    def __init__(self, call: Call):
        self.call = call
        trace = call.abstract_trace()
        self.structure = structure_of(trace)
        self.sites = [
            name
            for name in self.structure.hyperparameters
            if not self.structure.latents[name].row_local
        ]
        self.transforms = {
            name: biject_to(trace[name]["kwargs"].get("constraint", constraints.real))
            for name in self.structure.params
        }
        if not self.sites and not self.transforms:
            raise ValueError(
                "`em` moves hyperparameters and `numpyro.param`s; the model has none."
            )
        if len(self.sites) == len(self.structure.latents):
            raise ValueError(
                "`em` moves hyperparameters while SGHMC samples the GPs; the model has "
                f"none of these, only {self.sites}. Leave `em` out."
            )

    def start(self, key, params: dict) -> tuple[dict, dict]:
        """Where the point starts; `params` are used where they are given."""
        key_params, key_sites = jr.split(key)
        with handlers.block():
            trace = self.call.trace(params, key_params)
        params = {name: trace[name]["value"] for name in self.transforms}
        found = initial_values(self.call, self.structure, key_sites, params=params)
        values = {name: found[name] for name in self.sites}
        free = {name: self.transforms[name].inv(x) for name, x in params.items()}
        return self.structure.unconstrain(values), free

    def on_supports(self, point) -> tuple[dict, dict]:
        """Values of the sites and of the parameters."""
        sites, params = point
        values = self.structure.constrain(sites)
        return values, {name: self.transforms[name](x) for name, x in params.items()}

    def target(self, point) -> Target:
        """The density of all other sites, given the point.

        It includes the prior of the point, so that it is also what the point climbs.
        """
        values, params = self.on_supports(point)
        model: Any = handlers.condition(self.call.model, data=values)
        return Target(self.call.with_model(model), params=params)
