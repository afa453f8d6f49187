"""What every engine must satisfy."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from numpyro_gpx.contracts.fits import (
    fitted,
    not_random,
    same,
    saved_and_loaded,
    sentence,
    some_draws,
    sound_draws,
    without_warnings,
)
from numpyro_gpx.contracts.shared import finite
from numpyro_gpx.engines.engine import Engine, Outcome, Start
from numpyro_gpx.engines.retry import NotFinite
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.notes import SEVERITIES, Note
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.density import log_terms
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.facts import BIASED, EXACT, UNKNOWN, VARIATIONAL, Facts
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import Posterior

__all__ = ["check_engine"]

_APPROXIMATIONS = (VARIATIONAL, EXACT, BIASED, UNKNOWN)
# No step is over in so many seconds.
_NO_TIME = 1e-9


def check_engine(engine: Engine, model, *args, key=None, **kwargs) -> None:
    """Raise unless an engine keeps what its fits promise.

    * Its `facts` are a name, one of the four approximations, and settings in plain
      values; an `objection` is a sentence, and here there is none.
    * It runs through `gpx.fit`; its posterior is one of the library's, with draws of
      all latent sites of their shapes, inside their supports; parameters are finite.
    * The same key gives the same draws to the last bit, another one other draws, unless
      nothing is random.
    * Its `watch` can end it: with no time at all (the fit so far, or a `TimeoutError`
      in words), and once the first step or draw is done.
    * A start from values, or from a fit, is taken or refused in words.
    * A density that is NaN or 0 for all values is reported: by an error, or a note that
      is `"wrong"`.
    * Its notes are notes. Saved and loaded, the fit predicts the same to the last bit.

    It does not see whether the draws are right: for that see simulation-based
    calibration, or moments of a posterior that is known.

    Args:
        engine: The engine, with few steps: it is run some nine times.
        model: A small NumPyro model that it takes.
        args: Its arguments: inputs, targets.
        key: Random key; fixed if left out.
        kwargs: Its further arguments.
    """
    if not isinstance(engine, Engine):
        raise TypeError(
            "`engine` must be one, such as `gpx.engines.NUTS()`; got "
            f"{type(engine).__name__}."
        )
    key = jr.key(0) if key is None else key
    name = type(engine).__name__
    _check_facts(engine.facts, name)
    call = Call.create(model, args, kwargs, function="check_engine")
    runs = _Runs(engine, Program.of(call, engine.batch), name)
    _check_objection(engine, runs.program, name)
    fit = fitted(name, call, engine, key)
    _check_fit(fit, name)
    short = _check_ends_early(runs, key)
    _check_keys(runs, fit, short, key)
    _check_starts(runs, fit, key)
    _check_nan(runs, fit, key)
    _check_saved(fit, name)


def _check_facts(facts, name: str) -> None:
    assert isinstance(facts, Facts), f"{name}: `facts` are {type(facts).__name__}"
    assert isinstance(facts.name, str) and facts.name, (
        f"{name}: the name in its `facts` is {facts.name!r}"
    )
    assert facts.approximation in _APPROXIMATIONS, (
        f"{name}: `approximation` is {facts.approximation!r}, and must be one of "
        f"{list(_APPROXIMATIONS)}"
    )
    try:
        again = json.loads(json.dumps(facts.settings))
    except TypeError as error:
        raise AssertionError(
            f"{name}: the settings in its `facts` are not plain values: {error}"
        ) from None
    assert again == facts.settings, (
        f"{name}: the settings in its `facts` are not plain values: {facts.settings} "
        f"is {again} in JSON"
    )


def _check_objection(engine: Engine, program: Program, name: str) -> None:
    found = engine.objection(program)
    if found is None:
        return
    assert sentence(found), (
        f"{name}: `objection` must be `None` or a sentence with a full stop; got "
        f"{found!r}"
    )
    raise ValueError(f"`model` must be one that the engine takes. {found}")


class _Runs:
    """Runs an engine again and again on one program."""

    def __init__(self, engine: Engine, program: Program, name: str):
        self.engine, self.program, self.name = engine, program, name

    def __call__(
        self, key, *, start: Start | None = None, watch: Watch | None = None,
        program: Program | None = None,
    ) -> Outcome:  # fmt: skip
        """What a run comes to; what it raises is passed on."""
        program = self.program if program is None else program
        start = Start() if start is None else start
        watch = Watch(self.name) if watch is None else watch
        with one_at_a_time(), without_warnings():
            return self.engine.run(program, key, start=start, watch=watch)

    def sound(self, found: Outcome, when: str) -> None:
        """Raise unless an outcome is one, with draws of all sites."""
        name = f"{self.name}, {when}"
        assert isinstance(found, Outcome), f"{name}: got {type(found).__name__}"
        _check_posterior(found.posterior, name)
        sound_draws(some_draws(found.posterior), self.program, name)
        _check_notes(found.notes, name)


def _check_fit(fit: Fit, name: str) -> None:
    _check_facts(fit.facts, name)
    _check_posterior(fit.posterior, name)
    sound_draws(some_draws(fit.posterior), fit.program, name)
    missing = sorted(set(fit.structure.params) - set(fit.params))
    assert not missing, f"{name}: has no values of the model's parameters {missing}"
    finite(fit.params, f"{name}: parameters")
    _check_notes(fit.notes, name)


def _check_posterior(posterior, name: str) -> None:
    assert isinstance(posterior, Posterior), (
        f"{name}: the posterior must be a `ChainPosterior` or a `GuidePosterior`; got "
        f"{type(posterior).__name__}"
    )


def _check_notes(notes, name: str) -> None:
    for note in notes:
        assert isinstance(note, Note), f"{name}: {note!r} is no `Note`"
        assert note.severity in SEVERITIES, (
            f"{name}: a note of severity {note.severity!r}; known are "
            f"{list(SEVERITIES)}"
        )
        for part in (note.message, note.advice):
            assert sentence(part), f"{name}: a note says {part!r}, which is no sentence"


class _Hasty(Watch):
    """Ends a run as soon as there is something to return."""

    def __init__(self, of: str):
        super().__init__(of)
        self.used = self.enough = False

    @property
    def stopped(self):
        return "stopped by the contract" if self.enough else None

    def loop(self, phase, block, state, num_steps, *, useless=0, **options):
        self.used = True

        def counted(state, first, number):
            found = block(state, first, number)
            self.enough |= first + number > useless and not self.is_preparing
            return found

        return super().loop(
            phase, counted, state, num_steps, useless=useless, **options
        )

    def whole(self, phase, fn, total):
        self.used = True

        def counted(tick: Callable[[str], None]):
            def line(text):
                self.enough |= not self.is_preparing
                tick(text)

            return fn(line)

        return super().whole(phase, counted, total)


def _check_ends_early(runs: _Runs, key) -> Outcome:
    """What a run comes to that is ended at once."""
    try:
        found = runs(key, watch=Watch(runs.name, time_limit=_NO_TIME))
    except TimeoutError as error:
        assert sentence(str(error)), f"{runs.name}: says {str(error)!r} without time"
    else:
        runs.sound(found, "without time")
    hasty = _Hasty(runs.name)
    try:
        found = runs(key, watch=hasty)
    except Exception as error:
        raise AssertionError(
            f"{runs.name}: ended after its first step or draw it raised "
            f"{type(error).__name__}: {error}"
        ) from error
    runs.sound(found, "ended early")
    assert hasty.used, (
        f"{runs.name}: never uses `watch`: neither Ctrl-C nor `time_limit` can end it"
    )
    return found


def _check_keys(runs: _Runs, fit: Fit, short: Outcome, key) -> None:
    """Raise unless draws are a function of the key.

    Args:
        runs: Of the engine.
        fit: Its fit with this key.
        short: The same, ended at once.
        key: The key.
    """
    draws, few = some_draws(fit.posterior), some_draws(short.posterior)
    again = some_draws(runs(key).posterior)
    assert same(draws, again), (
        f"{runs.name}: the same key gives other draws; all chance must come from it"
    )
    if not_random(draws):
        return
    key = jr.fold_in(key, 1)
    if not same(few, some_draws(runs(key, watch=_Hasty(runs.name)).posterior)):
        return
    # A single draw may be a start that is always the same.
    assert not same(draws, some_draws(runs(key).posterior)), (
        f"{runs.name}: another key gives the same draws; it does not use its key"
    )


def _check_starts(runs: _Runs, fit: Fit, key) -> None:
    first = {n: x[0, 0] for n, x in some_draws(fit.posterior).items()}
    sites = fit.structure.hyperparameters or tuple(first)
    values = {name: jnp.asarray(first[name]) for name in sites}
    starts = {"from values": Start(values), "from a fit": Start(fit=fit)}
    for when, start in starts.items():
        try:
            found = runs(key, start=start, watch=_Hasty(runs.name))
        except (ValueError, TypeError) as error:
            assert sentence(str(error)), (
                f"{runs.name}: refuses to start {when} with {str(error)!r}, which is "
                "no sentence"
            )
        except Exception as error:
            raise AssertionError(
                f"{runs.name}: started {when} it raised {type(error).__name__}: {error}"
            ) from error
        else:
            runs.sound(found, f"started {when}")


def _check_nan(runs: _Runs, fit: Fit, key) -> None:
    """Raise if a density that is finite nowhere goes unnoticed."""
    spoilt = _spoilt(runs.program)
    first = {n: x[0, 0] for n, x in some_draws(fit.posterior).items()}
    values = jax.tree.map(jnp.asarray, {**fit.params, **first})
    if np.isfinite(run(_log_joint, spoilt.call, values)):
        return  # the model has no numbers to spoil, or takes NaN for missing
    try:
        found = runs(key, program=spoilt)
    except (NotFinite, ValueError, FloatingPointError):
        return
    assert any(note.severity == "wrong" for note in found.notes), (
        f"{runs.name}: the log density is finite nowhere, and nothing is said of it; "
        "raise `NotFinite`"
    )


def _spoilt(program: Program) -> Program:
    """The same program at data that are NaN: nothing is compiled for it."""

    def nan(x):
        return jnp.full_like(x, jnp.nan) if eqx.is_inexact_array(x) else x

    def at_nan(call: Call) -> Call:
        args, kwargs = jax.tree.map(nan, (call.args, call.kwargs))
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    found = copy.copy(program)
    found.call, found.batched = at_nan(program.call), at_nan(program.batched)
    return found


def _log_joint(call: Call, values: dict):
    prior, likelihood = log_terms(call.trace(values, jr.key(0)))
    return prior + likelihood


def _check_saved(fit: Fit, name: str) -> None:
    loaded = saved_and_loaded(fit)
    draws = [some_draws(f.posterior) for f in (fit, loaded)]
    assert same(*draws), f"{name}: saved and loaded, the fit has other draws"
    for part in ("facts", "notes"):
        before, after = getattr(fit, part), getattr(loaded, part)
        assert before == after, f"{name}: saved {part} {before} are loaded as {after}"
    if len(fit.structure.observed) != 1:
        return
    moments = [(p.mean, p.var) for p in (f.replicate() for f in (fit, loaded))]
    assert same(*moments), f"{name}: saved and loaded, the fit predicts otherwise"
