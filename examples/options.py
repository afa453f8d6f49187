"""The command line that the examples share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Options", "parse", "save"]


class Options(NamedTuple):
    """Where to write, how much work to do, and where real data lies, if anywhere."""

    out: Path
    quick: bool
    data: Path | None


def parse(description: str, args=None) -> Options:
    """Read `--out`, `--quick` and `--data`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="output folder")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for tests")
    parser.add_argument("--data", help="folder of .npz files; or NUMPYRO_GPX_DATA")
    read = parser.parse_args(args)
    folder = read.data or os.environ.get("NUMPYRO_GPX_DATA")
    return Options(read.out, read.quick, None if folder is None else Path(folder))


def save(figure, options: Options, name: str) -> None:
    """Write a figure to the output folder and say so."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / name
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
