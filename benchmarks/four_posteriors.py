"""Four posteriors of one deep GP in equal time: DSVI, SGHMC, Flow and Implicit.

The pace of a method is measured by a short pilot and gives its number of steps. SGHMC
spends half of the time on Monte Carlo EM and half on draws; Flow and Implicit start
from a Gaussian fit, which takes a third of it. Hyperparameters and inducing inputs are
points in all methods. Compilation is not counted.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)
# Splits have the same shapes: what one compiles, the others load.
jax.config.update(
    "jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "gpx_benchmarks")
)

import jax.random as jr
import optax

import numpyro_gpx as gpx

__all__ = ["METHODS", "Contest"]

METHODS = ("DSVI", "SGHMC", "Flow", "Implicit")
NUM_DRAWS, WARMUP = 200, 50  # of SGHMC
# Steps of a pilot: more than the first block, which is compiled and not timed.
PILOT = 300


class Contest:
    """A model and its data, to be fitted by each of the methods.

    Args:
        model: A deep GP.
        X: Inputs `(N, D)`.
        y: Targets.
        batch: Rows of a minibatch, if there are more.
        rounds: Rounds of EM in the pilots of SGHMC, fewer where gradients are dear.
    """

    def __init__(self, model, X, y, *, batch=512, rounds=PILOT):
        self.model, self.data, self.rounds = model, (X, y), rounds
        self.options = {"progress": False}
        if len(X) > batch:
            self.options["batch_size"] = batch

    def gaussian(self, key, steps):
        """DSVI: Gaussian q for each layer (Salimbeni & Deisenroth 2017)."""
        return gpx.fit_svi(
            self.model, gpx.guides.WhitenedGaussian(self.model), *self.data, key=key,
            num_steps=steps, optimizer=optax.adam(0.01), **self.options,
        )  # fmt: skip

    def flow(self, key, steps, start):
        """A normalizing flow over the inducing variables of all layers."""
        guide = gpx.guides.Flow(self.model, theta="point", path_gradient=True)
        return gpx.fit_svi(
            self.model, guide, *self.data, key=key, num_steps=steps, init=start,
            optimizer=optax.adam(optax.cosine_decay_schedule(0.003, steps)),
            **self.options,
        )  # fmt: skip

    def implicit(self, key, steps, start):
        """A generator and a discriminator, of a size that leaves time for steps."""
        guide = gpx.guides.Implicit(self.model, widths=(32,))
        with warnings.catch_warnings():
            # In 1000 dimensions it tells all draws apart; benchmarks record that.
            warnings.simplefilter("ignore", UserWarning)
            return gpx.fit_implicit(
                self.model, guide, *self.data, key=key, num_rounds=steps, init=start,
                num_particles=1, num_draws=32, discriminator_steps=1, **self.options,
            )  # fmt: skip

    def sghmc(self, key, rounds, gradients, num_draws=NUM_DRAWS, warmup=WARMUP):
        """Monte Carlo EM, then the draws of one chain, `gradients` apart."""
        return gpx.fit_sghmc(
            self.model, *self.data, key=key, num_warmup=warmup, num_samples=num_draws,
            em=gpx.infer.MonteCarloEM(num_rounds=rounds), num_chains=1,
            num_integration_steps=gradients, step_size=0.1, **self.options,
        )  # fmt: skip

    def pace_of(self, method):
        """Seconds a step (of SGHMC a round of EM, and a gradient of the chain)."""
        key = jr.key(0)
        if method == "SGHMC":
            return self._pace_of_sghmc(key)
        start = self.gaussian(key, PILOT)
        if method == "DSVI":
            return {"step": start.info["seconds_per_step"]}
        fit = self._from_gaussian(method)(key, PILOT, start)
        return {
            "start": start.info["seconds_per_step"],
            "step": fit.info["seconds_per_step"],
        }

    def _pace_of_sghmc(self, key):
        num_draws = max(self.rounds // 4, 1)

        def seconds(rounds, gradients):
            return timed(self.sghmc, key, rounds, gradients, num_draws, 0)

        short = seconds(self.rounds, 4)
        gradient = slope(lambda n: seconds(self.rounds, 4 + n) - short, 10)
        return {
            "round": slope(lambda n: seconds(self.rounds + n, 4) - short, self.rounds),
            "gradient": gradient / num_draws,
        }

    def train(self, method, key, pace, seconds):
        """A fit that takes this long, and its numbers of steps."""
        if method == "SGHMC":
            rounds = int(seconds / 2.0 / pace["round"])
            gradients = int(seconds / 2.0 / pace["gradient"] / (NUM_DRAWS + WARMUP))
            return self.sghmc(key, rounds, gradients), [rounds, gradients]
        if method == "DSVI":
            steps = int(seconds / pace["step"])
            return self.gaussian(key, steps), [steps]
        first = int(seconds / 3.0 / pace["start"])
        second = int(seconds * 2.0 / 3.0 / pace["step"])
        start = self.gaussian(key, first)
        return self._from_gaussian(method)(key, second, start), [first, second]

    def _from_gaussian(self, method):
        return {"Flow": self.flow, "Implicit": self.implicit}[method]


def slope(seconds, number):
    """Seconds a unit, of so many that the difference stands out of the noise."""
    while (found := seconds(number)) < 2.0:
        number *= 5
    return found / number


def timed(function, *args):
    """Seconds of a second call, whose compilation is cached."""
    function(*args)
    before = time.perf_counter()
    function(*args)
    return time.perf_counter() - before
