"""Inputs that are not known exactly: Gaussian rows, joined to known columns."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import as_inputs

__all__ = ["InputBelief", "join"]


class InputBelief(eqx.Module):
    r"""Independent Gaussian rows :math:`x_n \sim \mathcal N(m_n, S_n S_n^\top)`.

    What the analytic rule hands to the model in the place of a latent input, and what
    `gpx.timeseries.simulate` feeds back. A GP called with it returns the moments of
    `f`.

    Attributes:
        mean: Means, `(N, D)`.
        scale: Standard deviations `(N, D)`, or lower factors `(N, D, D)`. A column
            that is known has the standard deviation 0.
    """

    mean: Float[Array, "N D"]
    scale: Float[Array, "N D"] | Float[Array, "N D D"]

    # NumPy leaves `array + belief` to this class, which has no arithmetic.
    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, ...]:
        """`(N, D)`."""
        return self.mean.shape

    @property
    def ndim(self) -> int:
        """2, as of an array of inputs."""
        return self.mean.ndim

    @property
    def is_diagonal(self) -> bool:
        """Whether the columns of a row are independent."""
        return self.scale.ndim == 2

    @property
    def var(self) -> Float[Array, "N D"]:
        """Marginal variances, `(N, D)`."""
        if self.is_diagonal:
            return self.scale**2
        return jnp.sum(self.scale**2, axis=-1)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows) -> InputBelief:
        """Some of the rows; `rows` is an index array or a slice."""
        return InputBelief(self.mean[rows], self.scale[rows])

    def _refuse(self, *_):
        raise TypeError(
            "The analytic rule hands the model a belief about its latent input, not "
            "an array. Join it to other columns with `gpx.inputs.join(X, H)` and "
            "pass the result to the GP as it is; or choose another rule, such as "
            "`gpx.cubature.Unscented()`, which hands over arrays."
        )

    __jax_array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __matmul__ = __rmatmul__ = __neg__ = __pow__ = _refuse


def join(*columns: Array | InputBelief) -> Array | InputBelief:
    """Join known columns and latent ones to the inputs of a GP.

    Args:
        columns: Arrays `(N, D_i)` or beliefs of as many rows.

    Returns:
        An array `(N, D)`, or a belief if any of the columns is one.
    """
    if not columns:
        raise ValueError("`join` needs columns; got none.")
    parts = [_as_belief(part) for part in columns]
    _same_rows(parts)
    mean = jnp.concatenate([part.mean for part in parts], axis=1)
    if not any(isinstance(part, InputBelief) for part in columns):
        return mean
    if all(part.is_diagonal for part in parts):
        scale = jnp.concatenate([part.scale for part in parts], axis=1)
        return InputBelief(mean, scale)
    factors = [jax.vmap(jnp.diag)(p.scale) if p.is_diagonal else p.scale for p in parts]
    return InputBelief(mean, jax.vmap(_block_diagonal)(*factors))


def _as_belief(part):
    if isinstance(part, InputBelief):
        return part
    part = as_inputs("columns", part)
    return InputBelief(part, jnp.zeros_like(part))


def _block_diagonal(*blocks):
    return jax.scipy.linalg.block_diag(*blocks)


def _same_rows(parts):
    rows = [part.shape[0] for part in parts]
    if len(set(rows)) != 1:
        raise ValueError(
            f"`columns` must have the same number of rows; got {rows} rows."
        )
