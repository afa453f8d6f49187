"""The control variates that a guide makes of all rows, in one look at the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.engines.control_variates import (
    Centre,
    Quadratic,
    Rows,
    RowSites,
    quadratics,
)
from numpyro_gpx.engines.coordinates import Coordinates
from numpyro_gpx.guides.parts.transport import GaussianTransport
from numpyro_gpx.sites.marks import GPMark, marked

__all__ = ["chunks", "guide_sites"]

# Rows that are looked at together, at most.
_CHUNK = 1000


def chunks(num_rows: int) -> np.ndarray:
    """All rows cut into pieces of equal length, the last filled up: `(pieces, C)`.

    A piece never has all rows, for which the plate would take its own order.
    """
    size = min(_CHUNK, num_rows - 1)
    number = -(-num_rows // size)
    rows = np.arange(number * size)
    return np.where(rows < num_rows, rows, -1).reshape(number, size)


def guide_sites(
    here: Coordinates, rows: Rows, pieces: Int[Array, "pieces C"], num_rows: int
) -> RowSites:
    """The control variates of all rows, and their sum.

    Args:
        here: The target in the guide's coordinates.
        rows: The rows, on minibatches of `C`.
        pieces: Their numbers, -1 where there is none.
        num_rows: Rows in all.
    """
    look = _Look(here, rows, jnp.maximum(pieces[0], 0))

    def piece(total: Quadratic, index):
        real = index >= 0
        found = look.at(jnp.maximum(index, 0), real)
        return jax.tree.map(jnp.add, total, found[-1]), found[:-1]

    size, num_theta = look.flat.size, here.transport.num_theta
    zero = Quadratic(
        jnp.zeros(size), jnp.zeros((size, size)), jnp.zeros(num_theta)
    )  # fmt: skip
    total, every = jax.lax.scan(piece, zero, pieces)
    linear, curvature, slope = (
        x.reshape(pieces.size, *x.shape[2:])[:num_rows] for x in every
    )
    return RowSites(linear, curvature, slope, total, look.centre)


class _Look:
    """What is found out about rows from the guide's centre."""

    def __init__(self, here: Coordinates, rows: Rows, index):
        self.here, self.rows = here, rows
        assert isinstance(here.transport, GaussianTransport)  # the engine has asked
        z = here.transport.forward(jnp.zeros(here.transport.size)).z
        beliefs = here.transport.beliefs(z)
        values = here.target.constrain(z)
        sites = here.target.structure
        self.beliefs: dict[str, Array | Belief] = {**values}
        # Sites besides GPs are points here: only GPs take beliefs in every model.
        self.beliefs |= {n: b for n, b in beliefs.items() if n in sites.gps}
        self.means = {
            **values, **{name: belief.mean for name, belief in beliefs.items()}
        }  # fmt: skip
        zeros = {n: jnp.zeros_like(values[n]) for n in sites.gps}
        at_zero = {**self.means, **zeros}
        marks = marked(rows.trace(at_zero, index), GPMark)
        factors = {name: gp.prior.factor for name, gp in marks.items()}
        self.centre = Centre(at_zero, factors)
        self.flat, self.unravel = ravel_pytree(zeros)

    def at(self, index: Int[Array, " C"], real: Array):
        """`b_n`, `Lambda_n`, `G_n` of some rows, and their sums over `real` ones."""
        slope, curvature = self.rows.expansion(self.beliefs, index)
        v = self.rows.inducing(self.means, self.centre, index)
        z = self.rows.predictors(v, self.centre, index)
        linear = slope + jnp.einsum("bef,bf->be", curvature, z)

        def smooth(v):
            z = self.rows.predictors(v, self.centre, index)
            return quadratics(z, linear, curvature)

        left = self._slopes(smooth, index)

        def total(flat):
            return jnp.sum(jnp.where(real, smooth(self.unravel(flat)), 0.0))

        sums = Quadratic(
            jax.grad(total)(self.flat),
            -jax.jacfwd(jax.grad(total))(self.flat),
            jnp.sum(jnp.where(real[:, None], left, 0.0), axis=0),
        )
        return linear, curvature, left, sums

    def _slopes(self, smooth, index) -> Float[Array, "C T"]:
        """What is left of the rows' slopes in the hyperparameters' coordinates.

        By differences: whatever their error, the estimate stays unbiased.
        """
        transport, target = self.here.transport, self.here.target
        num_theta = transport.num_theta
        if not num_theta:
            return jnp.zeros((len(index), 0))
        step = 1e-3 if self.flat.dtype == jnp.float64 else 3e-2

        def left(e):
            x = jnp.zeros(transport.size).at[:num_theta].set(e)
            values = target.constrain(transport.forward(x).z)
            v = self.rows.inducing(values, self.centre, index)
            return self.rows.terms(values, index) - smooth(v)

        def slope(direction):
            return (left(step * direction) - left(-step * direction)) / (2.0 * step)

        return jax.lax.map(slope, jnp.eye(num_theta)).T
