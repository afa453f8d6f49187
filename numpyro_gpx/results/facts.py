"""What engines are: their name, what their draws are worth, their settings.

Kernels with more to say register here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from numpyro import handlers
from numpyro.infer import (
    AIES,
    ESS,
    HMC,
    NUTS,
    SA,
    BarkerMH,
    DiscreteHMCGibbs,
    HMCGibbs,
    MixedHMC,
)

__all__ = [
    "BIASED",
    "EXACT",
    "PRIOR",
    "UNKNOWN",
    "VARIATIONAL",
    "Facts",
    "kernel_facts",
    "kernel_params",
]

# How an engine's draws relate to the target density.
EXACT = "asymptotically exact"
BIASED = "biased by the step size"  # samplers without an accept step
VARIATIONAL = "variational"
UNKNOWN = "unknown"
PRIOR = "exact draws of the prior"

# NumPyro's kernels that leave the target invariant. These very classes: what somebody
# has derived from them may do anything.
_EXACT = (
    AIES, BarkerMH, ESS, HMC, NUTS, SA, DiscreteHMCGibbs, HMCGibbs, MixedHMC,
)  # fmt: skip


class Facts(NamedTuple):
    """What an engine is, in plain values that are saved with a fit.

    Attributes:
        name: Name in reports.
        approximation: How its draws relate to the target density: `"variational"`,
            `"asymptotically exact"`, `"biased by the step size"`, `"unknown"`, or
            `"exact draws of the prior"`.
        settings: How it was set: numbers, texts and `None` by name.
    """

    name: str
    approximation: str
    settings: dict[str, Any] = {}


@functools.singledispatch
def kernel_facts(kernel) -> Facts:
    """What is known of a kernel; nothing of one that was never heard of."""
    known = type(kernel) in _EXACT
    return Facts(type(kernel).__name__.lower(), EXACT if known else UNKNOWN)


@functools.singledispatch
def kernel_params(kernel) -> dict:
    """Values of `numpyro.param`s that a kernel evaluates its model with."""
    if isinstance(kernel.model, handlers.substitute):
        return dict(kernel.model.data or {})
    return {}
