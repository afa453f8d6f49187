"""Fits read from files."""

from __future__ import annotations

from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.save import read

__all__ = ["load"]


def load(path, model) -> Fit:
    """Read a fit written by `Fit.save`.

    Args:
        path: The file.
        model: The model that was fitted; functions are not saved.

    Returns:
        A fit whose predictions equal those of the saved one.
    """
    return Fit(**read(path, model))
