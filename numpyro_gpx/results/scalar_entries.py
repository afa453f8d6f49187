"""The scalars of a fit: draws by site and entry, with labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["entries_of", "entry_labels", "scalar_entries"]

# Entries of a long site that a summary looks at, evenly spaced.
_MAX_SUMMARISED = 500


def scalar_entries(
    fit: Fit, num_draws: int = 1000, summaries: dict[str, Callable] | None = None
) -> dict[str, dict[str, np.ndarray]]:
    """Draws of each scalar, `(chains, draws)`, by site and label.

    The labels of a site's entries are `lengthscale[0]`, `lengthscale[1]`, ...; a scalar
    site is its own label. Of long sites 500 entries are given.

    Args:
        fit: The fit.
        num_draws: Draws of a variational fit; of a sampler all are used.
        summaries: Functions of the draws by name, in the place of the rows' own sites.
    """
    chains = fit.chains(None if fit.is_mcmc else num_draws)
    names = fit.structure.global_sites if summaries else tuple(fit.structure.latents)
    found = {name: entries_of(name, chains[name]) for name in names}
    for name, summary in (summaries or {}).items():
        found[name] = entries_of(name, _summarised(name, summary, chains))
    return found


def entry_labels(name: str, shape: tuple[int, ...]) -> list[str]:
    """Labels of a site's entries; of a long site 500, evenly spaced."""
    if not shape:
        return [name]
    places = zip(*np.unravel_index(_kept(shape), shape), strict=True)
    return [f"{name}[{','.join(map(str, place))}]" for place in places]


def _summarised(name, summary, chains):
    """A summary of draws, `(chains, draws, K)`."""
    num_chains, length = next(iter(chains.values())).shape[:2]
    flat = {n: x.reshape(-1, *x.shape[2:]) for n, x in chains.items()}
    values = np.asarray(summary(flat))
    if values.shape[:1] != (num_chains * length,):
        raise ValueError(
            f"`summaries[{name!r}]` must return one row a draw, "
            f"({num_chains * length}, ...); got shape {values.shape}."
        )
    return values.reshape(num_chains, length, *values.shape[1:])


def _kept(shape):
    size = int(np.prod(shape))
    return np.linspace(0, size - 1, min(size, _MAX_SUMMARISED)).round().astype(int)


def entries_of(name: str, chains: np.ndarray) -> dict[str, np.ndarray]:
    """Draws of each scalar of a site, `(chains, draws)`, by label."""
    shape = chains.shape[2:]
    flat = chains.reshape(*chains.shape[:2], -1)[..., _kept(shape)]
    labels = entry_labels(name, shape)
    return {label: flat[..., i] for i, label in enumerate(labels)}
