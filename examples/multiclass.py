"""Three classes in the plane: softmax and robust-max on the same latent functions.

python examples/multiclass.py [--out out]
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
from options import parse, save

import numpyro_gpx as gpx

COLOURS = np.array([[0.0, 0.45, 0.7], [0.84, 0.37, 0.0], [0.0, 0.62, 0.45]])


def main(args=None) -> None:
    options = parse(__doc__, args)
    X, y = make_data(60 if options.quick else 300, seed=0)
    X_test, y_test = make_data(60 if options.quick else 2000, seed=1)
    Z = gpx.inducing.Points(gpx.inducing.kmeans(jr.key(0), X, 20))
    side = np.linspace(-3.0, 3.0, 8 if options.quick else 60)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    likelihoods = {
        "softmax": gpx.likelihoods.Categorical(3),
        "robust-max": gpx.likelihoods.RobustMax(3),
    }
    for ax, (name, likelihood) in zip(axes, likelihoods.items(), strict=True):
        fit = fit_classes(X, y, Z, likelihood, options)
        prediction = fit.predict(X_test)
        wrong = np.mean(np.argmax(prediction.probabilities, axis=1) != y_test)
        density = prediction.log_prob(y_test).mean()
        print(f"{name}: {wrong:.2%} of test labels wrong, log density {density:.4f}")
        shares = fit.predict(grid).probabilities @ COLOURS
        ax.imshow(
            shares.reshape(side.size, side.size, 3).clip(0.0, 1.0), origin="lower",
            extent=(-3.0, 3.0, -3.0, 3.0), alpha=0.6, interpolation="bilinear",
        )  # fmt: skip
        colours = COLOURS[y.astype(int)]
        ax.scatter(*X.T, c=colours, s=8, edgecolor="white", linewidth=0.3)
        ax.set(title=name, xticks=[], yticks=[])
    save(figure, options, "multiclass.png")


def fit_classes(X, y, Z, likelihood, options):
    def model(X, y=None):
        kernel = gpx.models.priors.stationary(gpx.kernels.RBF)()
        f = gpx.gp("f", kernel, inducing=Z, num_outputs=3)
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), likelihood, obs=y)

    return gpx.fit_svi(
        model,
        gpx.guides.WhitenedGaussian(model),
        X,
        y,
        key=jr.key(1),
        num_steps=5 if options.quick else 1000,
        optimizer=optax.adam(0.05),
        progress=not options.quick,
    )


def make_data(number, *, seed):
    """Three arms of a spiral, blurred."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, number)
    radius = rng.uniform(0.3, 2.6, number)
    angle = 2.0 * np.pi * y / 3.0 + 1.1 * radius
    X = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return X + 0.2 * rng.normal(size=(number, 2)), y.astype(float)


if __name__ == "__main__":
    main()
