"""Counts with exposure: rates of events where areas were watched for unequal times.

    python examples/counts.py [--out out]

The same counts without the exposure, beside it, show rates that are not there.
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
from options import parse, save

import numpyro_gpx as gpx


def main(args=None) -> None:
    options = parse(__doc__, args)
    X, y, exposure, rate = make_data()
    Z = gpx.inducing.Points(np.linspace(0.0, 10.0, 12)[:, None])

    def model(X, y=None, *, exposure=1.0):
        kernel = gpx.models.priors.stationary(gpx.kernels.RBF, lengthscale=1.5)()
        f = gpx.gp("f", kernel, inducing=Z)
        likelihood = gpx.likelihoods.Poisson(exposure=exposure)
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), likelihood, obs=y)

    guide = gpx.guides.ConditionalGaussian(model, theta="point")
    common = dict(key=jr.key(0), progress=not options.quick)
    common["max_steps"] = 5 if options.quick else 500
    fits = {
        "with exposure": gpx.fit_lbfgs(model, guide, X, y, exposure=exposure, **common),
        "without": gpx.fit_lbfgs(model, guide, X, y, **common),
    }
    grid = np.linspace(0.0, 10.0, 150)[:, None]
    figure, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for name, fit in fits.items():
        latent = fit.predict(grid, of="latent")
        low, high = (np.exp(latent.mean + c * latent.sd) for c in (-2.0, 2.0))
        ax.fill_between(grid[:, 0], low, high, alpha=0.2, linewidth=0)
        ax.plot(grid[:, 0], np.exp(latent.mean), label=name)
        low, high = (np.interp(X[:, 0], grid[:, 0], edge) for edge in (low, high))
        inside = np.mean((low < rate) & (rate < high))
        print(f"{name}: the true rate lies in the band at {inside:.0%} of the rows")
    ax.plot(X[:, 0], rate, "k--", linewidth=1, label="true rate")
    ax.plot(X[:, 0], y / exposure, ".", color="0.4", label="count / exposure")
    ax.set(xlabel="x", ylabel="events a unit of exposure")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    save(figure, options, "counts.png")


def make_data():
    rng = np.random.default_rng(3)
    x = np.sort(rng.uniform(0.0, 10.0, 150))
    rate = np.exp(0.4 + np.sin(x))
    exposure = np.where(x < 5.0, 1.0, 6.0) * rng.uniform(0.7, 1.3, 150)
    return x[:, None], rng.poisson(rate * exposure).astype(float), exposure, rate


if __name__ == "__main__":
    main()
