"""Effective draws per gradient and per CPU second, all in, of eleven samplers.

    python benchmarks/samplers.py --data DIR [--seeds 3] [--draws 1000] [--only TEXT]

Eight posteriors (`sampler_problems.py`), each as our model and by hand in NumPyro,
as a user would have it; samplers in `sampler_peers.py`, nutpie where it is installed.
Every run is a process of its own, and CPU seconds are those of everything after the
imports: guide, compilation, warm-up, draws. One chain of 500 + 1000, our guided fits
four of 500. ESS is that of the worst log hyperparameter (in bulk, and of the
worse tail), and of the worst value of `f`; of weights that of these. Gradients are
those of draws; warm-up and weights are not counted. `z` is the largest difference of
means, and of standard deviations, of log hyperparameters from a reference (NumPyro's
NUTS, 8000 draws; for the deep GP `fit_nuts`), in standard errors of both. Ratios are to
NumPyro's NUTS of the same seed, of the deep GP to `fit_nuts`.

Runs that are done are kept in `results/samplers.json`; another call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from datasets import add_data_option, data_folder
from numpyro.diagnostics import effective_sample_size
from results import FOLDER, markdown_table, write
from sampler_peers import SAMPLERS
from sampler_problems import problems

_REFERENCE, _REFERENCE_SEED, _LONG = "reference", 1000, 8
# Runs that take longer are given up, and said to be.
_PATIENCE = 3600.0


def run_one(folder, name: str, who: str, seed: int, draws: int) -> dict:
    """One sampler on one posterior, in this process."""
    problem = problems(folder)[name]()
    sampler = SAMPLERS[first_of(problem) if who == _REFERENCE else who]
    number = _LONG * draws if who == _REFERENCE else draws
    before = time.process_time()
    drawn = sampler(problem, jr.key(seed), number)
    seconds = time.process_time() - before
    return {"seconds": seconds, **summary(problem, drawn)}


def first_of(problem) -> str:
    """Whom ratios and the reference are of."""
    return "fit_nuts" if problem.noisy else next(iter(SAMPLERS))


def summary(problem, drawn) -> dict:
    """Moments of log hyperparameters, and what draws are worth."""
    theta = np.concatenate(
        [
            np.log(drawn.chains[n]).reshape(*drawn.chains[n].shape[:2], -1)
            for n in problem.thetas
        ],
        axis=-1,
    )
    if drawn.worth is None:
        bulk, tail = effective_sample_size(theta), in_tails(theta)
        squares = effective_sample_size((theta - theta.mean((0, 1))) ** 2)
        ess_f = float(np.min(effective_sample_size(functions(problem, drawn.chains))))
    else:  # independent draws, drawn again by their weights
        bulk = tail = squares = np.full(theta.shape[-1], drawn.worth)
        ess_f = drawn.worth
    flat = theta.reshape(-1, theta.shape[-1])
    sd = flat.std(axis=0)
    return {
        "gradients": drawn.gradients, "ess": float(np.min(bulk)),
        "ess_tail": float(np.min(tail)), "ess_f": ess_f, "note": drawn.note,
        "mean": flat.mean(axis=0).tolist(), "mean_error": (sd / np.sqrt(bulk)).tolist(),
        "sd": sd.tolist(), "sd_error": (sd / np.sqrt(2.0 * squares)).tolist(),
    }  # fmt: skip


def in_tails(theta: np.ndarray) -> np.ndarray:
    """ESS of being in the worse of the tails of a twentieth."""
    low, high = np.quantile(theta, [0.05, 0.95], axis=(0, 1))
    shares = (theta <= low, theta >= high)
    return np.minimum(*(effective_sample_size(s.astype(float)) for s in shares))


def functions(problem, chains: dict) -> np.ndarray:
    """`f` at the rows, `(chains, draws, N)`."""
    lead = next(iter(chains.values())).shape[:2]
    flat = {n: jnp.asarray(x).reshape(-1, *x.shape[2:]) for n, x in chains.items()}
    values = jax.jit(lambda flat: jax.lax.map(problem.function, flat))(flat)
    return np.asarray(values).reshape(*lead, -1)


def in_a_process(args, name: str, who: str, seed: int) -> dict:
    """One run in a process of its own; what went wrong, if something did."""
    command = [
        sys.executable, __file__, "--data", str(args.folder), "--draws",
        str(args.draws), "--one", name, who, str(seed),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {_PATIENCE:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def key_of(name: str, who: str, seed: int, draws: int) -> str:
    return f"{name} | {who} | seed {seed} | {draws} draws"


def table(record: dict, draws: int, seeds: int, folder) -> str:
    header = [
        "problem", "seed", "who", "CPU s", "ESS, theta", "tail", "f",
        "per 1000 gradients", "per CPU s, theta", "f", "ratio, theta", "ratio, f",
        "z, means", "z, sds", "diagnostic",
    ]  # fmt: skip
    rows = []
    for name, make in problems(folder).items():
        first = first_of(make())
        reference = record.get(key_of(name, _REFERENCE, _REFERENCE_SEED, draws))
        for seed in range(seeds):
            base = record.get(key_of(name, first, seed, draws))
            for who in SAMPLERS:
                one = record.get(key_of(name, who, seed, draws))
                if one is not None:
                    rows.append([name, seed, who, *cells(one, base, reference)])
    return markdown_table(header, rows)


def cells(one: dict, base: dict | None, reference: dict | None) -> list:
    if "failed" in one:
        return [""] * 11 + [one["failed"]]
    rates = [one[e] / one["seconds"] for e in ("ess", "ess_f")]
    ratios: list = ["", ""]
    if base is not None and "failed" not in base:
        ratios = [
            rate / (base[e] / base["seconds"])
            for rate, e in zip(rates, ("ess", "ess_f"), strict=True)
        ]
    z: list = ["", ""]
    if reference is not None and "failed" not in reference:
        z = [apart(one, reference, what) for what in ("mean", "sd")]
    per_gradient = 1000.0 * one["ess"] / one["gradients"] if one["gradients"] else ""
    return [
        one["seconds"], one["ess"], one["ess_tail"], one["ess_f"], per_gradient,
        *rates, *ratios, *z, one["note"],
    ]  # fmt: skip


def apart(one: dict, reference: dict, what: str) -> float:
    errors = [np.asarray(x[f"{what}_error"]) for x in (one, reference)]
    gap = np.asarray(one[what]) - np.asarray(reference[what])
    return float(np.max(np.abs(gap / np.hypot(*errors))))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_data_option(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--only", default="", help="problems whose name has this")
    parser.add_argument("--who", default="", help="samplers whose name has this")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.folder = data_folder(args.data)
    if args.one:
        name, who, seed = args.one
        print(json.dumps(run_one(args.folder, name, who, int(seed), args.draws)))
        return
    path = Path(FOLDER / "samplers.json")
    record = json.loads(path.read_text()) if path.exists() else {}
    # Of this script alone, not of the one that it has replaced.
    record = {key: one for key, one in record.items() if key.endswith(" draws")}
    for name, make in problems(args.folder).items():
        if args.only not in name:
            continue
        jobs = [(_REFERENCE, _REFERENCE_SEED)]
        jobs += [(who, seed) for seed in range(args.seeds) for who in SAMPLERS]
        ours_alone = make().noisy
        for who, seed in jobs:
            key = key_of(name, who, seed, args.draws)
            theirs = ours_alone and who != _REFERENCE and not who.startswith("fit_")
            if key in record or theirs or args.who not in who:
                continue
            print(key, flush=True)
            record[key] = in_a_process(args, name, who, seed)
            text = table(record, args.draws, args.seeds, args.folder)
            write("samplers", record, f"# Effective draws\n\n{__doc__}\n{text}")


if __name__ == "__main__":
    main()
