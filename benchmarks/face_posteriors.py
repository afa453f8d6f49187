"""Where is a half-seen face in the latent plane? (thesis figure 4.4)

    python benchmarks/face_posteriors.py --data DIR

A GPLVM with two latent dimensions learns 1000 frames of Frey's face. Of new frames only
the upper half is seen, so that several places in the plane may explain it. Their
posterior, `gpx.latent_space.row_model`, is computed on a grid and inferred by a
Gaussian, a flow and an implicit guide. The frames shown are those, of 200 that were not
learnt from, whose grid posterior has the most mass outside the region around its
highest mode. The thesis has two layers, and no inducing points; one sparse layer is
what two cores manage.

Settings were fixed before the first run.
"""

from __future__ import annotations

import argparse
import warnings

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optax
from datasets import add_data_option, data_folder
from results import FOLDER, markdown_table, write
from scipy import ndimage
from scipy.stats import norm

import numpyro_gpx as gpx

NAME = "face_posteriors"
SHAPE = (28, 20)
NUM_SHOWN, NUM_CANDIDATES, NUM_DRAWS = 4, 200, 20000
METHODS = ("Gaussian", "Flow", "Implicit")


def faces(folder):
    with np.load(folder / "freyface.npz") as archive:
        images = archive["Y"].astype(float)
    images = images[np.random.default_rng(0).permutation(len(images))]
    train, new = images[:1000], images[1000 : 1000 + NUM_CANDIDATES]
    middle = train.mean(axis=0)
    scale = np.std(train - middle)
    upper = np.arange(560) < 280
    return (train - middle) / scale, np.where(upper, (new - middle) / scale, np.nan)


def learn(Y):
    start = np.asarray(gpx.latent_space.pca(Y, 2))
    Z = gpx.inducing.kmeans(jr.key(0), start, 50)
    model = gpx.models.gplvm(gpx.inducing.Points(Z, learn=True), num_outputs=Y.shape[1])
    guide = gpx.guides.UnscentedLatent(gpx.guides.OptimalGaussian(model))
    return gpx.fit_lbfgs(model, guide, Y, key=jr.key(0), max_steps=200, progress=False)


def plane(fit, number=100):
    """Coordinates of a grid over the latent inputs that were learnt, `(G,)` each."""
    means = fit.latent_inputs().mean
    low, high = means.min(axis=0) - 1.0, means.max(axis=0) + 1.0
    return np.linspace(low[0], high[0], number), np.linspace(low[1], high[1], number)


class Grid:
    """Predictions at all cells, and posteriors of rows by Bayes' rule."""

    def __init__(self, fit, axes):
        self.shape = tuple(map(len, axes))
        self.H = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
        prediction = fit.predict(given={"h": self.H})
        self.mean, self.sd = prediction.mean, prediction.sd  # (G, 560)

    def posterior(self, row):
        """Probabilities of the cells."""
        seen = np.isfinite(row)
        entries = norm(self.mean[:, seen], self.sd[:, seen]).logpdf(row[seen])
        log_p = entries.sum(axis=1) + norm.logpdf(self.H).sum(axis=1)
        p = np.exp(log_p - log_p.max())
        return (p / p.sum()).reshape(self.shape)


def mass_elsewhere(p):
    """Mass outside the region above 1 % of the maximum that holds the maximum."""
    regions, _ = ndimage.label(p > 0.01 * p.max())
    return 1.0 - p[regions == regions[np.unravel_index(p.argmax(), p.shape)]].sum()


def cells(draws, axes):
    """Shares of draws in the cells; those outside are in the nearest."""
    index = []
    for x, axis in zip(draws.T, axes, strict=True):
        step = axis[1] - axis[0]
        place = np.round((x - axis[0]) / step).astype(int)
        index.append(np.clip(place, 0, len(axis) - 1))
    shares = np.zeros((len(axes[0]), len(axes[1])))
    np.add.at(shares, tuple(index), 1.0 / len(draws))
    return shares


def infer(method, model):
    options = {"key": jr.key(0), "progress": False}
    if method == "Implicit":
        guide = gpx.guides.Implicit(model, theta="joint")
        return gpx.fit_implicit(
            model, guide, num_rounds=5000, temperature=20.0, **options
        )
    blocks = 0 if method == "Gaussian" else 4
    guide = gpx.guides.Flow(
        model, num_blocks=blocks, init_scale=1.0, path_gradient=True
    )
    steps = 3000 if method == "Gaussian" else 20000
    temperature, rate = (1.0, 0.01) if method == "Gaussian" else (200.0, 5e-4)
    return gpx.fit_svi(
        model, guide, num_steps=steps, temperature=temperature,
        loss=gpx.infer.ELBO(32),
        optimizer=optax.adam(optax.cosine_decay_schedule(rate, steps)), **options,
    )  # fmt: skip


def divergence(p, q, width=1.0):
    """Jensen-Shannon divergence of two sets of cells, both smoothed by one cell.

    Smoothing keeps the noise of 20000 draws in 10000 cells out of it.
    """
    p, q = (ndimage.gaussian_filter(x, width) + 1e-300 for x in (p, q))
    middle = 0.5 * (p + q)
    return float(0.5 * np.sum(p * np.log(p / middle) + q * np.log(q / middle)))


def window(ps, axes):
    """Limits of a panel that hold what any of the densities shows."""
    places = np.argwhere(np.max([p / p.max() for p in ps], axis=0) > 0.02)
    limits = []
    for axis, low, high in zip(axes, places.min(0), places.max(0), strict=True):
        middle = 0.5 * (axis[low] + axis[high])
        half = max(0.6 * (axis[high] - axis[low]), 1.0)
        limits.append((middle - half, middle + half))
    return {"xlim": limits[0], "ylim": limits[1]}


def draw(panels, axes, path):
    """Rows: frames; columns: the grid, then the methods."""
    names = ("posterior on a grid", *METHODS)
    figure, places = plt.subplots(
        len(panels), len(names), figsize=(2.3 * len(names), 2.2 * len(panels)),
        sharex="row", sharey="row", layout="constrained", squeeze=False,
    )  # fmt: skip
    for row, (ps, scores) in zip(places, panels, strict=True):
        row[0].set(**window(ps, axes))
        for ax, name, p in zip(row, names, ps, strict=True):
            smooth = ndimage.gaussian_filter(p, 1.0)
            ax.pcolormesh(*axes, smooth.T**0.5, cmap="Blues", rasterized=True)
            score = scores.get(name)
            ax.set_title(name if score is None else f"{name}: {score:.3f}", fontsize=8)
    figure.supxlabel("latent inputs; colour: root of the density", fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    options = parser.parse_args()
    Y, seen = faces(data_folder(options.data))
    fit = learn(Y)
    print(f"learnt in {fit.seconds:.0f} s", flush=True)
    axes = plane(fit)
    grid = Grid(fit, axes)
    elsewhere = [mass_elsewhere(grid.posterior(row)) for row in seen]
    shown = np.argsort(elsewhere)[::-1][:NUM_SHOWN]
    panels, lines = [], []
    for index in shown:
        truth = grid.posterior(seen[index])
        model = gpx.latent_space.row_model(fit, seen[index][None], missing=True)
        ps, scores = [truth], {}
        for method in METHODS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                found = infer(method, model)
            draws = np.asarray(found.draws(NUM_DRAWS)["h"])[:, 0]
            ps.append(cells(draws, axes))
            scores[method] = divergence(truth, ps[-1])
        panels.append((ps, scores))
        lines.append([int(index), elsewhere[index], *scores.values()])
        print(lines[-1], flush=True)
    draw(panels, axes, FOLDER.parents[1] / "docs" / f"{NAME}.png")
    header = ["frame", "mass of other modes", *METHODS]
    text = (
        "# Half-seen faces in the latent plane\n\nJensen-Shannon divergence, in nats, "
        "from the posterior on a grid; at most 0.693. Settings: "
        "`benchmarks/face_posteriors.py`; figure: `docs/face_posteriors.png`.\n\n"
        + markdown_table(header, lines)
    )
    write(NAME, {"rows": lines}, text)


if __name__ == "__main__":
    main()
