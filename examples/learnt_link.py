"""A link learnt from the data: labels of which a tenth is wrong, real targets bent.

    python examples/learnt_link.py [--data DIR] [--out out]

Left, a classifier whose link is a parameter (on banana with `--data`, else on made-up
labels with errors); right, a regression whose link has a prior, by SVI and by NUTS.
"""

from __future__ import annotations

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import optax
from options import Options, parse, save

import numpyro_gpx as gpx


def main(args=None) -> None:
    options = parse(__doc__, args)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    fit = classify(options)
    gpx.plots.link(fit, base="logit", ax=axes[0])
    axes[0].set_title("labels, link as a parameter")
    for ax, (name, fit) in zip(axes[1:], regress(options).items(), strict=True):
        gpx.plots.link(fit, base="identity", ax=ax)
        ax.set(title=f"bent targets, link with a prior, {name}", ylim=(-4.5, 4.5))
    save(figure, options, "learnt_link.png")


def classify(options: Options):
    X, y = read_labels(options)
    Z = gpx.inducing.kmeans(jr.key(0), X, 15)

    def model(X, y=None):
        kernel = gpx.models.priors.stationary(gpx.kernels.RBF)()
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        link = gpx.links.learnt_link("link", "logit", num_pieces=20)
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(link), obs=y)

    return gpx.fit_svi(
        model,
        gpx.guides.WhitenedGaussian(model),
        X,
        y,
        key=jr.key(1),
        num_steps=10 if options.quick else 2000,
        optimizer=optax.adam(0.03),
        progress=not options.quick,
    )


def read_labels(options: Options):
    if options.data is not None:
        with np.load(options.data / "banana.npz") as archive:
            X, y = archive["X"].astype(float), archive["y"].astype(float)
            return X[::5], y[::5]
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (400, 2))
    inside = np.sum(X**2, axis=1) < 2.0
    wrong = rng.uniform(size=400) < 0.1
    return X, (inside ^ wrong).astype(float)


def regress(options: Options):
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(-2.0, 2.0, 150))[:, None]
    y = 1.5 * np.tanh(2.0 * np.sin(2.0 * X[:, 0])) + 0.15 * rng.normal(size=150)
    Z = np.linspace(-2.0, 2.0, 10)[:, None]

    def model(X, y=None):
        kernel = gpx.kernels.RBF(variance=1.0, lengthscale=0.8)
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        link = gpx.links.random_link("link", num_pieces=16, integrate=True)
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.15, link), obs=y)

    progress = not options.quick
    svi = gpx.fit_svi(
        model,
        gpx.guides.WhitenedGaussian(model),
        X,
        y,
        key=jr.key(2),
        num_steps=10 if options.quick else 3000,
        optimizer=optax.adam(0.03),
        progress=progress,
    )
    draws = 5 if options.quick else 500
    nuts = gpx.fit_nuts(
        model, X, y, key=jr.key(3), init=svi, progress=progress, num_chains=1,
        num_warmup=draws, num_samples=draws,
    )  # fmt: skip
    return {"SVI": svi, "NUTS": nuts}


if __name__ == "__main__":
    main()
