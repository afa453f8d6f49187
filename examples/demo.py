"""One model, four posteriors: sparse GP classification by SVI, through its guide,
by NUTS and by SGHMC.

    python examples/demo.py --out out

Prints a comparison and leaves figures (PNG) and fits (NetCDF, for ArviZ) in `out/`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple


class Sizes(NamedTuple):
    """How much work the demonstration does."""

    num_data: int = 120
    num_inducing: int = 12
    num_test: int = 200
    svi_steps: int = 500
    guided_draws: int = 1000
    nuts_draws: int = 400
    sghmc_draws: int = 1000
    sghmc_steps: int = 40  # gradients a draw


QUICK = Sizes(20, 4, 10, 10, 8, 8, 8, 2)


def main(args=None) -> None:
    """Run the demonstration.

    Args:
        args: Command line; `--quick` runs at tiny sizes, without a useful result.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="output folder")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for tests")
    options = parser.parse_args(args)
    say("Sparse GP classification with one model and four posteriors")
    say("Loading JAX and NumPyro ...")
    run(options.out, QUICK if options.quick else Sizes(), progress=not options.quick)


def run(out: Path, sizes: Sizes, *, progress: bool) -> None:
    started = time.perf_counter()
    import jax

    # Cholesky factors of smooth kernels need the digits; before any array is made.
    jax.config.update("jax_enable_x64", True)

    import jax.numpy as jnp
    import jax.random as jr
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    import numpyro_gpx as gpx

    key_data, key_test, *keys = jr.split(jr.key(0), 6)
    key_svi, key_nuts, key_sghmc, key_guided = keys
    X, y = make_data(key_data, sizes.num_data)
    X_test, y_test = make_data(key_test, sizes.num_test)
    Z = jnp.linspace(-3.0, 3.0, sizes.num_inducing)[:, None]
    say(f"{sizes.num_data} labels, {sizes.num_inducing} inducing points")

    def model(X, y=None, *, batch_size=None):
        kernel = gpx.kernels.RBF(
            variance=numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
            lengthscale=numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0)),
        )
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            gpx.observe("y", f(X[i]), gpx.likelihoods.Bernoulli(), obs=y, rows=i)

    say("SVI: a Gaussian q(v | theta) q(theta) ...")
    guide = gpx.guides.ConditionalGaussian(model)
    svi = gpx.fit_svi(
        model, guide, X, y, key=key_svi, num_steps=sizes.svi_steps, progress=progress
    )
    say(f"  {svi.seconds:.1f} s")

    say("Guided: the best q, without a family, by weighing draws of the guide ...")
    guided = gpx.fit_guided(
        model, X, y, guide=svi, key=key_guided, num_samples=sizes.guided_draws,
        progress=progress,
    )  # fmt: skip
    say(f"  {guided.seconds:.1f} s, k-hat {guided.info.get('k_hat', np.nan):.2f}")

    say("NUTS: the same, without a guide ...")
    nuts = gpx.fit_nuts(
        model, X, y, key=key_nuts, num_warmup=sizes.nuts_draws,
        num_samples=sizes.nuts_draws, num_chains=2, progress=progress,
    )  # fmt: skip
    say(f"  {nuts.seconds:.1f} s")

    say("SGHMC: the same, from minibatches ...")
    sghmc = gpx.fit_sghmc(
        model, X, y, key=key_sghmc, batch_size=sizes.num_data // 2,
        num_warmup=sizes.sghmc_draws, num_samples=sizes.sghmc_draws, num_chains=2,
        step_size=0.1, num_integration_steps=sizes.sghmc_steps,
        progress=progress,
    )  # fmt: skip
    say(f"  {sghmc.seconds:.1f} s")

    say("Comparing on test data ...")
    fits = {"svi": svi, "guided": guided, "nuts": nuts, "sghmc": sghmc}
    comparison = gpx.compare(fits, X_test, y_test, reference="nuts")
    say(f"\n{comparison}\n")

    out.mkdir(parents=True, exist_ok=True)
    draw(out, fits, comparison, X, y)
    for name, fit in fits.items():
        save(out / f"{name}.nc", lambda path, fit=fit: fit.to_arviz().to_netcdf(path))
    say(f"Done in {time.perf_counter() - started:.0f} s.")


def make_data(key, number):
    """Inputs on [-3, 3] and labels with log odds `3 sin(2 x)`."""
    import jax
    import jax.numpy as jnp
    import jax.random as jr

    key_inputs, key_labels = jr.split(key)
    X = jr.uniform(key_inputs, (number, 1), minval=-3.0, maxval=3.0)
    p = jax.nn.sigmoid(log_odds(X[:, 0]))
    return X, jr.bernoulli(key_labels, p).astype(jnp.int32)


def log_odds(x):
    """The function behind the labels."""
    import jax.numpy as jnp

    return 3.0 * jnp.sin(2.0 * x)


def draw(out: Path, fits: dict, comparison, X, y) -> None:
    """Write the figures."""
    import jax
    import matplotlib

    matplotlib.use("Agg")  # files only; no display is needed
    import matplotlib.pyplot as plt
    import numpy as np

    from numpyro_gpx import plots

    x = np.linspace(-4.0, 4.0, 200)  # beyond the data, where the fits must be unsure
    truth = jax.nn.sigmoid(log_odds(x))
    ax = plots.predictions(fits, x, data=(X, y), truth=truth)
    figures = {"predictions": ax.figure, "comparison": comparison.plot()}
    for name, figure in figures.items():
        save(out / f"{name}.png", lambda path, f=figure: f.savefig(path, dpi=150))
        plt.close(figure)


def save(path: Path, write) -> None:
    write(str(path))
    say(f"Wrote {path}")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
