"""What engines are called, and what their draws are worth.

Samplers with more to say register here.
"""

from __future__ import annotations

import functools

from numpyro import handlers

__all__ = ["approximation_of", "engine_name", "kernel_params"]

_VARIATIONAL = ("implicit", "lbfgs", "svi")
# Samplers without an accept step.
_BIASED = ("csgld", "mclmc", "sghmc", "sgld", "sgnht")


def approximation_of(engine: str) -> str:
    """How an engine's draws relate to the target density."""
    if engine in _VARIATIONAL:
        return "variational"
    return "biased by the step size" if engine in _BIASED else "asymptotically exact"


@functools.singledispatch
def engine_name(kernel) -> str:
    """What reports call a kernel."""
    return type(kernel).__name__.lower()


@functools.singledispatch
def kernel_params(kernel) -> dict:
    """Values of `numpyro.param`s that a kernel evaluates its model with."""
    if isinstance(kernel.model, handlers.substitute):
        return dict(kernel.model.data or {})
    return {}
