"""The letters "DGP": shallow, deep, and with a latent input (tutorial figure 7).

    python benchmarks/deep_letters.py --data DIR [--steps 8000]

Targets have several values at one input, and jump: a deep GP can follow the jumps, a
latent input the several values. One row in ten is held out. Latent inputs are read off
the row by an encoder and weighed (10 replicates); densities at held-out rows are
mixtures over 500 draws of everything.
"""

from __future__ import annotations

import argparse

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optax
from datasets import add_data_option, data_folder, load
from results import FOLDER, markdown_table, write

import numpyro_gpx as gpx

NAME = "deep_letters"
BATCH, NUM_INDUCING = 512, 50


def models(X):
    """Models by name, and whether they have a latent input."""
    Z = np.asarray(gpx.inducing.kmeans(jr.key(0), X, NUM_INDUCING))
    # Latent inputs need inducing inputs of their own beside each one of X.
    rng = np.random.default_rng(0)
    wide = rng.permutation(np.tile(Z, (2, 1)))
    drawn = rng.normal(size=(len(wide), 1))
    points = gpx.inducing.Points(Z, learn=True)
    joint = gpx.inducing.Points(np.c_[wide, drawn], learn=True)
    # The second layer sees two columns, of which the second starts near 0.
    second = gpx.inducing.Points(np.c_[wide, 0.01 * drawn], learn=True)
    return {
        "shallow": (gpx.models.deep_gp(points), False),
        "deep": (gpx.models.deep_gp(points, widths=(1,)), False),
        "latent, shallow": (gpx.models.deep_gp([joint], num_latents=1), True),
        "latent, deep": (
            gpx.models.deep_gp([joint, second], widths=(2,), num_latents=(1, 0)),
            True,
        ),
    }


def fit_one(model, latent, X, y, steps):
    guide = gpx.guides.WhitenedGaussian(model)
    loss = gpx.infer.ELBO()
    if latent:
        guide = gpx.guides.UnscentedLatent(guide, encoder=gpx.guides.Encoder((50, 50)))
        loss = gpx.infer.ImportanceWeighted(10)
    return gpx.fit_svi(
        model, guide, X, y, key=jr.key(0), num_steps=steps, batch_size=BATCH,
        optimizer=optax.adam(0.005), loss=loss, progress=False,
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    parser.add_argument("--steps", type=int, default=8000)
    options = parser.parse_args()
    X, y = load(data_folder(options.data), "dgp_letters")
    order = np.random.default_rng(0).permutation(len(X))
    test, train = order[: len(X) // 10], order[len(X) // 10 :]
    figure, axes = plt.subplots(
        1, 5, figsize=(14, 3.2), sharex=True, sharey=True, layout="constrained"
    )
    axes[0].plot(X[train, 0], y[train], ".", color="0.2", markersize=0.8)
    axes[0].set_title("data", loc="left", fontsize="medium")
    rows = []
    for ax, (name, (model, latent)) in zip(axes[1:], models(X).items(), strict=True):
        fit = fit_one(model, latent, X[train], y[train], options.steps)
        prediction = fit.predict(X[test], num_components=500)
        score = prediction.log_prob(y[test])
        error = float(np.std(score) / np.sqrt(len(score)))
        rows.append([name, float(np.mean(score)), error, fit.seconds])
        print(rows[-1], flush=True)
        drawn = fit.predict(X[train][:4000]).sample(jr.key(1), 1)[0]
        ax.plot(X[train][:4000, 0], drawn, ".", color="#0072B2", markersize=0.8)
        title = f"{name}\ntest log density {np.mean(score):.3f}"
        ax.set_title(title, loc="left", fontsize="medium")
        jax.clear_caches()
    for ax in axes:
        ax.set_xlabel("x")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("y, and draws")
    figure.savefig(FOLDER.parents[1] / "docs" / f"{NAME}.png", dpi=110)
    header = ["model", "test log density a row", "standard error", "seconds"]
    text = (
        "# The letters (tutorial figure 7)\n\nFigure: `docs/deep_letters.png`. "
        "Settings: `benchmarks/deep_letters.py`, "
        f"{options.steps} steps.\n\n" + markdown_table(header, rows)
    )
    write(NAME, {"rows": rows, "steps": options.steps}, text)


if __name__ == "__main__":
    main()
