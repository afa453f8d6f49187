"""A comparison as text, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_gpx.comparison.scores import NUM_BINS

if TYPE_CHECKING:  # which imports this file
    from numpyro_gpx.comparison.result import Comparison

__all__ = ["as_text"]


def as_text(comparison: Comparison) -> str:
    """Title, what was fitted, notes, predictions and posterior, one below the other."""
    fits, sites = comparison.fits, comparison.sites
    number = comparison.num_rows
    rows = f", {number} test rows" if number else ""
    title = f"{len(fits)} fits{rows}; reference: {comparison.reference}"
    what = ["engine", "target", "approximation"]
    what += ["noise"] if fits["noise"].any() else []
    sampled = _table(
        ["fit", *what], [[name, *row] for name, *row in fits[what].itertuples()]
    )
    notes = [
        textwrap.fill(note, 98, initial_indent="* ", subsequent_indent="  ")
        for note in comparison.notes
    ]
    legend = (
        "log density: mean log predictive density of a test row, +- its standard "
        "error; difference: to the reference, rows paired; "
    ) + (
        "error rate: at probability 0.5; ECE: expected calibration error, 10 bins."
        if "error_rate" in fits
        else "coverage: share of targets inside the central 90 % predictive interval."
    )
    site_legend = (
        "ess, r_hat: samplers only, draws of a guide are independent; distance: "
        "Wasserstein distance to the reference in units of its sd; floor: what equal "
        "posteriors would show at these ESS."
    )
    blocks = [
        title,
        "What was fitted\n" + sampled,
        *(["Notes\n" + "\n".join(notes)] if notes else []),
        (
            "Predictions\n" + _scores(fits) + "\n" + textwrap.fill(legend, 100)
            if number
            else "Bounds\n" + _scores(fits)
        ),
        "Posterior\n" + _marginal_text(sites) + "\n" + textwrap.fill(site_legend, 100),
    ]
    return "\n\n".join(blocks)


def _scores(fits):
    titles = {
        "error_rate": "error rate",
        f"ece_{NUM_BINS}_bins": "ECE",
        "rmse": "RMSE",
        "coverage_90": "coverage",
    }
    shown = [column for column in titles if column in fits]
    # Columns with a standard error.
    forms = {"log_density": ".4f", "difference": "+.4f"} if "difference" in fits else {}
    heads = [column.replace("_", " ") for column in forms]
    header = ["fit", *heads, *(titles[c] for c in shown)]
    rows = []
    for name, row in fits.iterrows():
        rows.append(
            [
                name,
                *(_with_error(row[c], row[f"{c}_se"], f) for c, f in forms.items()),
                *(_number(row[column], ".3g") for column in shown),
                _with_error(row["elbo"], row["elbo_se"], ".2f"),
                _number(row["seconds"], ".1f"),
            ]
        )
    return _table([*header, "ELBO", "seconds"], rows)


def _marginal_text(sites):
    rows, previous = [], None
    for (site, name), row in sites.iterrows():
        rows.append(
            [
                "" if site == previous else site,
                name,
                *(_number(row[column], ".4g") for column in ("mean", "sd")),
                _number(row["ess"], ".0f"),
                _number(row["r_hat"], ".3f"),
                *(_number(row[column], ".3f") for column in ("distance", "floor")),
            ]
        )
        previous = site
    return _table(["site", "fit", *sites.columns], rows)


def _number(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


def _with_error(value, error, form):
    if np.isnan(value):
        return "-"
    if np.isnan(error) or error == 0:
        return format(value, form)
    return f"{format(value, form)} +- {format(error, form.removeprefix('+'))}"


def _table(header: list[str], rows: list[list[Any]]) -> str:
    """Text columns: words to the left, numbers to the right; long names are cut."""
    cells = [[_cut(str(cell)) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = {"site", "fit", "engine", "target", "approximation", "noise"}
    lines = [
        "  ".join(
            cell.ljust(width) if title in words else cell.rjust(width)
            for cell, width, title in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _cut(text, longest=24):
    return text if len(text) <= longest else text[: longest - 3] + "..."
