"""Where benchmark results go: JSON for machines, Markdown for readers."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import jax
import numpyro

__all__ = ["FOLDER", "machine", "markdown_table", "write"]

FOLDER = Path(__file__).parent / "results"


def machine() -> dict:
    """What the figures were measured on; no host names or paths."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpyro": numpyro.__version__,
        "float64": bool(jax.config.jax_enable_x64),
    }


def markdown_table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; floats with four significant digits."""

    def cell(x):
        return f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell(x) for x in line) + " |" for line in lines)


def write(name: str, record: dict, text: str) -> None:
    """Write `results/NAME.json` and `results/NAME.md`, and print the text."""
    FOLDER.mkdir(exist_ok=True)
    record = {"machine": machine(), **record}
    (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (FOLDER / f"{name}.md").write_text(text.rstrip() + "\n")
    print(text)
