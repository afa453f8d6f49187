r"""Annealing: a model that starts flat, so that a guide spreads over several modes.

The log joint density is divided by a temperature that falls geometrically to 1,

.. math:: T(s) = T_0^{\max(0,\, 1 - 2 s)},

where `s` is the share of the training that is done: the second half is at 1.
"""

from __future__ import annotations

import jax.numpy as jnp
from numpyro import handlers

__all__ = ["check_temperature", "tempered"]


def tempered(model, temperature: float, done):
    """The model at this point of the training.

    Args:
        model: A NumPyro function.
        temperature: What its log joint density is divided by at the start.
        done: Share of the training that is done, from 0 to 1.
    """
    if temperature == 1.0:
        return model
    left = jnp.maximum(0.0, 1.0 - 2.0 * done)
    return handlers.scale(model, temperature**-left)


def check_temperature(temperature) -> None:
    """Raise unless it is at least 1."""
    if not temperature >= 1.0:
        raise ValueError(f"`temperature` must be at least 1; got {temperature!r}.")
