"""Links that were learnt, with their uncertainty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from numpyro import handlers

from numpyro_gpx.links import Link, PiecewiseConstant, get_link
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.sites.observation import observation

if TYPE_CHECKING:  # loaded on first use
    from matplotlib.axes import Axes

__all__ = ["link"]


def link(
    fit: Fit,
    *,
    base: Link | str | None = None,
    site: str | None = None,
    margin: float = 1.0,
    num_draws: int = 400,
    ax: Axes | None = None,
) -> Axes:
    """Draw the piecewise-constant link of a fit: values, and a 95 % band of draws.

    Args:
        fit: A fit whose likelihood has a `PiecewiseConstant` link.
        base: A smooth link to draw beside it.
        site: Observed site; may be left out if there is one.
        margin: How far to go beyond the outer edges.
        num_draws: Draws of the posterior; a link of parameters has no spread.
        ax: Axes to draw into; made if left out.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt

    if ax is None:
        ax = plt.subplots(figsize=(5.5, 4.0), layout="constrained")[1]
    edges, values = _values(fit, fit.structure.observed_site(site), num_draws)
    x = np.concatenate([[edges[0] - margin], edges, [edges[-1] + margin]])
    low, middle, high = np.quantile(values, [0.025, 0.5, 0.975], axis=0)
    colour = "#0072B2"
    if np.any(high > low):
        ax.fill_between(
            x, _steps(low), _steps(high), step="post", color=colour, alpha=0.2,
            linewidth=0, label="95 % of draws",
        )  # fmt: skip
    y = _steps(middle)
    ax.step(x, y, where="post", color=colour, linewidth=2.0, label="learnt")
    if base is not None:
        grid = np.linspace(x[0], x[-1], 300)
        smooth = np.asarray(get_link(base)(jax.numpy.asarray(grid)))
        name = base if isinstance(base, str) else type(base).__name__
        ax.plot(grid, smooth, color="#E69F00", linewidth=1.5, label=name)
    ax.set_xlabel("latent function f")
    ax.set_ylabel("link(f)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small")
    return ax


def _steps(values):
    """Values of the pieces for `step(where="post")`: the last one twice."""
    return np.concatenate([values, values[-1:]])


def _values(fit, site, num_draws):
    """Edges `(K - 1,)`, and values of the pieces under draws of the fit, `(S, K)`."""
    draws = {name: jax.numpy.asarray(x) for name, x in fit.draws(num_draws).items()}

    def pieces(draws):
        def one(draw):
            with handlers.block():
                trace = fit.call.trace({**fit.params, **draw}, fit.key)
            found = _link_of(site, observation(trace[site]))
            return found.edges, found.values

        return jax.lax.map(one, draws)

    edges, values = run(pieces, draws)
    return np.asarray(edges[0]), np.asarray(values)


def _link_of(site, found):
    likelihood = found.likelihood
    if likelihood is not None and isinstance(likelihood.link, PiecewiseConstant):
        return likelihood.link
    raise ValueError(
        f"Site `{site}` must have a likelihood with a PiecewiseConstant link; got "
        f"{type(likelihood).__name__ if likelihood else 'a plain site'}."
    )
