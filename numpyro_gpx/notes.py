"""What a fit's reader must know: doubts, with their evidence and what to do."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["SEVERITIES", "FitWarning", "Note", "as_text", "warn"]

SEVERITIES = ("remark", "doubt", "wrong")


class FitWarning(UserWarning):
    """A fit that may be doubted; its notes say why.

    Attributes:
        fit: The fit, for who turns warnings into errors: it is not lost.
    """

    fit: Any = None


class Note(NamedTuple):
    """One thing to know of a fit.

    Attributes:
        kind: What it is about, in a word: `"divergences"`, `"r_hat"`, ...
        severity: `"remark"` (worth knowing), `"doubt"` (results may be off) or
            `"wrong"` (some results are).
        message: What was found.
        advice: The next call to make.
        evidence: The numbers behind it.
    """

    kind: str
    severity: str
    message: str
    advice: str
    evidence: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} {self.advice}".rstrip()


def as_text(notes: Iterable[Note], indent: str = "  ") -> str:
    """The notes, one below the other."""
    return "\n".join(
        textwrap.fill(str(note), 96, initial_indent=indent, subsequent_indent="    ")
        for note in notes
    )


def warn(fit, *, of: str, stacklevel: int) -> None:
    """Warn of a fit's notes, once for all of them.

    Args:
        fit: A fit; nothing is said if it has no notes.
        of: Who made it.
        stacklevel: As of `warnings.warn`, counted from the caller.
    """
    if not fit.notes:
        return
    said = FitWarning(
        f"Notes on this fit by {of} (`fit.check()` lists them):\n{as_text(fit.notes)}"
    )
    said.fit = fit
    warnings.warn(said, stacklevel=stacklevel + 1)
