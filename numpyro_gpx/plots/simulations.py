"""Fan charts of time series that were simulated ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_gpx.simulation import Simulation

if TYPE_CHECKING:  # loaded on first use
    from matplotlib.axes import Axes

__all__ = ["simulation"]

# Central bands, the widest first. Opaque tints of the mean's blue: bands that shine
# through each other would not look like their entries in the legend.
_BANDS = ((0.95, "#D9E9F3"), (0.80, "#ABCFE5"), (0.50, "#78B1D6"))


def simulation(
    sim: Simulation,
    *,
    history=None,
    y=None,
    time=None,
    xlabel: str = "step",
    ylabel: str = "y",
    ax: Axes | None = None,
) -> Axes:
    """Draw a fan chart: the mean with central bands of 50, 80 and 95 %.

    Args:
        sim: What `gpx.timeseries.simulate` returned, T steps.
        history: Observed values before the first step, `(H,)`, the most recent last.
        y: What came to pass, `(T,)`; NaN where it is not known.
        time: Times of history and steps, `(H + T,)`; by default the first step is 1.
        xlabel: Label of the time axis.
        ylabel: Label of the values.
        ax: Axes to draw into; made if left out.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt

    past = np.zeros(0) if history is None else np.asarray(history, float)
    time = _times(time, len(past), len(sim))
    before, after = time[: len(past)], time[len(past) :]
    if y is not None and np.shape(y) != sim.mean.shape:
        raise ValueError(
            f"`y` must have the shape {sim.mean.shape} of the simulation; got "
            f"{np.shape(y)}."
        )
    if ax is None:
        ax = plt.subplots(figsize=(7.5, 4.0), layout="constrained")[1]
    colour = "#0072B2"
    for level, tint in _BANDS:
        low, high = sim.quantile([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        ax.fill_between(
            after, low, high, color=tint, linewidth=0,
            label=f"{100 * level:.0f} %",
        )  # fmt: skip
    ax.plot(after, sim.mean, color=colour, linewidth=1.8, label="mean")
    if len(past):
        ax.plot(before, past, color="0.4", linewidth=1.4, label="history")
        ax.axvline(before[-1], color="0.7", linewidth=0.8, linestyle=":")
    if y is not None:
        # Joined to the history, of which it is the continuation.
        x_truth = np.concatenate([before[-1:], after])
        truth = np.concatenate([past[-1:], np.asarray(y, float)])
        ax.plot(x_truth, truth, color="black", linewidth=1.2, label="observed")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.margins(x=0.01)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="upper left")
    return ax


def _times(time, num_past, num_steps):
    if time is None:
        return np.arange(1 - num_past, num_steps + 1)
    time = np.asarray(time)
    if time.shape != (num_past + num_steps,):
        raise ValueError(
            f"`time` must have shape ({num_past + num_steps},), {num_past} values of "
            f"`history` and {num_steps} steps; got {time.shape}."
        )
    return time
