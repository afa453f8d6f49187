r"""A guide's sites as control variates of minibatch gradients.

Row `n` of a target density adds :math:`\mathrm{ELL}_n(\theta, v)`. What it adds is
nearly known in advance: with the guide's marginal :math:`q(f_n)` at its centre,

.. math:: g_n = \partial\,\mathrm{ELL}_n / \partial m_n, \qquad
    \Lambda_n = -\partial^2 \mathrm{ELL}_n / \partial m_n^2, \qquad
    b_n = g_n + \Lambda_n m_n, \\
    c_n(x) = b_n^\top z_n - \tfrac12 z_n^\top \Lambda_n z_n + G_n^\top e,

where :math:`m_n` and :math:`z_n` are what the inducing variables make of the row's
functions, of the guide's mean and of the present `u`, both through the kernel at the
centre, and :math:`G_n` is what is left of the row's slope in the hyperparameters'
coordinates `e` at :math:`x = 0`. A minibatch `B` of `N` rows estimates

.. math:: \sum_n \mathrm{ELL}_n \approx \sum_n c_n
    + \frac{N}{|B|} \sum_{n \in B} (\mathrm{ELL}_n - c_n),

without bias whatever the numbers are; with these the noise nearly vanishes where the
guide is good. The sum over all rows is a quadratic whose coefficients are added up
once. A row may see several functions: :math:`\Lambda_n` is a matrix then.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from numpyro_gpx.numerics.factor import Factor
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.processes.conditional import conditional
from numpyro_gpx.processes.prior import SparsePrior
from numpyro_gpx.program.call import Call, Trace, site_log_prob
from numpyro_gpx.program.elbo import scaled
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.sites.gp_calls import CallId, given_marginals, recorded_calls
from numpyro_gpx.sites.marks import GPMark, marked
from numpyro_gpx.uncertain import InputBelief

__all__ = ["Centre", "Quadratic", "RowSites", "Rows", "quadratics", "row_calls"]


class Centre(NamedTuple):
    """Where the guide is centred.

    Attributes:
        values: Hyperparameters there, and GP sites at 0, on their supports.
        factors: Roots of `Kuu` there, by GP site.
    """

    values: dict[str, Array]
    factors: dict[str, Factor]


class Quadratic(NamedTuple):
    """Sums over all rows: coefficients of `u` (in units of the centre's `v`) and `e`.

    Attributes:
        linear: Sum of `b_n` times the row's weights, `(K,)`.
        curvature: Sum of their squares with `Lambda_n` between, `(K, K)`.
        slope: Sum of `G_n`, `(T,)`.
    """

    linear: Float[Array, " K"]
    curvature: Float[Array, "K K"]
    slope: Float[Array, " T"]

    def __call__(self, v: dict[str, Array], e: Float[Array, " T"]) -> Array:
        flat = ravel_pytree(v)[0]
        quadratic = 0.5 * flat @ (self.curvature @ flat)
        return self.linear @ flat - quadratic + self.slope @ e


class RowSites(NamedTuple):
    """The control variates of all rows; E functions at each.

    Attributes:
        linear: `b_n`, `(N, E)`.
        curvature: `Lambda_n`, `(N, E, E)`.
        slope: `G_n`, `(N, T)`.
        total: Of all rows together.
        centre: Where they were taken.
    """

    linear: Float[Array, "N E"]
    curvature: Float[Array, "N E E"]
    slope: Float[Array, "N T"]
    total: Quadratic
    centre: Centre


class Rows:
    """The rows of a plate: what they add to the log density, and the GPs there.

    Args:
        call: The model on minibatches.
        structure: Its sites.
        params: Values of its parameters.
        plate: Name of the plate that is subsampled.
        calls: GP calls at the rows.
    """

    def __init__(
        self, call: Call, structure: Structure, params: dict[str, Any], plate: str,
        calls: tuple[CallId, ...],
    ):  # fmt: skip
        self.call, self.structure, self.params = call, structure, params
        self.plate, self.calls = plate, calls

    def trace(self, values: dict, index: Int[Array, " B"]) -> Trace:
        data = {**self.params, **values, self.plate: index}
        return self.call.trace(data, jr.key(0))

    def terms(self, values: dict, index, marginals=None) -> Float[Array, " B"]:
        """What each row adds: of the observed sites in the plate, not scaled up to it.

        Args:
            values: Of all sites, or beliefs about them.
            index: The rows.
            marginals: Of GP calls, in the place of what they would be.
        """
        with given_marginals(marginals=marginals or {}):
            trace = self.trace(values, index)
        total = jnp.zeros(len(index))
        for site in trace.values():
            frames = {f.name: f for f in site.get("cond_indep_stack", ())}
            is_term = site["type"] == "sample" and site["is_observed"]
            if is_term and self.plate in frames:
                shape = site["fn"].batch_shape
                rows = jnp.broadcast_to(scaled(site, site_log_prob(site)), shape)
                rows = jnp.moveaxis(rows, frames[self.plate].dim, 0)
                total = total + rows.reshape(len(index), -1).sum(axis=1)
        return total / self.weight(index)

    def weight(self, index) -> float:
        """What a row of a minibatch stands for, `N / B`."""
        return self.structure.plates[self.plate].size / len(index)

    def marginals(self, values: dict, index) -> dict[CallId, tuple[Array, Array]]:
        """Mean and variance `(B, *P)` of the GPs at the rows."""
        with recorded_calls() as seen:
            self.trace(values, index)
        found = {}
        for name in self.calls:
            gp, X = seen.calls[name]
            latent = conditional(gp.prior, X, gp.whitened)
            found[name] = latent.mean, latent.var
        return found

    def inducing(self, values: dict, centre: Centre, index) -> dict[str, Array]:
        """The inducing variables `u` of `values` as the `v` that they are at the
        centre, by GP site."""
        here = marked(self.trace(values, index), GPMark)
        there = marked(self.trace(centre.values, index), GPMark)
        found = {}
        for name, gp in here.items():
            u = values[name]
            if gp.whiten:
                u = gp.prior.inducing_mean(gp.num_outputs) + _of_each(
                    gp.prior, lambda factor, v: factor.multiply(v), u
                )
            prior = dataclasses.replace(there[name].prior, factor=centre.factors[name])
            u = u - prior.inducing_mean(gp.num_outputs)
            found[name] = _of_each(prior, lambda factor, u: factor.solve(u), u)
        return found

    def predictors(self, v: dict, centre: Centre, index) -> Float[Array, "B E"]:
        """What `v` at the centre makes of the rows' functions, means left out."""
        with recorded_calls() as seen:
            self.trace(centre.values, index)
        found = []
        for name in self.calls:
            gp, X = seen.calls[name]
            prior = dataclasses.replace(gp.prior, factor=centre.factors[name.site])
            zero = conditional(prior, X, jnp.zeros_like(v[name.site])).mean
            known = conditional(prior, X, v[name.site]).mean - zero
            found.append(known.reshape(len(index), -1))
        return jnp.concatenate(found, axis=1)

    def expansion(self, beliefs: dict, index):
        r"""Slopes `(B, E)` of the rows' terms in the means of their functions, and
        negative second derivatives `(B, E, E)`, at the guide's own marginals.

        Args:
            beliefs: Values of sites, and beliefs about GPs.
            index: The rows.
        """
        marginals = self.marginals(beliefs, index)
        shapes = [marginals[name][0] for name in self.calls]
        sizes = [x[0].size for x in shapes]

        def terms(shift):  # (B, E)
            moved, start = {}, 0
            for name, size in zip(self.calls, sizes, strict=True):
                mean, var = marginals[name]
                step = shift[:, start : start + size].reshape(mean.shape)
                moved[name], start = (mean + step, var), start + size
            return jnp.sum(self.terms(beliefs, index, moved))

        zero = jnp.zeros((len(index), sum(sizes)), shapes[0].dtype)
        slope, along = jax.linearize(jax.grad(terms), zero)
        # Rows do not depend on each other: one direction for all of them at once.
        directions = jnp.eye(zero.shape[1], dtype=zero.dtype)
        second = jax.lax.map(lambda d: along(zero + d), directions)  # (E, B, E)
        return slope, -jnp.moveaxis(second, 0, -1)

    def variates(self, v, e, sites: RowSites, index) -> Float[Array, " B"]:
        """The control variates `c_n` of some rows."""
        z = self.predictors(v, sites.centre, index)
        smooth = quadratics(z, sites.linear[index], sites.curvature[index])
        return smooth + sites.slope[index] @ e


def quadratics(z, linear, curvature) -> Float[Array, " B"]:
    """`b_n^T z_n - z_n^T Lambda_n z_n / 2` of each row."""
    square = jnp.einsum("be,bef,bf->b", z, curvature, z)
    return jnp.sum(linear * z, axis=1) - 0.5 * square


def row_calls(program: Program) -> tuple[CallId, ...]:
    """GP calls whose inputs follow the minibatch: as many rows as it, or all."""
    whole = program.call.at(program.call.args, program.call.kwargs)
    ((_, plate),) = program.batched_structure.plates.items()
    sizes = _num_inputs(whole), _num_inputs(program.batched)
    wanted = plate.size, plate.subsample_size
    return tuple(
        name for name in sizes[1] if tuple(each.get(name) for each in sizes) == wanted
    )


def _num_inputs(call: Call) -> dict[CallId, int]:
    """Known inputs of each GP call, how many."""
    sizes: dict[CallId, int] = {}

    def look(call):
        with recorded_calls() as seen:
            call.trace({}, jr.key(0))
        arrays = {name: record.X for name, record in seen.calls.items()}
        known = {n: X for n, X in arrays.items() if not isinstance(X, InputBelief)}
        sizes.update({name: len(X) for name, X in known.items()})

    with one_at_a_time():
        eqx.filter_eval_shape(look, call)
    return sizes


def _of_each(prior: SparsePrior, fn, v: Float[Array, "*P M"]) -> Float[Array, "*P M"]:
    """`fn(factor, columns)` of one output, or of each."""
    if v.ndim == 1:
        return fn(prior.factor, v[:, None])[:, 0]
    if not prior.has_own_kernels:
        return fn(prior.factor, v.T).T
    return jax.vmap(lambda factor, v: fn(factor, v[:, None])[:, 0])(prior.factor, v)
