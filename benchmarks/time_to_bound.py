"""Steps until the bound that Adam at 0.01 reaches in 1000.

    python benchmarks/time_to_bound.py [--quick] [--only W1 W2 W4]

W1: sparse regression, 20000 rows of 8 columns, 256 inducing inputs, batches of 512.
W2: the same inputs with probit labels. W4: a two-layer deep GP, 10000 rows, width 8,
128 inducing inputs. Hyperparameters and inducing inputs are learnt. A schedule ends
with the fit, so that it is run with several numbers of steps; the smallest that reaches
the bound of 1000 steps of Adam at a constant 0.01 counts. The bound is that on all
rows, for W4 by the same draws in every row of the table. Rows that are known are not
run again.
"""

from __future__ import annotations

import argparse
import json
import time

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import numpy as np
import optax
from deep_speed import make_data as deep_data
from results import FOLDER, markdown_table, write
from scipy.special import ndtr

import numpyro_gpx as gpx

NAME = "time_to_bound"
NUM_ROWS, NUM_COLUMNS, NUM_INDUCING, BATCH = 20000, 8, 256, 512
BEFORE = "Adam 0.01, constant"  # what the others are measured by
SCHEDULE, NATURAL = "default schedule", "natural 0.1 + schedule"
STEPS = (250, 300, 350)
MUST = 350
DRAWS = 20


def sparse_data(labels):
    """A wave along one direction, with noise or as labels."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(NUM_ROWS, NUM_COLUMNS))
    f = np.sin(X @ rng.normal(size=NUM_COLUMNS))
    Z = X[rng.choice(NUM_ROWS, NUM_INDUCING, replace=False)].copy()
    if labels:
        return X, (rng.uniform(size=NUM_ROWS) < ndtr(3.0 * f)).astype(int), Z
    return X, f + 0.1 * rng.normal(size=NUM_ROWS), Z


def regression():
    X, y, Z = sparse_data(labels=False)
    return gpx.models.svgp(gpx.inducing.Points(Z, learn=True)), X, y


def classification():
    X, y, Z = sparse_data(labels=True)
    likelihood = gpx.likelihoods.Bernoulli("probit")
    points = gpx.inducing.Points(Z, learn=True)
    return gpx.models.svgp(points, likelihood=likelihood), X, y


def deep():
    X, y, Z = deep_data()
    points = gpx.inducing.Points(Z, learn=True)
    return gpx.models.deep_gp(points, widths=(X.shape[1],)), X, y


PROBLEMS = {"W1": regression, "W2": classification, "W4": deep}
OPTIMIZERS = {
    BEFORE: lambda: optax.adam(0.01),
    SCHEDULE: lambda: None,
    NATURAL: lambda: gpx.optimizers.natural(0.1),
}


def runs(problems):
    """Problem, optimiser and number of steps of each row; what matters most first."""
    for problem in problems:
        yield problem, BEFORE, 1000
        yield problem, SCHEDULE, MUST
    for num_steps in STEPS[::-1]:
        for problem in problems:
            yield problem, SCHEDULE, num_steps
            if problem != "W4":
                yield problem, NATURAL, num_steps


def run_row(problem, optimizer, num_steps):
    model, X, y = PROBLEMS[problem]()
    before = time.process_time()
    fit = gpx.fit_svi(
        model, gpx.guides.WhitenedGaussian, X, y, key=jr.key(0), num_steps=num_steps,
        batch_size=BATCH, optimizer=OPTIMIZERS[optimizer](), progress=False,
    )  # fmt: skip
    seconds = time.process_time() - before
    bound = fit.elbo(DRAWS, all_rows=True)
    return {
        "bound_per_row": float(bound.value) / len(X),
        "standard_error": float(bound.standard_error) / len(X),
        "cpu_seconds_loaded": seconds,
        "skipped": fit.info.get("natural_skipped", 0),
        "notes": [note.kind for note in fit.check()],
    }


def reached(rows, problem, optimizer):
    """The fewest steps that reach the bound before; `None` if none of them do."""
    target = rows[f"{problem}|{BEFORE}|1000"]["bound_per_row"]
    enough = [
        int(label.split("|")[2])
        for label, row in rows.items()
        if label.startswith(f"{problem}|{optimizer}|")
        and row["bound_per_row"] >= target
    ]
    return min(enough, default=None)


def not_run(rows, problem, optimizer):
    """Numbers of steps that have not been tried."""
    return [n for n in STEPS if f"{problem}|{optimizer}|{n}" not in rows]


def text_of(rows):
    summary, lines = [], []
    for problem in PROBLEMS:
        if f"{problem}|{BEFORE}|1000" not in rows:
            continue
        for optimizer in (SCHEDULE, NATURAL):
            if any(label.startswith(f"{problem}|{optimizer}|") for label in rows):
                steps = reached(rows, problem, optimizer)
                said = f"more than {max(STEPS)}" if steps is None else steps
                left = not_run(rows, problem, optimizer)
                summary.append([problem, optimizer, said, left or "", MUST])
    for label, row in rows.items():
        bound = f"{row['bound_per_row']:.4f} ± {row['standard_error']:.1g}"
        seconds = f"{row['cpu_seconds_loaded']:.0f}"
        said = ", ".join(row["notes"]) if "notes" in row else "not recorded"
        lines.append([*label.split("|"), bound, seconds, row["skipped"], said])
    names = ["problem", "optimiser", "steps"]
    return (
        "# Steps to the bound of 1000 steps of Adam at 0.01\n\n"
        "The fewest steps, of those tried, whose schedule ends at that bound or above "
        "it. One seed. Peers are not in this table.\n\n"
        + markdown_table([*names, "not tried", "must"], summary)
        + "\n\nAll rows. CPU seconds are of a busy machine, compilation included where "
        "a program was met for the first time: steps count, seconds do not.\n\n"
        + markdown_table(
            [*names, "bound per row", "CPU s (loaded)", "skipped", "notes"], lines
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, nothing kept")
    parser.add_argument("--only", nargs="+", default=list(PROBLEMS))
    options = parser.parse_args()
    path = FOLDER / f"{NAME}.json"
    rows = {}
    if path.exists() and not options.quick:
        rows = json.loads(path.read_text())["rows"]
    for problem, optimizer, num_steps in runs(options.only):
        label = f"{problem}|{optimizer}|{num_steps}"
        if label in rows:
            continue
        rows[label] = run_row(problem, optimizer, 2 if options.quick else num_steps)
        print(label, rows[label], flush=True)
        if not options.quick:
            write(NAME, {"rows": rows}, text_of(rows))
    print(text_of(rows))


if __name__ == "__main__":
    main()
