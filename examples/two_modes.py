"""A posterior with two modes: the square of a function is seen, its sign is not.

    python examples/two_modes.py [--out out]

Observations are `f(x)^2` with noise, so that `f` and `-f` are equally likely. A
Gaussian settles on one of them, and so do a chain of NUTS and an implicit posterior. A
flow that is trained slowly, while the model cools down, holds both, in shares that
differ from one half (`benchmarks/flow_modes.py`). It takes some minutes.
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
import optax
from numpyro import handlers
from options import Options, parse, save

import numpyro_gpx as gpx

Z = np.linspace(-2.0, 2.0, 8)[:, None]


def main(args=None) -> None:
    options = parse(__doc__, args)
    X, y = make_data()
    fits = fit_all(X, y, options)
    figure, axes = plt.subplots(
        1, len(fits), figsize=(3.6 * len(fits), 3.2), sharey=True, layout="constrained"
    )
    inputs = np.linspace(-2.3, 2.3, 80)[:, None]
    for ax, (name, fit) in zip(axes, fits.items(), strict=True):
        f = functions(fit, inputs, 60)
        ax.plot(inputs, f.T, color="C0", alpha=0.25, linewidth=0.8)
        root = np.sqrt(np.maximum(y, 0.0))
        ax.plot(X, root, "k.", X, -root, "k.", markersize=4)
        share = np.mean(f[:, 40] > 0.0)
        ax.set(title=f"{name}: {share:.0%} positive", xlabel="x", ylim=(-2.6, 2.6))
    axes[0].set_ylabel("draws of f; roots of y")
    save(figure, options, "two_modes.png")


def model(X, y=None):
    f = gpx.gp("f", gpx.kernels.RBF(1.5, 1.0), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", X.shape[0]):
        square = numpyro.deterministic("f_mean", f(X).mean) ** 2
        numpyro.sample("y", dist.Normal(square, 0.4), obs=y)


def make_data():
    rng = np.random.default_rng(2)
    X = np.sort(rng.uniform(-2.0, 2.0, 25))[:, None]
    f = 1.2 + 0.5 * np.sin(1.5 * X[:, 0])
    return X, f**2 + 0.4 * rng.normal(size=25)


def fit_all(X, y, options: Options):
    steps, length = (3, 3) if options.quick else (20000, 500)
    # A Gaussian that is drawn: the model asks for the mean of `f` given a draw, and
    # would not see the variance of a belief.
    guide = gpx.guides.Flow(model, num_blocks=0, path_gradient=True)
    gaussian = gpx.fit_svi(
        model, guide, X, y, key=jr.key(0), num_steps=min(steps, 3000), progress=False
    )
    nuts = gpx.fit_nuts(
        model, X, y, key=jr.key(1), num_chains=1, num_warmup=length,
        num_samples=length, progress=False,
    )  # fmt: skip
    implicit = gpx.fit_implicit(
        model, gpx.guides.Implicit(model), X, y, key=jr.key(0),
        num_rounds=min(steps, 3000), temperature=20.0, progress=False,
    )  # fmt: skip
    return {
        "Gaussian": gaussian,
        "NUTS": nuts,
        "implicit": implicit,
        "flow": cool_down(X, y, steps),
    }


def cool_down(X, y, steps):
    """A flow, trained from a hot model to the model itself."""
    return gpx.fit_svi(
        model, gpx.guides.Flow(model, init_scale=1.0, path_gradient=True), X, y,
        key=jr.key(0), num_steps=steps, temperature=200.0, loss=gpx.infer.ELBO(64),
        optimizer=optax.adam(optax.cosine_decay_schedule(5e-4, steps)), progress=False,
    )  # fmt: skip


def functions(fit, inputs, number):
    """Draws of the function's mean given the inducing variables, `(number, N)`."""

    def one(v):
        seeded = handlers.substitute(handlers.seed(model, 0), data={"f": v})
        return handlers.trace(seeded).get_trace(inputs)["f_mean"]["value"]

    return np.asarray(jax.jit(jax.vmap(one))(fit.draws(number)["f"][:number]))


if __name__ == "__main__":
    main()
