"""SGHMC on minibatches, with and without a guide, beside HMC on all rows.

    python benchmarks/sghmc.py [--seeds 1] [--quick]

A sparse classifier, N=5000, M=30, minibatches of 100; one guide (`fit_sites`) for all.
Seconds are CPU seconds of the fit without its guide, compilation included. ESS is that
of the worst hyperparameter on the log scale, and of the worst of 200 values of `f`.
Ratios of standard deviations and shifts (in standard deviations) are against guided HMC
on all rows, which is exact; of `f` the median and the range over the 200 rows.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from results import markdown_table, write

import numpyro_gpx as gpx

NAMES = ("lengthscale", "variance")


class Classifier:
    """Labels of `sin(2 a) + b`, logit link, through M inducing points."""

    def __init__(self, num_rows: int, num_inducing: int, seed: int):
        rng = np.random.default_rng(seed)
        self.X = rng.uniform(-2.0, 2.0, (num_rows, 2))
        f = np.sin(2.0 * self.X[:, 0]) + self.X[:, 1]
        self.y = (f + rng.logistic(size=num_rows) > 0.0).astype(float)
        self.Z = np.asarray(gpx.inducing.kmeans(jr.key(0), self.X, num_inducing))

    def model(self, X, y=None, *, batch_size=None):
        theta = {n: numpyro.sample(n, dist.LogNormal(0.0, 1.0)) for n in NAMES}
        kernel = gpx.kernels.RBF(theta["variance"], theta["lengthscale"])
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(self.Z))
        with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
            gpx.observe("y", f(X[i]), gpx.likelihoods.Bernoulli(), obs=y, rows=i)

    def functions(self, chains: dict, rows: int = 200):
        """Means of `f` at some rows, `(chains, draws, rows)`, by the formula."""
        X, Z = jnp.asarray(self.X[:rows]), jnp.asarray(self.Z)

        def one(draw):
            def k(A, B):
                squares = jnp.sum((A[:, None] - B[None]) ** 2, axis=-1)
                scaled = squares / draw["lengthscale"] ** 2
                return draw["variance"] * jnp.exp(-0.5 * scaled)

            jitter = 1e-8 * draw["variance"] * jnp.eye(len(Z))
            L = jnp.linalg.cholesky(k(Z, Z) + jitter)
            A = jax.scipy.linalg.solve_triangular(L, k(Z, X), lower=True)
            return A.T @ draw["f"]

        shape = chains["variance"].shape
        flat = {n: x.reshape(-1, *x.shape[2:]) for n, x in chains.items()}
        found = jax.jit(lambda flat: jax.lax.map(one, flat))(flat)
        return np.asarray(found).reshape(*shape, -1)


def measured(problem: Classifier, run) -> dict:
    """What a fit came to, in CPU seconds and draws."""
    gpx.cache.clear()
    before = time.process_time()
    fit = run()
    seconds = time.process_time() - before
    chains = fit.chains()
    theta = np.stack([np.log(chains[name]) for name in NAMES], axis=-1)
    f = problem.functions(chains)
    both = np.concatenate([theta, f], axis=-1)
    return {
        "seconds": seconds,
        "gradients": int(fit.info.get("num_gradients", 0)),
        "ess": float(np.min(effective_sample_size(theta))),
        "ess_f": float(np.min(effective_sample_size(f))),
        "r_hat": float(np.max(split_gelman_rubin(both))),
        "mean": both.mean(axis=(0, 1)),
        "sd": both.std(axis=(0, 1)),
        "info": {
            name: float(fit.info[name])
            for name in ("gradient_variance", "inflation", "temperature")
            if name in fit.info
        },
        "notes": [note.kind for note in fit.check()],
    }


def runs(problem: Classifier, seed: int, quick: bool) -> dict:
    size = dict(key=jr.key(seed), progress=False)
    args = problem.model, problem.X, problem.y
    guide = gpx.fit_sites(*args, **size)
    share = 20 if quick else 1
    hmc = dict(method="hmc", num_samples=500 // share, **size)
    plain = dict(batch_size=100, num_samples=600 // share, **size)
    through = dict(plain, guide=guide, num_samples=2500 // share, num_warmup=100)
    if quick:
        plain["num_warmup"] = 25
    return {
        "fit_guided, HMC, all rows": lambda: gpx.fit_guided(*args, guide=guide, **hmc),
        "fit_sghmc(guide=...)": lambda: gpx.fit_sghmc(*args, **through),
        "fit_sghmc": lambda: gpx.fit_sghmc(*args, **plain),
    }


def row(seed: int, who: str, one: dict, exact: dict) -> list:
    ratio = one["sd"] / exact["sd"]
    shift = np.abs(one["mean"] - exact["mean"]) / exact["sd"]
    theta = ", ".join(f"{x:.2f}" for x in ratio[: len(NAMES)])
    f = ratio[len(NAMES) :]
    return [
        seed, who, one["seconds"], one["gradients"], one["ess"], one["ess_f"],
        one["ess"] / one["seconds"], one["ess_f"] / one["seconds"], theta,
        f"{np.median(f):.3f} ({f.min():.2f}-{f.max():.2f})",
        float(shift[: len(NAMES)].max()), float(shift[len(NAMES) :].max()),
        one["r_hat"], " ".join(one["notes"]),
    ]  # fmt: skip


HEADER = [
    "seed", "who", "CPU s", "gradients of draws", "ESS, theta", "ESS, f",
    "ESS per CPU s, theta", "f", "sd ratio, theta", "sd ratio, f", "shift, theta",
    "shift, f", "R-hat", "notes",
]  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="300 rows, few draws")
    args = parser.parse_args(arguments)
    rows, record = [], {}
    for seed in range(args.seeds):
        problem = Classifier(*((300, 10) if args.quick else (5000, 30)), seed + 1)
        found = {}
        for who, run in runs(problem, seed, args.quick).items():
            found[who] = measured(problem, run)
            line = row(seed, who, found[who], next(iter(found.values())))
            print(line, flush=True)
            rows.append(line)
        record[f"seed {seed}"] = {
            who: {k: v.tolist() if hasattr(v, "tolist") else v for k, v in one.items()}
            for who, one in found.items()
        }
    text = f"# SGHMC\n\n{__doc__}\n{markdown_table(HEADER, rows)}"
    write("sghmc", record, text)


if __name__ == "__main__":
    main()
