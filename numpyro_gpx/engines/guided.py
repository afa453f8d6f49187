"""The exact posterior through the map of a guide: `Guided`."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar

import jax.random as jr
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.engines.engine import Engine, Outcome, Start
from numpyro_gpx.engines.guided_chains import GuidedChains, worth_of
from numpyro_gpx.engines.guided_notes import TOO_HEAVY, hmc_notes, importance_notes
from numpyro_gpx.engines.importance import Weighted, importance
from numpyro_gpx.engines.sites import Sites
from numpyro_gpx.engines.svi import SVI
from numpyro_gpx.engines.through import Through, no_map
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.guides import ConditionalGaussian
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.facts import EXACT, Facts
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import ChainPosterior

__all__ = ["Guided"]

# Weights worth less than this share of the draws are wasted on their tail.
_FEW = 0.1
# k-hat of the stage before the last from which that is not worth its draws.
_HOPELESS = 1.0


class Guided(Engine):
    r"""The exact posterior, through a guide that is near to it.

    The guide is a map from standard normal vectors to all sites; the posterior in its
    coordinates is nearly standard normal. Importance sampling there needs no gradient
    and gives independent draws; where the tail of its weights objects (k-hat), HMC that
    rotates the guide's Gaussian exactly takes over, started from the resampled draws.
    Both are exact for any guide; a poor one makes them slow, and is named.

    Attributes:
        guide: A fit of a Gaussian guide or of a `Flow`, by this very model; `None` to
            train a `ConditionalGaussian` first.
        method: `"importance"`, `"hmc"`, or `"auto"`: the former if its k-hat is below
            0.7 and its weights are worth a tenth of the draws.
        num_samples: Draws of each chain.
        num_chains: Chains; of importance sampling a way to count its draws.
        num_proposals: Draws of the guide that importance sampling weighs; of `"hmc"`,
            and of `"auto"` where k-hat is above 1 after them, only the 3000 before
            these, from which chains start.
        noise_sets: As in `NUTS`: of models with noise between layers.

    Its fits have in `fit.info` the `method`, `k_hat` and `importance_ess`, and of HMC
    `num_gradients` (of the draws), `angle`, `acceptance_rate`, mean and sd of the
    coordinates (`x_mean`, `x_sd`: largest of the means, smallest and largest of the
    sds), worst `r_hat`, `bulk_ess` and `tail_ess` of hyperparameters, and
    `seconds_by_phase`.
    """

    name: ClassVar[str] = "guided"
    approximation: ClassVar[str] = EXACT

    guide: Fit | None = None
    _: dataclasses.KW_ONLY
    method: str = "auto"
    num_samples: int = 1000
    num_chains: int = 4
    num_proposals: int = 8000
    noise_sets: int = 16

    def __check_init__(self):
        checks.one_of("method", self.method, ("auto", "importance", "hmc"))
        for name in ("num_samples", "num_chains", "noise_sets"):
            checks.at_least(name, getattr(self, name), 1)
        checks.at_least("num_proposals", self.num_proposals, 100)
        if self.guide is not None:
            checks.instance("guide", self.guide, Fit, "such as `gpx.fit_svi(...)`")

    @property
    def facts(self):
        settings = dict(super().facts.settings)
        if self.guide is not None:
            settings["guide"] = self.guide.facts.name
        return Facts(self.name, self.approximation, settings)

    def objection(self, program):
        return no_map(program, self.guide, "guide")

    def run(self, program, key, *, start, watch) -> Outcome:
        started = time.perf_counter()
        key_guide, key_noise, key_run = jr.split(key, 3)
        fit = self._trained(program, key_guide, start, watch)
        through = Through(program, fit, key_noise, self.noise_sets)
        seconds = {"guide": time.perf_counter() - started}
        return _Run(self, through, watch, seconds).outcome(key_run, fit)

    def _trained(self, program: Program, key, start: Start, watch: Watch) -> Fit:
        if self.guide is not None:
            return self.guide
        engine: Engine = Sites()
        if engine.objection(program) is not None:
            engine = SVI(ConditionalGaussian)
        with watch.preparing():
            found = engine.run(program, key, start=start, watch=watch)
        return Fit(
            program, found.posterior, facts=engine.facts, params=found.params,
            info=found.info, notes=found.notes,
        )  # fmt: skip


class _Run:
    """One run: importance sampling, HMC if need be, and what is to be said of them."""

    def __init__(self, engine: Guided, through: Through, watch: Watch, seconds):
        self.engine, self.through = engine, through
        self.watch, self.seconds = watch, seconds

    def outcome(self, key, fit: Fit) -> Outcome:
        key_weights, key_choice, key_hmc = jr.split(key, 3)
        before = time.perf_counter()
        # HMC needs no more of it than where to start.
        number = 0 if self.engine.method == "hmc" else self.engine.num_proposals
        hopeless = _HOPELESS if self.engine.method == "auto" else np.inf
        weighted = importance(
            self.through, key_weights, number, self.watch, hopeless=hopeless
        )
        self.seconds["importance"] = time.perf_counter() - before
        info: dict[str, Any] = {
            "k_hat": weighted.k_hat,
            "importance_ess": weighted.ess,
            "guide_losses": fit.info.get("losses", np.zeros(0)),
        }
        if self.through.structure.noise:
            info["noise"] = f"A, {self.engine.noise_sets} noise sets"
        names = self.through.structure.params
        if self._believed(weighted):
            found = self._resampled(weighted, key_choice, info)
        else:
            found = self._sampled(weighted, key_hmc, info)
        info["seconds_by_phase"] = dict(self.seconds)
        return found._replace(params={name: fit.params[name] for name in names})

    def _believed(self, weighted: Weighted) -> bool:
        if self.engine.method != "auto":
            return self.engine.method == "importance"
        enough = weighted.ess >= _FEW * len(weighted.weights)
        return self.watch.stopped is not None or (weighted.k_hat < TOO_HEAVY and enough)

    # Importance sampling --------------------------------------------------------------

    def _resampled(self, weighted: Weighted, key, info) -> Outcome:
        chains, length = self.engine.num_chains, self.engine.num_samples
        if self.watch.stopped:  # who is in a hurry wants no draw twice
            length = max(min(length, len(weighted.weights) // chains), 1)
        x = weighted.resampled(key, chains * length)
        draws = self.through.values(x.reshape(chains, length, -1))
        info |= {"method": "importance"}
        shape = (chains, length)
        stats = {
            "k_hat": np.full(shape, weighted.k_hat),
            "importance_ess": np.full(shape, weighted.ess),
        }
        posterior = ChainPosterior(draws, independent=True)
        notes = importance_notes(weighted)
        return Outcome(posterior, {}, info, stats, notes)

    # HMC ------------------------------------------------------------------------------

    def _sampled(self, weighted: Weighted, key, info) -> Outcome:
        before = time.perf_counter()
        chains = GuidedChains(self.engine, self.through, self.watch, weighted, key)
        record, angle = chains.run()
        self.seconds["hmc"] = time.perf_counter() - before
        if record is None:  # ended in its warm-up
            return self._resampled(weighted, key, info)
        x = np.moveaxis(record.pop("x"), 0, 1)
        stats = {name: np.moveaxis(v, 0, 1) for name, v in record.items()}
        draws = self.through.values(x)
        sd = x.std(axis=(0, 1))
        info |= {
            "method": "hmc",
            "num_gradients": int(stats["n_steps"][0].sum()) * self.engine.num_chains,
            "angle": angle,
            "acceptance_rate": float(stats["acceptance_rate"].mean()),
            "x_mean": float(np.abs(x.mean(axis=(0, 1))).max()),
            "x_sd": (float(sd.min()), float(sd.max())),
            **worth_of(x, self.through.num_theta)._asdict(),
        }
        notes = hmc_notes(weighted, info, stats, chains.mixing, chains.dropped)
        return Outcome(ChainPosterior(draws), {}, info, stats, notes)
