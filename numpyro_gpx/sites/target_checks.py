"""Whether concrete targets are such as an observed site can hold."""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.processes.latent import Taken

__all__ = [
    "Checker",
    "FiniteChecker",
    "LikelihoodChecker",
    "PlainChecker",
    "TakenChecker",
]


class Checker(eqx.Module):
    """Holds what the check needs, which the model may have computed."""

    @abc.abstractmethod
    def check(self, y: np.ndarray, name: str) -> None:
        """Raise if targets `y` of site `name` are not what it can hold."""


class TakenChecker(eqx.Module):
    """Columns taken of latents, as in `f(X).take(group)`."""

    taken: tuple[Taken, ...]

    def check(self, name: str) -> None:
        """Raise if a row of site `name` takes a column that is not there."""
        for group, number in ((np.asarray(t.group), t.number) for t in self.taken):
            outside = group[(group < 0) | (group >= number)]
            if outside.size:
                raise ValueError(
                    f"`take` at site `{name}` needs columns 0 to {number - 1}; got "
                    f"{outside[0]}, in {outside.size} of {group.size} rows."
                )


class LikelihoodChecker(Checker):
    """Targets of `gpx.observe`."""

    likelihood: Likelihood
    keep: Any
    weights: Any
    mask: Any
    offset: Any

    def check(self, y, name):
        keep = _both(self.keep, self.mask, y)
        if self.offset is not None:
            offset = np.asarray(self.offset)
            if np.shape(keep) == offset.shape:
                offset = np.where(keep, offset, 0.0)
            checks.finite(
                f"offset` of site `{name}", offset,
                hint="An exposure of 0 has no logarithm.",
            )  # fmt: skip
        self.likelihood.check(y, name=name, mask=keep)
        if keep is not None and not np.any(keep):
            raise ValueError(
                f"`mask` of site `{name}` leaves out every target (NaN is masked where "
                "`missing=True`)."
            )
        weights = self.weights
        if weights is not None and not np.all(weights >= 0.0):
            raise ValueError(
                f"`weights` of site `{name}` must be at least 0; got "
                f"{weights[~(weights >= 0.0)][0]}."
            )


class FiniteChecker(Checker):
    """Targets of `gpx.exact`."""

    def check(self, y, name):
        checks.finite(name, y)


class PlainChecker(Checker):
    """Targets of any other site of NumPyro's."""

    mask: Any

    def check(self, y, name):
        seen = y if self.mask is None else y[np.broadcast_to(self.mask, y.shape)]
        if np.isnan(seen).any():
            raise ValueError(
                f"Targets of site `{name}` must not be NaN; got {np.isnan(seen).sum()} "
                f"of {seen.size}. Leave these rows out, or mask them with "
                "`numpyro.handlers.mask`."
            )


def _both(keep, mask, y):
    """Both masks as one of the targets' shape; `None` if there is none."""
    found = None
    for one in (keep, mask):
        if one is not None:
            one = np.asarray(one)
            one = one.reshape(one.shape + (1,) * (np.ndim(y) - one.ndim))
            one = np.broadcast_to(one, np.shape(y))
            found = one if found is None else found & one
    return found
