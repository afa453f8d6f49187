"""Figure 1 and tables 1 and 2 of the dissertation on the unscented GPLVM.

    python benchmarks/unscented_tables.py --data DIR [--fresh] [--only NAME]

Table 3 is `free_simulation.py`. Every row is written as soon as it is known, and rows
that are known are not run again, so that the script can be stopped and resumed.

Settings, fixed before the first run: data standardised column by column (USPS: pixels
centred and divided by one common standard deviation); means start at the principal
components with variance 1, latent variances at 0.1, 20 inducing inputs at random rows
of the starting latent space, learnt; RBF or Matern kernels with one lengthscale a
dimension; hyperparameters as points; q(u) collapsed. Deterministic rules: L-BFGS.
Monte Carlo: the same collapsed objective with fresh draws, Adam at 0.01. Accuracy:
1-nearest-neighbour in the two latent dimensions of shortest lengthscale, five folds.
"""

from __future__ import annotations

import argparse
import json
import time

import jax

jax.config.update("jax_enable_x64", True)

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from datasets import add_data_option, data_folder
from numpyro.contrib.module import eqx_module
from results import FOLDER, markdown_table, write

import numpyro_gpx as gpx
from numpyro_gpx.processes.psi import psi_statistics
from numpyro_gpx.uncertain import InputBelief

NAME = "unscented_tables"
NUM_INDUCING = 20
PAPER = {
    ("oilflow100", "PCA-2", "-"): "79.0 ± 6.5",
    ("oilflow100", "analytic", "RBF"): "98.0 ± 2.7",
    ("oilflow100", "GH-32", "Matern32"): "95.0 ± 6.1",
    ("oilflow100", "GH-32", "RBF"): "98.0 ± 2.7",
    ("oilflow100", "UT-10", "Matern32"): "100.0 ± 0.0",
    ("oilflow100", "UT-10", "RBF"): "98.0 ± 2.7",
    ("oilflow100", "MC-10", "Matern32"): "85.6 ± 8.7",
    ("oilflow100", "MC-10", "RBF"): "98.2 ± 2.4",
    ("oilflow100", "MC-32", "Matern32"): "87.9 ± 5.4",
    ("oilflow100", "MC-32", "RBF"): "98.0 ± 2.5",
    ("oilflow100", "MC-200", "Matern32"): "95.4 ± 3.0",
    ("oilflow100", "MC-200", "RBF"): "97.0 ± 4.0",
    ("usps", "PCA-2", "-"): "35.5 ± 1.4",
    ("usps", "analytic", "RBF"): "36.0 ± 1.0",
    ("usps", "GH-4", "MLP"): "68.8 ± 0.9",
    ("usps", "GH-32", "RBF"): "36.7 ± 0.6",
    ("usps", "UT-4", "MLP"): "69.0 ± 1.9",
    ("usps", "UT-10", "RBF"): "39.0 ± 1.2",
    ("usps", "MC-4", "MLP"): "47.9 ± 1.8",
    ("usps", "MC-10", "RBF"): "26.6 ± 1.4",
    ("usps", "MC-32", "RBF"): "27.0 ± 1.4",
    ("usps", "MC-200", "MLP"): "54.3 ± 1.7",
    ("usps", "MC-200", "RBF"): "29.5 ± 1.5",
}


COMMENTS = """
Where ours differ from the paper's: on the 100 rows all deterministic rows agree within
the spread over folds (one wrong row is 1 %), save that the unscented Matern reaches 98
rather than 100, and Monte Carlo with few draws does as well as the others, where the
paper has 86 to 88; PCA differs since we standardise the columns. On USPS the RBF rows
are level with the paper's or above them, Monte Carlo by 15 points: ours draws afresh at
each step of Adam and ends at the bounds of the fixed rules. The MLP rows by fixed rules
reach 60 to 62 in 3000 L-BFGS steps from one start of the network, where the paper has
69; Monte Carlo with 4 draws reaches 73 (paper 48), with a bound 50000 nats higher: the
rules' rows are poor optima, not worse objectives. MC-200 of USPS was not reached (a
step of it evaluates the kernel at 10^6 points). The analytic row of USPS was fitted
with a jitter of 1e-6: with the default one L-BFGS ran into rounding errors of the
closed form and stopped 90000 nats short. On the 1000 rows the analytic bound falls into
poor optima from some inducing inputs, as its objective shows, and two Gauss-Hermite
nodes a dimension let the Matern objective rise 3750 nats above the bound.
"""


def rule_of(method):
    """The rule called `method` in the tables, and whether it draws."""
    kind, _, number = method.partition("-")
    if kind == "analytic":
        return gpx.cubature.Analytic()
    if kind == "UT":
        return gpx.cubature.Unscented()
    if kind == "GH":
        return gpx.cubature.GaussHermite(2)
    return gpx.cubature.MonteCarlo(int(number))


def accuracies(H, labels, seed=0):
    """Accuracy of 1-nearest-neighbour in each of five folds, in percent."""
    order = np.random.default_rng(seed).permutation(len(H))
    found = []
    for test in np.array_split(order, 5):
        train = np.setdiff1d(order, test)
        distances = ((H[test][:, None] - H[train][None]) ** 2).sum(-1)
        nearest = labels[train][distances.argmin(1)]
        found.append(100.0 * np.mean(nearest == labels[test]))
    return np.array(found)


def load(folder, name):
    """Standardised observations and labels."""
    with np.load(folder / f"{name}.npz") as archive:
        Y, labels = archive["Y"].astype(float), archive["labels"]
    if name != "usps":
        return (Y - Y.mean(0)) / Y.std(0), labels
    chosen = np.concatenate([np.flatnonzero(labels == c)[:500] for c in range(10)])
    Y, labels = Y[chosen], labels[chosen]
    return (Y - Y.mean(0)) / Y.std(), labels


def kernel_prior(kind, num_dims):
    """A function that draws the kernel inside the model."""
    if kind != "MLP":
        stationary = gpx.models.priors.stationary
        return stationary(getattr(gpx.kernels, kind), num_dims=num_dims)

    def kernel():
        make = eqx.nn.MLP(num_dims, 60, 30, 1, activation=jnp.tanh, key=jr.key(0))
        network = eqx_module("network", make)
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        return gpx.kernels.Warped(gpx.kernels.RBF(variance=variance), network)

    return kernel


def fit_once(Y, method, kind, num_dims, seed, steps):
    """One fit: latent means in the two most relevant dimensions, and its record."""
    start = np.asarray(gpx.latent_space.pca(Y, num_dims))
    chosen = np.random.default_rng(seed).choice(len(Y), NUM_INDUCING, replace=False)
    model = gpx.models.gplvm(
        gpx.inducing.Points(start[chosen], learn=True),
        num_outputs=Y.shape[1],
        kernel=kernel_prior(kind, num_dims),
    )
    rule = rule_of(method)
    guide = gpx.guides.UnscentedLatent(gpx.guides.OptimalGaussian(model), rule=rule)
    key = jr.key(seed)
    if rule.random:
        fit = gpx.fit_svi(
            model, guide, Y, key=key, num_steps=steps, progress=False,
            optimizer=optax.adam(0.01),
        )  # fmt: skip
    else:
        # Closed forms lose digits where lengthscales grow: on USPS with the default
        # jitter L-BFGS found "bounds" that were 3000 nats too high.
        with gpx.jitter(1e-6 if method == "analytic" and len(Y) > 1000 else None):
            fit = gpx.fit_lbfgs(
                model, guide, Y, key=key, max_steps=steps, progress=False
            )
    H = fit.latent_inputs().mean
    if kind != "MLP":
        H = H[:, np.argsort(fit.draws(4)["lengthscale"][0])[:2]]
    info = {
        "objective": fit.info["objective"],
        "elbo": fit.info["elbo"],
        "elbo_standard_error": fit.info["elbo_standard_error"],
        "seconds": fit.seconds,
    }
    return H, info


def run_row(Y, labels, method, kind, num_dims, repeats, steps):
    """Accuracy over folds and repeats, with the mean objective and bound."""
    every, infos = [], []
    for seed in range(repeats):
        H, info = fit_once(Y, method, kind, num_dims, seed, steps)
        every.append(accuracies(H, labels))
        infos.append(info)
        jax.clear_caches()  # every fit compiles its own functions
    means = [a.mean() for a in every]
    return {
        "accuracy": float(np.mean(every)),
        "fold_sd": float(np.mean([a.std() for a in every])),
        "repeat_sd": float(np.std(means)) if repeats > 1 else None,
        "repeats": repeats,
        "steps": steps,
        **{name: float(np.mean([i[name] for i in infos])) for name in infos[0]},
    }


def baseline(Y, labels, method):
    """1-NN on principal components, or on the data themselves."""
    H = Y if method == "raw" else np.asarray(gpx.latent_space.pca(Y, int(method[4:])))
    found = accuracies(H, labels)
    return {"accuracy": float(found.mean()), "fold_sd": float(found.std())}


def plan(name):
    """Rows of a table: method, kernel, latent dimensions, repeats, steps."""
    if name == "usps":
        return [
            ("UT-4", "MLP", 2, 1, 3000),
            ("GH-4", "MLP", 2, 1, 3000),
            ("UT-10", "RBF", 5, 1, 1000),
            ("analytic", "RBF", 5, 1, 1000),
            ("MC-4", "MLP", 2, 3, 3000),
            ("MC-10", "RBF", 5, 3, 1000),
            ("MC-32", "RBF", 5, 1, 500),
            ("GH-32", "RBF", 5, 1, 300),
            ("MC-200", "MLP", 2, 1, 300),
            ("MC-200", "RBF", 5, 1, 200),
        ]
    small = name == "oilflow100"
    few = 3 if small else 1
    rows = [("UT-10", "Matern32", 5, 5, 2000), ("UT-10", "RBF", 5, 5, 2000)]
    rows += [("analytic", "RBF", 5, 5, 2000)]
    rows += [("GH-32", kind, 5, few, 1000) for kind in ("Matern32", "RBF")]
    for number, repeats in ((10, 3), (32, 2), (200, 1)):
        for kind in ("Matern32", "RBF"):
            steps = 2000 if small else {10: 2000, 32: 1000, 200: 300}[number]
            rows.append((f"MC-{number}", kind, 5, repeats if small else 1, steps))
    return rows


def figure_1():
    """Error of Psi_1 and cost, relative to the unscented rule, by dimension."""
    rng = np.random.default_rng(0)
    X, Z = rng.normal(size=(40, 12)), rng.normal(size=(20, 12))
    rows = []
    for num_dims in range(1, 13):
        belief = InputBelief(
            jnp.asarray(X[:, :num_dims]), jnp.full((40, num_dims), 0.1**0.5)
        )
        kernel, points = gpx.kernels.RBF(), jnp.asarray(Z[:, :num_dims])
        truth = psi_statistics(kernel, belief, points).psi1
        rules = {
            "UT": gpx.cubature.Unscented(),
            "GH 2^D": gpx.cubature.GaussHermite(2),
            "MC 2D": gpx.cubature.MonteCarlo(2 * num_dims),
            "MC 2^D": gpx.cubature.MonteCarlo(2**num_dims),
            "MC 200": gpx.cubature.MonteCarlo(200),
        }
        found = {}
        for name, rule in rules.items():
            error, seconds = error_and_seconds(rule, kernel, belief, points, truth)
            found[name] = {"error": error, "seconds": seconds}
        rows.append({"dims": num_dims, **found})
    return rows


def error_and_seconds(rule, kernel, belief, points, truth):
    """Frobenius error (root mean square over 20 keys if it draws) and median time."""

    @jax.jit
    def psi1(key):
        nodes = rule.nodes(belief, key)
        every = jax.vmap(lambda X: kernel(X, points))(nodes.points)
        return jnp.tensordot(nodes.weights, every, axes=1)

    keys = jr.split(jr.key(0), 20 if rule.random else 1)
    errors = [float(jnp.sum((psi1(key) - truth) ** 2)) for key in keys]
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        psi1(keys[0]).block_until_ready()
        times.append(time.perf_counter() - begin)
    return float(np.sqrt(np.mean(errors))), float(np.median(times))


def text_of(record):
    """The tables as Markdown."""
    parts = [
        "# The tables of the unscented GPLVM\n",
        "Settings: see `benchmarks/unscented_tables.py`. Accuracy is of 1-nearest-"
        "neighbour in two latent dimensions, in percent, mean ± standard deviation "
        "over five folds; 'repeats' adds the standard deviation of the mean accuracy "
        "over repeats (inducing inputs and draws differ). 'objective' is what was "
        "maximised, 'elbo' the bound by 1000 draws with its standard error. 'paper' is "
        "table 1 (made on the 100 rows) or table 2 of the dissertation.\n",
        COMMENTS,
    ]
    for name, rows in record["tables"].items():
        parts.append(f"\n## {name}\n\n{table_text(name, rows)}\n")
    if record.get("figure_1"):
        parts.append(f"\n## Figure 1\n\n{figure_text(record['figure_1'])}\n")
    return "\n".join(parts)


def table_text(name, rows):
    header = ["method", "kernel", "accuracy", "repeats", "steps", "objective", "elbo"]
    lines = []
    for label, row in rows.items():
        method, kind = label.split(" ")
        accuracy = f"{row['accuracy']:.1f} ± {row['fold_sd']:.1f}"
        repeats = objective = elbo = steps = ""
        if "elbo" in row:
            spread = row["repeat_sd"]
            repeats = f"{row['repeats']}"
            repeats += "" if spread is None else f" (sd {spread:.1f})"
            objective = f"{row['objective']:.0f}"
            elbo = f"{row['elbo']:.0f} ({row['elbo_standard_error']:.1g})"
            steps = row["steps"]
        paper = PAPER.get((name, method, kind), "")
        line = [method, kind, accuracy, repeats, steps, objective, elbo, paper]
        lines.append(line)
    return markdown_table([*header, "paper"], lines)


def figure_text(rows):
    names = ["UT", "GH 2^D", "MC 2D", "MC 2^D", "MC 200"]
    errors = [[r["dims"], *(r[n]["error"] for n in names)] for r in rows]
    times = [[r["dims"], *(1e6 * r[n]["seconds"] for n in names)] for r in rows]
    return (
        "Frobenius error of Psi_1 (RBF, lengthscale 1, latent variance 0.1, n = 40, m ="
        " 20; Monte Carlo: root mean square of 20 runs):\n\n"
        + markdown_table(["D", *names], errors)
        + "\n\nMicroseconds an evaluation:\n\n"
        + markdown_table(["D", *names], times)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    parser.add_argument("--fresh", action="store_true", help="forget earlier rows")
    parser.add_argument("--only", default=None, help="a data set, or figure_1")
    options = parser.parse_args()
    folder = data_folder(options.data)
    path = FOLDER / f"{NAME}.json"
    record = {"tables": {}}
    if path.exists() and not options.fresh:
        record = json.loads(path.read_text())
    for name in ("oilflow100", "oilflow", "usps"):
        if options.only not in (None, name):
            continue
        Y, labels = load(folder, name)
        rows = record["tables"].setdefault(name, {})
        for method in ("raw", "PCA-2", "PCA-5"):
            rows.setdefault(f"{method} -", baseline(Y, labels, method))
        for method, kind, num_dims, repeats, steps in plan(name):
            label = f"{method} {kind}"
            if label not in rows:
                rows[label] = run_row(Y, labels, method, kind, num_dims, repeats, steps)
                print(name, label, rows[label], flush=True)
                path.write_text(json.dumps(record, indent=1) + "\n")
    if options.only in (None, "figure_1") and not record.get("figure_1"):
        record["figure_1"] = figure_1()
    write(NAME, record, text_of(record))


if __name__ == "__main__":
    main()
