"""Deep GPs on UCI regression: one model, four posteriors, equal wall-clock time.

    python benchmarks/deep_uci.py --data DIR [--sets ...] [--depths 1 2] [--splits 5]
        [--seconds 60] [--methods ...]

Figures 4.3 and 5.7 of the thesis: mean test log-likelihood in original units, on the
published splits. Every row is written as soon as it is known, and rows that are known
are not run again.

Settings, fixed before the first run: 100 inducing inputs (k-means), inner layers as
wide as the inputs, RBF kernels with one lengthscale a column, hyperparameters and
inducing inputs as points in all methods, minibatches of 512. A fit takes `--seconds`,
compilation included; a short pilot, not counted, tells how many steps that is. SGHMC
spends half of it on Monte Carlo EM and half on draws; Flow and Implicit start from a
Gaussian fit of a third of the time, which is counted.
"""

from __future__ import annotations

import argparse
import json

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import numpy as np
import optax
from datasets import add_data_option, data_folder
from results import FOLDER, machine, markdown_table, write

import numpyro_gpx as gpx

NAME = "deep_uci"
SETS = ("boston", "energy", "concrete", "power")
NUM_INDUCING, BATCH = 100, 512
PILOT = 300


def make_model(X, depth):
    Z = gpx.inducing.kmeans(jr.key(0), X, min(NUM_INDUCING, len(X)))
    return gpx.models.deep_gp(np.asarray(Z), widths=(X.shape[1],) * (depth - 1))


def steps_within(seconds, run):
    """Steps that fit into the time, found with a pilot `run(number)`."""
    pilot = run(PILOT)
    each = pilot.info["seconds_per_step"]
    return max(PILOT, int((seconds - pilot.seconds + PILOT * each) / each))


def dsvi(model, X, y, key, seconds):
    """Gaussian q for each layer (Salimbeni & Deisenroth 2017)."""
    guide = gpx.guides.WhitenedGaussian(model)

    def run(number):
        return gpx.fit_svi(
            model, guide, X, y, key=key, num_steps=number, progress=False,
            batch_size=batch_size(X), optimizer=optax.adam(0.01),
        )  # fmt: skip

    return run(steps_within(seconds, run))


def flow(model, X, y, key, seconds):
    """A normalizing flow over the inducing variables of all layers."""
    start = dsvi(model, X, y, key, seconds / 3.0)
    guide = gpx.guides.Flow(model, theta="point")

    def run(number):
        return gpx.fit_svi(
            model, guide, X, y, key=key, num_steps=number, progress=False,
            batch_size=batch_size(X), optimizer=optax.adam(0.003), init=start,
        )  # fmt: skip

    return run(steps_within(seconds * 2.0 / 3.0, run))


def implicit(model, X, y, key, seconds):
    """A generator and a discriminator."""
    start = dsvi(model, X, y, key, seconds / 3.0)
    guide = gpx.guides.Implicit(model)

    def run(number):
        return gpx.fit_implicit(
            model, guide, X, y, key=key, num_steps=number, progress=False,
            batch_size=batch_size(X), init=start,
        )  # fmt: skip

    return run(steps_within(seconds * 2.0 / 3.0, run))


def sghmc(model, X, y, key, seconds):
    """Monte Carlo EM, then 200 draws of one chain, as far apart as time allows."""

    def run(rounds, gradients):
        return gpx.fit_sghmc(
            model, X, y, key=key, batch_size=batch_size(X), progress=False,
            em=gpx.infer.MonteCarloEM(num_rounds=rounds), num_warmup=50,
            num_samples=200, num_chains=1, num_steps=gradients, step_size=0.1,
        )  # fmt: skip

    short, long = run(200, 2), run(1000, 2)
    gradient = (long.seconds - short.seconds) / (800 * 6)
    compiling = short.seconds - gradient * (200 * 6 + 250 * 2)
    left = max(seconds - compiling, 0.2 * seconds) / gradient / 2.0
    return run(max(int(left / 6), 200), max(int(left / 250), 2))


METHODS = {"DSVI": dsvi, "SGHMC": sghmc, "Flow": flow, "Implicit": implicit}


def batch_size(X):
    return None if len(X) <= BATCH else BATCH


def run_row(folder, name, depth, split, method, seconds):
    with np.load(folder / f"{name}.npz") as archive:
        X, y = archive["X"].astype(float), archive["y"].astype(float)
        test = archive["test_idx"][split]
    train = np.setdiff1d(np.arange(len(X)), test)
    data = gpx.standardise(X[train], y[train])
    model = make_model(data.X, depth)
    fit = METHODS[method](model, data.X, data.y, jr.key(split), seconds)
    prediction = data.predict(fit, X[test])
    jax.clear_caches()
    return {
        "log_likelihood": float(np.mean(prediction.log_prob(y[test]))),
        "rmse": float(np.sqrt(np.mean((prediction.mean - y[test]) ** 2))),
        "seconds": float(fit.seconds),
        "budget": seconds,
    }


def text_of(rows):
    """Means and standard errors over the splits that were run."""
    found: dict = {}
    for label, row in rows.items():
        name, depth, _, method = label.split()
        found.setdefault((name, depth), {}).setdefault(method, []).append(row)
    lines = []
    for (name, depth), methods in found.items():
        cells = []
        for method in METHODS:
            values = [row["log_likelihood"] for row in methods.get(method, [])]
            spread = np.std(values) / max(len(values), 1) ** 0.5
            cell = f"{np.mean(values):.3f} ± {spread:.3f} ({len(values)})"
            cells.append(cell if values else "")
        lines.append([name, depth, *cells])
    budgets = sorted({row["budget"] for row in rows.values()})
    return (
        "# Deep GPs on UCI regression\n\nMean test log-likelihood in original units, "
        "mean ± standard error over splits (how many). Wall-clock budget of a fit: "
        f"{budgets} s, compilation included. Settings: `benchmarks/deep_uci.py`.\n\n"
        + markdown_table(["set", "layers", *METHODS], lines)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    options = parser.parse_args()
    folder = data_folder(options.data)
    path = FOLDER / f"{NAME}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for split in range(options.splits):
        for name in options.sets:
            for depth in options.depths:
                for method in options.methods:
                    label = f"{name} {depth} {split} {method}"
                    if label in rows:
                        continue
                    rows[label] = run_row(
                        folder, name, depth, split, method, options.seconds
                    )
                    print(label, rows[label], flush=True)
                    record = {"machine": machine(), "rows": rows}
                    path.write_text(json.dumps(record, indent=1) + "\n")
    write(NAME, {"rows": rows}, text_of(rows))


if __name__ == "__main__":
    main()
