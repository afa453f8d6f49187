r"""Guides as maps: a standard normal vector to all sites, with the log determinant.

A Gaussian guide :math:`q(\theta)\,q(v \mid \theta)` is the image of
:math:`x = (e, w) \sim \mathcal N(0, I)` under

.. math:: \theta = t_0 + S e, \qquad v = \mu(\theta) + R(\theta)\,w,
    \qquad \log|\det T'| = \log|S| + \log|R(\theta)|,

on the real line. The exact posterior in the coordinates `x` is as near to a standard
normal as the guide is to it, also where `v` and the hyperparameters hang together.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array
from numpyro import handlers

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.program.call import Call

if TYPE_CHECKING:
    from numpyro_gpx.guides.flow import Flow
    from numpyro_gpx.guides.parts.gaussian import GaussianGuide

__all__ = ["FlowTransport", "GaussianTransport", "Placed", "Transport"]


class Placed(NamedTuple):
    """Where a vector lands.

    Attributes:
        z: Values of all latent sites on the real line, by site.
        log_det: Log determinant of the map there.
    """

    z: dict[str, Array]
    log_det: Array


class Transport(abc.ABC):
    """A map from standard normal vectors `(size,)` to all sites.

    Attributes:
        size: Length of the vectors.
        num_theta: How many of their first entries are of hyperparameters.
    """

    size: int
    num_theta: int

    @abc.abstractmethod
    def forward(self, x: Array) -> Placed:
        """Where `x` lands."""

    @abc.abstractmethod
    def inverse(self, z: dict[str, Array]) -> Array:
        """The vector that lands at `z`."""


class GaussianTransport(Transport):
    """Of a Gaussian guide with its parameters.

    Args:
        guide: The guide, which knows the model's sites.
        params: Its parameters, and those of the model.
        call: The model with its arguments.
        root: Of the covariance of the hyperparameters on the real line, `(T, T)`,
            lower triangular; `None` for the guide's own, which one with
            `theta="point"` does not have.
    """

    def __init__(self, guide: GaussianGuide, params: dict, call: Call, root=None):
        self.guide, self.params, self.call = guide, params, call
        self.names = guide.structure.hyperparameters
        loc, own = self._theta()
        self.loc = loc
        self.root = own if root is None else root
        self.num_theta = loc.size
        sites = guide.structure.latents
        self.drawn = guide.structure.gps + guide.structure.integrated
        self.size = self.num_theta + sum(
            jnp.zeros(sites[name].shape).size for name in self.drawn
        )

    def forward(self, x):
        e, rest = x[: self.num_theta], x[self.num_theta :]
        theta = self.loc + self.root @ e
        z = self.guide.unravel_unconstrained(self.names, theta) if self.names else {}
        log_det = jnp.sum(jnp.log(jnp.diagonal(self.root)))
        start = 0
        for group in self._groups(z):
            size = sum(belief.mean.size for belief in group.beliefs.values())
            values, more = group.push(rest[start : start + size])
            z, log_det, start = {**z, **values}, log_det + more, start + size
        return Placed(z, log_det)

    def inverse(self, z):
        pieces = []
        if self.names:
            theta = ravel_pytree({name: z[name] for name in self.names})[0]
            pieces.append(solve_triangular(self.root, theta - self.loc, lower=True))
        groups = self._groups({name: z[name] for name in self.names})
        pieces += [group.pull(z) for group in groups]
        return jnp.concatenate(pieces)

    def beliefs(self, z: dict[str, Array]) -> dict[str, Belief]:
        """What the guide believes of all other sites, given hyperparameters `z`."""
        found: dict[str, Belief] = {}
        for group in self._groups({name: z[name] for name in self.names}):
            found |= group.beliefs
        return found

    def _groups(self, z: dict):
        theta = self.guide.structure.constrain(z)
        with handlers.block(), handlers.seed(rng_seed=0):
            with handlers.substitute(data=self.params):
                return [held.group for held in self.guide.held_of(theta, self.call)]

    def _theta(self):
        if not self.names:
            return jnp.zeros(0), jnp.zeros((0, 0))
        with handlers.block(), handlers.seed(rng_seed=0):
            with handlers.substitute(data=self.params):
                return self.guide.theta_root(self.call)


class FlowTransport(Transport):
    """Of a normalizing flow: its own map."""

    def __init__(self, guide: Flow, params: dict, call: Call):
        with handlers.block(), handlers.seed(rng_seed=0):
            with handlers.substitute(data=params):
                self.flow = guide.flow(call)
        self.guide, self.num_theta, self.size = guide, 0, guide.size

    def forward(self, x):
        z, log_det = self.flow.forward(x)
        return Placed(self.guide.unflatten(z), log_det)

    def inverse(self, z):
        return self.flow.inverse(self.guide.flatten(z))[0]
