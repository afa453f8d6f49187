r"""A `ConditionalGaussian` by its pseudo-observations, in closed form: `Sites`.

The guide holds a pseudo-observation of `u`, of precision :math:`\Lambda` and linear
term `b`. At fixed hyperparameters, with :math:`\mathcal L(m, S)` the expected log
likelihood under :math:`q(v) = \mathcal N(m, S)`, the natural gradient of the bound is
zero where, in units of `v`,

.. math:: \Lambda_v = -2\,\partial\mathcal L/\partial S, \qquad
    b_v = \partial\mathcal L/\partial m + \Lambda_v m,

so that each update puts these in the place of the old ones, as far as the bound rises.
Under a Gaussian likelihood one update is exact. Hyperparameters take Newton steps on
the bound in between; a Laplace approximation there is their belief.

References:
    Khan & Lin (2017), "Conjugate-computation variational inference"; Adam, Chang, Khan
    & Solin (2021).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from numpyro_gpx import checks
from numpyro_gpx.engines.curvature import hessian_by_differences, root_of_covariance
from numpyro_gpx.engines.engine import Engine, Outcome, Start
from numpyro_gpx.engines.pseudo_bound import Place, Pseudo, PseudoBound
from numpyro_gpx.engines.retry import NotFinite
from numpyro_gpx.engines.training import means_of
from numpyro_gpx.guides import ConditionalGaussian, WhitenedGaussian
from numpyro_gpx.guides.parts.base import set_up
from numpyro_gpx.guides.parts.doubts import doubts_of
from numpyro_gpx.notes import Note
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import compiled, run
from numpyro_gpx.program.starts import initial_values
from numpyro_gpx.results.facts import VARIATIONAL
from numpyro_gpx.results.posteriors import GuidePosterior

__all__ = ["Sites"]

# Shares of a step that are tried; that of the highest bound is taken.
_SHARES = (1.0, 0.5, 0.25, 0.0625, 0.0)
# Updates before the hyperparameters move.
_FIRST = 8
# Newton steps are no longer than this in any coordinate of the real line, and treat
# curvatures as no smaller than that.
_LONGEST, _LEAST_CURVATURE = 0.7, 0.5
# It is over when so many updates in a row gain less than this, in nats.
_PATIENCE, _NEGLIGIBLE = 3, 1e-4
# More hyperparameters than this are not for Newton.
_MOST_THETA = 40
# What a pseudo-precision has on its diagonal at least, relative to its largest.
_FLOOR = 1e-12


class Sites(Engine):
    """Trains a `ConditionalGaussian` by closed-form updates and Newton steps.

    Some twenty updates in the place of a thousand steps of `SVI`, for models of a few
    hyperparameters; without GPs (`gpx.exact`) it is the Laplace approximation. All rows
    at each update.

    Attributes:
        max_updates: Updates at most.

    Its fits have in `fit.info` the `losses`, one an update, `num_steps` and whether it
    `converged`.
    """

    name: ClassVar[str] = "sites"
    approximation: ClassVar[str] = VARIATIONAL

    _: dataclasses.KW_ONLY
    max_updates: int = 100

    def __check_init__(self):
        checks.at_least("max_updates", self.max_updates, 1)

    def objection(self, program):
        structure = program.structure
        names = [n for n in structure.gps if not structure.latents[n].whitened]
        size = sum(
            int(np.prod(structure.latents[n].unconstrained_shape))
            for n in structure.hyperparameters
        )
        reasons = {
            f"the rows have latent sites of their own, {list(structure.row_sites)}":
                structure.row_sites,
            f"the model draws noise at {sorted(structure.noise)}": structure.noise,
            f"the model has parameters {list(structure.params)}": structure.params,
            f"sites {list(structure.integrated)} ask for beliefs":
                structure.integrated,
            f"GP sites {names} are not whitened": names,
            f"{size} hyperparameters are too many for Newton steps":
                size > _MOST_THETA,
        }  # fmt: skip
        found = [reason for reason, holds in reasons.items() if holds]
        return f"Use `fit_svi`: {', and '.join(found)}." if found else None

    def run(self, program, key, *, start, watch) -> Outcome:
        bound = PseudoBound(program.structure)
        place = _starting_place(bound, program.call, key, start)
        step = _program(bound, place, program.call)
        losses: list[float] = []
        still = [0]

        def block(place, first, number):
            place, value = step(place, jnp.asarray(first >= _FIRST), program.call)
            return place, jnp.reshape(-value, (1,))

        def say(record) -> str | None:
            losses.append(float(record.latest[-1]))
            gain = losses[-2] - losses[-1] if len(losses) > 1 else np.inf
            still[0] = still[0] + 1 if gain < _NEGLIGIBLE else 0
            done = still[0] >= _PATIENCE and len(losses) > _FIRST + _PATIENCE
            return None if done else f"loss {losses[-1]:.5g}"

        def check(latest, first):
            if not np.all(np.isfinite(latest)):
                raise NotFinite(f"The bound is {-latest[0]} at update {first}.")

        place, _ = watch.loop(
            "sites", block, place, self.max_updates, most=1, say=say, check=check
        )
        guide, params = _as_guide(bound, place, program)
        posterior = GuidePosterior(guide, params, program.call, key=key)
        converged = still[0] >= _PATIENCE
        info = {
            "losses": np.asarray(losses), "num_steps": len(losses),
            "converged": converged,
        }  # fmt: skip
        notes = list(doubts_of(guide, program))
        if not (converged or watch.stopped):
            notes.append(_not_converged(losses))
        return Outcome(posterior, params, info, notes=tuple(notes))


def _program(bound: PseudoBound, place: Place, call: Call):
    """One update as a compiled program."""

    def best(values):
        finite = jnp.where(jnp.isfinite(values), values, -jnp.inf)
        index = jnp.argmax(finite)
        return jnp.asarray(_SHARES)[index], values[index]

    def step(place: Place, moves, call):
        wanted = bound.updated(place, call)

        def mixed(share):
            return jax.tree.map(
                lambda new, old: old + share * (new - old), wanted, place.pseudo
            )

        shares = jnp.asarray(_SHARES)
        values = jax.lax.map(lambda t: bound(place.theta, mixed(t), call), shares)
        share, value = best(values)
        # Where nothing is finite yet the old ones are left alone.
        pseudo = jax.tree.map(
            lambda new, old: jnp.where(share > 0.0, new, old), mixed(share),
            place.pseudo,
        )  # fmt: skip
        if not place.theta.size:
            return Place(place.theta, pseudo), value

        def newton(theta):
            direction = _direction(lambda t: jax.grad(bound)(t, pseudo, call), theta)
            found = jax.lax.map(
                lambda t: bound(theta + t * direction, pseudo, call), shares
            )
            share, value = best(found)
            return theta + share * jnp.where(share > 0.0, direction, 0.0), value

        theta, value = jax.lax.cond(
            moves, newton, lambda theta: (theta, value), place.theta
        )
        return Place(theta, pseudo), value

    return compiled(step, place, jnp.asarray(True), call)


def _direction(slope, theta):
    """A Newton step uphill, the Hessian by differences of gradients."""
    step = 1e-4 if theta.dtype == jnp.float64 else 1e-2
    offsets = step * jnp.eye(theta.size, dtype=theta.dtype)
    points = theta + jnp.concatenate([jnp.zeros((1, theta.size)), offsets, -offsets])
    slopes = jax.lax.map(slope, points.astype(theta.dtype))
    here, ahead, behind = slopes[0], *jnp.split(slopes[1:], 2)
    hessian = (ahead - behind) / (2.0 * step)
    values, vectors = jnp.linalg.eigh(0.5 * (hessian + hessian.T))
    curvature = jnp.maximum(jnp.abs(values), _LEAST_CURVATURE)
    direction = vectors @ ((vectors.T @ here) / curvature)
    direction = jnp.where(jnp.isfinite(direction), direction, 0.0)
    longest = jnp.max(jnp.abs(direction))
    return direction * jnp.minimum(1.0, _LONGEST / jnp.maximum(longest, 1e-30))


def _starting_place(bound: PseudoBound, call: Call, key, start: Start) -> Place:
    structure = bound.structure
    known = dict(start.values)
    if start.fit is not None:
        known |= means_of(start.fit, bound.names)

    def starting(call, key):
        found = initial_values(call, structure, key)
        z = structure.unconstrain({n: {**found, **known}[n] for n in bound.names})
        theta = ravel_pytree(z)[0] if z else jnp.zeros(0)
        pseudo = {}
        for name in structure.gps:
            shape, dtype = structure.latents[name].shape, structure.latents[name].dtype
            square = (*shape, shape[-1])
            pseudo[name] = Pseudo(jnp.zeros(square, dtype), jnp.zeros(shape, dtype))
        return Place(theta, pseudo)

    return run(starting, call, key)


def _as_guide(bound: PseudoBound, place: Place, program):
    """The guide that has come of it, and its parameters."""
    structure = bound.structure
    kind = ConditionalGaussian if structure.gps else WhitenedGaussian
    guide = kind(program.model, theta="full")
    set_up(guide, program)
    params: dict[str, Any] = {}
    if bound.names:
        params[guide.theta_name] = place.theta
        params[f"theta_{guide.prefix}_scale_tril"] = _theta_root(bound, place, program)
    for name, pseudo in place.pseudo.items():
        loc, root = _target_and_root(pseudo)
        params[f"{name}_{guide.prefix}_loc"] = loc
        params[f"{name}_{guide.prefix}_precision_tril"] = root
    return guide, params


def _theta_root(bound: PseudoBound, place: Place, program) -> Array:
    """Root of the covariance of the hyperparameters, by Laplace's approximation."""

    def slopes(theta, pseudo, call):
        def log_prior(theta):
            return bound.terms(theta, bound.beliefs(theta, pseudo, call), call)[1]

        return jax.grad(bound)(theta, pseudo, call), jax.grad(log_prior)(theta)

    program_ = compiled(slopes, place.theta, place.pseudo, program.call)

    def hessian(which):
        return hessian_by_differences(
            lambda theta: -program_(theta, place.pseudo, program.call)[which],
            place.theta,
        )

    least = np.linalg.eigvalsh(hessian(1))[0]  # no wider than the prior
    return jnp.asarray(root_of_covariance(hessian(0), max(least, 0.01)))


def _target_and_root(pseudo: Pseudo) -> tuple[Array, Array]:
    """Pseudo-targets and root of their precision, as the guide has them."""
    precision, linear = np.asarray(pseudo.precision), np.asarray(pseudo.linear)
    values, vectors = np.linalg.eigh(precision)
    floor = np.maximum(_FLOOR * values[..., -1:], np.finfo(values.dtype).tiny ** 0.5)
    values = np.maximum(values, floor)
    inside = np.einsum("...ji,...j->...i", vectors, linear) / values
    loc = np.einsum("...ij,...j->...i", vectors, inside)
    # A triangular root of V diag(values) V^T, which need not be formed.
    upper = np.linalg.qr(
        np.sqrt(values)[..., :, None] * np.swapaxes(vectors, -1, -2), mode="r"
    )
    root = np.swapaxes(upper, -1, -2)
    sign = np.sign(np.diagonal(root, axis1=-2, axis2=-1))
    return jnp.asarray(loc), jnp.asarray(root * sign[..., None, :])


def _not_converged(losses) -> Note:
    gain = losses[-2] - losses[-1] if len(losses) > 1 else float("nan")
    return Note(
        "not_converged", "doubt",
        f"The bound still rose by {gain:.2g} nats in the last of {len(losses)} "
        "updates.",
        "Raise `max_updates`, or use `fit_svi`.",
        {"gain": gain, "num_steps": len(losses)},
    )  # fmt: skip
