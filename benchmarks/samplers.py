"""Effective draws per gradient and per CPU second: `fit_guided` beside NumPyro's NUTS.

    python benchmarks/samplers.py --data DIR [--seeds 1] [--quick]

NUTS runs on the same model written by hand in plain NumPyro, whitened, one chain of 500
+ 1000, as a user would have it. Seconds are CPU seconds of everything: guide,
compilation, warm-up, draws. ESS is that of the worst hyperparameter on the log scale,
and of the worst entry of `f`; of weights that of the weights. Gradients are those of
draws, warm-up and weights not counted. `z` is the largest difference of means of the
hyperparameters from NUTS, in standard errors of both.
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
from datasets import add_data_option, data_folder, load
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from results import markdown_table, write

import numpyro_gpx as gpx

NAMES = ("variance", "lengthscale")


def hyperparameters():
    return {name: numpyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in NAMES}


class FullGP:
    """A GP at its own rows, under a likelihood of ours and of NumPyro's."""

    def __init__(self, X, y, likelihood, theirs):
        self.X, self.y, self.likelihood, self.theirs = X, y, likelihood, theirs
        self.points = gpx.inducing.Data(X)

    def ours(self, X, y=None):
        kernel = gpx.kernels.RBF(**hyperparameters())
        f = gpx.gp("f", kernel, inducing=self.points)
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), self.likelihood, obs=y)

    def by_hand(self, y):
        squares = jnp.sum((self.X[:, None] - self.X[None]) ** 2, axis=-1)
        theta = hyperparameters()
        K = theta["variance"] * jnp.exp(-0.5 * squares / theta["lengthscale"] ** 2)
        N = len(self.X)
        L = jnp.linalg.cholesky(K + 1e-8 * theta["variance"] * jnp.eye(N))
        v = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([N]).to_event(1))
        with numpyro.plate("data", N):
            numpyro.sample("y", self.theirs(L @ v), obs=y)


class SparseGP(FullGP):
    """Through M inducing points; labels with the logit link, whose expectation under
    the conditional is by 20 Gauss-Hermite nodes for both."""

    def __init__(self, X, y, Z):
        super().__init__(X, y, gpx.likelihoods.Bernoulli(), None)
        self.points, self.Z = gpx.inducing.Points(Z), Z

    def by_hand(self, y):
        theta = hyperparameters()

        def k(A, B):
            squares = jnp.sum((A[:, None] - B[None]) ** 2, axis=-1)
            return theta["variance"] * jnp.exp(
                -0.5 * squares / theta["lengthscale"] ** 2
            )

        M = len(self.Z)
        L = jnp.linalg.cholesky(
            k(self.Z, self.Z) + 1e-8 * theta["variance"] * jnp.eye(M)
        )
        A = jax.scipy.linalg.solve_triangular(L, k(self.Z, self.X), lower=True)
        v = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([M]).to_event(1))
        sd = jnp.sqrt(jnp.maximum(theta["variance"] - jnp.sum(A**2, axis=0), 1e-30))
        nodes, weights = np.polynomial.hermite_e.hermegauss(20)
        f = (A.T @ v)[:, None] + sd[:, None] * nodes
        terms = dist.Bernoulli(logits=f).log_prob(y[:, None])
        numpyro.factor("y", jnp.sum(terms @ (weights / weights.sum())))


def problems(folder, quick: bool) -> dict:
    years, counts = load(folder, "coal")
    years = (years - 1907.0) / 30.0
    rng = np.random.default_rng(1)
    X = rng.uniform(-2.0, 2.0, (200, 2))
    f = np.sin(2.0 * X[:, 0]) + X[:, 1]
    labels = (f + rng.logistic(size=200) > 0.0).astype(float)
    found = {
        "coal, 112 years, full GP": FullGP(
            years, counts, gpx.likelihoods.Poisson(),
            lambda f: dist.Poisson(jnp.exp(f)),
        ),
        "classifier, N=200, full GP": FullGP(
            X, labels, gpx.likelihoods.Bernoulli(), lambda f: dist.Bernoulli(logits=f)
        ),
    }  # fmt: skip
    X = rng.uniform(-2.0, 2.0, (2000, 2))
    f = np.sin(2.0 * X[:, 0]) + X[:, 1]
    labels = (f + rng.logistic(size=2000) > 0.0).astype(float)
    Z = np.asarray(gpx.inducing.kmeans(jr.key(0), X, 30))
    found["classifier, N=2000, M=30"] = SparseGP(X, labels, Z)
    return dict(list(found.items())[:1]) if quick else found


def summary(chains: dict, ess=None) -> dict:
    """Moments of log hyperparameters, and the worst ESS of these and of `f`."""
    theta = np.stack([np.log(chains[name]) for name in NAMES], axis=-1)
    each = effective_sample_size(theta)
    function = np.min(effective_sample_size(chains["f"]))
    if ess is not None:  # independent draws, drawn again by their weights
        each, function = np.full(len(NAMES), ess), ess
    flat = theta.reshape(-1, len(NAMES))
    return {
        "ess": float(np.min(each)),
        "ess_f": float(function),
        "mean": flat.mean(axis=0),
        "error": flat.std(axis=0) / np.sqrt(each),
    }


def plain(problem, seed: int, quick: bool) -> dict:
    number = 100 if quick else 1000
    before = time.process_time()
    mcmc = MCMC(
        NUTS(problem.by_hand), num_warmup=number // 2, num_samples=number,
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(jr.key(seed), jnp.asarray(problem.y), extra_fields=("num_steps",))
    chains = {n: np.asarray(x)[None] for n, x in mcmc.get_samples().items()}
    seconds = time.process_time() - before
    gradients = int(np.sum(mcmc.get_extra_fields()["num_steps"]))
    return {"seconds": seconds, "gradients": gradients, **summary(chains)}


def guided(problem, seed: int, method: str) -> dict:
    gpx.cache.clear()  # all in
    jax.clear_caches()
    before = time.process_time()
    fit = gpx.fit_guided(
        problem.ours, problem.X, problem.y, method=method, key=jr.key(seed),
        num_samples=500 if method == "hmc" else 2000, progress=False,
    )  # fmt: skip
    chains = fit.chains()
    seconds = time.process_time() - before
    by_weights = fit.info["method"] == "importance"
    worth = fit.info["importance_ess"] if by_weights else None
    return {
        "seconds": seconds,
        "gradients": fit.info.get("num_gradients", 0),
        "method": fit.info["method"],
        "k_hat": fit.info["k_hat"],
        "notes": [note.kind for note in fit.check()],
        **summary(chains, worth),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one problem, few draws")
    args = parser.parse_args(arguments)
    rows, record = [], {}
    for name, problem in problems(data_folder(args.data), args.quick).items():
        for seed in range(args.seeds):
            found = {"NumPyro NUTS": plain(problem, seed, args.quick)}
            for method in ("importance", "hmc"):
                found[f"fit_guided, {method}"] = guided(problem, seed, method)
            reference = found["NumPyro NUTS"]
            for who, one in found.items():
                z = (one["mean"] - reference["mean"]) / np.hypot(
                    one["error"], reference["error"]
                )
                rate, rate_f = (one[e] / one["seconds"] for e in ("ess", "ess_f"))
                ratio = rate / (reference["ess"] / reference["seconds"])
                per_gradient = (
                    1000.0 * one["ess"] / one["gradients"]
                    if one["gradients"]
                    else float("nan")
                )
                diagnostic = f"k-hat {one['k_hat']:.2f}" if "k_hat" in one else ""
                rows.append([
                    name, seed, who, one["seconds"], one["ess"], one["ess_f"],
                    per_gradient, rate, rate_f, ratio, float(np.max(np.abs(z))),
                    " ".join([diagnostic, *one.get("notes", [])]),
                ])  # fmt: skip
            record[f"{name}, seed {seed}"] = {
                who: {
                    k: v.tolist() if isinstance(v, np.ndarray) else v
                    for k, v in one.items()
                }
                for who, one in found.items()
            }
    header = [
        "problem", "seed", "who", "CPU s, all in", "ESS, theta", "ESS, f",
        "ESS per 1000 gradients", "ESS per CPU s, theta", "f", "ratio, theta", "z",
        "diagnostic",
    ]  # fmt: skip
    text = f"# Effective draws\n\n{__doc__}\n{markdown_table(header, rows)}"
    write("samplers", record, text)


if __name__ == "__main__":
    main()
