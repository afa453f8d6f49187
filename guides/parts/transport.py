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
import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.sites.marks import GPMark, find, marked

if TYPE_CHECKING:
    from numpyro_gpx.guides.flow import Flow
    from numpyro_gpx.guides.parts.gaussian import GaussianGuide

__all__ = [
    "FlowTransport",
    "GaussianTransport",
    "PlacingTransport",
    "Placed",
    "Transport",
]


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

    def log_density(self, x: Array, target: Target) -> Array:
        r""":math:`\log\pi(T(x)) + \log|\det T'(x)|` of a target density."""
        z, log_det = self.forward(x)
        return target.log_density(z) + log_det


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
        z, log_det = self._hyperparameters(x)
        return _pushed(self._groups(z), x[self.num_theta :], z, log_det)

    def inverse(self, z):
        groups = self._groups({name: z[name] for name in self.names})
        return jnp.concatenate([self._back(z), *(group.pull(z) for group in groups)])

    def _hyperparameters(self, x) -> Placed:
        theta = self.loc + self.root @ x[: self.num_theta]
        z = self.guide.unravel_unconstrained(self.names, theta) if self.names else {}
        return Placed(z, jnp.sum(jnp.log(jnp.diagonal(self.root))))

    def _back(self, z):
        """Coordinates of hyperparameters."""
        if not self.names:
            return jnp.zeros(0)
        theta = ravel_pytree({name: z[name] for name in self.names})[0]
        return solve_triangular(self.root, theta - self.loc, lower=True)

    def beliefs(self, z: dict[str, Array]) -> dict[str, Belief]:
        """What the guide believes of all other sites, given hyperparameters `z`."""
        found: dict[str, Belief] = {}
        for group in self._groups({name: z[name] for name in self.names}):
            found |= group.beliefs
        return found

    def _groups(self, z: dict):
        theta = self.guide.structure.constrain(z)
        with self._at_params():
            return [held.group for held in self.guide.held_of(theta, self.call)]

    @contextlib.contextmanager
    def _at_params(self):
        """The guide's parameters, unseen from outside."""
        with handlers.block(), handlers.seed(rng_seed=0):
            with handlers.substitute(data=self.params):
                yield

    def _theta(self):
        if not self.names:
            return jnp.zeros(0), jnp.zeros((0, 0))
        with self._at_params():
            return self.guide.theta_root(self.call)


class PlacingTransport(GaussianTransport):
    """Of a guide that can place a GP site from its prior alone.

    The sites are placed where the model registers them, so that map and model share one
    factorisation of every `Kuu`, and its derivative.
    """

    def forward(self, x):
        z, log_det = self._hyperparameters(x)
        placing = self._placing(x)
        self.call.trace(self._values(z), jr.key(0), model=placing)
        rest = x[self.num_theta + placing.size :]
        z, log_det = {**z, **placing.z}, log_det + placing.log_det
        return _pushed(self._others(), rest, z, log_det)

    def inverse(self, z):
        at = self._values(z)
        gps = marked(self.call.trace(at, jr.key(0)), GPMark)
        each = [
            self.guide.pull(name, gps[name], self.params, z[name]).reshape(-1)
            for name in self.guide.structure.gps
        ]
        others = [group.pull(z) for group in self._others()]
        return jnp.concatenate([self._back(z), *each, *others])

    def log_density(self, x, target):
        if target.noise is not None:  # mapped over: what was placed would be hidden
            return super().log_density(x, target)
        z, log_det = self._hyperparameters(x)
        placing = self._placing(x)
        rest = x[self.num_theta + placing.size :]
        z, log_det = _pushed(self._others(), rest, z, log_det)
        log_density = target.log_density(z, model=placing)
        return log_density + log_det + placing.log_det

    def _placing(self, x):
        return _Placing(self.call.model, self.guide, self.params, x[self.num_theta :])

    def _values(self, z):
        return {**self.params, **self.guide.structure.constrain(z)}

    def _others(self):
        """Beliefs about sites that are neither GPs nor hyperparameters."""
        with self._at_params():
            return [held.group for held in self.guide.integrated_held(self.call)]


class _Placing(Messenger):
    """The model, its GP sites placed as it registers them.

    Attributes:
        size: How many entries of the vector they take.
        z: Their values, once the model has run.
        log_det: Log determinant of the map.
    """

    def __init__(self, model, guide: GaussianGuide, params: dict, w: Array):
        super().__init__(model)
        self.guide, self.params = guide, params
        sites, start = guide.structure.latents, 0
        self.parts = {}
        for name in guide.structure.gps:
            shape = sites[name].shape
            end = start + math.prod(shape)
            self.parts[name] = w[start:end].reshape(shape)
            start = end
        self.size = start
        self.z: dict[str, Array] = {}
        self.log_det = jnp.zeros(())

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["name"] not in self.parts:
            return
        name, gp = msg["name"], find(msg, GPMark)
        with handlers.block():
            value, log_det = self.guide.push(name, gp, self.params, self.parts[name])
        msg["value"] = self.z[name] = value
        self.log_det = self.log_det + log_det


def _pushed(groups, w, z, log_det) -> Placed:
    """Sites of these groups beside those that are placed already."""
    start = 0
    for group in groups:
        size = sum(belief.mean.size for belief in group.beliefs.values())
        values, more = group.push(w[start : start + size])
        z, log_det, start = {**z, **values}, log_det + more, start + size
    return Placed(z, log_det)


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
