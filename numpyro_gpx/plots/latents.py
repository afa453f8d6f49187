"""Latent inputs: where the rows lie, which dimensions matter, what they look like."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.random as jr
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.plots.fits import styles
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.prediction import Prediction

if TYPE_CHECKING:  # loaded on first use
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["latent_space", "manifold", "reconstructions", "relevance"]

_LENGTHSCALE = "lengthscale"
# Draws of the lengthscales, where they are random.
_NUM_DRAWS = 200
# A tone that no grey of an image has: what was not seen.
_MISSING = "#A6D3EE"


def latent_space(
    fit: Fit,
    *,
    labels=None,
    dims: tuple[int, int] | None = None,
    site: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the rows in two latent dimensions: posterior means, ellipses of 1 sd.

    Args:
        fit: A fit of a model with latent inputs of its rows, two dimensions at least.
        labels: A label of each row, `(N,)`, for colours and markers.
        dims: The dimensions to draw; by default the two of the shortest lengthscales,
            if the fit has a site `lengthscale` with one for each dimension, else 0, 1.
        site: The latent input; may be left out if there is one.
        ax: Axes to draw into; made if left out.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt
    from matplotlib.collections import EllipseCollection

    moments = fit.latent_inputs(site)
    first, second = dims = _dims(fit, moments.mean, dims)
    mean, sd = moments.mean[:, list(dims)], moments.sd[:, list(dims)]
    groups = _groups(labels, len(mean))
    if ax is None:
        ax = plt.subplots(figsize=(5.0, 4.6), layout="constrained")[1]
    few = len(mean) <= 200
    looks = styles([str(label) for label, _ in groups])
    for label, rows in groups:
        look = looks[str(label)]
        # Ellipses first: no mean is hidden by another row's uncertainty.
        ax.add_collection(
            EllipseCollection(
                2.0 * sd[rows, 0], 2.0 * sd[rows, 1], np.zeros(len(rows)),
                units="xy", offsets=mean[rows], offset_transform=ax.transData,
                facecolors=look["color"], alpha=0.18 if few else 0.08, linewidths=0,
                zorder=1,
            )
        )  # fmt: skip
        ax.scatter(
            mean[rows, 0], mean[rows, 1], s=16 if few else 6, color=look["color"],
            marker=look["marker"], linewidths=0, alpha=0.9, zorder=2, label=label,
        )  # fmt: skip
    ax.set_xlabel(f"latent dimension {first}")
    ax.set_ylabel(f"latent dimension {second}")
    ax.set_title("means, with ellipses of 1 sd", fontsize="medium", loc="left")
    if labels is not None:
        ax.legend(frameon=False, fontsize="small", markerscale=1.0 if few else 1.8)
    _tidy(ax)
    return ax


def relevance(fit: Fit, *, site: str = _LENGTHSCALE, ax: Axes | None = None) -> Axes:
    """Draw the relevance of each dimension, 1 / lengthscale, as bars.

    Bars are posterior means; where the posterior has spread, whiskers are its central
    90 %. Dimensions are in their order.

    Args:
        fit: A fit with one lengthscale a dimension.
        site: Name of the site of the lengthscales.
        ax: Axes to draw into; made if left out.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt

    known = fit.structure.latents.get(site)
    if known is None or len(known.shape) != 1:
        raise ValueError(
            f"`site` must name a site of one lengthscale a dimension; {site!r} is not "
            f"one of the fit's sites {_shapes(fit)}."
        )
    draws = 1.0 / _draws(fit, site)  # (S, Q)
    mean = draws.mean(axis=0)
    if ax is None:
        ax = plt.subplots(figsize=(4.2, 3.0), layout="constrained")[1]
    ax.bar(np.arange(len(mean)), mean, width=0.7, color="#0072B2")
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    if np.any(high - low > 1e-9 * mean):
        # A skewed posterior may have its mean outside the central 90 %.
        whiskers = np.maximum([mean - low, high - mean], 0.0)
        ax.errorbar(
            np.arange(len(mean)), mean, yerr=whiskers, color="0.2", capsize=3,
            linestyle="none",
        )  # fmt: skip
    ax.set_xticks(np.arange(len(mean)))
    ax.set_xlabel("dimension")
    ax.set_ylabel(f"relevance, 1 / {site}")
    _tidy(ax)
    return ax


def manifold(
    fit: Fit,
    shape: tuple[int, int],
    *,
    dims: tuple[int, int] | None = None,
    num: tuple[int, int] = (10, 10),
    site: str | None = None,
    limits: tuple[tuple[float, float], tuple[float, float]] | None = None,
    shift=0.0,
    scale=1.0,
) -> Figure:
    """Draw the predicted images at a grid of latent inputs, other dimensions at 0.

    All images share one scale of grey.

    Args:
        fit: A fit of a model of images that has no inputs but latent ones.
        shape: Height and width of an image; its pixels are the columns of the data.
        dims: The dimensions of the grid, across and up; see `latent_space`.
        num: Number of images across and up.
        site: The latent input; may be left out if there is one.
        limits: Ranges of the grid, `((low, high), (low, high))`; by default the central
            98 % of the rows' posterior means.
        shift: Added to predictions, after `scale`, for data that was standardised: a
            number or an image `(P,)`, such as the mean of the images.
        scale: Multiplies predictions.

    Returns:
        The figure.
    """
    import matplotlib.pyplot as plt

    name = _row_site(fit, site)
    means = fit.latent_inputs(name).mean
    dims = _dims(fit, means, dims)
    for number in num:
        checks.at_least("num", number, 1)
    if limits is None:
        edges = np.quantile(means[:, list(dims)], [0.01, 0.99], axis=0)
    else:
        edges = np.asarray(limits, float).T
    across, up = (np.linspace(edges[0, j], edges[1, j], num[j]) for j in (0, 1))
    H = np.zeros((num[0] * num[1], means.shape[1]))
    # From the top: the second dimension grows upwards, as in `latent_space`.
    H[:, dims[1]], H[:, dims[0]] = (x.ravel() for x in _pairs(up[::-1], across))
    predicted = fit.predict(num_rows=len(H), given={name: H}, of="latent")
    predicted = predicted.rescaled(np.asarray(shift), scale)
    pixels = _images(predicted.mean, shape, "the fit's predictions")
    rows = pixels.reshape(num[1], num[0], *shape)
    sheet = np.concatenate(np.concatenate(rows, axis=1), axis=1)

    height, width = sheet.shape
    inches = 7.0 / max(height, width)
    figure, ax = plt.subplots(
        figsize=(inches * width + 0.7, inches * height + 0.6), layout="constrained"
    )
    ax.imshow(sheet, cmap="gray", interpolation="nearest")
    for j in range(1, num[0]):
        ax.axvline(j * shape[1] - 0.5, color="white", linewidth=0.6)
    for i in range(1, num[1]):
        ax.axhline(i * shape[0] - 0.5, color="white", linewidth=0.6)
    centres_x = (np.arange(num[0]) + 0.5) * shape[1] - 0.5
    centres_y = (np.arange(num[1]) + 0.5) * shape[0] - 0.5
    ax.set_xticks(centres_x, [f"{x:.1f}" for x in across])
    ax.set_yticks(centres_y, [f"{x:.1f}" for x in up[::-1]])
    ax.tick_params(length=0, labelsize="small")
    ax.set_xlabel(f"latent dimension {dims[0]}")
    ax.set_ylabel(f"latent dimension {dims[1]}")
    ax.spines[:].set_visible(False)
    return figure


def reconstructions(
    truth,
    observed,
    prediction: Prediction,
    shape: tuple[int, int],
    *,
    num: int = 6,
    num_draws: int = 2,
) -> Figure:
    """Draw images, what was seen of them, and what was predicted, a row of each.

    Rows: the truth, the observed pixels (missing ones blue), the predictive mean, the
    predictive standard deviation (its scale at the side), and draws. Truth, mean and
    draws share one scale of grey.

    Args:
        truth: Whole images `(N, P)`.
        observed: The same with NaN where pixels are missing.
        prediction: What `gpx.latent_space.project(...).reconstruct()` returned; with
            `of="latent"` draws and standard deviations are without the noise of single
            pixels.
        shape: Height and width of an image.
        num: Number of images, the first of all.
        num_draws: Number of draws.

    Returns:
        The figure.
    """
    import matplotlib.pyplot as plt
    from matplotlib import colormaps
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    checks.at_least("num", num, 1)
    checks.at_least("num_draws", num_draws, 0)
    truth, observed = np.asarray(truth, float), np.asarray(observed, float)
    if not truth.shape == observed.shape == prediction.shape:
        raise ValueError(
            "`truth`, `observed` and `prediction` must have the same shape (N, P); got "
            f"{truth.shape}, {observed.shape} and {prediction.shape}."
        )
    num = min(num, len(truth))
    rows = {"truth": truth, "observed": observed, "mean": prediction.mean}
    rows["sd"] = prediction.sd
    if num_draws:
        draws = prediction.sample(jr.key(0), num_draws)
        rows |= {f"draw {i + 1}": draw for i, draw in enumerate(draws)}
    pixels = {name: _images(x[:num], shape, name) for name, x in rows.items()}
    low, high = np.nanmin(pixels["truth"]), np.nanmax(pixels["truth"])
    grey = colormaps["gray"].with_extremes(bad=_MISSING)
    cell = 0.95
    figure, grid = plt.subplots(
        len(pixels), num, squeeze=False,
        layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0),
        figsize=(cell * num + 1.3, cell * len(pixels) * shape[0] / shape[1] + 0.2),
    )  # fmt: skip
    for axes, (name, images) in zip(grid, pixels.items(), strict=True):
        if name == "sd":
            look = dict(cmap="magma", vmin=0.0, vmax=images.max())
        else:
            look = dict(cmap=grey, vmin=low, vmax=high)
        for ax, image in zip(axes, images, strict=True):
            drawn = ax.imshow(image, interpolation="nearest", **look)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        axes[0].set_ylabel(name)
        if name == "sd":
            # Beside the last image, so that the columns stay above each other.
            bar = figure.colorbar(
                drawn, cax=axes[-1].inset_axes([1.06, 0.08, 0.09, 0.84])
            )
            bar.ax.tick_params(labelsize="x-small")
    return figure


def _row_site(fit, site):
    """The name of the rows' latent input; `Fit.latents` complains of others."""
    names = fit.structure.row_sites
    return names[0] if site is None and len(names) == 1 else site


def _dims(fit, means, dims) -> tuple[int, int]:
    """Two dimensions of the latent input, checked."""
    if means.ndim != 2 or means.shape[1] < 2:
        raise ValueError(
            "A plane needs a latent input with two or more dimensions, (N, Q); got "
            f"shape {means.shape}. Draw `fit.latent_inputs().mean` over the rows "
            "instead."
        )
    num_dims = means.shape[1]
    if dims is not None:
        chosen = tuple(int(d) for d in dims)
        if len(set(chosen)) != 2 or not all(0 <= d < num_dims for d in chosen):
            raise ValueError(
                f"`dims` must be two different dimensions below {num_dims}; got "
                f"{tuple(dims)}."
            )
        return chosen[0], chosen[1]
    known = fit.structure.latents.get(_LENGTHSCALE)
    if known is None or known.shape != (num_dims,):
        return 0, 1
    lengthscale = _draws(fit, _LENGTHSCALE).mean(axis=0)
    first, second = np.argsort(lengthscale, kind="stable")[:2]
    return int(first), int(second)


def _draws(fit, site) -> np.ndarray:
    """Draws `(S, ...)` of a hyperparameter, one if it is a point.

    From the components of predictions: `fit.draws` would hold as many draws of all
    rows and of the inducing variables of all pixels.
    """
    return np.asarray(fit.posterior.components(_NUM_DRAWS)[site])


def _groups(labels, num_rows) -> list[tuple[str | None, np.ndarray]]:
    """Rows of each label, in the order of the labels."""
    if labels is None:
        return [(None, np.arange(num_rows))]
    labels = np.asarray(labels)
    if labels.shape != (num_rows,):
        raise ValueError(
            f"`labels` must have shape ({num_rows},), a label a row; got "
            f"{labels.shape}."
        )
    return [(str(x), np.flatnonzero(labels == x)) for x in np.unique(labels)]


def _images(rows, shape, name) -> np.ndarray:
    """Rows `(N, P)` as images `(N, height, width)`."""
    if len(shape) != 2 or rows.ndim != 2 or rows.shape[1] != shape[0] * shape[1]:
        raise ValueError(
            f"`shape` must be (height, width) with as many pixels as {name} has "
            f"columns; got {tuple(shape)} for {rows.shape}."
        )
    return rows.reshape(-1, *shape)


def _pairs(slow, fast):
    """All pairs, the second running fastest, as two arrays."""
    return np.meshgrid(slow, fast, indexing="ij")


def _shapes(fit):
    return {name: site.shape for name, site in fit.structure.latents.items()}


def _tidy(ax):
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize="small")
