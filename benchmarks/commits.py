"""Two commits side by side: does a change of the layout cost time?

    python benchmarks/commits.py --old e8bff97 [--quick]

Each commit is installed into a folder of its own and answers in a process of its own;
the two take turns, 30 pairs for each workload. A workload is compiled as the commit's
own fits compile it. The gradient of the full GP is compared with a model written by
hand in plain NumPyro, in the same process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from results import markdown_table, write

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("commits_worker.py")
WORKLOADS = {
    "SVGP step, N=20000 D=8 M=256 batch 512": "svgp",
    "the same, N=10^6": "large",
    "two-layer deep GP step, N=10000 M=128 batch 512": "deep",
    "collapsed bound, value and gradient, N=10000 M=200": "collapsed",
}
# From the call to the result, the compilation of a first fit not counted.
FITS = {
    "`fit_svi`, 1000 steps, N=500 M=50": "fit_svi",
    "`fit_nuts`, 2 chains of 50 + 50, N=200 M=20": "fit_nuts",
    "`fit_sghmc`, 2 chains of 50 + 50, N=500 M=50": "fit_sghmc",
}
START = "import to first step of `fit_svi`"
# A third of the pairs for these.
SLOW = (*FITS, START)
# A process from its start to its first step.
FIRST_STEP = """
import jax, numpy as np, numpyro, numpyro.distributions as dist, warnings
jax.config.update("jax_enable_x64", True)
import numpyro_gpx as gpx
inputs = np.linspace(-1.0, 1.0, 200)[:, None]
points = gpx.inducing.Points(inputs[::10])
def model(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=points)
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(scale), obs=y)
warnings.simplefilter("ignore")  # one step is no fit
guide = gpx.guides.WhitenedGaussian(model)
gpx.fit_svi(model, guide, inputs, np.sin(inputs[:, 0]), key=jax.random.key(0),
            num_steps=1, progress=False)
"""


def environment(folder: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": folder, "OPENBLAS_NUM_THREADS": "1"}


def first_step(folder: str) -> float:
    """Seconds from the start of a process to the end of its first step."""
    before = time.perf_counter()
    command = [sys.executable, "-c", FIRST_STEP]
    subprocess.run(command, env=environment(folder), check=True)
    return time.perf_counter() - before


class Worker:
    """A process that times workloads with one commit's code."""

    def __init__(self, folder: str):
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], env=environment(folder), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def seconds(self, workload: str) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"The worker stopped while timing {workload}.")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def install(commit: str | None, folder: str) -> None:
    """The package at a commit, or as it stands, laid out as an installer does."""
    source = str(ROOT)
    if commit is not None:
        source = folder + ".source"
        Path(source).mkdir()
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", source], input=archive, check=True)
    command = "-m pip install --quiet --no-deps --no-build-isolation --target".split()
    subprocess.run([sys.executable, *command, folder, source], check=True)


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """95 % of the median, by the binomial law of the order statistics."""
    ordered = np.sort(ratios)
    number = len(ordered)
    half = 0.98 * np.sqrt(number)
    low = max(int(np.floor(number / 2.0 - half)), 0)
    return ordered[low], ordered[number - 1 - low]


def ratios(first, second, pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ratios of seconds in turns, and the seconds of both."""
    first(), second()  # compiled
    first(), second()
    a, b = [], []
    for i in range(pairs):
        # Taking turns at being first evens out what one leaves in the caches.
        if i % 2:
            a.append(first()), b.append(second())
        else:
            b.append(second()), a.append(first())
    return np.array(a) / np.array(b), np.array(a), np.array(b)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", default="e8bff97", help="commit to compare with")
    parser.add_argument("--quick", action="store_true", help="few pairs")
    args = parser.parse_args(arguments)
    pairs = 4 if args.quick else 30
    rows, record = [], {"old": args.old, "pairs": pairs}
    with tempfile.TemporaryDirectory() as folder:
        install(args.old, f"{folder}/old")
        install(None, f"{folder}/new")
        old, new = Worker(f"{folder}/old"), Worker(f"{folder}/new")
        cases = [
            (name, lambda w=w: new.seconds(w), lambda w=w: old.seconds(w), "1.05")
            for name, w in {**WORKLOADS, **FITS}.items()
        ]
        cases.append((
            START, lambda: first_step(f"{folder}/new"),
            lambda: first_step(f"{folder}/old"), "1.05",
        ))  # fmt: skip
        name = "gradient of the full GP classifier, N=200, against NumPyro by hand"
        for label, worker in (("", new), (" (old)", old)):
            cases.append((
                name + label, lambda w=worker: w.seconds("full"),
                lambda w=worker: w.seconds("by hand"), "1.3",
            ))  # fmt: skip
        for name, ours, theirs, limit in cases:
            number = pairs // 3 if name in SLOW else pairs
            ratio, a, b = ratios(ours, theirs, number)
            low, high = interval(ratio)
            middle = float(np.median(ratio))
            record[name] = {
                "ratio": middle, "interval": [low, high],
                "ms": [1e3 * float(np.median(a)), 1e3 * float(np.median(b))],
            }  # fmt: skip
            rows.append([
                name, 1e3 * np.median(a), 1e3 * np.median(b), middle,
                f"{low:.3f} to {high:.3f}", limit,
            ])  # fmt: skip
        old.stop()
        new.stop()
    text = "\n".join(
        [
            f"# The code as it stands against commit {args.old}",
            "",
            f"Medians of {pairs} pairs that take turns, float64, one BLAS thread; the "
            "interval is that of the median (95 %). Fits and first steps: a third of "
            "the pairs. Last two rows: against a model written by hand in the same "
            "process. `python benchmarks/commits.py`.",
            "",
            markdown_table(
                [
                    "what",
                    "new (ms)",
                    "old or by hand (ms)",
                    "ratio",
                    "interval",
                    "limit",
                ],
                rows,
            ),
        ]
    )
    write("commits", record, text)


if __name__ == "__main__":
    main()
