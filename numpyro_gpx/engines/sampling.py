"""What samplers share: parameters that are given, draws put on their supports."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_gpx.engines.engine import Start
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.density import Target, require_params
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.results.fit import Fit

__all__ = ["constrained", "known_params"]


def constrained(target: Target, z: dict) -> dict:
    """Draws `(chains, draws, ...)` on the sites' supports."""
    both = jax.vmap(jax.vmap(target.constrain))
    return run(both, jax.tree.map(jnp.asarray, z))


def known_params(
    params: Fit | dict | None, start: Start, structure: Structure, *, required=True
) -> dict[str, Any]:
    """Values of `numpyro.param`s; a fit has those of its guide as well.

    Args:
        params: What the user gave.
        start: Where the fit starts, which may have others.
        structure: The model's sites.
        required: Whether the sampler must have all of them.
    """
    found = _known(params, start, structure)
    if required:
        require_params(structure, found)
    return found


def _known(params, start, structure) -> dict[str, Any]:
    known = {} if start.fit is None else start.fit.params
    known = {name: known[name] for name in structure.params if name in known}
    if isinstance(params, Fit):
        return {**known, **params.params}
    if params is not None and not isinstance(params, dict):
        raise TypeError(
            "`params` must be a fit or a dictionary of values by name; got "
            f"{type(params).__name__}."
        )
    unknown = sorted(set(params or {}) - set(structure.params))
    if unknown:
        raise ValueError(
            f"`params` must name `numpyro.param`s of the model, which are "
            f"{list(structure.params)}; got {unknown} as well."
        )
    return {**known, **(params or {})}
