"""What samplers say of themselves; those that need to register here."""

from __future__ import annotations

import functools

from numpyro import handlers

__all__ = ["engine_name", "kernel_params"]


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
