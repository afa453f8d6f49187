r"""Natural gradients for Gaussian beliefs with parameters of their own.

For :math:`q(v) = \mathcal N(m, TT^\top)` and a loss :math:`\ell`, a step at rate
:math:`\rho` along the natural gradient moves the precision and the linear term by the
gradients in :math:`S = TT^\top` and `m`,

.. math:: S^{-1} \leftarrow S^{-1} + 2 \rho\, \nabla_S \ell, \qquad
    S^{-1} m \leftarrow S^{-1} m - \rho\,(\nabla_m \ell - 2 \nabla_S \ell\, m).

With `Y` the gradient in `T` (lower), `Q` the lower triangle of :math:`T^\top Y`,
mirrored, and :math:`B = I + \rho Q = U U^\top` with `U` upper triangular, this is

.. math:: T \leftarrow T U^{-\top}, \qquad
    m \leftarrow m - \rho\, T T^\top \nabla_m \ell \quad\text{with the new } T.

For a Gaussian likelihood and all rows :math:`\rho = 1` is the optimum. `B` is positive
definite at any rate up to 1 if the likelihood is log-concave; otherwise it need not be,
and the step is skipped.

References: Salimbeni, Eleftheriadis & Hensman (2018), "Natural gradients in practice";
thesis eq. 2.42, with the prior's terms that are missing there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array

from numpyro_gpx import checks
from numpyro_gpx.guides.parts.base import SiteGuide
from numpyro_gpx.guides.parts.factors import DenseFactorTransform
from numpyro_gpx.notes import Note

__all__ = ["Natural", "NaturalState", "natural", "natural_notes", "natural_step"]

# Skipping more than this share of the updates is no longer an exception.
_TOO_MANY = 0.1

_FACTOR = DenseFactorTransform()

Pairs = tuple[tuple[str, str], ...]


class NaturalState(NamedTuple):
    """What is carried from step to step.

    Attributes:
        number: Steps so far.
        updates: Updates of Gaussians so far, one a step for each `(M, M)` factor.
        skipped: Those of them that were left out.
        rest: State of the other parameters' optimiser.
    """

    number: Array
    updates: Array
    skipped: Array
    rest: Any


class Natural(optax.GradientTransformationExtraArgs):
    """An optax transformation with natural steps for some parameters; see `natural`."""

    rate: Any
    rest: Any
    pairs: Callable[[], Pairs]

    def __new__(cls, rate, rest, pairs):
        steps = _Steps(rate, rest, pairs)
        self = super().__new__(cls, steps.init, steps.update)
        self.rate, self.rest, self.pairs = rate, rest, pairs
        return self

    def of(self, guide, rest) -> Natural:
        """The same for a guide that is set up, with this optimiser for the others."""
        pairs = _pairs_of(guide)
        return Natural(self.rate, rest, lambda: pairs)


def natural(rate=0.1, rest=None, *, guide: SiteGuide | None = None) -> Natural:
    """Natural gradients for Gaussian beliefs, another optimiser for the rest.

    For guides whose beliefs about GP sites are parameters, a mean and a factor each:
    `gpx.guides.WhitenedGaussian`, alone or inside `gpx.guides.UnscentedLatent`;
    whatever the likelihood, minibatches included. Steps that have no meaning (see
    `fit.info["natural_skipped"]`) are skipped and counted.

    Args:
        rate: Learning rate of the natural steps, in (0, 1], or an optax schedule. With
            a Gaussian likelihood and all rows 1 gets there in one step. With
            minibatches a constant rate ends some nats off, one that decays does not.
        rest: An optax optimiser for all other parameters. If left out, `fit_svi` uses
            its default schedule; NumPyro's own `SVI` then moves nothing else, and
            complains if there is something else.
        guide: For NumPyro's own `SVI` only: the guide being fitted.

    Example:
        >>> import numpyro_gpx as gpx
        >>> optimizer = gpx.optimizers.natural(0.1)
    """
    if not callable(rate):
        checks.number("rate", rate, 0.0)
        if not rate <= 1.0:
            raise ValueError(
                f"`rate` must be in (0, 1]; got {rate!r}. At 1 a Gaussian likelihood "
                "is solved in one step; more overshoots."
            )
    checks.optimizer(rest)

    def pairs() -> Pairs:
        if guide is None:
            raise ValueError(
                "`gpx.optimizers.natural` must know whose parameters it moves: pass "
                "`guide=guide`, or fit with `gpx.fit_svi`, which says so itself."
            )
        return _pairs_of(guide)

    return Natural(rate, rest, pairs)


def _pairs_of(guide) -> Pairs:
    found = guide.natural_pairs() if isinstance(guide, SiteGuide) else ()
    if not found:
        raise ValueError(
            "`gpx.optimizers.natural` moves Gaussian beliefs whose mean and factor are "
            f"parameters; {type(guide).__name__} has none. Use "
            "`gpx.guides.WhitenedGaussian(model)`, or another `optimizer`."
        )
    return found


class _Steps:
    """The two functions of the transformation."""

    def __init__(self, rate, rest, pairs: Callable[[], Pairs]):
        self.rate, self.rest, self.pairs = rate, rest, pairs

    def init(self, params: dict) -> NaturalState:
        _, others = self._split(params)
        zero = jnp.zeros((), jnp.int32)
        rest = None if not others else self._rest(others).init(others)
        return NaturalState(zero, zero, zero, rest)

    def update(self, grads, state, params=None, **extra):
        if params is None:
            raise ValueError("`gpx.optimizers.natural` needs `params` at each update.")
        ours, others = self._split(params)
        rate = self.rate(state.number) if callable(self.rate) else self.rate
        updates, skipped, factors = {}, state.skipped, 0
        for loc, scale in ours:
            old = params[loc], params[scale]
            step = _step if old[0].ndim < old[1].ndim else _diagonal_step
            *new, failed = step(*old, grads[loc], grads[scale], rate)
            updates[loc], updates[scale] = new[0] - old[0], new[1] - old[1]
            skipped = skipped + jnp.sum(failed, dtype=jnp.int32)
            factors += failed.size
        rest = state.rest
        if others:
            slopes = {name: grads[name] for name in others}
            moved, rest = self._rest(others).update(slopes, rest, others, **extra)
            updates |= moved
        done = NaturalState(state.number + 1, state.updates + factors, skipped, rest)
        return updates, done

    def _split(self, params) -> tuple[Pairs, dict]:
        """The pairs, and the other parameters."""
        pairs = self.pairs()
        names = {name for pair in pairs for name in pair}
        missing = sorted(names - set(params))
        if missing:
            raise ValueError(
                f"`gpx.optimizers.natural` is for a guide with parameters {missing}; "
                f"got {sorted(params)}."
            )
        return pairs, {n: x for n, x in params.items() if n not in names}

    def _rest(self, others):
        if self.rest is None:
            raise ValueError(
                "`rest` must be an optimiser for the other parameters, "
                f"{sorted(others)}: `gpx.optimizers.natural(0.1, optax.adam(0.01))`, "
                "or fit with `gpx.fit_svi`, which has one."
            )
        return optax.with_extra_args_support(self.rest)


def natural_step(loc, factor, of_loc, of_factor, rate):
    r"""One step for :math:`\mathcal N(m, TT^\top)`, or a batch of them.

    Args:
        loc: `m`, `(*P, M)`.
        factor: `T`, lower, `(*P, M, M)`.
        of_loc: Gradient of the loss in `m`.
        of_factor: Gradient in `T`; its upper triangle is not looked at.
        rate: :math:`\rho`.

    Returns:
        The new `m` and `T`, and whether they are the old ones because `B` was not
        positive definite, `(*P,)`. Gradients that are not finite are handed on.
    """
    rate = jnp.asarray(rate, loc.dtype)
    lower = jnp.tril(jnp.swapaxes(factor, -1, -2) @ jnp.tril(of_factor))
    Q = lower + jnp.swapaxes(jnp.tril(lower, -1), -1, -2)  # (*P, M, M)
    B = jnp.eye(loc.shape[-1], dtype=loc.dtype) + rate * Q
    # Turned around, a lower factor of B is an upper one.
    turned = jnp.linalg.cholesky(B[..., ::-1, ::-1], symmetrize_input=False)
    U = turned[..., ::-1, ::-1]
    failed = jnp.all(jnp.isfinite(B), (-2, -1)) & ~jnp.all(jnp.isfinite(U), (-2, -1))
    half = solve_triangular(U, jnp.swapaxes(factor, -1, -2), lower=False)
    T = jnp.tril(jnp.swapaxes(half, -1, -2))  # (*P, M, M)
    inner = jnp.einsum("...ji,...j->...i", T, of_loc)
    m = loc - rate * jnp.einsum("...ij,...j->...i", T, inner)
    kept = failed[..., None]
    return jnp.where(kept, loc, m), jnp.where(kept[..., None], factor, T), failed


def _step(loc, raw, of_loc, of_raw, rate):
    """The same in the guide's parameter, the factor on the real line."""
    factor = _FACTOR(raw)
    m, T, failed = natural_step(loc, factor, of_loc, _of_factor(raw, of_raw), rate)
    return m, jnp.where(failed[..., None, None], raw, _FACTOR.inv(T)), failed


def _diagonal_step(loc, raw, of_loc, of_raw, rate):
    """The same for standard deviations: every one is a factor of its own."""
    wide = raw[..., None, None], of_raw[..., None, None]
    m, found, failed = _step(loc[..., None], wide[0], of_loc[..., None], wide[1], rate)
    return m[..., 0], found[..., 0, 0], failed


def _of_factor(raw, of_raw):
    r"""The gradient in `T` from that in the guide's parameter `R`.

    :math:`T = D(I + N)`: :math:`\partial\ell/\partial R_{ij} = d_i Y_{ij}` below the
    diagonal, and on it :math:`\sigma(R_{ii})(Y_{ii} + \sum_{j<i} R_{ij} Y_{ij})`.
    """
    diagonal = jnp.diagonal(raw, axis1=-2, axis2=-1)
    below = jnp.tril(of_raw, -1) / jax.nn.softplus(diagonal)[..., None]
    slope = jnp.diagonal(of_raw, axis1=-2, axis2=-1) / jax.nn.sigmoid(diagonal)
    on_it = slope - jnp.sum(raw * below, axis=-1)
    return below + on_it[..., None] * jnp.eye(raw.shape[-1], dtype=raw.dtype)


def natural_notes(info: dict) -> list[Note]:
    """On a training in which many updates made no sense."""
    share = info["natural_skipped"] / max(info["natural_updates"], 1)
    if share <= _TOO_MANY:
        return []
    return [
        Note(
            "natural_steps", "doubt",
            f"{100.0 * share:.0f} % of the natural steps were skipped: the loss curves "
            "the wrong way there, as it can where a likelihood is not log-concave.",
            "Start with Adam: fit with `optimizer=None`, then go on with `init=fit`.",
            {"skipped": info["natural_skipped"], "updates": info["natural_updates"]},
        )
    ]  # fmt: skip
