"""Draws of a guide beside what it says of them: its beliefs, its density."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array
from numpyro import handlers

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.program.call import Call, Trace
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.latent_inputs import LatentInput
from numpyro_gpx.program.structure import structure_of
from numpyro_gpx.sites.marks import held_beliefs, marked

__all__ = ["Draws", "beliefs_are_those_of_draws", "density_is_that_of_draws", "drawn"]

_DRAWS = 2000
# Of a thousand moments of right draws, all lie within so many standard errors but in
# one check out of several thousand.
_ERRORS = 5.5


class Draws(NamedTuple):
    """Draws with all that a guide says of them, `(S, ...)`.

    Attributes:
        values: By site of the model.
        real: The same on the real line, `(S, K)`.
        changes: Log determinants of the way back, `(S,)`, by site.
        log_density: What the guide says it is, `(S,)`.
        again: What it says once its own draws are put back, `(S,)`.
        residuals: By site that it holds a belief about, draws in units of that belief,
            `(S, P, M)`.
    """

    values: dict[str, Array]
    real: dict[str, Array]
    changes: dict[str, Array]
    log_density: Array
    again: Array
    residuals: dict[str, Array]


def drawn(guide, params: dict, call: Call, key) -> Draws:
    """2000 draws of a guide."""
    found = run(_look, guide, params, call, jr.split(key, _DRAWS))
    return jax.tree.map(np.asarray, found)


def beliefs_are_those_of_draws(found: Draws, name: str) -> None:
    """Raise unless draws have the moments of the beliefs about them."""
    for site, e in found.residuals.items():
        number, _, size = e.shape
        mean = np.sqrt(number) * np.mean(e, axis=0)  # (P, M)
        assert np.all(np.abs(mean) < _ERRORS), (
            f"{name}: the belief about `{site}` is not that of its draws: their mean "
            f"is {np.max(np.abs(mean)):.1f} standard errors from its own"
        )
        eye = np.eye(size)
        square = np.einsum("spi,spj->pij", e, e) / number - eye
        square *= np.sqrt(number / (1.0 + eye))
        assert np.all(np.abs(square) < _ERRORS), (
            f"{name}: the belief about `{site}` is not that of its draws: their "
            f"covariance is {np.max(np.abs(square)):.1f} standard errors from its own"
        )


def density_is_that_of_draws(found: Draws, name: str) -> None:
    """Raise unless the log density is one, and that of the draws."""
    log_q = found.log_density
    assert np.all(np.isfinite(log_q)), f"{name}: its log density is not finite"
    digits = 1e4 * np.finfo(log_q.dtype).eps
    close = np.allclose(found.again, log_q, rtol=digits, atol=digits)
    assert close, (
        f"{name}: its log density changes if its own draws are put back: by up to "
        f"{np.max(np.abs(found.again - log_q)):.2g}; it depends on more than them"
    )
    # Points have no density: they count for nothing.
    moving = [n for n, x in found.real.items() if np.any(np.ptp(x, axis=0) > 0.0)]
    if not moving:
        return
    z = np.concatenate([found.real[n] for n in moving], axis=1)  # (S, K)
    log_q = log_q + sum(found.changes[n] for n in moving)
    half = len(z) // 2
    # As wide as the draws, r / q has the least noise, but is least also where q is
    # right, so that a wrong width hardly shows; as narrow as the other, r / q still has
    # a variance below 1 whatever the number of dimensions.
    for width in (1.0, 1.0 - 1.0 / np.sqrt(max(z.shape[1], 4))):
        log_r = _gaussian(z[:half], width, z[half:], name)
        w = np.exp(log_r - log_q[half:])
        error = np.std(w) / np.sqrt(len(w))
        off = np.mean(w) - 1.0
        # Digits: of an exact Gaussian of one number little noise may be left.
        assert np.abs(off) < _ERRORS * error + digits, (
            f"{name}: its log density is not that of its draws: the mean of r / q over "
            f"them, 1 for any density r, is {1.0 + off:.4g} (standard error "
            f"{error:.2g})"
        )


def _gaussian(z, width: float, at, name: str):
    """Log density at other draws of the Gaussian with the moments of `z`.

    Args:
        z: Draws `(S, K)`.
        width: What their covariance is multiplied by.
        at: The others, `(S, K)`.
        name: Whose draws they are.
    """
    mean, cov = np.mean(z, axis=0), width * np.atleast_2d(np.cov(z.T))
    scale = np.sqrt(np.diag(cov))
    smallest = np.linalg.eigvalsh(cov / np.outer(scale, scale))[0]
    assert smallest > 1e-12, (
        f"{name}: some of the numbers that it draws are functions of others, and have "
        "no density together; `has_density` must be False"
    )
    root = np.linalg.cholesky(cov)
    e = np.linalg.solve(root, (at - mean).T)
    log_det = np.sum(np.log(np.diag(root)))
    return -0.5 * np.sum(e**2, axis=0) - log_det - 0.5 * len(e) * np.log(2.0 * np.pi)


def _look(guide, params, call: Call, keys) -> Draws:
    """Draws, and what is said of each."""
    latents = structure_of(call).latents

    def one(key):
        trace = _trace(guide, params, call, key)
        random = {n: site["value"] for n, site in trace.items() if _is_random(site)}
        other = _trace(guide, {**params, **random}, call, jr.fold_in(key, 1))
        values = {n: trace[n]["value"] for n in latents}
        real, changes = {}, {}
        for name, x in values.items():
            transform = latents[name].transform
            z = transform.inv(x)
            real[name] = jnp.reshape(z, (-1,))
            changes[name] = jnp.sum(transform.log_abs_det_jacobian(z, x))
        return Draws(
            values, real, changes, _log_density(trace), _log_density(other),
            _residuals(trace, real),
        )  # fmt: skip

    return jax.lax.map(one, keys)


def _trace(guide, params, call: Call, key) -> Trace:
    with handlers.block():
        return call.trace(params, key, model=guide)


def _is_random(site) -> bool:
    """Whether a site is drawn; what is a function of others follows them."""
    if site["type"] != "sample" or site["is_observed"]:
        return False
    fn = site["fn"]
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return not isinstance(fn, dist.Delta)


def _log_density(trace: Trace):
    terms = [
        jnp.sum(site["fn"].log_prob(site["value"]))
        for site in trace.values()
        if site["type"] == "sample"
    ]
    return sum(terms, start=jnp.zeros(()))


def _residuals(trace: Trace, real: dict) -> dict[str, Array]:
    """Draws in units of what is believed of them, `(P, M)` by site."""
    found = {}
    for name, belief in held_beliefs(trace).items():
        found[name] = _in_units(belief, trace[name]["value"])
    for name, latent in marked(trace, LatentInput).items():
        rows = latent.belief
        apart = real[name].reshape(rows.mean.shape) - rows.mean
        if rows.is_diagonal:
            found[name] = apart / rows.scale
        else:
            found[name] = _solve(rows.scale, apart)
    return found


def _in_units(belief: Belief, value):
    size = jnp.shape(belief.mean)[-1]
    S = belief.spread(jnp.eye(size, dtype=belief.mean.dtype))  # (*P, R, M)
    cov = jnp.swapaxes(S, -1, -2) @ S
    apart = (value - belief.mean).reshape(-1, size)
    root = jnp.linalg.cholesky(cov)
    return _solve(jnp.broadcast_to(root, (len(apart), size, size)), apart)


def _solve(root, apart):
    """Rows `(P, M)` in units of lower factors `(P, M, M)`."""
    return jax.vmap(lambda L, x: solve_triangular(L, x, lower=True))(root, apart)
