"""Figures of fits: marginal posteriors, predictions over one input, comparisons.

Pure matplotlib. Nothing is shown or saved; functions that draw into axes return them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.random as jr
import numpy as np

from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.scalar_entries import entry_labels, scalar_entries
from numpyro_gpx.results.targets import target_support

if TYPE_CHECKING:  # loaded on first use
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from numpyro_gpx.comparison import Comparison

__all__ = ["comparison", "posteriors", "predictions", "styles"]

# Okabe & Ito (2008): told apart with any colour vision, and in grey by their markers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":")
_GREY = "0.45"
_MAX_PANELS = 8
_NUM_GRID = 200
_NUM_DRAWS = 10_000


def styles(names) -> dict[str, dict]:
    """Colour, marker and line style of each name, the same in every figure."""
    return {
        name: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "linestyle": _LINES[i % len(_LINES)],
        }
        for i, name in enumerate(names)
    }


def posteriors(
    fits: dict[str, Fit],
    sites: list[str] | None = None,
    *,
    ax: Axes | list[Axes] | None = None,
) -> list[Axes]:
    """Marginal posteriors of scalars, one panel each, the fits overlaid.

    Positive sites have a logarithmic axis and the density of their logarithm. A point
    estimate is a vertical line.

    Args:
        fits: Fits by name.
        sites: Scalars to draw: names of scalar sites, or entries of longer ones such as
            `"lengthscale[1]"`; by default the first eight hyperparameters.
        ax: Axes to draw into, one for each scalar; made if left out.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt

    draws = {name: _draws(fit) for name, fit in fits.items()}
    labels = _hyperparameters(fits) if sites is None else list(sites)
    known = dict.fromkeys(label for group in draws.values() for label in group)
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise ValueError(f"`sites` must be among {list(known)}; got {unknown}.")
    if ax is None:
        _, grid = plt.subplots(
            1, len(labels), figsize=(3.2 * len(labels), 2.8), squeeze=False,
            layout="constrained",
        )  # fmt: skip
        ax = list(grid[0])
    axes = list(ax) if isinstance(ax, list | tuple | np.ndarray) else [ax]
    if len(axes) != len(labels):
        raise ValueError(
            f"`ax` must have one of axes for each of {labels}; got {len(axes)}."
        )
    for panel, label in zip(axes, labels, strict=True):
        log = any(_is_positive(fit, label) for fit in fits.values())
        for name, style in styles(fits).items():
            if label in draws[name]:
                _marginal(panel, draws[name][label], log, name, style)
        if log:
            _log_axis(panel)
        panel.set_xlabel(f"{label} (log scale)" if log else label)
        panel.set_ylabel(f"density of log {label}" if log else "density")
        panel.set_ylim(bottom=0)
        _tidy(panel)
    axes[0].legend(frameon=False, fontsize="small")
    return axes


def predictions(
    fits: dict[str, Fit],
    X,
    *,
    data: tuple | None = None,
    truth=None,
    site: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Predictive means and central 90 % bands over one input.

    The band is that of a new target; for binary targets, where it would be 0 or 1, it
    is that of the probability of 1.

    Args:
        fits: Fits by name.
        X: Inputs `(N,)` or `(N, 1)` in increasing order; or a tuple of the model's
            arguments that starts with inputs `(N, 1)`.
        data: Training inputs and targets `(x, y)`, drawn as points.
        truth: The true function (probability, for binary targets) at `X`, if known.
        site: Observed site; may be left out if there is one.
        ax: Axes to draw into; made if left out.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt

    args = X if isinstance(X, tuple) else (_column(X),)
    if np.ndim(args[0]) != 2 or np.shape(args[0])[1] != 1:
        raise ValueError(
            f"`X` must have one column to be drawn over; got shape {np.shape(args[0])}."
        )
    x = np.asarray(args[0])[:, 0]
    ax = plt.subplots(figsize=(7.5, 4.2), layout="constrained")[1] if ax is None else ax
    binary = False
    for name, style in styles(fits).items():
        mean, band, is_binary = _predictive_band(fits[name], args, site)
        binary = binary or is_binary
        line = {"color": style["color"], "linestyle": style["linestyle"]}
        if band is not None:
            ax.fill_between(x, *band, color=style["color"], alpha=0.10, linewidth=0)
            for edge in band:
                ax.plot(x, edge, **line, linewidth=0.8, alpha=0.7)
        ax.plot(x, mean, **line, linewidth=2.2, label=name)
    if truth is not None:
        ax.plot(x, truth, color="black", linewidth=1.2, label="truth")
    if data is not None:
        x_data, y_data = data
        _points(ax, x_data, y_data, binary)
    ax.set_xlabel("x")
    ax.set_ylabel("probability of y = 1" if binary else "y")
    ax.set_title("mean and central 90 % band", fontsize="medium", loc="left")
    # Above the axes: the curves may go anywhere.
    handles, names = ax.get_legend_handles_labels()
    ax.legend(
        handles, names, frameon=False, fontsize="small", ncols=len(names),
        loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2,
    )  # fmt: skip
    _tidy(ax)
    return ax


def comparison(result: Comparison) -> Figure:
    """The figure of a comparison: marginals above, distances and scores below."""
    import matplotlib.pyplot as plt

    labels = _hyperparameters(result.members)
    columns = min(max(len(labels), 2), 4)
    rows = -(-len(labels) // columns)
    sites = result.sites["distance"].dropna().index.unique("site")
    lower = 1.1 + 0.28 * max(len(sites), len(result.fits))
    heights = [*[2.6] * rows, lower]
    legend_height = 0.2 * len(result.fits)  # a line each: their words are long
    figure = plt.figure(
        figsize=(max(3.0 * columns, 8.5), sum(heights) + 0.6 + legend_height),
        layout="constrained",
    )
    grid = figure.add_gridspec(rows + 1, 1, height_ratios=heights)
    panels = []
    for row in range(rows):
        number = min(columns, len(labels) - row * columns)
        cells = grid[row].subgridspec(1, number)
        panels += [figure.add_subplot(cells[j]) for j in range(number)]
    if panels:
        posteriors(result.members, labels, ax=panels)
        legend = panels[0].get_legend()
        assert legend is not None  # `posteriors` has just drawn it
        legend.remove()
    title = f"{len(result.fits)} fits against {result.reference}"
    if result.num_rows:
        title += f", {result.num_rows} test rows"
        cells = grid[rows].subgridspec(1, 2, width_ratios=[1.35, 1])
        _distances(figure.add_subplot(cells[0]), result)
        _scores(figure.add_subplot(cells[1]), result)
    else:
        _distances(figure.add_subplot(grid[rows]), result)
    figure.suptitle(title, x=0.01, ha="left", fontsize="large")
    handles = [
        plt.Line2D([], [], label=_described(result, name), markersize=5, **style)
        for name, style in styles(result.fits.index).items()
    ]
    figure.legend(
        handles=handles, loc="outside lower left",
        frameon=False, fontsize="small",
    )  # fmt: skip
    return figure


def _described(result, name):
    row = result.fits.loc[name]
    noise = f", noise {row['noise']}" if row["noise"] else ""
    return f"{name} ({row['target']} target, {row['approximation']}{noise})"


def _distances(ax, result):
    """A row a site, a marker a fit; grey ticks are what equal posteriors would show."""
    table = result.sites
    shown = list(table["distance"].dropna().index.unique("site"))
    looks = styles(result.fits.index)
    others = [name for name in looks if name != result.reference]
    offsets = np.linspace(-0.18, 0.18, len(others)) if len(others) > 1 else [0.0]
    floor = None
    for name, offset in zip(others, offsets, strict=False):
        for i, site in enumerate(shown):
            if (site, name) not in table.index:
                continue
            row, place = table.loc[(site, name)], i + offset
            ax.plot(
                row["distance"], place, color=looks[name]["color"],
                marker=looks[name]["marker"], markersize=6, linestyle="none",
            )  # fmt: skip
            (floor,) = ax.plot(
                row["floor"], place, color=_GREY, marker="|", markersize=8,
                linestyle="none",
            )  # fmt: skip
    ax.set_yticks(range(len(shown)), shown)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.set_xlabel(f"Wasserstein distance to {result.reference} (its sd)")
    ax.grid(axis="y", color="0.9", linewidth=0.8)
    if floor is not None:
        ax.legend(
            [floor], ["expected of equal posteriors"], frameon=False, fontsize="small",
            handletextpad=0.1, loc="lower right", bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.1,
        )  # fmt: skip
    _tidy(ax)


def _scores(ax, result):
    table = result.fits
    for i, (name, style) in enumerate(styles(table.index).items()):
        row = table.loc[name]
        ax.errorbar(
            row["log_density"], i, xerr=row["log_density_se"], color=style["color"],
            marker=style["marker"], markersize=6, capsize=3, linestyle="none",
        )  # fmt: skip
        if name != result.reference:
            # Rows are paired, so that differences are surer than the bars suggest.
            ax.annotate(
                f"{row['difference']:+.3f} ± {row['difference_se']:.3f} to "
                f"{result.reference}",
                (row["log_density"], i), (0, 6), textcoords="offset points",
                ha="center", fontsize="x-small", color=style["color"],
            )  # fmt: skip
    ax.locator_params(axis="x", nbins=5)
    ax.set_yticks(range(len(table)), table.index)
    ax.set_ylim(len(table) - 0.5, -0.5)
    ax.set_xlabel("test log predictive density\n(nats a row, ± standard error)")
    ax.grid(axis="y", color="0.9", linewidth=0.8)
    _tidy(ax)


def _predictive_band(fit, X, site):
    """Mean `(N,)`, band `(2, N)` or `None`, and whether targets are binary."""
    prediction = fit.predict(*X, site=site)
    if len(prediction.shape) != 1:
        raise ValueError(
            "`predictions` draws one output; the model has "
            f"{prediction.shape[1]}. Use `fit.predict` and matplotlib."
        )
    support = target_support(fit, site)
    if not support.is_discrete or not _within_unit(support):
        return prediction.mean, _band(prediction), False
    likelihood = fit.program.observation(fit.structure.observed_site(site)).likelihood
    if likelihood is None:
        return prediction.mean, None, True
    f = _band(fit.predict(*X, site=site, of="latent"))
    # Quantiles pass through the link, which is monotone.
    return prediction.mean, np.asarray(likelihood.distribution(f).mean), True


def _band(prediction):
    # More draws than `quantile` takes: rows are independent, and edges look ragged.
    draws = prediction.sample(jr.key(0), _NUM_DRAWS)
    return np.quantile(draws, [0.05, 0.95], axis=0)


def _within_unit(support):
    return not bool(np.asarray(support(2)))


def _points(ax, x, y, binary):
    x, y = np.asarray(x).reshape(-1), np.asarray(y).reshape(-1)
    if binary:
        ax.plot(x, y, "|", color=_GREY, markersize=9, label="data", clip_on=False)
        ax.set_ylim(-0.05, 1.05)
    else:
        ax.plot(x, y, ".", color=_GREY, markersize=5, label="data", zorder=1)


def _column(X):
    X = np.asarray(X)
    return X[:, None] if X.ndim == 1 else X


def _draws(fit):
    """Draws `(S,)` of each scalar, by label."""
    return {
        label: chains.ravel()
        for group in scalar_entries(fit).values()
        for label, chains in group.items()
    }


def _hyperparameters(fits):
    """Labels of the first hyperparameters of any of the fits, GP sites left out."""
    labels: dict[str, None] = {}
    for fit in fits.values():
        for name, site in fit.structure.latents.items():
            if not (site.is_gp or site.row_local):
                labels |= dict.fromkeys(entry_labels(name, site.shape))
    return list(labels)[:_MAX_PANELS]


def _is_positive(fit, label):
    site = fit.structure.latents.get(label.split("[")[0])
    if site is None:
        return False
    codomain = site.transform.codomain
    inside = [
        bool(np.all(np.asarray(codomain(np.full(site.shape, x)))))
        for x in (-1e-3, 1e-3, 1e6)
    ]
    return inside == [False, True, True]


def _marginal(ax, draws, log, name, style):
    from scipy.stats import gaussian_kde

    values = np.log(draws) if log else draws
    line = {"color": style["color"], "linestyle": style["linestyle"], "label": name}
    if np.ptp(values) < 1e-9 * max(1.0, np.abs(values).max()):
        ax.axvline(draws.flat[0], linewidth=1.8, **line)
        return
    # The tails of a long chain would leave the rest of the panel empty.
    low, high = np.quantile(values, [0.001, 0.999])
    pad = 0.15 * (high - low)
    grid = np.linspace(low - pad, high + pad, _NUM_GRID)
    density = gaussian_kde(values)(grid)
    x = np.exp(grid) if log else grid
    ax.plot(x, density, linewidth=1.8, **line)
    ax.fill_between(x, density, color=style["color"], alpha=0.12, linewidth=0)


def _log_axis(ax):
    """A logarithmic axis whose ticks are plain numbers, a handful of them."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ratio = high / low
    subs = (1.0, 2.0, 3.0, 5.0) if ratio < 20 else (1.0, 3.0) if ratio < 300 else (1.0,)
    ax.xaxis.set_major_locator(LogLocator(subs=subs))
    ax.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.xaxis.set_minor_locator(NullLocator())


def _tidy(ax):
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize="small")
