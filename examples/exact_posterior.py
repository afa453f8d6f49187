"""The exact posterior of a classifier, through its guide.

    python examples/exact_posterior.py --out out

A guide is trained in some twenty closed-form updates, and its draws are weighed: k-hat
says whether to believe them. Beside it the guide alone, and HMC in the guide's
coordinates as a second opinion. Draws `exact_posterior.png`.
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from options import parse, save

import numpyro_gpx as gpx

NAMES = ("lengthscale", "variance")


def make_data(number: int):
    """Labels on [-2, 2], with log odds `4 sin(3 x)`."""
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(-2.0, 2.0, number))[:, None]
    labels = 4.0 * np.sin(3.0 * X[:, 0]) + rng.logistic(size=number) > 0.0
    return X, labels.astype(float)


def make_model(rows):
    """A full GP: nothing is approximated."""

    def model(X, y=None):
        kernel = gpx.kernels.RBF(
            variance=numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
            lengthscale=numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0)),
        )
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Data(rows))
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(), obs=y)

    return model


def main(args=None) -> None:
    """Run the example."""
    options = parse(__doc__, args)
    X, y = make_data(12 if options.quick else 80)
    model = make_model(X)
    number = {"num_samples": 20 if options.quick else 500}
    key_guide, key_weights, key_hmc = jr.split(jr.key(0), 3)
    guide = gpx.fit_sites(model, X, y, key=key_guide)
    fits = {
        "guide": guide,
        "exact, by weights": gpx.fit_guided(
            model, X, y, guide=guide, key=key_weights, **number
        ),
        "exact, by HMC": gpx.fit_guided(
            model, X, y, guide=guide, method="hmc", key=key_hmc, **number
        ),
    }
    info = fits["exact, by weights"].info
    print(f"k-hat {info['k_hat']:.2f}, worth {info['importance_ess']:.0f} draws")
    print(gpx.compare(fits, reference="exact, by HMC"))
    save(figure_of(fits, X, y), options, "exact_posterior.png")


def figure_of(fits: dict, X, y):
    """Draws of the hyperparameters, and the share of ones."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), width_ratios=(1, 1, 1.6))
    for ax, (name, fit) in zip(axes, list(fits.items())[:2], strict=False):
        draws = fit.draws(2000)
        ax.plot(*(np.log(draws[n]) for n in NAMES), ".", markersize=2, alpha=0.4)
        ax.set(title=name, xlabel="log lengthscale", ylabel="log variance")
    for ax in axes[:2]:
        ax.set(xlim=axes[1].get_xlim(), ylim=axes[1].get_ylim())
    x = np.linspace(-2.5, 2.5, 150)
    gpx.plots.predictions(fits, x, data=(X, y), ax=axes[2])
    axes[2].set_title("")  # where the legend stands
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
