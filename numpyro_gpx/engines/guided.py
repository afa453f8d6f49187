"""The exact posterior through the map of a guide: `Guided`."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.diagnostics import effective_sample_size

from numpyro_gpx import checks
from numpyro_gpx.engines.coordinates import Coordinates, GuideState, Reference
from numpyro_gpx.engines.curvature import root_at_point
from numpyro_gpx.engines.engine import Engine, Outcome, Start
from numpyro_gpx.engines.importance import Weighted, importance
from numpyro_gpx.engines.rotation import BLOCK, Rotation, RotationState, rotations
from numpyro_gpx.engines.sites import Sites
from numpyro_gpx.engines.svi import SVI
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.guides import ConditionalGaussian
from numpyro_gpx.guides.parts.base import SiteGuide
from numpyro_gpx.notes import Note
from numpyro_gpx.program.compile_cache import compiled
from numpyro_gpx.program.layer_noise import noise_sets
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.facts import EXACT, Facts
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import ChainPosterior

__all__ = ["Guided"]

# k-hat from which importance sampling is not to be believed, and from which it is
# worth a word (Vehtari et al. 2024).
_TOO_HEAVY, _HEAVY = 0.7, 0.5
# Weights worth less than this share of the draws are wasted on their tail.
_FEW = 0.1
# k-hat beyond which the guide is too narrow somewhere: HMC then goes through a weakened
# map as well, one transition in five.
_LIGHT_TAILS = 1.0
# Blocks of HMC's warm-up, and after which of them positions get a new reference.
_WARM_UP, _REFERENCES = 5, (2, 3, 4)


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
        num_proposals: Draws of the guide that importance sampling weighs.
        noise_sets: As in `NUTS`: of models with noise between layers.

    Its fits have in `fit.info` the `method`, `k_hat` and `importance_ess`, and of HMC
    `num_gradients`, `angle`, `acceptance_rate`, mean and sd of the coordinates
    (`x_mean`, `x_sd`: largest of the means, smallest and largest of the sds),
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
        rows = list(program.structure.row_sites)
        if rows:
            return (
                f"The rows have latent sites of their own, {rows}, for which guides "
                "have no map. Use `fit_nuts`."
            )
        if self.guide is None:
            return None
        posterior = self.guide.posterior
        guide = posterior.guide if isinstance(posterior, GuidePosterior) else None
        if not isinstance(guide, SiteGuide) or not guide.can_transport:
            what = "a sampler" if guide is None else type(guide).__name__
            return (
                f"The fit `guide` is of {what}, which is no map from normal vectors. "
                "Use a fit of `gpx.guides.ConditionalGaussian`, or leave it out."
            )
        if guide.model is not program.model:
            return (
                "The fit `guide` is of another model. Fit the guide to this very model."
            )
        return None

    def run(self, program, key, *, start, watch) -> Outcome:
        started = time.perf_counter()
        key_guide, key_noise, key_run = jr.split(key, 3)
        fit = self._trained(program, key_guide, start, watch)
        posterior = fit.posterior
        assert isinstance(posterior, GuidePosterior)  # else it has objected
        guide = posterior.guide
        noise = None
        if program.structure.noise:
            noise = noise_sets(key_noise, program.structure, self.noise_sets)
        root = root_at_point(guide, fit, key_noise)
        state = GuideState(program.call, fit.params, root, noise)
        seconds = {"guide": time.perf_counter() - started}
        run_ = _Run(self, program, guide, state, watch, seconds)
        return run_.outcome(key_run, fit)

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

    def __init__(self, engine, program, guide, state, watch, seconds):
        self.engine, self.program, self.guide = engine, program, guide
        self.state, self.watch, self.seconds = state, watch, seconds
        transport = guide.transport(state.params, program.call, state.root)
        self.sizes = transport.size, transport.num_theta

    def make(self, state: GuideState, strength=None) -> Coordinates:
        return Coordinates(self.guide, self.program.structure, state, strength)

    def outcome(self, key, fit: Fit) -> Outcome:
        key_weights, key_choice, key_hmc = jr.split(key, 3)
        before = time.perf_counter()
        weighted = importance(
            self.make, self.state, key_weights, self.sizes,
            self.engine.num_proposals, self.watch,
        )  # fmt: skip
        self.seconds["importance"] = time.perf_counter() - before
        info: dict[str, Any] = {
            "k_hat": weighted.k_hat,
            "importance_ess": weighted.ess,
            "guide_losses": fit.info.get("losses", np.zeros(0)),
        }
        params = {name: fit.params[name] for name in self.program.structure.params}
        if self._believed(weighted):
            found = self._resampled(weighted, key_choice, info)
        else:
            found = self._sampled(weighted, key_hmc, info)
        info["seconds_by_phase"] = dict(self.seconds)
        return found._replace(params=params)

    def _believed(self, weighted: Weighted) -> bool:
        if self.engine.method != "auto":
            return self.engine.method == "importance"
        enough = weighted.ess >= _FEW * len(weighted.weights)
        return self.watch.stopped is not None or (
            weighted.k_hat < _TOO_HEAVY and enough
        )

    # Importance sampling --------------------------------------------------------------

    def _resampled(self, weighted: Weighted, key, info) -> Outcome:
        chains, length = self.engine.num_chains, self.engine.num_samples
        x = weighted.resampled(key, chains * length)
        draws = self._values(x.reshape(chains, length, -1))
        info |= {"method": "importance"}
        shape = (chains, length)
        stats = {
            "k_hat": np.full(shape, weighted.k_hat),
            "importance_ess": np.full(shape, weighted.ess),
        }
        posterior = ChainPosterior(draws, independent=True)
        notes = _importance_notes(weighted)
        return Outcome(posterior, {}, info, stats, notes)

    def _values(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Values of all sites `(chains, draws, ...)` on their supports."""
        flat = jnp.asarray(x.reshape(-1, x.shape[-1]))

        def values(state, flat):
            here = self.make(state)
            return jax.lax.map(here.values, flat)  # without `vmap`: tests/test_hang.py

        drawn = compiled(values, self.state, flat)(self.state, flat)
        return {
            name: np.asarray(v).reshape(*x.shape[:2], *v.shape[1:])
            for name, v in drawn.items()
        }

    # HMC ------------------------------------------------------------------------------

    def _sampled(self, weighted: Weighted, key, info) -> Outcome:
        before = time.perf_counter()
        chains = _Hamiltonian(self, weighted, key)
        record, angle, dropped = chains.run()
        self.seconds["hmc"] = time.perf_counter() - before
        if record is None:  # ended in its warm-up
            return self._resampled(weighted, key, info)
        x = np.moveaxis(record.pop("x"), 0, 1)
        stats = {name: np.moveaxis(v, 0, 1) for name, v in record.items()}
        draws = self._values(x)
        sd = x.std(axis=(0, 1))
        info |= {
            "method": "hmc",
            "num_gradients": int(stats["n_steps"][0].sum()) * self.engine.num_chains,
            "angle": angle,
            "acceptance_rate": float(stats["acceptance_rate"].mean()),
            "x_mean": float(np.abs(x.mean(axis=(0, 1))).max()),
            "x_sd": (float(sd.min()), float(sd.max())),
        }
        notes = _hmc_notes(self, weighted, info, stats, chains.mixing, dropped)
        return Outcome(ChainPosterior(draws), {}, info, stats, notes)


class _Hamiltonian:
    """HMC from resampled draws: warm-up, references, draws."""

    def __init__(self, whole: _Run, weighted: Weighted, key):
        self.whole, self.engine = whole, whole.engine
        self.num_theta = whole.sizes[1]
        key_start, key_chain = jr.split(key)
        number = self.engine.num_chains
        x = weighted.resampled(key_start, number)
        # Weights may lie on a draw or two: chains have to start apart.
        x = x + 0.1 * np.asarray(jr.normal(key_chain, x.shape))
        worth = min(weighted.ess, 1000.0)
        self.reference = Reference.of_draws(
            weighted.resampled(key_chain, 4000), self.num_theta, worth
        )
        y = jax.vmap(self.reference.inverse)(jnp.asarray(x))
        self.state = RotationState.start(key_chain, y)
        self.can_weaken = whole.guide.can_weaken
        self.mixing = self.can_weaken and weighted.k_hat > _LIGHT_TAILS
        how = Rotation(self.reference, jnp.asarray(True), jnp.asarray(self.mixing))
        self.program = rotations(
            whole.make, self.state, how, whole.state, can_weaken=self.can_weaken
        )
        self.seen: list[np.ndarray] = []
        self.dropped = 0

    def run(self):
        """What draws reported, `(draws, chains, ...)`; the angle; draws left out."""
        warm_up = _WARM_UP * BLOCK
        total = warm_up + self.engine.num_samples
        self.last = self.state
        _, record = self.whole.watch.loop(
            f"guided, {self.engine.num_chains} chains", self._block, self.state, total,
            most=BLOCK, useless=warm_up + 1,
        )  # fmt: skip
        first = warm_up + self.dropped
        angle = float(jnp.exp(self.last.angles.average[0]))
        if record.num_steps <= first:
            return None, angle, self.dropped
        return {n: x[first:] for n, x in record.values.items()}, angle, self.dropped

    def _block(self, state: RotationState, first: int, number: int):
        if first % BLOCK == 0:
            state = self._between(state, first // BLOCK)
        adapt = jnp.asarray(first < _WARM_UP * BLOCK)
        how = Rotation(self.reference, adapt, jnp.asarray(self.mixing))
        state, reports = self.program(state, jnp.asarray(number), how, self.whole.state)
        self.seen.append(np.asarray(reports["x"])[:number])
        self.last = state
        return state, reports

    def _between(self, state: RotationState, done: int) -> RotationState:
        """What changes after so many blocks."""
        seen, self.seen = self.seen, []
        if done in _REFERENCES:
            x = np.concatenate(seen).reshape(-1, self.whole.sizes[0])
            state = self._moved(
                state, Reference.of_draws(x, self.num_theta, len(x) / 2)
            )
        elif done > _WARM_UP:
            self.seen = seen  # draws, all of which are looked at
        if done == _WARM_UP - 1:
            state = state._replace(angles=state.angles.again())
        quarter = _WARM_UP + max(self.engine.num_samples // (4 * BLOCK), 1)
        if done == quarter and self.can_weaken and not self.mixing:
            if _has_light_tails(np.concatenate(seen), self.num_theta):
                self.mixing = True
                self.dropped = (done - _WARM_UP) * BLOCK
        return state

    def _moved(self, state: RotationState, new: Reference) -> RotationState:
        x = jax.vmap(self.reference.forward)(state.y)
        self.reference = new
        fresh = jnp.asarray(True)
        return state._replace(y=jax.vmap(new.inverse)(x), fresh=fresh)


def _has_light_tails(x: np.ndarray, num_theta: int) -> bool:
    """Whether tails of the hyperparameters mix far worse than their middles.

    Args:
        x: Draws so far, `(draws, chains, K)`.
        num_theta: Number of hyperparameters.
    """
    e = np.moveaxis(x[..., :num_theta], 0, 1)
    if not num_theta or e.shape[1] < BLOCK:
        return False
    bulk = effective_sample_size(e)
    low, high = np.quantile(e, [0.05, 0.95], axis=(0, 1))
    tails = [
        effective_sample_size(share.astype(float)) for share in (e <= low, e <= high)
    ]
    return bool(np.any(np.minimum(*tails) < bulk / 3.0))


def _importance_notes(weighted: Weighted) -> tuple[Note, ...]:
    evidence = {"k_hat": weighted.k_hat, "ess": weighted.ess}
    advice = "Train the guide longer, or use `method='hmc'`."
    if weighted.k_hat >= _TOO_HEAVY:
        return (
            Note(
                "k_hat", "wrong",
                f"The weights have a tail that is too heavy (k-hat {weighted.k_hat:.2f}"
                f", above {_TOO_HEAVY}): averages over these draws may be far off.",
                advice, evidence,
            ),
        )  # fmt: skip
    if weighted.k_hat >= _HEAVY:
        return (
            Note(
                "k_hat", "remark",
                f"The weights have a heavy tail (k-hat {weighted.k_hat:.2f}); averages "
                f"are still right, of {weighted.ess:.0f} effective draws.",
                advice, evidence,
            ),
        )  # fmt: skip
    return ()


def _hmc_notes(whole, weighted, info, stats, mixing, dropped) -> tuple[Note, ...]:
    notes = []
    if dropped:
        notes.append(
            Note(
                "light_tails", "remark",
                "Tails mixed far worse than the middle: from then on one transition in "
                f"five went through a weakened guide, and the {dropped} draws before "
                "were left out.",
                "Nothing is wrong; longer chains have more of the tails.",
                {"dropped": dropped},
            )
        )  # fmt: skip
    elif mixing:
        notes.append(
            Note(
                "light_tails", "remark",
                f"The guide is too narrow somewhere (k-hat {weighted.k_hat:.2f}); one "
                "transition in five went through a weakened one.",
                "Look at R-hat and ESS: `fit.summary()`.",
                {"k_hat": weighted.k_hat},
            )
        )  # fmt: skip
    acceptance = info["acceptance_rate"]
    if acceptance < 0.5:
        notes.append(
            Note(
                "acceptance", "wrong",
                f"Only {100 * acceptance:.0f} % of the trajectories were accepted: the "
                "guide's map does not lead to this posterior.",
                "Use `fit_nuts`, or train the guide longer.",
                {"acceptance_rate": acceptance},
            )
        )  # fmt: skip
    kicks = float(np.mean(stats["n_steps"]))
    low, high = info["x_sd"]
    if kicks > 8.0 or low < 0.5 or high > 2.0:
        notes.append(
            Note(
                "guide", "remark",
                f"The guide fits poorly ({kicks:.1f} gradients a draw; in its "
                f"coordinates the posterior's sd is {low:.2g} to {high:.2g}, 1 if it "
                "were exact): draws are right, but dear.",
                "Train the guide longer, or use `fit_nuts`.",
                {"gradients_a_draw": kicks, "x_sd": (low, high)},
            )
        )  # fmt: skip
    return tuple(notes)
