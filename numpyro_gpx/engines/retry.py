"""When a factorisation fails: once more with a larger jitter, then a diagnosis."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from numpyro_gpx.notes import Note
from numpyro_gpx.numerics.jitter import current_jitter, explicit_jitter, jitter
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.starts import initial_values
from numpyro_gpx.program.structure import structure_of
from numpyro_gpx.sites.marks import GPMark, marked

__all__ = ["NotFinite", "finding_a_start", "with_retry"]

# A second and last attempt uses this many times the default jitter.
_LARGER = 100.0

T = TypeVar("T")


class NotFinite(Exception):
    """An engine met NaN or infinity; the message says where.

    Attributes:
        step: Steps that were finite before it; `None` where there are no steps.
    """

    def __init__(self, message: str = "", step: int | None = None):
        super().__init__(message)
        self.step = step


@contextlib.contextmanager
def finding_a_start() -> Iterator[None]:
    """Let NumPyro's complaint that there is no start be one that is tried again."""
    try:
        yield
    except RuntimeError as error:
        if "valid initial parameters" not in str(error):
            raise
        raise NotFinite("No starting point with a finite density was found.") from None


def with_retry(
    attempt: Callable[[float | None], T], call: Call, params, *, stacklevel: int
) -> tuple[T, list[Note]]:
    """Call `attempt(jitter)`; on `NotFinite` once more from the start, with more.

    Returns what it came to, with a note on the second start if there was one.

    Args:
        attempt: The fit, given a relative jitter (`None` for the default).
        call: The model with its arguments, for the diagnosis.
        params: Values of its parameters, if known.
        stacklevel: Of the warning.
    """
    try:
        return attempt(explicit_jitter()), []
    except NotFinite as first:
        larger = _LARGER * current_jitter(_data_dtype(call))
        warnings.warn(
            f"{first} Starting again with a relative jitter of {larger:.0e}.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
        reason = str(first)
    try:
        with jitter(larger):
            found = attempt(larger)
    except NotFinite as second:
        raise ValueError(
            f"{second} A relative jitter of {larger:.0e} did not help either. "
            f"{_diagnosis(call.with_jitter(larger), params)}"
        ) from None
    return found, [_note(reason, larger)]


def _note(reason: str, larger: float) -> Note:
    return Note(
        "jitter", "remark",
        f"{reason} It was started again with a relative jitter of {larger:.0e}.",
        "Standardise the inputs, or use fewer or better spread inducing points.",
        {"jitter": larger},
    )  # fmt: skip


def _data_dtype(call: Call):
    """The floating dtype of the data; float32 data may live beside float64."""
    floats = [
        x.dtype
        for x in jax.tree.leaves(call.args)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.result_type(*floats) if floats else jnp.result_type(float)


def _diagnosis(call: Call, params) -> str:
    """What is known about the GP sites at the starting values."""
    structure = structure_of(call)

    def conditions(call, key):
        start = initial_values(call, structure, key, params=params)
        trace = call.trace({**(params or {}), **start}, key)
        priors = {name: m.prior for name, m in marked(trace, GPMark).items()}
        return {n: (p.condition(), p.inducing.coordinates()) for n, p in priors.items()}

    reports = []
    kernels = {
        name: type(mark.prior.kernels[0]).__name__
        for name, mark in marked(call.abstract_trace(), GPMark).items()
    }
    for name, (condition, Z) in run(conditions, call, jr.key(0)).items():
        size = structure.latents[name].shape[-1]
        repeated = 0 if Z is None else size - np.unique(np.asarray(Z), axis=0).shape[0]
        state = (
            f"has a condition of about {float(np.max(condition)):.0e}"
            if np.all(np.isfinite(condition))
            else "could not be factorised"
        )
        reports.append(
            f"GP site `{name}` (kernel {kernels[name]}, {size} inducing inputs, "
            f"{repeated} repeated): at the starting values Kuu {state}."
        )
    advice = (
        "Standardise the inputs, use fewer or better spread inducing points, a smaller "
        "learning rate or step size, float64, or priors that keep lengthscales and "
        "noise away from extremes."
    )
    return " ".join([*reports, advice])
