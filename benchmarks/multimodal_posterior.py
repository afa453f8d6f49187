"""The five-mode posterior of thesis C.4.1: modes found, and Jensen-Shannon divergence.

    python benchmarks/multimodal_posterior.py [--fresh] [--only METHOD]

One function value `u = f(0)`, a prior that is a mixture of five GPs (constant kernel,
means mu_i exp(-8 x^2)), noise so large that the posterior keeps all five modes. The
component is marginalised, given `u` too. Rows are written as they are known and not run
again, so that the script can be stopped and resumed; the figure is drawn at the end.

Data. The thesis calls them a "diamond" and does not give them. Its posterior variance
1/4 = 1/(1/sigma_A^2 + N/sigma_B^2) makes N = 7, its shifts delta_i make the sum of
exp(-8 x_n^2) equal 5 and the sum of targets 0. Ours have this: (0, 8), (0, 0), (0, -8)
and (+-x, +-4) with exp(-8 x^2) = 1/2. Its weights p'_i cannot be had: in this model
log p'_i falls with mu_i^2, so that log p'_1/p'_3 is four times log p'_2/p'_3, which is
not so of 0.1988 and 0.2004 beside 0.2016. The exact ones for our data are used.

Measures. 20000 draws; Jensen-Shannon divergence in nats (at most 0.693) between the
shares of draws in 120 bins on [-12, 12] and the exact probabilities of the bins. Its
bias is about 0.0007 for independent draws. A mode counts as found if at least 5 % of
the draws are within 1 (two standard deviations) of it, and within 0.5 of it there are
twice as many as within 0.5 of the middle between it and either neighbour.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from results import FOLDER, markdown_table, write
from scipy.stats import multivariate_normal, norm

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target

NAME = "multimodal_posterior"
SEEDS = range(5)
NUM_DRAWS = 20000
EDGES = np.linspace(-12.0, 12.0, 121)

MU = np.array([-8.0, -4.0, 0.0, 4.0, 8.0])
VAR_A = 1.0 / (4.0 - np.exp(-8.0))
VAR_B = 7.0 * np.exp(8.0)
SIDE = np.sqrt(np.log(2.0) / 8.0)
X = np.array([0.0, 0.0, 0.0, -SIDE, -SIDE, SIDE, SIDE])
Y = np.array([-8.0, 0.0, 8.0, -4.0, 4.0, -4.0, 4.0])
BUMP = np.exp(-8.0 * X**2)  # (N,)


COMMENTS = """
Tempered: the log joint density is divided by a temperature, for Implicit one that falls
from 20 to 1 over the first half of the rounds. Budgets are not equal, and settings were
not chosen with equal care: Implicit was tuned on this posterior (with other targets, to
which it is indifferent), mostly on seed 0, and its tempering was chosen after seeing
the rows of seeds 0 to 4: of its rows, that of the seeds 5 to 9 is the held-out one.
The chains were not tuned; the flow's wide start and small box (`init_scale=6`,
`bound=3`) were chosen by what is known of this posterior, without trials. The tempered
flow has the settings of `flow_modes.py`, found on another posterior: it differs from
the flow in its box, rate, number of steps and gradient as well, not in temperature
alone.

What was tried for Implicit: some 20 runs of a generator that saw no signs of its noise
left a plateau between the outer modes or dropped two of them (divergence 0.11 to 0.31;
widths 32 to 128, two or three layers; shared noise of size 0 to 8; rates 0.002 to 0.01;
leaky, smooth and tanh units; with and without a temperature). In the run that was
looked at, the discriminator's density followed the histogram: it was the smooth map
that fell short. With signs the modes separated. All this was with a contrast that
lagged behind the generator; the rows above are with one that does not. Without a
temperature more than one mode is lost on three of five seeds, with one on one of ten,
each time to a plateau over the lost modes and without a warning: only the density of
the draws, or another seed, shows it. A temperature with the prior as contrast was tried
once, without signs, and diverged. The thesis's rates are 0.05 (discriminator), 0.001
(generator) and 0.025 (hyperparameters, of which this posterior has none); within our
number of rounds a generator at 0.001 separates no modes.

The tempered flow loses one or two of the three inner modes on every seed, with the
settings that keep both modes of `flow_modes.py` on every seed: they are no recipe for
more than two. Why was not looked into.
"""


def model(y=None):
    """`u` from the mixture; targets given `u`, the component marginalised."""
    mu, sd = jnp.asarray(MU), np.sqrt(VAR_A)
    equal = dist.Categorical(probs=jnp.full(5, 0.2))
    u = numpyro.sample("u", dist.MixtureSameFamily(equal, dist.Normal(mu, sd)))
    component = dist.Categorical(logits=dist.Normal(mu, sd).log_prob(u))
    # The GP is u + mu_i (exp(-8 x^2) - 1): its kernel is constant.
    f = u + mu[:, None] * (BUMP - 1.0)  # (5, N)
    rows = dist.Normal(f, np.sqrt(VAR_B)).to_event(1)
    numpyro.sample("y", dist.MixtureSameFamily(component, rows), obs=y)


def exact():
    """Weights, means and standard deviation of the posterior's components."""
    sd = 1.0 / np.sqrt(1.0 / VAR_A + len(X) / VAR_B)
    delta = sd**2 * (Y.sum() - MU * BUMP.sum()) / VAR_B
    log_p = log_evidences()
    weights = np.exp(log_p - log_p.max())
    return weights / weights.sum(), MU + delta, sd


def log_evidences():
    """Log density of the targets under each component."""
    cov = VAR_B * np.eye(len(X)) + VAR_A
    return np.array([multivariate_normal(mu * BUMP, cov).logpdf(Y) for mu in MU])


def density(u):
    weights, means, sd = exact()
    return norm(means, sd).pdf(np.asarray(u)[:, None]) @ weights


def check_density():
    """The model's own density, normalised on a grid, is the one in closed form."""
    grid = np.linspace(-14.0, 14.0, 4001)
    target = Target(Call(model, (jnp.asarray(Y),)))
    log_p = jax.vmap(lambda u: target.log_density({"u": u}))(jnp.asarray(grid))
    p = np.exp(np.asarray(log_p) - np.max(log_p))
    p /= np.trapezoid(p, grid)
    np.testing.assert_allclose(p, density(grid), atol=1e-9)


def divergence(draws):
    """Jensen-Shannon divergence of the draws to the posterior, by bins."""
    weights, means, sd = exact()
    P = np.diff(norm(means, sd).cdf(EDGES[:, None]) @ weights)
    Q = np.histogram(np.clip(draws, EDGES[0], EDGES[-1]), EDGES)[0] / len(draws)
    middle = 0.5 * (P + Q)

    def kl(p):
        return np.sum(p[p > 0] * np.log(p[p > 0] / middle[p > 0]))

    return float(0.5 * kl(P) + 0.5 * kl(Q))


def modes_found(draws):
    """Which of the five modes the draws show."""

    def share(centre, half):
        return np.mean(np.abs(draws - centre) < half)

    found = []
    for mu in MU:
        sides = [m for m in (mu - 2.0, mu + 2.0) if abs(m) < 8.0]
        gap = max(share(m, 0.5) for m in sides)
        found.append(bool(share(mu, 1.0) >= 0.05 and share(mu, 0.5) >= 2.0 * gap))
    return found


def implicit(seed, y, **options):
    options = dict(options)  # `THESIS` is used again
    guide = gpx.guides.Implicit(model, theta="joint", **options.pop("guide", {}))
    return gpx.fit_implicit(
        model, guide, y, key=jr.key(seed), num_rounds=6000, num_particles=64,
        progress=False, **options,
    )  # fmt: skip


def gaussian(seed, y):
    guide = gpx.guides.WhitenedGaussian(
        model, theta="full", init_loc_fn=numpyro.infer.init_to_sample
    )
    return gpx.fit_svi(
        model, guide, y, key=jr.key(seed), num_steps=5000, progress=False,
        loss=gpx.infer.ELBO(num_particles=16),
    )  # fmt: skip


def flow(seed, y):
    guide = gpx.guides.Flow(model, init_scale=6.0, bound=3.0)
    return gpx.fit_svi(
        model, guide, y, key=jr.key(seed), num_steps=2000, loss=gpx.infer.ELBO(64),
        progress=False,
    )  # fmt: skip


def tempered_flow(seed, y):
    """With the settings of `flow_modes.py`."""
    guide = gpx.guides.Flow(model, init_scale=6.0, path_gradient=True)
    return gpx.fit_svi(
        model, guide, y, key=jr.key(seed), num_steps=20000, temperature=200.0,
        loss=gpx.infer.ELBO(64), progress=False,
        optimizer=optax.adam(optax.cosine_decay_schedule(5e-4, 20000)),
    )  # fmt: skip


def nuts(seed, y):
    return gpx.fit_nuts(
        model, y, key=jr.key(seed), num_samples=NUM_DRAWS // 4, num_chains=4,
        progress=False,
    )  # fmt: skip


def sghmc(seed, y, step_size):
    return gpx.fit_sghmc(
        model, y, key=jr.key(seed), num_samples=NUM_DRAWS // 4, num_chains=4,
        step_size=step_size, progress=False,
    )  # fmt: skip


PRIOR = {"contrast": "prior"}
THESIS = {"guide": PRIOR, "discriminator_rate": 0.05, "generator_rate": 0.001}
METHODS = {
    "Implicit": implicit,
    "Implicit, tempered": lambda s, y: implicit(s, y, temperature=20.0),
    "Implicit, prior contrast": lambda s, y: implicit(s, y, guide=PRIOR),
    "Implicit, tempered, new seeds": lambda s, y: implicit(s + 5, y, temperature=20.0),
    "Implicit, the thesis's rates": lambda s, y: implicit(s, y, **THESIS),
    "Gaussian": gaussian,
    "NUTS": nuts,
    "SGHMC, step 0.1": lambda s, y: sghmc(s, y, 0.1),
    "SGHMC, step 0.5": lambda s, y: sghmc(s, y, 0.5),
    "SGHMC, step 1.5": lambda s, y: sghmc(s, y, 1.5),
    "Flow": flow,
    "Flow, tempered": tempered_flow,
}


def run(method, seed):
    """One row of the table."""
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = METHODS[method](seed, jnp.asarray(Y))
        draws = np.asarray(fit.draws(NUM_DRAWS)["u"]).reshape(-1)
    return {
        "method": method,
        "seed": seed,
        "divergence": divergence(draws),
        "modes": modes_found(draws),
        "elbo": None if fit.is_mcmc else fit.elbo(1000).value,
        "seconds": time.perf_counter() - started,
        "warnings": sorted({str(w.message) for w in caught}),
        "shares": (np.histogram(draws, EDGES)[0] / len(draws)).round(6).tolist(),
    }


def report(rows):
    header = ["method", "modes found, by seed", "Jensen-Shannon divergence, by seed",
              "mean", "mean bound", "seconds a fit"]  # fmt: skip
    lines = []
    for method in METHODS:
        mine = [r for r in rows if r["method"] == method]
        if mine:
            values = [r["divergence"] for r in mine]
            lines.append([
                method,
                " ".join(str(sum(r["modes"])) for r in mine),
                " ".join(f"{x:.3f}" for x in values),
                float(np.mean(values)),
                "-" if mine[0]["elbo"] is None
                else f"{np.mean([r['elbo'] for r in mine]):.2f}",
                f"{np.median([r['seconds'] for r in mine]):.0f}",
            ])  # fmt: skip
    weights, means, sd = exact()
    evidence = np.log(np.mean(np.exp(log_evidences())))
    intro = (
        "# A posterior with five modes (thesis C.4.1)\n\n"
        f"Exact posterior: weights {np.round(weights, 4).tolist()}, shifts "
        f"{np.round(means - MU, 6).tolist()}, variance {sd**2:.4f}. 20000 draws a row, "
        "seeds 0 to 4 (5 to 9 for the row that says new seeds); evidence "
        f"{evidence:.2f}, and bounds of Implicit are estimates. "
        f"`benchmarks/{NAME}.py` says how modes are counted and the divergence (in "
        "nats, at most 0.693) is taken. Chains: 4, from starts spread by 0.3 about the "
        "prior's median. Times on a machine that ran other work.\n\n"
    )
    return intro + markdown_table(header, lines) + "\n" + COMMENTS


def draw(rows, path):
    """Figure 4.2 of the thesis, redrawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = [m for m in METHODS if any(r["method"] == m for r in rows)]
    figure = plt.figure(figsize=(15, 8.5), layout="constrained")
    grid = figure.add_gridspec(3, 5)
    _draw_truth(figure.add_subplot(grid[0, 0]))
    _draw_divergences(figure.add_subplot(grid[0, 1:3]), rows, methods)
    u = np.linspace(-12.0, 12.0, 600)
    width = EDGES[1] - EDGES[0]
    for i, method in enumerate(methods, start=3):
        axis = figure.add_subplot(grid[i // 5, i % 5])
        axis.fill_between(u, density(u), color="0.85")
        for row in (r for r in rows if r["method"] == method):
            axis.stairs(np.array(row["shares"]) / width, EDGES, alpha=0.8, lw=1.0)
        axis.set(title=method, xlim=(-11, 11), ylim=(0, 0.5), xlabel="f(0)")
    figure.savefig(path, dpi=110)


def _draw_truth(axis):
    x, f = np.linspace(-1.0, 1.0, 200), np.linspace(-11.0, 11.0, 300)
    weights, means, sd = exact()
    bumps = MU[None] * np.exp(-8.0 * x[:, None] ** 2) + (means - MU)[None]
    image = norm(bumps[:, None], sd).pdf(f[None, :, None]) @ weights
    axis.pcolormesh(x, f, image.T, cmap="Blues", shading="auto", rasterized=True)
    axis.plot(X, Y, "k.", ms=7)
    axis.set(title="posterior of f, and data", xlabel="x", ylabel="f(x)")


def _draw_divergences(axis, rows, methods):
    for i, method in enumerate(methods):
        values = [r["divergence"] for r in rows if r["method"] == method]
        axis.plot(values, np.full(len(values), -i), "o", ms=4, alpha=0.7)
        axis.text(0.45, -i, method, va="center", fontsize=8)
    axis.set_yticks([])
    axis.set(xlabel="Jensen-Shannon divergence", xlim=(0, 0.68))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="forget earlier rows")
    parser.add_argument("--only", default="", help="methods that start with this")
    options = parser.parse_args()
    check_density()
    path = FOLDER / f"{NAME}.json"
    rows = []
    if path.exists() and not options.fresh:
        rows = json.loads(path.read_text())["rows"]
    known = {(r["method"], r["seed"]) for r in rows}
    for method in METHODS:
        for seed in SEEDS:
            if method.startswith(options.only) and (method, seed) not in known:
                rows.append(run(method, seed))
                rows.sort(key=lambda r: (list(METHODS).index(r["method"]), r["seed"]))
                write(NAME, {"rows": rows}, report(rows))
    draw(rows, FOLDER.parents[1] / "docs" / f"{NAME}.png")


if __name__ == "__main__":
    main()
