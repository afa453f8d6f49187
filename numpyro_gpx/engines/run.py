"""The driver of all engines: `fit`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.mcmc import MCMCKernel

from numpyro_gpx import checks, notes
from numpyro_gpx.engines.engine import Engine, Outcome, Start
from numpyro_gpx.engines.retry import with_retry
from numpyro_gpx.engines.watch import Watch
from numpyro_gpx.notes import Note
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call, signature
from numpyro_gpx.program.compile_cache import seconds_compiling
from numpyro_gpx.program.options import takes_options
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.program.units import unit_notes
from numpyro_gpx.results.chain_notes import mixing_notes
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.posteriors import ChainPosterior

__all__ = ["fit", "run_engine"]


@takes_options
def fit(
    model,
    engine: Engine,
    *args,
    key,
    init: Fit | dict | None = None,
    progress: bool = True,
    time_limit: float | None = None,
    **kwargs,
) -> Fit:
    """Fit a model with an engine.

    Args:
        model: A NumPyro function; see the README for its shape.
        engine: What fits it: `gpx.engines.NUTS()`,
            `gpx.engines.SVI(gpx.guides.ConditionalGaussian, batch_size=100)`, ...
        args: Arguments of the model: inputs, targets.
        key: Random key.
        init: Where to start: an earlier fit, or values by site such as
            `{"lengthscale": 0.5}`.
        progress: Whether to show progress bars.
        time_limit: Seconds after which the fit so far is returned.
        kwargs: Further arguments of the model.

    Returns:
        A fit. Ctrl-C, too, returns the fit so far, marked as interrupted; a second one
        ends it at once. `fit.notes` says what may be doubted; it is warned of once.
    """
    _check_order(model, engine)
    elsewhere = _check_options(model, engine, kwargs)
    call = Call.create(model, args, kwargs, function="fit", elsewhere=elsewhere)
    return run_engine(
        call, engine, key, init, progress, time_limit, function="fit", stacklevel=3
    )


def run_engine(
    call: Call, engine: Engine, key, init, progress: bool,
    time_limit: float | None = None, *, function: str, stacklevel: int = 3,
) -> Fit:  # fmt: skip
    """Fit a call with an engine; see `fit`.

    Args:
        call: The model with its arguments.
        engine: What fits it.
        key: Random key.
        init: Where to start.
        progress: Whether to show progress bars.
        time_limit: Seconds after which the fit so far is returned.
        function: Who asks, for messages.
        stacklevel: Of warnings: 2 would be the caller of this function.
    """
    started, compiling = time.perf_counter(), seconds_compiling()
    checks.key(key)
    if time_limit is not None:
        checks.number("time_limit", time_limit, 0.0)
    _check_batches(call, engine, function)
    with one_at_a_time(), _listening(function, progress, time_limit) as watch:
        program = Program.of(call, engine.batch)
        objection = engine.objection(program)
        if objection is not None:
            raise ValueError(f"`{function}` cannot fit this model. {objection}")
        start = _start(init, program.structure)
        doubts = unit_notes(program)

        def attempt(jitter) -> tuple[Outcome, Program]:
            watch.begin_again()
            here = program.with_jitter(jitter)
            found = engine.run(here, key, start=start, watch=watch)
            return found, here

        (outcome, program), retried = with_retry(
            attempt, program.batched, _known_params(init), stacklevel=stacklevel + 1
        )
        found = Fit(
            program, outcome.posterior,
            facts=outcome.facts or engine.facts, params=outcome.params,
            seconds=time.perf_counter() - started,
            seconds_compiling=seconds_compiling() - compiling,
            info=_info(outcome, watch), batch_size=program.batched.batch_size,
            sample_stats=outcome.stats, loss=outcome.loss,
            notes=tuple([*_notes(outcome, watch), *doubts, *retried]),
        )  # fmt: skip
    notes.warn(found, of=f"`{function}`", stacklevel=stacklevel)
    return found


@contextlib.contextmanager
def _listening(function: str, progress: bool, time_limit) -> Iterator[Watch]:
    """A watch that hears Ctrl-C; its time begins now, not in a queue of threads."""
    watch = Watch(function, progress=progress, time_limit=time_limit)
    with watch.listening():
        yield watch


def _known_params(init) -> dict | None:
    """Values of parameters that are known before a fit, for a diagnosis."""
    return init.params if isinstance(init, Fit) else None


def _check_order(model, engine) -> None:
    """Raise unless a model came first, and an engine behind it."""
    what = getattr(engine, "__name__", type(engine).__name__)
    hint = "such as `gpx.engines.NUTS()`"
    if isinstance(model, Engine) or not callable(model):
        raise TypeError(
            f"`model` must be a NumPyro function; got {type(model).__name__}. The "
            "order is `gpx.fit(model, engine, X, y, key=key)`."
        )
    if isinstance(engine, Engine):
        return
    if isinstance(engine, type) and issubclass(engine, Engine):
        hint = f"`gpx.engines.{what}(...)` with brackets"
    elif isinstance(engine, MCMCKernel):
        hint = "`gpx.engines.MCMC(kernel)` for a kernel of NumPyro's kind"
    elif isinstance(engine, AutoGuide | type):
        hint = "`gpx.engines.SVI(guide)` for a guide"
    raise TypeError(
        f"`engine` must be one of `gpx.engines`, {hint}; got {what}. The order is "
        "`gpx.fit(model, engine, X, y, key=key)`."
    )


def _check_options(model, engine: Engine, named: dict) -> dict[str, str]:
    """Options of the engine, and how they are written; none was given to the fit."""
    name = type(engine).__name__
    options = {
        field.name: f"gpx.engines.{name}({field.name}=...)"
        for field in dataclasses.fields(engine)
    }
    mine = set(options) & set(named) - set(signature(model).parameters)
    if mine:
        raise TypeError(
            f"`{min(mine)}` is an option of the engine: `{options[min(mine)]}`."
        )
    return options


def _check_batches(call: Call, engine: Engine, function: str) -> None:
    """Raise if minibatches were asked for in the wrong place."""
    if call.batch_size is None:
        return
    if engine.takes_batches:
        raise TypeError(
            "`batch_size` is an option of the engine: "
            f"`gpx.engines.{type(engine).__name__}(batch_size={call.batch_size})`."
        )
    raise ValueError(
        f"`{function}` needs all rows at each step; got "
        f"`batch_size={call.batch_size}`. Leave it out, or use `fit_svi` or "
        "`fit_sghmc`."
    )


def _start(init, structure: Structure) -> Start:
    """Where a fit starts, checked."""
    if init is None:
        return Start()
    if isinstance(init, Fit):
        return Start(fit=init)
    if not isinstance(init, dict):
        raise TypeError(
            "`init` must be a fit, such as an earlier fit of the model, or values by "
            f"site such as {{'lengthscale': 0.5}}; got {type(init).__name__}."
        )
    values: dict[str, Any] = {}
    for name, value in init.items():
        site = structure.latents.get(name)
        if site is None:
            raise ValueError(
                f"`init` must hold latent sites of the model, "
                f"{list(structure.latents)}; got {name!r}."
            )
        x = jnp.asarray(checks.numbers(f"init[{name!r}]", value), site.dtype)
        try:
            x = jnp.broadcast_to(x, site.shape)
        except ValueError:
            raise ValueError(
                f"`init[{name!r}]` must have shape {site.shape}; got {x.shape}."
            ) from None
        if not np.all(np.isfinite(np.asarray(site.transform.inv(x)))):
            raise ValueError(
                f"`init[{name!r}]` must lie inside the support of the site; got "
                f"{value!r}."
            )
        values[name] = x
    return Start(values)


def _info(outcome: Outcome, watch: Watch) -> dict[str, Any]:
    cut = {} if watch.cut is None else {"interrupted": True}
    return {**outcome.info, **cut}


def _notes(outcome: Outcome, watch: Watch) -> list[Note]:
    """What the engine says, what its chains show, and that it was ended early."""
    found = list(outcome.notes)
    posterior = outcome.posterior
    if isinstance(posterior, ChainPosterior) and not posterior.independent:
        found += mixing_notes(posterior.draws, fixed=posterior.fixed)
    if watch.cut is not None:
        found.insert(
            0,
            Note(
                "interrupted", "doubt",
                f"The fit was {watch.cut} before its end; this is the fit so far.",
                "Go on from here: `init=fit`.",
            ),
        )  # fmt: skip
    return found
