"""Speed and memory against hand-written, tuned JAX in the same run.

    python benchmarks/speed.py [--quick]

Ratios are medians over alternating repeats. See `reference.py` for what tuned means.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import reference
from results import markdown_table, write

import numpyro_gpx as gpx
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.processes.collapse import collapsed_bound

NUM_DIMS, NUM_INDUCING, BATCH = 8, 256, 512


def make_data(num_rows, key=0):
    rng = np.random.default_rng(key)
    X = rng.uniform(-1.0, 1.0, (num_rows, NUM_DIMS))
    y = np.sin(3.0 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.normal(size=num_rows)
    return X, y, X[:NUM_INDUCING].copy()


def make_model(Z):
    def model(X, y=None, *, batch_size=None):
        prior = dist.LogNormal(jnp.zeros(NUM_DIMS), 1.0).to_event(1)
        kernel = gpx.kernels.RBF(
            variance=numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
            lengthscale=numpyro.sample("lengthscale", prior),
        )
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            likelihood = gpx.likelihoods.Gaussian(noise)
            gpx.observe("y", f(X[i]), likelihood, obs=y, rows=i)

    return model


def our_step_seconds(num_rows, num_steps):
    X, y, Z = make_data(num_rows)
    model = make_model(Z)
    fit = gpx.fit_svi(
        model,
        gpx.guides.WhitenedGaussian(model),
        X,
        y,
        key=jr.key(0),
        batch_size=BATCH,
        num_steps=num_steps,
        progress=False,
    )
    return fit.info["seconds_per_step"]


def reference_step_seconds(num_rows, num_steps):
    X, y, Z = make_data(num_rows)
    optimizer = optax.adam(1e-2)
    params = reference.initial_params(NUM_INDUCING, NUM_DIMS)
    state = (params, optimizer.init(params), jnp.zeros(()))
    block = reference.make_block(jnp.asarray(Z), BATCH, optimizer)
    X, y = jnp.asarray(X), jnp.asarray(y)
    times = []
    with one_at_a_time():
        for i in range(max(num_steps // 100, 2)):
            before = time.perf_counter()
            state = jax.block_until_ready(block(state, 100, jr.key(i), X, y))
            times.append((time.perf_counter() - before) / 100)
    return float(np.median(times[1:]))


def compare_steps(num_steps, repeats):
    ours, theirs = [], []
    our_step_seconds(20_000, 200)  # the first fit of a process is slower
    for _ in range(repeats):
        ours.append(our_step_seconds(20_000, num_steps))
        theirs.append(reference_step_seconds(20_000, num_steps))
    return float(np.median(ours)), float(np.median(theirs))


def compare_sizes(num_steps, repeats):
    small, large = [], []
    for _ in range(repeats):
        small.append(our_step_seconds(10_000, num_steps))
        large.append(our_step_seconds(1_000_000, num_steps))
    return float(np.median(large)), float(np.median(small))


def compare_collapsed(repeats):
    rng = np.random.default_rng(1)
    X, y, _ = make_data(10_000, key=1)
    Z = jnp.asarray(X[rng.choice(10_000, 200, replace=False)])
    X, y = jnp.asarray(X), jnp.asarray(y)
    params = reference.initial_params(200, NUM_DIMS)
    params = {n: params[n] for n in ("log_variance", "log_lengthscale", "log_noise")}

    def ours(params):
        kernel = gpx.kernels.RBF(
            variance=jnp.exp(params["log_variance"]),
            lengthscale=jnp.exp(params["log_lengthscale"]),
        )
        noise_var = jnp.exp(2.0 * params["log_noise"])
        points = gpx.inducing.Points(Z)
        return collapsed_bound(kernel, points, X, y, noise_var=noise_var)

    functions = {
        "ours": jax.jit(jax.value_and_grad(ours)),
        "reference": jax.jit(
            jax.value_and_grad(lambda p: reference.collapsed_bound(p, Z, X, y))
        ),
    }
    times = {name: [] for name in functions}
    values = {}
    with one_at_a_time():
        for name, fn in functions.items():
            values[name] = float(fn(params)[0])
        for repeat in range(repeats):
            # Taking turns at being first evens out what one leaves in the caches.
            turns = list(functions.items())[:: 1 if repeat % 2 else -1]
            for name, fn in turns:
                before = time.perf_counter()
                jax.block_until_ready(fn(params))
                times[name].append(time.perf_counter() - before)
    medians = {name: float(np.median(t)) for name, t in times.items()}
    return medians["ours"], medians["reference"], values


# Each runs in a process of its own and prints seconds: of the clock, of the processor,
# and what else it says.
_FIRST_STEP = """
import time
started = time.perf_counter()
import jax
jax.config.update("jax_enable_x64", True)
import sys
sys.path.insert(0, {folder!r})
said = []
{body}
print(time.perf_counter() - started, time.process_time(), *said)
"""

_OUR_FIRST = "import speed; speed.our_step_seconds(20_000, 1)"
_FROM_DISK = (
    """
import numpyro_gpx as gpx
gpx.cache.to_disk({cache!r})
"""
    + _OUR_FIRST
)
_TWO_FITS = """
import speed
before = time.process_time()
speed.our_step_seconds(20_000, 1)
between = time.process_time()
speed.our_step_seconds(20_000, 1)
said = [between - before, time.process_time() - between]
"""
_REFERENCE_FIRST = """
import numpy as np, jax.numpy as jnp, jax.random as jr, optax, reference
rng = np.random.default_rng(0)
X = rng.uniform(-1.0, 1.0, (20_000, 8))
y = np.sin(3.0 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.normal(size=20_000)
optimizer = optax.adam(1e-2)
params = reference.initial_params(256, 8)
state = (params, optimizer.init(params), jnp.zeros(()))
block = reference.make_block(jnp.asarray(X[:256]), 512, optimizer)
jax.block_until_ready(block(state, 1, jr.key(0), jnp.asarray(X), jnp.asarray(y)))
"""


def in_a_process(body):
    """What a process that runs `body` prints at its end."""
    code = _FIRST_STEP.format(folder=str(Path(__file__).parent), body=body)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def compare_first_step(repeats):
    """Medians of clock and processor seconds, by what is run, in turns."""
    found = {"ours": [], "from_disk": [], "two_fits": [], "reference": []}
    with tempfile.TemporaryDirectory() as cache:
        bodies = {
            "ours": _OUR_FIRST, "from_disk": _FROM_DISK.format(cache=cache),
            "two_fits": _TWO_FITS, "reference": _REFERENCE_FIRST,
        }  # fmt: skip
        in_a_process(bodies["from_disk"])  # fills the cache
        for _ in range(repeats):
            for name, body in bodies.items():
                found[name].append(in_a_process(body))
    return {name: np.median(rows, axis=0).tolist() for name, rows in found.items()}


def add_first_steps(add, repeats):
    found = compare_first_step(repeats)
    reference = found["reference"]
    start = "import to first step"
    add(f"{start} (s)", found["ours"][0], reference[0], "1.5", unit=1.0)
    add(f"{start} (CPU s)", found["ours"][1], reference[1], "1.4", unit=1.0)
    cached = f"{start}, second process with `cache.to_disk` (CPU s)"
    add(cached, found["from_disk"][1], reference[1], "0.9", unit=1.0)
    first, second = found["two_fits"][2:]
    add("second fit against the first (CPU s)", second, first, "0.2", unit=1.0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args(arguments)
    repeats = 1 if args.quick else 4
    num_steps = 300 if args.quick else 500
    rows, record = [], {}

    def add(name, ours, theirs, limit, unit=1e3):
        ratio = ours / theirs
        record[name] = {"ours": ours, "reference": theirs, "ratio": ratio}
        rows.append([name, ours * unit, theirs * unit, ratio, limit])

    add(
        "SVGP step, N=20000 D=8 M=256 batch 512 (ms)",
        *compare_steps(num_steps, repeats),
        "1.1",
    )
    add(
        "step at N=10^6 against N=10^4 (ms)",
        *compare_sizes(num_steps, min(repeats, 3)),
        "1.15",
    )
    *times, values = compare_collapsed(20 * repeats)
    add("collapsed bound, value and gradient, N=10000 M=200 (ms)", *times, "1.1")
    add_first_steps(add, max(repeats, 3))
    record["collapsed_values"] = values
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    record["peak_memory_mb"] = peak
    text = "\n".join(
        [
            "# Speed against hand-written, tuned JAX",
            "",
            "Medians, float64, same run. `python benchmarks/speed.py`.",
            "",
            markdown_table(["what", "ours", "reference", "ratio", "limit"], rows),
            "",
            f"Peak memory of the whole run (N up to 10^6): {peak:.0f} MB.",
        ]
    )
    write("speed", record, text)


if __name__ == "__main__":
    main()
