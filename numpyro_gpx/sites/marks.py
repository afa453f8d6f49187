"""Marks: what a model tells engines and guides of a site, and a guide the engines.

They travel in a site's `infer` dictionary, under two keys, the model's and the guide's,
so that neither overwrites the other. No other file looks into that dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array

from numpyro_gpx.beliefs import GUIDE, Belief, Integrable, Mark, as_infer
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.processes.prior import SparsePrior

__all__ = [
    "AUXILIARY",
    "Collapsed",
    "GPMark",
    "Held",
    "Integrable",
    "Mark",
    "Noise",
    "as_infer",
    "find",
    "held_beliefs",
    "is_auxiliary",
    "marked",
    "without",
]

# NumPyro's own mark of sites that are part of a guide but not of the model.
AUXILIARY = {"is_auxiliary": True}


class GPMark(Mark):
    """A GP site, with its prior given the hyperparameters."""

    prior: SparsePrior
    num_outputs: int | None = eqx.field(static=True)
    whiten: bool = eqx.field(static=True)

    def each_output(self, fn: Callable, *arrays):
        """`fn(factor, inducing mean, ...)` of the one output, or of each.

        Args:
            fn: A function of the root of `Kuu`, the mean `(M,)` of `u`, and arrays.
            arrays: Those; with several outputs each has a leading axis over them.
        """
        mean = self.prior.inducing_mean(self.num_outputs)  # (M,) or (P, M)
        if self.num_outputs is None:
            return fn(self.prior.factor, mean, *arrays)
        own = 0 if self.prior.has_own_kernels else None
        axes = (own, *[0] * (1 + len(arrays)))
        return jax.vmap(fn, in_axes=axes)(self.prior.factor, mean, *arrays)


class Noise(Mark):
    """Drawn afresh for every evaluation of the density.

    Attributes:
        inner: Names of the GPs whose functions are drawn with it.
    """

    inner: frozenset = eqx.field(static=True)


class Held(Mark):
    """The guide integrates sites over what it believes of them.

    Left at the site, or, if several are held together, at their joint draw.

    Attributes:
        group: What it believes, by site.
        collapsed: The bound that it has worked out already, if it has.
    """

    owner: ClassVar[str] = GUIDE

    group: Group
    collapsed: Collapsed | None = None


class Collapsed(eqx.Module):
    """The bound of one GP site with its data, in closed form.

    Attributes:
        model: The model that it was worked out for.
        observed: The observed site whose term it includes.
        bound: Expected log likelihood less divergence.
    """

    model: Callable = eqx.field(static=True)
    observed: str = eqx.field(static=True)
    bound: Array


M = TypeVar("M", bound=Mark)


def find(site: dict[str, Any], kind: type[M]) -> M | None:
    """The mark of this kind at a site, if it has one."""
    mark = site.get("infer", {}).get(kind.owner)
    return mark if isinstance(mark, kind) else None


def marked(trace: dict[str, Any], kind: type[M]) -> dict[str, M]:
    """The marks of this kind by sample site."""
    found = {
        name: find(site, kind)
        for name, site in trace.items()
        if site["type"] == "sample"
    }
    return {name: mark for name, mark in found.items() if mark is not None}


def held_beliefs(trace: dict[str, Any]) -> dict[str, Belief]:
    """What a guide believes, by site of the model."""
    found: dict[str, Belief] = {}
    for mark in marked(trace, Held).values():
        found |= mark.group.beliefs
    return found


def without(site: dict[str, Any], kind: type[M]) -> dict[str, Any]:
    """A message without its mark of this kind."""
    infer = {key: x for key, x in site["infer"].items() if not isinstance(x, kind)}
    return {**site, "infer": infer}


def is_auxiliary(site: dict[str, Any]) -> bool:
    """Whether a guide's site is not one of the model's."""
    return bool(site["infer"].get("is_auxiliary"))
