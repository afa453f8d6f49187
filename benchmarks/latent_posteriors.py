"""The posterior of latent inputs: NUTS beside the unscented rule and its rivals.

    python benchmarks/latent_posteriors.py [--quick]

Thirty rows of five columns are drawn from the model itself (two latent dimensions), for
three seeds. NUTS samples latent inputs, inducing variables and hyperparameters, started
from draws of the guide with the best bound; the guides see the same model. What is
compared does not depend on rotations: distances between the latent inputs of all 435
pairs of rows.
"""

from __future__ import annotations

import argparse
import warnings

import jax

jax.config.update("jax_enable_x64", True)

import arviz as az
import jax.random as jr
import numpy as np
import optax
from results import markdown_table, write

import numpyro_gpx as gpx

NUM_ROWS, NUM_OUTPUTS, NUM_LATENTS, NUM_INDUCING = 30, 5, 2, 15
DISTANCES = gpx.latent_space.pairwise_distances("h")


def make_data(seed):
    """Rows drawn from a full GP of latent inputs."""
    rng = np.random.default_rng(seed)
    H = rng.normal(size=(NUM_ROWS, NUM_LATENTS))
    K = np.asarray(gpx.kernels.RBF(lengthscale=2.5)(H)) + 1e-9 * np.eye(NUM_ROWS)
    F = np.linalg.cholesky(K) @ rng.normal(size=(NUM_ROWS, NUM_OUTPUTS))
    Z = rng.normal(size=(NUM_INDUCING, NUM_LATENTS))
    return F + 0.3 * rng.normal(size=F.shape), Z, H


def make_guides(model):
    """The rivals: rule by name."""
    rules = {
        "UT-4": gpx.cubature.Unscented(),
        "GH-25": gpx.cubature.GaussHermite(5),
        "MC-10": gpx.cubature.MonteCarlo(10),
    }
    return {
        name: gpx.guides.UnscentedLatent(
            gpx.guides.WhitenedGaussian(model, theta="mean_field"), rule=rule
        )
        for name, rule in rules.items()
    }


def fit_all(seed, quick):
    """Variational fits, and NUTS started from the one with the best bound."""
    Y, Z, _ = make_data(seed)
    model = gpx.models.gplvm(gpx.inducing.Points(Z), num_outputs=NUM_OUTPUTS)
    steps, length = (200, 50) if quick else (4000, 1000)
    schedule = optax.cosine_decay_schedule(0.02, steps)
    fits = {
        name: gpx.fit_svi(
            model, guide, Y, key=jr.key(seed), num_steps=steps, progress=False,
            optimizer=optax.adam(schedule),
        )
        for name, guide in make_guides(model).items()
    }  # fmt: skip
    best = max(fits.values(), key=lambda fit: fit.info["elbo"])
    fits["nuts"] = gpx.fit_nuts(
        model, Y, key=jr.key(seed), init=best, num_warmup=length,
        num_samples=length, num_chains=2 if quick else 4, progress=False,
        target_accept_prob=0.9, dense_mass=True,
    )  # fmt: skip
    return fits


def compare_distances(fits):
    """Means and spreads of the distances, relative to NUTS."""
    chains = fits["nuts"].chains()["h"]
    flat = {"h": chains.reshape(-1, *chains.shape[2:])}
    reference = DISTANCES(flat)
    by_chain = reference.reshape(*chains.shape[:2], -1)
    r_hat = np.array(
        [float(az.rhat(by_chain[..., j])) for j in range(by_chain.shape[-1])]
    )
    rows = {
        "nuts": {
            "r_hat_max": float(r_hat.max()),
            "r_hat_share_below_1.05": float(np.mean(r_hat < 1.05)),
            "divergences": int(np.sum(fits["nuts"].sample_stats["diverging"])),
            "seconds": fits["nuts"].seconds,
        }
    }
    for name, fit in fits.items():
        if name == "nuts":
            continue
        found = DISTANCES(fit.draws(2000))
        ratio = found.mean(0) / reference.mean(0)
        rows[name] = {
            "mean_ratio": float(ratio.mean()),
            "sd_ratio": float(np.mean(found.std(0) / reference.std(0))),
            "correlation": float(np.corrcoef(found.mean(0), reference.mean(0))[0, 1]),
            "objective": fit.info["objective"],
            "elbo": fit.info["elbo"],
            "elbo_standard_error": fit.info["elbo_standard_error"],
            "seconds": fit.seconds,
        }
    return rows


def text_of(record):
    parts = [
        "# Latent inputs: guides beside NUTS\n",
        "Thirty rows of five columns drawn from the model, three seeds; see "
        "`benchmarks/latent_posteriors.py`. Distances are between the latent inputs of "
        "all 435 pairs of rows. 'mean ratio': posterior mean distance over that of "
        "NUTS, averaged over pairs; 'sd ratio': the same of their posterior standard "
        "deviations; 'correlation': of the posterior mean distances over pairs.\n",
    ]
    for seed, rows in record["seeds"].items():
        nuts = rows["nuts"]
        parts.append(
            f"\n## Seed {seed}\n\nNUTS: largest R-hat of a distance "
            f"{nuts['r_hat_max']:.3f}, {nuts['r_hat_share_below_1.05']:.0%} below "
            "1.05; "
            f"{nuts['divergences']} divergent transitions; {nuts['seconds']:.0f} s.\n"
        )
        header = ["guide", "mean ratio", "sd ratio", "correlation", "objective", "elbo"]
        lines = [
            [
                name,
                row["mean_ratio"],
                row["sd_ratio"],
                row["correlation"],
                f"{row['objective']:.1f}",
                f"{row['elbo']:.1f} ({row['elbo_standard_error']:.1g})",
            ]
            for name, row in rows.items()
            if name != "nuts"
        ]
        parts.append(markdown_table(header, lines) + "\n")
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    quick = parser.parse_args().quick
    warnings.simplefilter("always")
    record = {"seeds": {}}
    for seed in range(1 if quick else 3):
        record["seeds"][seed] = compare_distances(fit_all(seed, quick))
        if quick:
            print(text_of(record))
        else:  # after each seed, since a run takes a while
            write("latent_posteriors", record, text_of(record))


if __name__ == "__main__":
    main()
