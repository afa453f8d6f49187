"""Real data for benchmarks, read from a folder that the user names."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["Fold", "add_data_option", "data_folder", "folds", "load"]


class Fold(NamedTuple):
    """Training and test rows, standardised by the training rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def add_data_option(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the option `--data`."""
    parser.add_argument(
        "--data", default=None, help="folder of .npz files; or set NUMPYRO_GPX_DATA"
    )


def data_folder(given: str | None) -> Path:
    """The folder of `--data`, or of the environment variable."""
    folder = given or os.environ.get("NUMPYRO_GPX_DATA")
    if folder is None or not Path(folder).is_dir():
        raise SystemExit(
            "This benchmark reads real data: name its folder with --data DIR or "
            f"NUMPYRO_GPX_DATA; got {folder!r}."
        )
    return Path(folder)


def load(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `(N, D)` and targets `(N,)` of one data set, as floats."""
    with np.load(folder / f"{name}.npz") as archive:
        return archive["X"].astype(float), archive["y"].astype(float)


def folds(X, y, number: int, *, scale_targets: bool, seed: int = 0):
    """Folds of cross-validation over shuffled rows, standardised one by one."""
    order = np.random.default_rng(seed).permutation(len(X))
    for test in np.array_split(order, number):
        train = np.setdiff1d(order, test)
        shift, scale = X[train].mean(0), X[train].std(0)
        scale = np.where(scale > 1e-12, scale, 1.0)
        inputs = [(X[rows] - shift) / scale for rows in (train, test)]
        targets = [y[rows] for rows in (train, test)]
        if scale_targets:
            middle, spread = targets[0].mean(), targets[0].std()
            targets = [(t - middle) / spread for t in targets]
        yield Fold(inputs[0], targets[0], inputs[1], targets[1])
