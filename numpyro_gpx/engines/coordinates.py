r"""The target density in the coordinates of a guide, and where a sampler refers to.

With the guide's map `T` and the target density :math:`\pi`, both on the real line,

.. math:: U(x) = -\log\pi(T(x)) - \log|\det T'(x)|,

which is :math:`|x|^2 / 2` and a constant wherever the guide is exact. A *reference* is
a Gaussian in these coordinates, of what the first draws have shown: `x` is written as
:math:`x = c + R y`, full in the hyperparameters and diagonal in the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from numpyro_gpx.guides.parts.base import SiteGuide
from numpyro_gpx.guides.parts.transport import Transport
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import compiled
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import GuidePosterior

__all__ = ["Coordinates", "GuideState", "Reference", "guide_objection", "placed"]


class GuideState(NamedTuple):
    """What a guide's map and the target need; passes through `jit` as arguments.

    Attributes:
        call: The model with its arguments.
        params: Values of the parameters of guide and model.
        root: Of the hyperparameters' covariance, `(T, T)`; `None` for the guide's own.
        noise: Noise sets that the density is averaged over, if there is noise.
    """

    call: Call
    params: dict[str, Any]
    root: Array | None
    noise: dict[str, Array] | None = None


class Reference(NamedTuple):
    """A Gaussian in the guide's coordinates.

    Attributes:
        mean: Of all coordinates, `(K,)`.
        root: Lower factor of the covariance of the first `T`, `(T, T)`.
        scale: Standard deviations of the others, `(K - T,)`.
    """

    mean: Array
    root: Array
    scale: Array

    @classmethod
    def standard(cls, size: int, num_theta: int, width: float = 1.0) -> Reference:
        """No shift; the hyperparameters' standard deviations are `width`."""
        return cls(
            jnp.zeros(size), width * jnp.eye(num_theta), jnp.ones(size - num_theta)
        )

    @classmethod
    def of_draws(cls, x: np.ndarray, num_theta: int, number: float) -> Reference:
        """Of draws `(S, K)` worth `number`, shrunk towards the guide.

        By `number / (number + 10)` in the hyperparameters, all of whose covariances
        are estimated, and by `number / (number + 100)` in the rest.
        """
        e, w = x[:, :num_theta], x[:, num_theta:]
        few, many = number / (number + 10.0), number / (number + 100.0)
        cov = np.atleast_2d(np.cov(e, rowvar=False)) if num_theta else np.zeros((0, 0))
        cov = few * cov + (1.0 - few) * np.eye(num_theta)
        scale = np.sqrt(many * w.var(axis=0) + (1.0 - many))
        mean = np.concatenate([few * e.mean(axis=0), many * w.mean(axis=0)])
        return cls(*map(jnp.asarray, (mean, np.linalg.cholesky(cov), scale)))

    def forward(self, y: Array) -> Array:
        """`x` of `y`."""
        T = len(self.root)
        return self.mean + jnp.concatenate([self.root @ y[:T], self.scale * y[T:]])

    def inverse(self, x: Array) -> Array:
        """`y` of `x`."""
        T = len(self.root)
        apart = x - self.mean
        head = jnp.linalg.solve(self.root, apart[:T]) if T else apart[:0]
        return jnp.concatenate([head, apart[T:] / self.scale])

    @property
    def log_det(self) -> Array:
        """Log determinant of the root."""
        return jnp.sum(jnp.log(jnp.diagonal(self.root))) + jnp.sum(jnp.log(self.scale))


class Coordinates:
    """A target seen through a guide; made anew inside each program.

    Args:
        guide: The guide.
        structure: The model's sites.
        state: Arrays of both.
        strength: What the guide's pseudo-observations count; 1 for what it says.
    """

    def __init__(
        self, guide: SiteGuide, structure: Structure, state: GuideState, strength=None
    ):
        params = {name: state.params[name] for name in structure.params}
        self.target = Target(
            state.call, params=params, noise=state.noise, structure=structure
        )
        known = state.params
        if strength is not None and guide.can_weaken:
            known = guide.weakened(known, strength)
        transport = guide.transport(known, state.call, state.root)
        assert transport is not None  # the engine has asked before
        self.transport: Transport = transport

    def energy(self, x: Array) -> Array:
        """`U(x)`, up to a constant."""
        z, log_det = self.transport.forward(x)
        return -self.target.log_density(z) - log_det

    def values(self, x: Array) -> dict[str, Array]:
        """Values of all sites on their supports."""
        return self.target.constrain(self.transport.forward(x).z)


def placed(
    make: Callable[[GuideState], Coordinates], state: GuideState, x: np.ndarray
) -> dict[str, np.ndarray]:
    """Values of all sites `(chains, draws, ...)` at vectors `(chains, draws, K)`.

    Args:
        make: The target in the guide's coordinates, from its arrays.
        state: These arrays.
        x: The vectors.
    """
    flat = jnp.asarray(x.reshape(-1, x.shape[-1]))

    def values(state, flat):
        here = make(state)
        return jax.lax.map(here.values, flat)  # without `vmap`: tests/test_hang.py

    drawn = compiled(values, state, flat)(state, flat)
    return {
        name: np.asarray(v).reshape(*x.shape[:2], *v.shape[1:])
        for name, v in drawn.items()
    }


def guide_objection(fit: Fit, program: Program) -> str | None:
    """Why a fit is no map to this model's sites, in words; `None` if it is one.

    Args:
        fit: The fit of a guide.
        program: The model; its rows have no latent sites of their own.
    """
    posterior = fit.posterior
    guide = posterior.guide if isinstance(posterior, GuidePosterior) else None
    if not isinstance(guide, SiteGuide) or not guide.can_transport:
        what = "a sampler" if guide is None else type(guide).__name__
        return (
            f"The fit `guide` is of {what}, which is no map from normal vectors. "
            "Use a fit of `gpx.guides.ConditionalGaussian`, or leave it out."
        )
    if guide.model != program.model:
        return "The fit `guide` is of another model. Fit the guide to this very model."
    return None
