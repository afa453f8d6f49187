"""Standardised data, and predictions back in original units."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.results.prediction import Prediction

__all__ = ["Standardised", "standardise"]

# Spread of a constant column in units of the last digit of its entries.
_ROUNDING = 10.0


class Standardised(NamedTuple):
    """Data with mean 0 and standard deviation 1, and the way back.

    Attributes:
        X: Inputs `(N, D)`, each column standardised.
        y: Targets `(N,)` or `(N, P)`, standardised.
        X_shift: Column means of the inputs, `(D,)`.
        X_scale: Column standard deviations, 1 where a column is constant.
        y_shift: Mean of the targets.
        y_scale: Standard deviation of the targets, 1 where they are constant.
    """

    X: np.ndarray
    y: np.ndarray | None
    X_shift: np.ndarray
    X_scale: np.ndarray
    y_shift: np.ndarray
    y_scale: np.ndarray

    def inputs(self, X) -> np.ndarray:
        """New inputs `(N, D)` in standardised units."""
        X = X if isinstance(X, jax.Array) else np.asarray(X)
        if X.shape[1:] != self.X.shape[1:]:
            raise ValueError(
                f"`X` must have shape (N, {self.X.shape[1]}), as at "
                f"`standardise`; got {X.shape}."
            )
        return (X - self.X_shift) / self.X_scale

    def targets(self, y) -> np.ndarray:
        """New targets in standardised units."""
        y = y if isinstance(y, jax.Array) else np.asarray(y)
        return (y - self.y_shift) / self.y_scale

    def predict(self, fit, X, **options) -> Prediction:
        """`fit.predict` at inputs in original units, answered in original units.

        Means, variances, draws and log densities are all those of the original target.
        """
        prediction = fit.predict(self.inputs(X), **options)
        if self.y is None:
            return prediction
        _check_targets(fit, self.y)
        return prediction.rescaled(self.y_shift, self.y_scale)


def standardise(X, y=None, *, missing: bool = False) -> Standardised:
    """Standardise inputs and targets, column by column.

    Args:
        X: Inputs `(N, D)`.
        y: Real targets `(N,)` or `(N, P)`; left out, as for counts, labels and whatever
            else has units of its own, the inputs alone are scaled.
        missing: Whether NaN in `y` stands for a missing target; it stays NaN.

    Returns:
        The scaled data with `inputs`, `targets` and `predict` for new rows.
    """
    X = np.asarray(checks.inputs("X", X))
    X_shift, X_scale = _moments("X", X)
    if y is None:
        none = np.zeros((), X.dtype), np.ones((), X.dtype)
        return Standardised((X - X_shift) / X_scale, None, X_shift, X_scale, *none)
    y = np.asarray(checks.numbers("y", y), dtype=X.dtype)
    hint = "Pass `missing=True` if NaN stands for missing."
    checks.finite("y", np.where(missing & np.isnan(y), 0.0, y), hint=hint)
    if y.shape[:1] != X.shape[:1]:
        raise ValueError(
            f"`X` and `y` must have the same number of rows; got {X.shape[0]} and "
            f"{y.shape[0] if y.ndim else 'a scalar'}."
        )
    y_shift, y_scale = _moments("y", y)
    return Standardised(
        (X - X_shift) / X_scale, (y - y_shift) / y_scale,
        X_shift, X_scale, y_shift, y_scale,
    )  # fmt: skip


def _moments(name: str, values) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each column, and its standard deviation or 1 where it is constant."""
    if np.isnan(values).all(axis=0).any():
        raise ValueError(f"`{name}` must have a value in each column; got only NaN.")
    largest = np.nanmax(np.abs(values), axis=0)
    # In units of the largest entry, and in float64: nothing overflows or vanishes.
    unit = np.where(largest > 0.0, largest, 1.0).astype(np.float64)
    relative = values / unit
    mean, sd = np.nanmean(relative, axis=0), np.nanstd(relative, axis=0)
    # A constant column has no scale of its own: all that is left is rounding.
    constant = sd <= _ROUNDING * np.finfo(values.dtype).eps
    scale = np.where(constant, 1.0, unit * sd)
    _check_units(name, scale, values.dtype)
    return (unit * mean).astype(values.dtype), scale.astype(values.dtype)


def _check_units(name: str, scale, dtype) -> None:
    """Raise where a variance is out of range: predictions could not be told in `y`."""
    lowest, highest = np.sqrt([np.finfo(dtype).tiny, np.finfo(dtype).max])
    wrong = ~((scale > lowest) & (scale < highest))
    if np.any(wrong):
        worst = np.asarray(scale)[wrong][0]
        raise ValueError(
            f"`{name}` must have columns whose variance {dtype} can hold; got a "
            f"standard deviation of {worst:.3g}. Give them in other units, as in "
            f"`{name} / {worst:.0e}`."
        )


def _check_targets(fit, y: np.ndarray) -> None:
    """Raise if a fit was made to targets in other units."""
    seen = fit.program.observed.values()
    if not any(
        np.shape(x) == y.shape and np.allclose(x, y, equal_nan=True) for x in seen
    ):
        raise ValueError(
            "`fit` was made to other targets than `data.y`: its predictions are in "
            "units of their own. Fit to `data.y`, or scale the inputs alone: "
            "`data = gpx.standardise(X)`."
        )
