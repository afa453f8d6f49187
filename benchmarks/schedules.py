"""Where the default schedule of `fit_svi` should start, for each kind of guide.

    python benchmarks/schedules.py [--quick] [--only CASE ...]

Each case is fitted with the default schedule from 0.1, 0.03 and 0.01 (a cosine to a
hundredth of it) and with Adam at a constant 0.01, the default before; three seeds. What
is compared is the bound at the end, by the same number of draws on all rows. Rows that
are known are not run again.
"""

from __future__ import annotations

import argparse
import json
import time

import jax

jax.config.update("jax_enable_x64", True)

import flow_modes
import jax.numpy as jnp
import jax.random as jr
import latent_posteriors
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import autoguide
from results import FOLDER, markdown_table, write

import numpyro_gpx as gpx

NAME = "schedules"
RATES = {"0.1": 0.1, "0.03": 0.03, "0.01": 0.01, "constant 0.01": None}
SEEDS = range(3)
STEPS = 500
DRAWS = 500


def hierarchy():
    """Rubin's eight schools, not centred."""
    y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sd = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
        z = numpyro.sample("z", dist.Normal(jnp.zeros(8), 1.0).to_event(1))
        with numpyro.plate("schools", 8):
            numpyro.sample("y", dist.Normal(mu + tau * z, sd), obs=y)

    return model, (y,)


def latents(seed):
    Y, Z, _ = latent_posteriors.make_data(seed)
    points = gpx.inducing.Points(Z)
    return gpx.models.gplvm(points, num_outputs=Y.shape[1]), (Y,)


def unscented(model):
    inner = gpx.guides.WhitenedGaussian(model, theta="mean_field")
    return gpx.guides.UnscentedLatent(inner)


def flow(model):
    return gpx.guides.Flow(model, path_gradient=True)


# Guide, problem (of the seed), draws of a step.
CASES = {
    "UnscentedLatent, GPLVM": (unscented, latents, 1),
    "Flow, squares": (flow, lambda seed: (flow_modes.squares, flow_modes.data()), 16),
    "Flow, eight schools": (flow, lambda seed: hierarchy(), 16),
    "AutoNormal, eight schools": (autoguide.AutoNormal, lambda seed: hierarchy(), 1),
    "AutoMultivariateNormal, eight schools": (
        autoguide.AutoMultivariateNormal, lambda seed: hierarchy(), 1,
    ),
}  # fmt: skip


def run_row(case, rate, seed, steps):
    make, problem, particles = CASES[case]
    model, args = problem(seed)
    guide = make(model)
    if rate is None:
        optimizer = optax.adam(0.01)
    else:
        optimizer, guide.learning_rate = None, rate
    before = time.process_time()
    fit = gpx.fit_svi(
        model, guide, *args, key=jr.key(seed), num_steps=steps, progress=False,
        loss=gpx.infer.ELBO(particles), optimizer=optimizer,
    )  # fmt: skip
    bound = fit.elbo(DRAWS)
    return {
        "bound": float(bound.value), "standard_error": float(bound.standard_error),
        "restarted": any(note.kind == "learning_rate" for note in fit.notes),
        "cpu_seconds": time.process_time() - before,
    }  # fmt: skip


def gaps_of(rows, case):
    """Nats below the best setting of each seed whose fits are all known, by setting."""
    gaps = {rate: [] for rate in RATES}
    for seed in SEEDS:
        found = {rate: rows.get(f"{case}|{rate}|{seed}") for rate in RATES}
        if None not in found.values():
            best = max(row["bound"] for row in found.values())
            for rate, row in found.items():
                gaps[rate].append(best - row["bound"])
    return gaps


def text_of(rows):
    lines = []
    for case in CASES:
        gaps = gaps_of(rows, case)
        mean = {rate: float(np.mean(gap)) for rate, gap in gaps.items() if gap}
        if not mean:
            continue
        cells = [f"{mean[rate]:.3g} ({max(gaps[rate]):.3g})" for rate in RATES]
        ours = [row for name, row in rows.items() if name.startswith(f"{case}|")]
        errors = max(row["standard_error"] for row in ours)
        again = sum(row["restarted"] for row in ours)
        seeds = len(gaps["0.1"])
        lines.append([case, seeds, *cells, min(mean, key=mean.get), errors, again])
    header = ["case", "seeds", *RATES, "best", "largest standard error", "restarts"]
    return (
        "# Where the default schedule starts\n\nNats below the best of the four "
        "settings at the same seed, mean (largest) over seeds, after "
        f"{STEPS} steps; a "
        "cosine from the rate to a hundredth of it, beside Adam at a constant 0.01. "
        f"Bounds by {DRAWS} draws on all rows. Restarts: fits that met NaN and began "
        "again at 0.03. See `benchmarks/schedules.py`.\n\n"
        + markdown_table(header, lines)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, nothing kept")
    parser.add_argument("--only", nargs="+", default=list(CASES))
    options = parser.parse_args()
    path = FOLDER / f"{NAME}.json"
    rows = {}
    if path.exists() and not options.quick:
        rows = json.loads(path.read_text())["rows"]
    for seed in SEEDS[:1] if options.quick else SEEDS:
        for case in options.only:
            for name, rate in RATES.items():
                label = f"{case}|{name}|{seed}"
                if label in rows:
                    continue
                steps = 20 if options.quick else STEPS
                rows[label] = run_row(case, rate, seed, steps)
                print(label, rows[label], flush=True)
                if not options.quick:
                    write(NAME, {"rows": rows}, text_of(rows))
    print(text_of(rows))


if __name__ == "__main__":
    main()
