"""Simulation-based calibration of draws through a guide, by both methods.

    python benchmarks/calibration.py [--replicates 200] [--out docs]

Hyperparameters, a function and targets are drawn from the prior; the rank of the truth
among 99 draws of the posterior is then uniform if the posterior is right (Talts et al.
2018). A classifier and counts of 30 rows. Beside them draws of a guide whose spread in
the hyperparameters was halved, which must fail. `p` is that of the largest departure of
the ranks' distribution function, everywhere at once. Draws `calibration_guided.png`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

jax.config.update("jax_enable_x64", True)

import jax.random as jr
import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import scipy.stats
from results import markdown_table, write

import numpyro_gpx as gpx

X = np.linspace(-2.0, 2.0, 30)[:, None]
SPREAD = 0.5  # of the priors of log hyperparameters
ROWS = (4, 20)  # where the function is looked at
NUM_DRAWS = 99
WAYS = ("importance", "hmc", "halved guide")


class Case(NamedTuple):
    """A likelihood, and how its targets are drawn."""

    likelihood: object
    targets: object


CASES = {
    "classifier": Case(
        gpx.likelihoods.Bernoulli(),
        lambda rng, f: (rng.uniform(size=len(f)) < 1 / (1 + np.exp(-f))).astype(float),
    ),
    "counts": Case(
        gpx.likelihoods.Poisson(), lambda rng, f: rng.poisson(np.exp(f)).astype(float)
    ),
}


def make_model(likelihood):
    def model(X_, y=None):
        theta = {
            name: numpyro.sample(name, dist.LogNormal(0.0, SPREAD))
            for name in ("variance", "lengthscale")
        }
        kernel = gpx.kernels.RBF(theta["variance"], theta["lengthscale"])
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Data(X))
        with numpyro.plate("data", len(X_)):
            gpx.observe("y", f(X_), likelihood, obs=y)

    return model


def looked_at(variance, lengthscale, v) -> np.ndarray:
    """Log hyperparameters, and the function at two rows."""
    K = variance * np.exp(-0.5 * (X - X.T) ** 2 / lengthscale**2)
    L = np.linalg.cholesky(K + 1e-8 * variance * np.eye(len(X)))
    f = L @ v
    return np.array([np.log(variance), np.log(lengthscale), *f[list(ROWS)]])


def ranks(case: Case, way: str, replicates: int, seed: int = 0) -> np.ndarray:
    """Ranks of the truth among 99 draws, `(replicates, 4)`."""
    rng, model = np.random.default_rng(seed), make_model(case.likelihood)
    found = []
    for i in range(replicates):
        variance, lengthscale = np.exp(SPREAD * rng.normal(size=2))
        v = rng.normal(size=len(X))
        K = variance * np.exp(-0.5 * (X - X.T) ** 2 / lengthscale**2)
        f = np.linalg.cholesky(K + 1e-8 * variance * np.eye(len(X))) @ v
        y = case.targets(rng, f)
        draws = posterior(model, y, way, jr.key(i))
        truth = looked_at(variance, lengthscale, v)
        found.append(np.sum(draws < truth, axis=0))
    return np.stack(found)


def posterior(model, y, way: str, key) -> np.ndarray:
    """What is looked at in 99 draws, `(99, 4)`."""
    key_guide, key_fit, key_draws = jr.split(key, 3)
    guide = gpx.fit_sites(model, X, y, key=key_guide, progress=False)
    if way == "halved guide":
        params = dict(guide.params)
        params["theta_auto_scale_tril"] = 0.5 * params["theta_auto_scale_tril"]
        inner = guide.posterior.guide
        drawn = inner.sample_posterior(key_draws, params, sample_shape=(NUM_DRAWS,))
    else:
        options = {"num_proposals": 2000} if way == "importance" else {}
        fit = gpx.fit_guided(
            model, X, y, guide=guide, method=way, key=key_fit, num_samples=200,
            progress=False, **options,
        )  # fmt: skip
        chains = fit.chains()
        length = next(iter(chains.values())).shape
        picked = np.linspace(0, length[0] * length[1] - 1, NUM_DRAWS).astype(int)
        drawn = {n: x.reshape(-1, *x.shape[2:])[picked] for n, x in chains.items()}
    names = ("variance", "lengthscale", "f")
    each = zip(*(np.asarray(drawn[n]) for n in names), strict=True)
    return np.stack([looked_at(*one) for one in each])


def departure(found: np.ndarray) -> np.ndarray:
    """Smallest pointwise p-value of the ranks' distribution function, by column."""
    replicates, places = len(found), np.arange(NUM_DRAWS)
    below = np.sum(found[..., None] <= places, axis=0)  # (Q, 99)
    binomial = scipy.stats.binom(replicates, (places + 1.0) / (NUM_DRAWS + 1.0))
    both = np.minimum(binomial.cdf(below), binomial.sf(below - 1))
    return np.min(2.0 * both, axis=-1)


def p_values(found: np.ndarray, simulations: int = 4000) -> np.ndarray:
    """Of the departures, among those of uniform ranks."""
    rng = np.random.default_rng(0)
    uniform = rng.integers(0, NUM_DRAWS + 1, (len(found), simulations))
    none = departure(uniform)
    return np.mean(none[None] <= departure(found)[:, None], axis=1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args(arguments)
    names = ["log variance", "log lengthscale", *(f"f at row {r}" for r in ROWS)]
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), sharex=True, sharey=True)
    rows, record = [], {}
    for line, (name, case) in zip(axes, CASES.items(), strict=True):
        for ax, way in zip(line, WAYS, strict=True):
            found = ranks(case, way, args.replicates)
            p = p_values(found)
            rows.append([name, way, *map(float, p)])
            record[f"{name}, {way}"] = {"p": p.tolist(), "ranks": found.tolist()}
            draw(ax, found, names, f"{name}: {way}")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    args.out.mkdir(exist_ok=True)
    figure.savefig(args.out / "calibration_guided.png", dpi=120)
    table = markdown_table(["model", "posterior", *(f"p, {n}" for n in names)], rows)
    write("calibration", record, f"# Calibration\n\n{__doc__}\n{table}")


def draw(ax, found, names, title):
    """Distribution functions of the ranks less the uniform one, with a 95 % band."""
    places = np.arange(NUM_DRAWS + 1)
    uniform = (places + 1.0) / (NUM_DRAWS + 1.0)
    for column, name in zip(found.T, names, strict=True):
        share = np.mean(column[:, None] <= places, axis=0)
        ax.plot(places, share - uniform, label=name)
    rng = np.random.default_rng(1)
    none = departure(rng.integers(0, NUM_DRAWS + 1, (len(found), 2000)))
    level = 0.5 * np.quantile(none, 0.05)
    binomial = scipy.stats.binom(len(found), uniform)
    low, high = binomial.ppf(level), binomial.isf(level)
    band = [x / len(found) - uniform for x in (low, high)]
    ax.fill_between(places, *band, color="0.85", zorder=0)
    ax.set(title=title, xlabel="rank")


if __name__ == "__main__":
    main()
