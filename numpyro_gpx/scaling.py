"""Standardised data, and predictions back in original units."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.results.prediction import Prediction

__all__ = ["Standardised", "standardise"]


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
    y: np.ndarray
    X_shift: np.ndarray
    X_scale: np.ndarray
    y_shift: np.ndarray
    y_scale: np.ndarray

    def inputs(self, X) -> np.ndarray:
        """New inputs `(N, D)` in standardised units."""
        return (np.asarray(X) - self.X_shift) / self.X_scale

    def targets(self, y) -> np.ndarray:
        """New targets in standardised units."""
        return (np.asarray(y) - self.y_shift) / self.y_scale

    def predict(self, fit, X, **options) -> Prediction:
        """`fit.predict` at inputs in original units, answered in original units.

        Means, variances, draws and log densities are all those of the original target.
        """
        prediction = fit.predict(self.inputs(X), **options)
        return prediction.rescaled(self.y_shift, self.y_scale)


def standardise(X, y, *, missing: bool = False) -> Standardised:
    """Standardise inputs and targets, column by column.

    Args:
        X: Inputs `(N, D)`.
        y: Real targets `(N,)` or `(N, P)`.
        missing: Whether NaN in `y` stands for a missing target; it stays NaN.

    Returns:
        The scaled data with `inputs`, `targets` and `predict` for new rows.
    """
    X = np.asarray(checks.inputs("X", X))
    y = np.asarray(y, dtype=X.dtype)
    if not missing:
        checks.finite("y", y, hint="Pass `missing=True` if NaN stands for missing.")
    if y.shape[:1] != X.shape[:1]:
        raise ValueError(
            f"`X` and `y` must have the same number of rows; got {X.shape[0]} and "
            f"{y.shape[0] if y.ndim else 'a scalar'}."
        )
    X_shift, X_scale = X.mean(axis=0), _scale(X)
    y_shift, y_scale = np.nanmean(y, axis=0), _scale(y)
    return Standardised(
        (X - X_shift) / X_scale, (y - y_shift) / y_scale,
        X_shift, X_scale, y_shift, y_scale,
    )  # fmt: skip


def _scale(values):
    sd = np.nanstd(values, axis=0)
    # A constant column has no scale of its own.
    largest = np.nanmax(np.abs(values), axis=0)
    return np.where(sd > 1e-12 * np.maximum(1.0, largest), sd, 1.0)
