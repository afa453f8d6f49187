"""A model seen through the fit of a guide, for the engines that sample there."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_gpx.engines.coordinates import Coordinates, GuideState
from numpyro_gpx.engines.curvature import root_at_point
from numpyro_gpx.guides.parts.base import SiteGuide
from numpyro_gpx.program.compile_cache import compiled
from numpyro_gpx.program.layer_noise import noise_sets
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import GuidePosterior

__all__ = ["Through", "no_map", "values_at"]


def no_map(program: Program, fit: Fit | None, name: str) -> str | None:
    """Why a model cannot be sampled through the guide of a fit, in words.

    Args:
        program: The model.
        fit: The fit; `None` for a guide that is still to be trained.
        name: What the fit is called, for messages.
    """
    rows = list(program.structure.row_sites)
    if rows:
        return (
            f"The rows have latent sites of their own, {rows}, for which guides "
            "have no map. Use `fit_nuts`."
        )
    if fit is None:
        return None
    posterior = fit.posterior
    guide = posterior.guide if isinstance(posterior, GuidePosterior) else None
    if not isinstance(guide, SiteGuide) or not guide.can_transport:
        what = "a sampler" if guide is None else type(guide).__name__
        return (
            f"The fit `{name}` is of {what}, which is no map from normal vectors. "
            "Use a fit of `gpx.guides.ConditionalGaussian`, or leave it out."
        )
    if guide.model != program.model:
        return (
            f"The fit `{name}` is of another model. Fit the guide to this very model."
        )
    return None


class Through:
    """A model and a guide that was fitted to it.

    Args:
        program: The model.
        fit: The fit, of which `no_map` has not complained.
        key: For noise sets, and draws of the bound.
        num_sets: Noise sets that the density is averaged over, if there is noise.

    Attributes:
        guide: The guide.
        state: The arrays that guide and target need.
        size: Number of coordinates.
        num_theta: How many of the first are of hyperparameters.
    """

    def __init__(self, program: Program, fit: Fit, key, num_sets: int):
        posterior = fit.posterior
        assert isinstance(posterior, GuidePosterior)  # `no_map` has asked
        self.structure, self.guide = program.structure, posterior.guide
        noise = None
        if self.structure.noise:
            noise = noise_sets(key, self.structure, num_sets)
        root = root_at_point(self.guide, fit, key)
        self.state = GuideState(program.call, fit.params, root, noise)
        transport = self.guide.transport(fit.params, program.call, root)
        self.size, self.num_theta = transport.size, transport.num_theta

    def make(self, state: GuideState, strength=None) -> Coordinates:
        """The target in the guide's coordinates, inside a program."""
        return Coordinates(self.guide, self.structure, state, strength)

    def values(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Values of all sites on their supports, of coordinates `(C, S, K)`."""
        return values_at(self.make, self.state, x)


def values_at(
    make: Callable[[GuideState], Coordinates], state: GuideState, x: np.ndarray
) -> dict[str, np.ndarray]:
    """Values of all sites `(chains, draws, ...)` at coordinates `(chains, draws, K)`.

    Args:
        make: The target in the guide's coordinates, from its arrays.
        state: These arrays.
        x: The coordinates.
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
