"""How well do guides find the posterior of the hyperparameters?

    python benchmarks/hyperparameter_posteriors.py [--seeds 5] [--resume]

A one-dimensional classifier, the same model under NUTS and four guides.
"""

from __future__ import annotations

import argparse
import json

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from results import FOLDER, markdown_table, write

import numpyro_gpx as gpx

Z = np.linspace(-3.0, 3.0, 20)[:, None]
NUM_STEPS = 5000


def make_data(seed):
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-3.0, 3.0, 200))
    y = (np.sin(2.0 * x) + 0.3 * rng.normal(size=200) > 0.0).astype(float)
    return x[:, None], y


def model(X, y=None):
    kernel = gpx.kernels.RBF(
        variance=numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
        lengthscale=numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0)),
    )
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(), obs=y)


GUIDES = {
    "WhitenedGaussian, mean-field θ": lambda: gpx.guides.WhitenedGaussian(
        model, theta="mean_field"
    ),
    "WhitenedGaussian, full θ": lambda: gpx.guides.WhitenedGaussian(
        model, theta="full"
    ),
    "ConditionalGaussian": lambda: gpx.guides.ConditionalGaussian(model),
}


def fit(name, seed, num_steps):
    X, y = make_data(seed)
    key_nuts, key_svi = jr.split(jr.key(seed))
    if name == "NUTS":
        return gpx.fit_nuts(
            model, X, y, key=key_nuts, num_warmup=500, num_samples=1500, progress=False
        )
    return gpx.fit_svi(
        model,
        GUIDES[name](),
        X,
        y,
        key=key_svi,
        num_steps=num_steps,
        optimizer=optax.adam(optax.cosine_decay_schedule(0.05, num_steps)),
        loss=gpx.infer.ELBO(num_particles=8),
        progress=False,
    )


def summarise(fit):
    draws = fit.draws(3000)
    return {
        "sd_log_lengthscale": float(np.log(draws["lengthscale"]).std()),
        "sd_log_variance": float(np.log(draws["variance"]).std()),
        "elbo": fit.elbo(1000).value,
        "seconds": fit.seconds,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--resume", action="store_true", help="skip what is done")
    args = parser.parse_args(arguments)
    done = FOLDER / "hyperparameter_posteriors.json"
    results = json.loads(done.read_text())["results"] if args.resume else []
    finished = {(r["seed"], r["posterior"]) for r in results}
    for seed in range(args.seeds):
        for name in ("NUTS", *GUIDES):
            if (seed, name) in finished:
                continue
            found = summarise(fit(name, seed, args.steps))
            results.append({"seed": seed, "posterior": name, **found})
            print(results[-1], flush=True)
            done.write_text(json.dumps({"results": results}))
    write("hyperparameter_posteriors", {"results": results}, report(results))


def report(results):
    keys = ["sd_log_lengthscale", "sd_log_variance", "elbo", "seconds"]
    header = ["posterior", "sd log lengthscale", "sd log variance", "bound", "seconds"]
    names = list(dict.fromkeys(r["posterior"] for r in results))

    def shown(r, key):
        return "" if np.isnan(r[key]) else round(r[key], 3)

    every = [
        [r["seed"], r["posterior"], *(shown(r, key) for key in keys)] for r in results
    ]
    medians = []
    for name in names:
        own = [r for r in results if r["posterior"] == name]
        middle = {key: float(np.median([r[key] for r in own])) for key in keys}
        ratios = [np.median(_ratios(results, name, key)) for key in keys[:2]]
        medians.append(
            [
                name,
                *(shown(middle, key) for key in keys),
                *(round(x, 3) for x in ratios),
            ]
        )
    return "\n".join(
        [
            "# Posterior of the hyperparameters: guides against NUTS",
            "",
            "X = sorted U(-3, 3), N = 200, y = 1[sin 2x + 0.3 ε > 0], 20 inducing "
            "points on a grid, LogNormal(0, 1) priors, logit link. Medians over the "
            "seeds; the last two columns are medians of the ratio to NUTS on the same "
            "data.",
            "",
            markdown_table([*header, "ratio, lengthscale", "ratio, variance"], medians),
            "",
            "All seeds:",
            "",
            markdown_table(["seed", *header], every),
        ]
    )


def _ratios(results, name, key):
    nuts = {r["seed"]: r[key] for r in results if r["posterior"] == "NUTS"}
    return [r[key] / nuts[r["seed"]] for r in results if r["posterior"] == name]


if __name__ == "__main__":
    main()
