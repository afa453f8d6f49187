"""The Bayesian GPLVM: three kinds of oil flow found in twelve readings, unlabelled.

    python examples/gplvm.py [--data DIR] [--out out]

A Matérn kernel has no closed-form psi statistics; the unscented rule needs none. Labels
are used for colours, and to ask whether the nearest row has the same one. Oil flow if
`--data` names a folder with `oilflow.npz`, else a made-up set of three classes.
"""

from __future__ import annotations

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from options import parse, save

import numpyro_gpx as gpx


def main(args=None) -> None:
    options = parse(__doc__, args)
    Y, labels = load_data(options)
    Y = (Y - Y.mean(axis=0)) / Y.std(axis=0)
    num_dims = 3 if options.quick else 5
    start = np.asarray(gpx.latent_space.pca(Y, num_dims))
    Z = gpx.inducing.kmeans(jr.key(0), start, 8 if options.quick else 50)
    kernel = gpx.models.priors.stationary(
        gpx.kernels.Matern32, num_dims=num_dims, lengthscale=num_dims**0.5
    )
    inducing = gpx.inducing.Points(Z, learn=True)
    model = gpx.models.gplvm(inducing, num_outputs=Y.shape[1], kernel=kernel)
    fit = gpx.fit_lbfgs(
        model,
        gpx.guides.UnscentedLatent(gpx.guides.OptimalGaussian(model)),
        Y,
        key=jr.key(0),
        max_steps=5 if options.quick else 400,
        progress=not options.quick,
    )
    print(
        f"objective {fit.info['objective']:.1f}; bound, of 1000 draws, "
        f"{fit.info['elbo']:.1f} ± {fit.info['elbo_standard_error']:.1f}"
    )

    figure, axes = plt.subplots(
        1, 3, figsize=(12, 4.2), width_ratios=(4, 4, 2.6), layout="constrained"
    )
    gpx.plots.latent_space(fit, labels=labels, ax=axes[1])
    for label, look in gpx.plots.styles(np.unique(labels)).items():
        shown = start[labels == label]
        axes[0].scatter(
            shown[:, 0], shown[:, 1], s=6, color=look["color"], marker=look["marker"],
            linewidths=0,
        )  # fmt: skip
    axes[0].set(xlabel="component 0", ylabel="component 1")
    axes[0].spines[["top", "right"]].set_visible(False)
    axes[0].tick_params(labelsize="small")
    gpx.plots.relevance(fit, ax=axes[2])
    axes[2].set_title("relevance of the dimensions", loc="left", fontsize="medium")

    lengthscale = fit.draws(1)["lengthscale"][0]
    means = fit.latent_inputs().mean
    two = np.argsort(lengthscale)[:2]
    found = {
        "two principal components": start[:, :2],
        "two latent dimensions": means[:, two] / lengthscale[two],
        "all latent dimensions": means / lengthscale,
        "all readings": Y,
    }
    scores = {name: nearest_agrees(x, labels) for name, x in found.items()}
    for name, score in scores.items():
        print(f"{name}: {score:.1%} of nearest rows have the same label")
    shown = ("two principal components", "two latent dimensions")
    for ax, words, name in zip(axes, ("PCA", "GPLVM"), shown, strict=False):
        words = f"{words}: {scores[name]:.1%} of nearest rows agree"
        ax.set_title(words, loc="left", fontsize="medium")
    axes[1].text(0.01, 0.01, "ellipses: 1 sd", transform=axes[1].transAxes, fontsize=8)
    save(figure, options, "gplvm.png")


def nearest_agrees(x, labels) -> float:
    """How often the nearest other row has the same label."""
    sq_dist = np.sum((x[:, None] - x[None]) ** 2, axis=-1)  # (N, N)
    np.fill_diagonal(sq_dist, np.inf)
    return float(np.mean(labels[np.argmin(sq_dist, axis=1)] == labels))


def load_data(options):
    """Readings `(N, 12)` and labels `(N,)`."""
    if options.data is not None:
        with np.load(options.data / "oilflow.npz") as archive:
            Y, labels = archive["Y"], archive["labels"]
        step = 20 if options.quick else 1
        return Y[::step].astype(float), labels[::step]
    rng = np.random.default_rng(0)
    number = 40 if options.quick else 300
    labels = rng.integers(0, 3, number)
    # Three bent arms in a plane, seen through smooth functions.
    along = rng.uniform(0.3, 2.0, number)
    angle = 2.0 * np.pi * labels / 3.0 + 1.5 * along
    H = along[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    H += 0.08 * rng.normal(size=H.shape)
    waves = H @ rng.normal(size=(2, 12)) * 2.0 + rng.uniform(0.0, 2.0 * np.pi, 12)
    return np.sin(waves) + 0.05 * rng.normal(size=waves.shape), labels


if __name__ == "__main__":
    main()
