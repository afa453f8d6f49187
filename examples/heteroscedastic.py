"""Noise that changes: accelerations in a motorcycle accident, two latent functions.

    python examples/heteroscedastic.py [--data DIR] [--out out]

With `--data` it reads `mcycle.npz` (Silverman 1985); otherwise it makes data that look
like it. Beside it a Gaussian with constant noise, on the same kernel.
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
import numpyro.distributions as dist
import optax
from options import Options, parse, save

import numpyro_gpx as gpx


def main(args=None) -> None:
    options = parse(__doc__, args)
    X, y = read(options)
    data = gpx.standardise(X, y)
    Z = gpx.inducing.Points(np.linspace(data.X.min(), data.X.max(), 15)[:, None])
    num_steps = 20 if options.quick else 3000
    models = {"constant noise": constant(Z), "changing noise": changing(Z)}
    fits = {}
    for name, model in models.items():
        fits[name] = gpx.fit_svi(
            model,
            gpx.guides.WhitenedGaussian(model),
            data.X,
            data.y,
            key=jr.key(0),
            num_steps=num_steps,
            optimizer=optax.adam(0.02),
            progress=not options.quick,
        )
        density = data.predict(fits[name], X).log_prob(y).mean()
        bound = fits[name].elbo().value
        print(f"{name}: bound {bound:.1f}, log density of a training row {density:.2f}")
    save(draw(fits, data, X, y), options, "heteroscedastic.png")


def read(options: Options):
    if options.data is not None:
        with np.load(options.data / "mcycle.npz") as archive:
            return archive["X"].astype(float), archive["y"].astype(float)
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(2.0, 58.0, 130))
    bump = -110.0 * np.exp(-0.5 * ((x - 21.0) / 4.0) ** 2)
    rebound = 40.0 * np.exp(-0.5 * ((x - 33.0) / 5.0) ** 2)
    noise = np.where(x < 14.0, 2.0, 24.0)
    return x[:, None], bump + rebound + noise * rng.normal(size=130)


def kernel(name: str):
    """A kernel of its own for each latent function."""
    variance = numpyro.sample(f"{name}/variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample(f"{name}/lengthscale", dist.LogNormal(-1.0, 1.0))
    return gpx.kernels.Matern52(variance, lengthscale)


def constant(Z):
    def model(X, y=None):
        f = gpx.gp("f", kernel("f"), inducing=Z)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(scale), obs=y)

    return model


def changing(Z):
    def model(X, y=None):
        f = gpx.gp("f", kernel("f"), inducing=Z)
        g = gpx.gp("g", kernel("g"), inducing=Z, mean=gpx.means.Constant(-1.0))
        likelihood = gpx.likelihoods.HeteroscedasticGaussian()
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", gpx.stack(f(X), g(X)), likelihood, obs=y)

    return model


def draw(fits, data, X, y):
    grid = np.linspace(X.min(), X.max(), 200)[:, None]
    figure, axes = plt.subplots(
        1, 2, figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    for ax, (name, fit) in zip(axes, fits.items(), strict=True):
        prediction = data.predict(fit, grid)
        low, high = prediction.quantile([0.05, 0.95])
        ax.fill_between(grid[:, 0], low, high, alpha=0.2, linewidth=0, label="90 %")
        ax.plot(grid[:, 0], prediction.mean, label="mean")
        ax.plot(X[:, 0], y, ".", color="0.3", markersize=4)
        ax.set(title=name, xlabel="time (ms)")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("acceleration (g)")
    axes[0].legend(frameon=False, loc="lower right")
    return figure


if __name__ == "__main__":
    main()
