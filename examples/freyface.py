"""Faces on a plane, and half-seen faces completed with their uncertainty.

    python examples/freyface.py [--data DIR] [--out out]

A GPLVM of images with two latent dimensions. Each test image is placed in the plane by
its upper half; the lower half is then predicted. Frey's face if `--data` names a folder
with `freyface.npz` (1000 frames chosen at random to learn from: later frames show
expressions that the first thousand do not), else made-up images of a moving blob.
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

NUM_SHOWN = 7


def main(args=None) -> None:
    options = parse(__doc__, args)
    train, test, shape = load_data(options)
    mean_image = train.mean(axis=0)
    scale = float(np.std(train - mean_image))
    Y = (train - mean_image) / scale
    fit = fit_images(Y, options)
    print(
        f"objective {fit.info['objective']:.0f}; bound, of 1000 draws, "
        f"{fit.info['elbo']:.0f} ± {fit.info['elbo_standard_error']:.0f}; "
        f"{fit.seconds:.0f} s"
    )

    upper_half = np.arange(test.shape[1]) < (shape[0] // 2) * shape[1]
    seen = np.where(upper_half, test, np.nan)
    projection = gpx.latent_space.project(
        fit,
        (seen - mean_image) / scale,
        key=jr.key(1),
        missing=True,  # unlike the images that were learnt from
        num_steps=20 if options.quick else 300,
    )
    completed = projection.reconstruct().rescaled(mean_image, scale)
    report(test, completed, mean_image, ~upper_half)

    number = (4, 4) if options.quick else (10, 8)
    plane = gpx.plots.manifold(fit, shape, num=number, shift=mean_image, scale=scale)
    # Without the noise of single pixels, which would hide all else.
    faces = projection.reconstruct(of="f").rescaled(mean_image, scale)
    halves = gpx.plots.reconstructions(
        test, seen, faces, shape, num=NUM_SHOWN, num_draws=1
    )
    save(side_by_side(plane, halves), options, "freyface.png")


def fit_images(Y, options):
    """A GPLVM with two latent dimensions."""
    start = np.asarray(gpx.latent_space.pca(Y, 2))
    Z = gpx.inducing.kmeans(jr.key(0), start, 10 if options.quick else 50)
    inducing = gpx.inducing.Points(Z, learn=True)
    model = gpx.models.gplvm(inducing, num_outputs=Y.shape[1])
    return gpx.fit_lbfgs(
        model,
        gpx.guides.UnscentedLatent(gpx.guides.OptimalGaussian(model)),
        Y,
        key=jr.key(0),
        max_steps=5 if options.quick else 200,
        progress=not options.quick,
    )


def side_by_side(*figures):
    """One figure of the pictures of several."""
    for figure in figures:
        figure.set_dpi(120)
        figure.canvas.draw()
    pictures = [np.asarray(figure.canvas.buffer_rgba()) for figure in figures]
    height = max(len(picture) for picture in pictures)
    padded = [
        np.pad(p, ((0, height - len(p)), (0, 0), (0, 0)), constant_values=255)
        for p in pictures
    ]
    joined = np.concatenate(padded, axis=1)
    figure = plt.figure(figsize=(joined.shape[1] / 120, height / 120))
    figure.figimage(joined)
    return figure


def report(truth, completed, mean_image, hidden):
    """Errors of the hidden pixels, in grey levels, and how often 90 % hold them."""
    errors = {"GPLVM": completed.mean, "mean image": mean_image}
    for name, guess in errors.items():
        rmse = np.sqrt(np.mean((guess - truth)[:, hidden] ** 2))
        print(f"{name}: RMSE {rmse:.2f} on {len(truth)} hidden halves")
    draws = completed.sample(jr.key(2), 400)  # (400, N, P)
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    inside = np.mean(((low < truth) & (truth < high))[:, hidden])
    print(f"{inside:.1%} of hidden pixels lie in their central 90 %")


def load_data(options):
    """Images to learn from `(N, P)`, images to test on, and their shape."""
    rng = np.random.default_rng(0)
    if options.data is not None:
        with np.load(options.data / "freyface.npz") as archive:
            images = archive["Y"].astype(float)
        images = images[rng.permutation(len(images))]
        if options.quick:
            return images[:40], images[1000:1008], (28, 20)
        return images[:1000], images[1000:1100], (28, 20)
    number = 48 if options.quick else 400
    rows, columns = np.meshgrid(np.arange(12.0), np.arange(10.0), indexing="ij")
    place = rng.uniform(2.0, 7.0, (number, 1, 1))
    width = rng.uniform(1.0, 2.5, (number, 1, 1))
    # Round, and as tall as it is wide: its top tells where it ends.
    sq_dist = (rows - 5.5) ** 2 + (columns - place) ** 2
    images = 200.0 * np.exp(-0.5 * sq_dist / width**2) + 20.0
    images = images.reshape(number, -1) + 5.0 * rng.normal(size=(number, 120))
    num_train = number * 3 // 4
    return images[:num_train], images[num_train:], (12, 10)


if __name__ == "__main__":
    main()
