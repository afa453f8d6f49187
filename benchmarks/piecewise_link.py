"""The piecewise-constant link: what it costs, and how fast it converges.

    python benchmarks/piecewise_link.py [--quick]

The expected log-likelihood of 10^5 binary targets, value and gradient in means and
variances, with 50 pieces against a 20-point Gauss-Hermite rule on the same link; and
the error of the expectation against the number of pieces.
"""

from __future__ import annotations

import argparse
import time

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import numpy as np
from results import FOLDER, markdown_table, write

import numpyro_gpx as gpx
from numpyro_gpx.likelihoods import Bernoulli
from numpyro_gpx.links import PiecewiseConstant
from numpyro_gpx.numerics.threads import one_at_a_time


def make_data(num_rows):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, num_rows).astype(float)
    mean, var = rng.normal(size=num_rows), rng.uniform(0.05, 1.5, num_rows)
    return jnp.asarray(y), jnp.asarray(mean), jnp.asarray(var)


def compare_cost(num_rows, repeats):
    y, mean, var = make_data(num_rows)
    rules = {
        "50 pieces": Bernoulli(link=PiecewiseConstant.of("logit", num_pieces=50)),
        "20 nodes": Bernoulli(num_nodes=20),
    }
    functions, times = {}, {name: [] for name in rules}
    for name, likelihood in rules.items():

        def total(mean, var, likelihood=likelihood):
            return jnp.sum(likelihood.expected_log_prob(y, mean, var))

        functions[name] = jax.jit(jax.value_and_grad(total, (0, 1)))
        jax.block_until_ready(functions[name](mean, var))
    with one_at_a_time():
        for repeat in range(repeats):
            for name in list(functions)[:: 1 if repeat % 2 else -1]:
                before = time.perf_counter()
                jax.block_until_ready(functions[name](mean, var))
                times[name].append(time.perf_counter() - before)
    return {name: float(np.median(t)) for name, t in times.items()}


def convergence(sizes):
    """Error of the expectation on 200 rows, by number of pieces and place."""
    y, mean, var = make_data(200)
    exact = Bernoulli(num_nodes=64).expected_log_prob(y, mean, var)
    errors = {}
    for at in ("upper", "middle"):
        for size in sizes:
            link = PiecewiseConstant.of(
                "logit", num_pieces=size, lower=-10.0, upper=10.0, at=at
            )
            ours = Bernoulli(link=link).expected_log_prob(y, mean, var)
            errors[at, size] = float(jnp.max(jnp.abs(ours - exact)))
    return errors


def theorem(sizes):
    """Root of the bound of theorem 1 on the error of the link itself."""
    found = {}
    for size in sizes:
        edges = gpx.links.even_edges(size, -10.0, 10.0)
        bound = gpx.links.lipschitz_error(
            edges, gpx.links.places(edges), jnp.zeros(()), jnp.ones(()), lipschitz=0.25
        )
        found[size] = float(jnp.sqrt(bound))
    return found


def draw(errors, bounds, sizes):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, ax = plt.subplots(figsize=(5.5, 4.0), layout="constrained")
    for at, style in (("upper", "o-"), ("middle", "s-")):
        ax.loglog(
            sizes,
            [errors[at, k] for k in sizes],
            style,
            label=f"link at {at} of pieces",
        )
    ax.loglog(sizes, list(bounds.values()), "k:", label="theorem 1, error of the link")
    ax.set(xlabel="pieces K on [-10, 10]", ylabel="largest error of E log p(y | f)")
    ax.set_xticks(sizes, [str(k) for k in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / "piecewise_convergence.png", dpi=120)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    args = parser.parse_args(arguments)
    num_rows, repeats = (1000, 3) if args.quick else (100_000, 40)
    sizes = (20, 40) if args.quick else (20, 40, 80, 160, 320, 640)
    cost = compare_cost(num_rows, repeats)
    ratio = cost["50 pieces"] / cost["20 nodes"]
    errors, bounds = convergence(sizes), theorem(sizes)
    draw(errors, bounds, sizes)
    rows = [[k, errors["upper", k], errors["middle", k], bounds[k]] for k in sizes]
    text = "\n".join(
        [
            "# The piecewise-constant link",
            "",
            f"Expected log-likelihood of {num_rows} binary targets, value and "
            "gradient, float64: "
            f"50 pieces {1e3 * cost['50 pieces']:.1f} ms, "
            f"20 Gauss-Hermite nodes {1e3 * cost['20 nodes']:.1f} ms, "
            f"ratio {ratio:.2f} (limit 2).",
            "",
            "Largest error of the expectation over 200 rows (logit, K pieces on "
            "[-10, 10]); the last column is theorem 1's bound on the root mean squared "
            "error of the link under N(0, 1). Figure: `piecewise_convergence.png`.",
            "",
            markdown_table(["K", "upper edge", "middle", "theorem 1"], rows),
        ]
    )
    record = {
        "cost": cost,
        "ratio": ratio,
        "errors": {f"{at} {k}": e for (at, k), e in errors.items()},
        "theorem_1": bounds,
    }
    write("piecewise_link", record, text)


if __name__ == "__main__":
    main()
