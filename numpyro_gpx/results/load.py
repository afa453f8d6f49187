"""Fits read from files."""

from __future__ import annotations

import os

from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.save import read

__all__ = ["load"]


def load(path, model, *, guide=None) -> Fit:
    """Read a fit written by `Fit.save`.

    Args:
        path: The file.
        model: The model that was fitted; functions are not saved.
        guide: The guide that was fitted, if it is one that cannot be made again from a
            file (`Fit.save` warns of that).

    Returns:
        A fit whose predictions equal those of the saved one.

    Raises:
        ValueError: If the file is damaged, or the model or the guide another one.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"`path` must name a file; got {type(path).__name__}. The order is "
            "`gpx.load(path, model)`."
        )
    if not callable(model):
        raise TypeError(
            "`model` must be the NumPyro function that was fitted, which files do not "
            f"hold: `gpx.load(path, model)`; got {type(model).__name__}."
        )
    return Fit(**read(path, model, guide))
