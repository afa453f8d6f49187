"""Deep GPs on UCI regression: one model, four posteriors, equal time.

    python benchmarks/deep_uci.py --data DIR [--sets ...] [--depths 1 2] [--splits 5]
        [--seconds 30] [--methods ...]

Figures 4.3 and 5.7 of the thesis: mean test log-likelihood in original units, on the
published splits. Every row is written as soon as it is known, and rows that are known
are not run again.

Settings, fixed before the first run (looked at on split 10 of boston, which is not
reported): 100 inducing inputs (k-means), inner layers as wide as the inputs, RBF
kernels with one lengthscale a column, minibatches of 512, double precision, one core;
the rest is in `four_posteriors.py`. Each fit trains for `--seconds`, compilation apart:
the pace of a method is measured once a set and depth, and gives the same number of
steps on all splits.
"""

from __future__ import annotations

import argparse
import json
import time

import jax
import jax.random as jr
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from datasets import add_data_option, data_folder
from four_posteriors import METHODS, Contest
from results import FOLDER, machine, markdown_table, write

import numpyro_gpx as gpx

NAME = "deep_uci"
SETS = ("boston", "energy", "concrete", "power")
NUM_INDUCING = 100


def make_model(X, depth):
    Z = gpx.inducing.kmeans(jr.key(0), X, min(NUM_INDUCING, len(X)))
    return gpx.models.deep_gp(
        gpx.inducing.Points(Z, learn=True), widths=(X.shape[1],) * (depth - 1)
    )


def run_row(folder, name, depth, split, method, paces, seconds):
    with np.load(folder / f"{name}.npz") as archive:
        X, y = archive["X"].astype(float), archive["y"].astype(float)
        test = archive["test_idx"][split]
    train = np.setdiff1d(np.arange(len(X)), test)
    data = gpx.standardise(X[train], y[train])
    contest = Contest(make_model(data.X, depth), data.X, data.y)
    label = f"{name} {depth} {method}"
    if label not in paces:
        paces[label] = contest.pace_of(method)
    before = time.perf_counter()
    fit, steps = contest.train(method, jr.key(split), paces[label], seconds)
    elapsed = time.perf_counter() - before
    prediction = data.predict(fit, X[test])
    row = {
        "log_likelihood": float(np.mean(prediction.log_prob(y[test]))),
        "rmse": float(np.sqrt(np.mean((prediction.mean - y[test]) ** 2))),
        "steps": steps,
        "seconds": elapsed,
        "budget": seconds,
    }
    if method == "Implicit":
        row["discriminator_accuracy"] = fit.info["discriminator_accuracy"]
    jax.clear_caches()
    return row


def gathered(rows):
    """Test log-likelihoods by set and depth, then method, then split."""
    found: dict = {}
    for label, row in rows.items():
        name, depth, split, method = label.split()
        by_method = found.setdefault((name, depth), {})
        by_method.setdefault(method, {})[split] = row["log_likelihood"]
    return found


def mean_and_error(values):
    values = np.fromiter(values, float)
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return np.mean(values), error


def paired(rows):
    """Differences to DSVI on the same splits, and on how many they are positive."""
    lines = []
    for (name, depth), methods in gathered(rows).items():
        cells = []
        for method in METHODS[1:]:
            both = sorted(set(methods["DSVI"]) & set(methods.get(method, {})))
            values = [methods[method][s] - methods["DSVI"][s] for s in both]
            mean, error = mean_and_error(values)
            ahead = sum(x > 0.0 for x in values)
            cells.append(f"{mean:+.3f} ± {error:.3f} ({ahead} of {len(both)})")
        lines.append([name, depth, *cells])
    return markdown_table(["set", "layers", *METHODS[1:]], lines)


def text_of(rows):
    """Means and standard errors over the splits that were run."""
    lines = []
    for (name, depth), methods in gathered(rows).items():
        cells = []
        for method in METHODS:
            values = methods.get(method)
            if values is None:
                cells.append("")
                continue
            mean, error = mean_and_error(values.values())
            cells.append(f"{mean:.3f} ± {error:.3f} ({len(values)})")
        lines.append([name, depth, *cells])
    budgets = sorted({row["budget"] for row in rows.values()})
    return (
        "# Deep GPs on UCI regression\n\nMean test log-likelihood in original units, "
        "mean ± standard error over splits (how many). Training time of a fit: "
        f"{budgets} s on one core, compilation apart. Settings: "
        "`benchmarks/deep_uci.py`; figure: `docs/deep_uci.png`.\n\n"
        + markdown_table(["set", "layers", *METHODS], lines)
        + "\n\nDifferences to DSVI, split by split (on how many it is ahead). SGHMC "
        "starts from nothing, Flow and Implicit from a Gaussian fit that takes a third "
        "of their time.\n\n" + paired(rows)
    )


def draw(rows, path):
    """A dot with its standard error for each method and depth, a panel a set."""
    found = gathered(rows)
    sets = list(dict.fromkeys(name for name, _ in found))
    figure, axes = plt.subplots(
        1, len(sets), figsize=(2.7 * len(sets), 2.9), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for ax, name in zip(axes[0], sets, strict=True):
        labels = []
        for (other, depth), methods in found.items():
            if other != name:
                continue
            for method in METHODS:
                if method in methods:
                    mean, error = mean_and_error(methods[method].values())
                    colour = f"C{METHODS.index(method)}"
                    ax.errorbar(
                        mean, -len(labels), xerr=error, fmt="o", color=colour, capsize=2
                    )
                    labels.append(f"{method} {depth}")
        ax.set_yticks(-np.arange(len(labels)), labels)
        ax.set(title=name, xlabel="test log-likelihood")
        ax.grid(axis="x", alpha=0.3)
        ax.locator_params(axis="x", nbins=4)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    options = parser.parse_args()
    folder = data_folder(options.data)
    path = FOLDER / f"{NAME}.json"
    known = json.loads(path.read_text()) if path.exists() else {"rows": {}, "paces": {}}
    rows, paces = known["rows"], known["paces"]
    for split in range(options.splits):
        for name in options.sets:
            for depth in options.depths:
                for method in options.methods:
                    label = f"{name} {depth} {split} {method}"
                    if label in rows:
                        continue
                    rows[label] = run_row(
                        folder, name, depth, split, method, paces, options.seconds
                    )
                    print(label, rows[label], flush=True)
                    record = {"machine": machine(), "paces": paces, "rows": rows}
                    path.write_text(json.dumps(record, indent=1) + "\n")
    write(NAME, {"paces": paces, "rows": rows}, text_of(rows))
    draw(rows, FOLDER.parents[1] / "docs" / f"{NAME}.png")


if __name__ == "__main__":
    main()
