"""Inducing variables: values of the GP at chosen inputs."""

from __future__ import annotations

from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.util import not_jax_tracer

from numpyro_gpx.inducing.base import Inducing

__all__ = ["Data", "Points"]


class Points(Inducing):
    r"""Inducing points: :math:`u_m = f(z_m)`.

    Args:
        Z: Inducing inputs `(M, D)`: an array, or `numpyro.sample("Z", ...)` for a
            prior.
        learn: Whether `gpx.gp(name, ...)` makes them the parameter `{name}/Z`, which
            starts at `Z`; else they are fixed.

    References:
        Titsias (2009), "Variational learning of inducing variables in sparse GPs".
    """

    Z: Float[Array, "M D"] = eqx.field(converter=jnp.asarray)
    learn: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        _check_inputs("Z", self.Z)
        if not_jax_tracer(self.Z):
            _check_distinct("Z", np.asarray(self.Z))

    @property
    def size(self) -> int:
        return self.Z.shape[0]

    def mean(self, mean):
        return mean(self.Z)

    def coordinates(self):
        return self.Z


class Data(Inducing):
    """The full GP: one inducing variable for each training row.

    At these rows the conditional variance vanishes, so the target density is that of
    the exact model. Close over the training inputs in the model; never pass the
    model's argument `X`, or predictions at other inputs would move the site with them.

    Args:
        X: Training inputs `(N, D)`. Repeated rows are allowed.
    """

    target: ClassVar[Literal["exact", "sparse", "basis"]] = "exact"

    X: Float[Array, "N D"] = eqx.field(converter=jnp.asarray)

    def __check_init__(self):
        _check_inputs("X", self.X)

    @property
    def size(self) -> int:
        return self.X.shape[0]

    def mean(self, mean):
        return mean(self.X)

    def coordinates(self):
        return self.X


def _check_inputs(name, Z):
    if Z.ndim != 2:
        raise ValueError(
            f"`{name}` must have shape (M, D); got {Z.shape}. For one-dimensional "
            f"inputs pass `{name}[:, None]`."
        )
    if not jnp.issubdtype(Z.dtype, jnp.floating):
        raise ValueError(
            f"`{name}` must be floating point; got {Z.dtype}. Pass "
            f"`{name}.astype(float)`."
        )
    if not_jax_tracer(Z) and not np.all(np.isfinite(Z)):
        raise ValueError(f"`{name}` must be finite; got NaN or infinity.")


def _check_distinct(name, Z):
    distinct = np.unique(Z, axis=0).shape[0]
    if distinct < Z.shape[0]:
        raise ValueError(
            f"`{name}` must have distinct rows; {Z.shape[0] - distinct} of "
            f"{Z.shape[0]} repeat an earlier one. Choose inducing points with "
            "`gpx.inducing.kmeans` or `gpx.inducing.greedy_variance`."
        )
