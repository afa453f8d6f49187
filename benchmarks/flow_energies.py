"""Four two-dimensional energies matched by the flow guide (thesis D.1, figure 5.6).

    python benchmarks/flow_energies.py [--quick]

Targets are `exp(-U)` on the box [-4, 4]^2: (b) to (d) do not fall off along the first
axis and have no normaliser on the plane, and the first term of (a) is squared, without
which it has none either. Reported is KL(q || p) by quadrature on the box, for the flow
(three seeds) and for its channel-only form (one); draws and densities go to
`docs/flow_energies.png`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from results import markdown_table, write

import numpyro_gpx as gpx

HALF = 4.0  # of the side of the box
FIGURE = Path(__file__).parent.parent / "docs" / "flow_energies.png"


def energy_a(z):
    ring = 0.5 * ((jnp.hypot(z[0], z[1]) - 2.0) / 0.4) ** 2
    return ring + _either((z[0] - 2.0) / 0.6, (z[0] + 2.0) / 0.6)


def energy_b(z):
    rest = z[1] - _wave(z)
    step = 3.0 * jax.nn.sigmoid((z[0] - 1.0) / 0.3)
    return _either(rest / 0.4, (rest + step) / 0.35)


def energy_c(z):
    rest = z[1] - _wave(z)
    bump = 3.0 * jnp.exp(-0.5 * ((z[0] - 1.0) / 0.6) ** 2)
    return _either(rest / 0.35, (rest + bump) / 0.35)


def energy_d(z):
    return 0.5 * ((z[1] - _wave(z)) / 0.4) ** 2


def second_mode(name, z):
    """Whether a point lies in the part of the target that is easily lost."""
    if name == "a":
        return z[..., 0] > 0.0
    rest = z[..., 1] - jnp.sin(2.0 * jnp.pi * z[..., 0] / 4.0)
    if name == "b":
        return (z[..., 0] > 1.0) & (
            rest < -1.5 * jax.nn.sigmoid((z[..., 0] - 1.0) / 0.3)
        )
    if name == "c":
        return (jnp.abs(z[..., 0] - 1.0) < 0.6) & (
            rest < -1.5 * jnp.exp(-0.5 * ((z[..., 0] - 1.0) / 0.6) ** 2)
        )
    return jnp.zeros(z.shape[:-1], bool)  # (d) has one mode


ENERGIES = {"a": energy_a, "b": energy_b, "c": energy_c, "d": energy_d}


def make_model(energy):
    """The density as a NumPyro model."""

    def model():
        z = numpyro.sample("z", dist.Uniform(-HALF, HALF).expand([2]).to_event(1))
        numpyro.factor("energy", -energy(z))

    return model


def fit_energy(energy, mixing, seed, quick):
    """A flow of eight blocks, started wide."""
    steps = 100 if quick else 5000
    model = make_model(energy)
    guide = gpx.guides.Flow(
        model, mixing=mixing, num_blocks=8, init_scale=1.0, path_gradient=True
    )
    return gpx.fit_svi(
        model, guide, key=jr.key(seed), num_steps=steps, loss=gpx.infer.ELBO(16),
        optimizer=optax.adam(optax.cosine_decay_schedule(0.005, steps)),
        progress=False,
    )  # fmt: skip


def densities(fit, energy, side):
    """Middles of cells `(side, side, 2)`, log densities there, and a cell's area."""
    ticks = -HALF + 2.0 * HALF * (np.arange(side) + 0.5) / side
    grid = jnp.stack(jnp.meshgrid(ticks, ticks, indexing="ij"), axis=-1)
    area = (2.0 * HALF / side) ** 2
    log_p = -np.asarray(jax.vmap(jax.vmap(energy))(grid))
    log_p = log_p - np.log(np.sum(np.exp(log_p)) * area)
    guide = fit.posterior.guide

    @jax.jit
    def log_prob(row):
        return jax.vmap(lambda z: guide.log_prob(fit.params, {"z": z}))(row)

    log_q = np.stack([np.asarray(log_prob(row)) for row in grid])
    return grid, log_p, log_q, area


def measure(name, mixing, seed, quick):
    """Divergences by quadrature, and what they were computed from."""
    energy = ENERGIES[name]
    fit = fit_energy(energy, mixing, seed, quick)
    grid, log_p, log_q, area = densities(fit, energy, 100 if quick else 500)
    p, q = np.exp(log_p), np.exp(log_q)
    there = np.asarray(second_mode(name, grid))
    row = {
        "energy": name,
        "mixing": mixing,
        "seed": seed,
        "kl": float(np.sum(q * (log_q - log_p)) * area),
        "reverse_kl": float(np.sum(p * (log_p - log_q)) * area),
        "mass_of_q": float(np.sum(q) * area),
        "second_mode_of_q": float(np.sum(q[there]) * area),
        "second_mode_of_p": float(np.sum(p[there]) * area),
        "seconds": fit.seconds,
        "milliseconds_per_step": 1e3 * fit.info["seconds_per_step"],
    }
    print(row, flush=True)
    return row, fit, p, q


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    quick = parser.parse_args().quick
    rows, panels = [], {}
    for name in ENERGIES:
        for seed in range(1 if quick else 3):
            row, fit, p, q = measure(name, "full", seed, quick)
            rows.append(row)
            if seed == 0:
                panels[name] = (p, q, fit.draws(2000)["z"])
        rows.append(measure(name, "channel", 0, quick)[0])
    figure = draw(panels)
    if quick:
        return
    figure.savefig(FIGURE, dpi=110)
    write("flow_energies", {"rows": rows}, text(rows))


def draw(panels):
    """Target, flow and draws, a row for each energy."""
    figure, axes = plt.subplots(4, 3, figsize=(7.5, 9.6), layout="constrained")
    box = dict(extent=(-HALF, HALF, -HALF, HALF), origin="lower", cmap="viridis")
    for line, (name, (p, q, z)) in zip(axes, panels.items(), strict=True):
        top = p.max()
        line[0].imshow(p.T, vmin=0.0, vmax=top, **box)
        line[1].imshow(q.T, vmin=0.0, vmax=top, **box)
        line[2].plot(z[:, 0], z[:, 1], ".", markersize=1.5, alpha=0.6)
        line[2].set(xlim=(-HALF, HALF), ylim=(-HALF, HALF), aspect="equal")
        line[0].set_ylabel(f"({name})", rotation=0, labelpad=12)
        for ax in line:
            ax.set(xticks=[-4, 0, 4], yticks=[-4, 0, 4])
    for ax, title in zip(axes[0], ("target", "flow", "draws of the flow"), strict=True):
        ax.set_title(title)
    return figure


def text(rows):
    table = markdown_table(
        [
            "energy", "mixing", "seed", "KL(q, p)", "KL(p, q)", "mass of q",
            "second mode, q", "second mode, p", "ms a step",
        ],
        [
            [
                row["energy"], row["mixing"], row["seed"], row["kl"],
                row["reverse_kl"], row["mass_of_q"], row["second_mode_of_q"],
                row["second_mode_of_p"], row["milliseconds_per_step"],
            ]
            for row in rows
        ],
    )  # fmt: skip
    return (
        "# Four energies matched by the flow (thesis D.1, figure 5.6)\n\n"
        "Divergences by quadrature on a grid of 500 x 500 cells of the box [-4, 4]^2 "
        "(the mass of q there tells the quadrature's error). Eight blocks, 5000 steps "
        "of Adam with a falling rate, 16 draws a step, `init_scale=1`, "
        "`path_gradient=True`. The first term of (a) is squared and all are restricted "
        "to the box, without which they have no normaliser. `second mode` is the mass "
        "of q in the right side of (a), the lower branch of (b) and of (c), beside "
        f"that of p.\n\n{table}\n\n![densities](../../docs/flow_energies.png)\n"
    )


def _wave(z):
    return jnp.sin(2.0 * jnp.pi * z[0] / 4.0)


def _either(r, s):
    """Energy of the sum of two bumps."""
    return -jnp.logaddexp(-0.5 * r**2, -0.5 * s**2)


if __name__ == "__main__":
    main()
