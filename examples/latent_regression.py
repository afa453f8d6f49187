"""A latent input: targets with two branches, which Gaussian noise cannot describe.

    python examples/latent_regression.py [--data DIR] [--out out]

A plain sparse GP, and a GP on the input and a latent input, fitted to the plain bound
and to the importance-weighted one, which does not ask the posterior of each row's
latent input to be Gaussian. The letters "DGP" if `--data` names a folder with
`dgp_letters.npz`, else two sine waves.
"""

from __future__ import annotations

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optax
from options import parse, save

import numpyro_gpx as gpx


def main(args=None) -> None:
    options = parse(__doc__, args)
    X, y, X_test, y_test = load_data(options)
    fits = fit_all(X, y, options)
    figure, axes = plt.subplots(
        1, len(fits) + 1, figsize=(13, 3.4), sharex=True, sharey=True,
        layout="constrained",
    )  # fmt: skip
    axes[0].plot(X[:, 0], y, ".", color="0.2", markersize=1.5)
    axes[0].set_title("data", loc="left", fontsize="medium")
    for ax, (name, fit) in zip(axes[1:], fits.items(), strict=True):
        # Latent inputs are drawn from their prior: the mixture needs many components.
        prediction = fit.predict(X_test, num_components=10 if options.quick else 500)
        score = prediction.log_prob(y_test)
        error = score.std() / np.sqrt(len(score))
        print(f"{name}: test log density {score.mean():.3f} ± {error:.3f} a row")
        # A draw a row: as many points as there are data.
        drawn = prediction.sample(jr.key(3), 1)[0]
        ax.plot(X_test[:, 0], drawn, ".", color="#0072B2", markersize=1.5)
        title = f"{name}\ndraws; test log density {score.mean():.3f}"
        ax.set_title(title, loc="left", fontsize="medium")
    for ax in axes:
        ax.set_xlabel("x")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("y")
    save(figure, options, "latent_regression.png")


def fit_all(X, y, options):
    """Fits by name."""
    Z = gpx.inducing.kmeans(jr.key(0), X, 5 if options.quick else 25)
    # Columns of the data, then of the latent input, whose prior is standard normal.
    rng = np.random.default_rng(1)
    joint = np.concatenate(
        [rng.permutation(np.tile(Z, (2, 1))), rng.normal(size=(2 * len(Z), 1))], axis=1
    )
    spread = gpx.models.priors.lengthscale(X)
    plain = gpx.models.svgp(
        gpx.inducing.Points(Z),
        kernel=gpx.models.priors.stationary(gpx.kernels.RBF, lengthscale=spread[0]),
    )
    latent = gpx.models.latent_gp(
        gpx.inducing.Points(joint, learn=True),
        kernel=gpx.models.priors.stationary(
            gpx.kernels.RBF, num_dims=2, lengthscale=np.array([0.5 * spread[0], 1.0])
        ),
    )

    def guide():
        # The latent inputs start at the targets (`init="targets"`, the default here);
        # as noise they would be found useless at first, and stay unused.
        return gpx.guides.UnscentedLatent(
            gpx.guides.WhitenedGaussian(latent), rule=gpx.cubature.MonteCarlo(1)
        )

    common = dict(
        batch_size=20 if options.quick else 200,
        num_steps=5 if options.quick else 3000,
        optimizer=optax.adam(0.02),
        progress=not options.quick,
    )
    return {
        "sparse GP": gpx.fit_svi(
            plain, gpx.guides.WhitenedGaussian(plain), X, y, key=jr.key(0), **common
        ),
        "latent input, plain bound": gpx.fit_svi(
            latent, guide(), X, y, key=jr.key(1), **common
        ),
        "latent input, 10 replicates": gpx.fit_svi(
            latent, guide(), X, y, key=jr.key(1),
            loss=gpx.infer.ImportanceWeighted(10), **common,
        ),
    }  # fmt: skip


def load_data(options):
    """Inputs and targets to learn from, and others to test on."""
    rng = np.random.default_rng(0)
    number = 60 if options.quick else 1000
    if options.data is not None:
        with np.load(options.data / "dgp_letters.npz") as archive:
            x, y = archive["X"][:, 0].astype(float), archive["y"].astype(float)
        chosen = rng.permutation(len(x))[: 2 * number]
        x, y = x[chosen], y[chosen]
    else:
        x = rng.uniform(-3.0, 3.0, 2 * number)
        sign = rng.choice([-1.0, 1.0], 2 * number)
        y = sign * np.sin(x) + 0.1 * rng.normal(size=2 * number)
    X = x[:, None]
    return X[:number], y[:number], X[number:], y[number:]


if __name__ == "__main__":
    main()
