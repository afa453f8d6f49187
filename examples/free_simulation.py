"""Free simulation: years ahead, with predictions fed back as uncertain inputs.

    python examples/free_simulation.py [--data DIR] [--out out]

A GP learns the next month from the last twelve. Where its predictions are fed back as
if they had been observed, the bands hardly know how far ahead they are; fed back as
uncertain inputs, they widen. Airline passengers if `--data` names a folder with
`airpassengers.npz`, else a made-up series.
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
from options import parse, save

import numpyro_gpx as gpx

NUM_LAGS = 12
NUM_TRAIN = 96


def main(args=None) -> None:
    options = parse(__doc__, args)
    time, series, name = load_data(options.data)
    series = np.log(series)  # seasons grow with the level
    past, future = series[:NUM_TRAIN], series[NUM_TRAIN:]
    # The series is standardised before it is cut into rows: what is fed back is y.
    shift, scale = past.mean(), past.std()
    X, y = gpx.timeseries.lagged((past - shift) / scale, NUM_LAGS)
    model = gpx.models.svgp(gpx.inducing.Data(X), kernel=kernel)
    fit = gpx.fit_lbfgs(
        model,
        gpx.guides.OptimalGaussian(model),
        X,
        y,
        key=jr.key(0),
        max_steps=5 if options.quick else 500,
        progress=not options.quick,
    )
    history = (past[-NUM_LAGS:] - shift) / scale
    rules = {
        "means fed back (plain GP-NARX)": gpx.cubature.GaussHermite(1),
        "beliefs fed back (unscented)": gpx.cubature.Unscented(),
    }
    figure, panels = plt.subplots(
        1, 2, figsize=(11, 4), sharey=True, layout="constrained"
    )
    for ax, (words, rule) in zip(panels, rules.items(), strict=True):
        sim = gpx.timeseries.simulate(fit, history, len(future), rule=rule).rescaled(
            shift, scale
        )
        shown = past[-36:]
        gpx.plots.simulation(
            sim, history=shown, y=future, time=time[NUM_TRAIN - len(shown) :],
            xlabel="year", ylabel=name, ax=ax,
        )  # fmt: skip
        ax.set_title(words, loc="left", fontsize="medium")
        low, high = sim.quantile([0.025, 0.975])
        inside = np.mean((low < future) & (future < high))
        nlpd = -sim.log_prob(future).mean()
        print(f"{words}: NLPD {nlpd:.2f}, {inside:.0%} of months in the 95 % band")
    panels[1].set_ylabel("")
    panels[1].get_legend().remove()
    save(figure, options, "free_simulation.png")


def kernel():
    """A linear trend in the lags, and a smooth correction."""
    slope_var = numpyro.sample("slope_variance", dist.LogNormal(-2.0, 1.0))
    smooth = gpx.models.priors.stationary(gpx.kernels.RBF, lengthscale=4.0)()
    return gpx.kernels.Linear(slope_var) + smooth


def load_data(folder):
    """Times in years, the series, and what it counts."""
    if folder is not None:
        with np.load(folder / "airpassengers.npz") as archive:
            return archive["X"][:, 0], archive["y"], "log passengers (thousands)"
    rng = np.random.default_rng(5)
    time = np.arange(144) / 12.0
    season = np.sin(2.0 * np.pi * time) + 0.4 * np.cos(4.0 * np.pi * time)
    growth = 20.0 + 2.0 * time
    series = growth * (1.0 + 0.15 * season) + rng.normal(size=144)
    return 2000.0 + time, series, "log sales (made up)"


if __name__ == "__main__":
    main()
