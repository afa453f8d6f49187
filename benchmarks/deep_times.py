"""Times of three posteriors of one deep GP (thesis table 4.3).

    python benchmarks/deep_times.py --data DIR [--layers 2]

Seconds of a training step, and seconds for an *effective* draw of all inducing
variables: those of a flow and of a generator are independent; those of a chain count by
their effective sample size (ArviZ, the median over all inducing variables, and the
lowest tenth of them beside it). Minibatches of 512 of the power data, 100 inducing
points a layer, inner layers of four outputs, Monte Carlo EM of 500 rounds; the chain
keeps each tenth gradient step of 2000 x 10 after 500 x 10 of warm-up. Compilation is
not counted: each timed call is a second one.
"""

from __future__ import annotations

import argparse

import arviz as az
import jax
import jax.random as jr
import numpy as np
from datasets import add_data_option, data_folder, load
from deep_uci import make_model
from four_posteriors import Contest, timed
from results import markdown_table, write

import numpyro_gpx as gpx

NAME = "deep_times"
STEPS = 300
WARMUP, SAMPLES, THINNING, ROUNDS = 500, 2000, 10, 500
NUM_DRAWS = 2000


def independent(contest, name, start):
    """Seconds of a step and of a draw."""
    fit = {"Flow": contest.flow, "Implicit": contest.implicit}[name](
        jr.key(1), STEPS, start
    )
    draw = timed(
        lambda: jax.block_until_ready(fit.posterior.sample(jr.key(2), NUM_DRAWS))
    )
    return fit.info["seconds_per_step"], draw / NUM_DRAWS


def chain(contest, rounds, warmup, samples):
    return gpx.fit_sghmc(
        contest.model, *contest.data, key=jr.key(3), num_warmup=warmup,
        num_samples=samples, num_integration_steps=THINNING, num_chains=1,
        step_size=0.1, em=gpx.infer.MonteCarloEM(num_rounds=rounds), **contest.options,
    )  # fmt: skip


def effective_draws(fit):
    """Effective sample sizes of all inducing variables."""
    draws = {name: x for name, x in fit.chains().items() if name in fit.structure.gps}
    sizes = az.ess(az.convert_to_dataset(draws))
    return np.concatenate([np.ravel(sizes[name]) for name in sizes])


def sampled(contest):
    """Seconds of a gradient step and of an effective draw, by what is counted."""
    whole = timed(chain, contest, ROUNDS, WARMUP, SAMPLES)
    before = timed(chain, contest, ROUNDS, WARMUP, 2)
    sizes = effective_draws(chain(contest, ROUNDS, WARMUP, SAMPLES))
    median, low = np.median(sizes), np.quantile(sizes, 0.1)
    drawing = whole - before
    return drawing / (SAMPLES * THINNING), {
        "warm-up excluded": (drawing / median, drawing / low),
        "warm-up and EM included": (whole / median, whole / low),
        "sizes": (median, low),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    X, y = load(data_folder(options.data), "power")
    data = gpx.standardise(X, y)
    contest = Contest(make_model(data.X, options.layers), data.X, data.y)
    start = contest.gaussian(jr.key(0), STEPS)
    rows = [["DSVI", start.info["seconds_per_step"], "", ""]]
    for name in ("Flow", "Implicit"):
        step, draw = independent(contest, name, start)
        rows.append([name, step, draw, draw])
        print(rows[-1], flush=True)
    step, draws = sampled(contest)
    for label in ("warm-up excluded", "warm-up and EM included"):
        rows.append([f"SGHMC, {label}", step, *draws[label]])
    header = ["posterior", "s a step", "s an effective draw", "worst tenth"]
    median, low = draws["sizes"]
    text = (
        f"# Times of deep posteriors\n\n{options.layers} layers. Of {SAMPLES} draws "
        f"of SGHMC, {THINNING} gradients apart, {median:.0f} count for the median "
        f"inducing variable and {low:.0f} for the worst tenth. A step of SGHMC is one "
        "gradient. "
        "Settings: `benchmarks/deep_times.py`.\n\n" + markdown_table(header, rows)
    )
    write(NAME, {"rows": rows, "sizes": [median, low]}, text)


if __name__ == "__main__":
    main()
