"""NumPyro's Laplace approximation as the Gaussian guide that it comes to."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpyro.infer.autoguide import (
    AutoGuide,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
)

from numpyro_gpx.guides.parts.base import set_up
from numpyro_gpx.notes import Note
from numpyro_gpx.program.program import Program

__all__ = ["as_gaussian"]


def as_gaussian(
    guide: AutoGuide, params: dict[str, Any], program: Program
) -> tuple[AutoGuide, dict[str, Any], list[Note]]:
    """A guide whose sites have the distribution that it stands for.

    `AutoLaplaceApproximation` registers points; its normal, of the curvature at the
    mode, is made on the side. Any other guide is returned as it is.

    Args:
        guide: A trained guide.
        params: Its parameters.
        program: The model.

    Returns:
        A guide, its parameters, and what is to be known of it.
    """
    if not isinstance(guide, AutoLaplaceApproximation):
        return guide, params, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it becomes a note
        transform = guide.get_transform(params)
    if not np.all(np.diagonal(transform.scale_tril) > 0.0):
        return guide, params, [_singular(guide)]
    normal = AutoMultivariateNormal(program.model, prefix=guide.prefix)
    set_up(normal, program)
    known = {
        f"{guide.prefix}_loc": transform.loc,
        f"{guide.prefix}_scale_tril": transform.scale_tril,
    }
    return normal, {**params, **known}, []


def _singular(guide: AutoGuide) -> Note:
    return Note(
        "singular", "wrong",
        f"The Hessian at the mode is singular, so that {type(guide).__name__} is a "
        "point without a spread.",
        "Train it for longer, or use `AutoMultivariateNormal`, or a sampler.",
    )  # fmt: skip
