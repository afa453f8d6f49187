"""A deep GP written by hand, and its posterior by variational inference and sampling.

    python examples/deep_gp.py [--out out]

A step: a stationary GP rings beside it or smooths it away, two layers bend the input
instead. The same function of fifteen lines is fitted by doubly stochastic variational
inference and by SGHMC.
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
from options import parse, save

import numpyro_gpx as gpx

Z = np.linspace(-1.0, 1.0, 15)[:, None]


def rbf(name):
    """A kernel with priors, under the layer's name."""
    return gpx.kernels.RBF(
        variance=numpyro.sample(f"{name}/variance", dist.LogNormal(0.0, 1.0)),
        lengthscale=numpyro.sample(f"{name}/lengthscale", dist.LogNormal(-1.0, 1.0)),
    )


# What `gpx.models.deep_gp(gpx.inducing.Points(Z), widths=(1,))` returns, but for the
# priors and the inducing inputs of the second layer, which are learnt.
def deep(X, y=None, *, batch_size=None):
    f1 = gpx.gp(
        "f1", rbf("f1"), inducing=gpx.inducing.Points(Z), num_outputs=1,
        mean=gpx.means.Identity(),
    )  # fmt: skip
    f2 = gpx.gp("f2", rbf("f2"), inducing=gpx.inducing.Points(Z, learn=True))
    noise = gpx.models.priors.gaussian_noise()
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
        h = gpx.propagate("h", f1(X[i]))
        gpx.observe("y", f2(h), noise, obs=y, rows=i)


def shallow(X, y=None):
    f = gpx.gp("f1", rbf("f1"), inducing=gpx.inducing.Points(Z))
    noise = gpx.models.priors.gaussian_noise()
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", f(X), noise, obs=y)


def main(args=None) -> None:
    options = parse(__doc__, args)
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-1.0, 1.0, 20 if options.quick else 80))[:, None]
    y = np.where(X[:, 0] > 0.0, 1.0, -1.0) + 0.1 * rng.normal(size=len(X))
    fits = fit_all(X, y, options)
    grid = np.linspace(-1.2, 1.2, 200)[:, None]
    figure, axes = plt.subplots(
        1, len(fits), figsize=(12, 3.6), sharey=True, layout="constrained"
    )
    for ax, (name, fit) in zip(axes, fits.items(), strict=True):
        functions = np.asarray(fit.functions(jr.key(2), 20)(grid))
        ax.plot(grid[:, 0], functions.T, color="#0072B2", lw=0.6, alpha=0.6)
        ax.plot(X[:, 0], y, ".", color="0.2", markersize=3)
        ax.set_title(name, loc="left", fontsize="medium")
        ax.set_xlabel("x")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("y, and functions drawn from the posterior")
    save(figure, options, "deep_gp.png")


def fit_all(X, y, options):
    """Fits by name, the deep one by two engines."""
    key_shallow, key_svi, key_sghmc = jr.split(jr.key(0), 3)
    progress = not options.quick
    svi = gpx.fit_svi(
        deep, gpx.guides.WhitenedGaussian(deep), X, y, key=key_svi,
        num_steps=50 if options.quick else 8000, optimizer=optax.adam(0.01),
        progress=progress,
    )  # fmt: skip
    return {
        "one layer, L-BFGS": gpx.fit_lbfgs(
            shallow, gpx.guides.OptimalGaussian(shallow), X, y, key=key_shallow,
            progress=progress,
        ),
        "two layers, DSVI": svi,
        "two layers, SGHMC": gpx.fit_sghmc(
            deep, X, y, key=key_sghmc, params=svi, init=svi, step_size=0.1,
            num_chains=2, num_warmup=5 if options.quick else 500,
            num_samples=10 if options.quick else 500, progress=progress,
        ),
    }  # fmt: skip


if __name__ == "__main__":
    main()
