"""One look at a call: its trace, with the jaxpr of everything that it computes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro import handlers
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer

from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call, Trace
from numpyro_gpx.program.closure_digest import array_digest
from numpyro_gpx.program.compile_cache import compiled
from numpyro_gpx.program.dataflow import (
    Indexed,
    constants_read,
    dependencies,
    indexed_by_plates,
    looked_up,
    only,
    plate_indices,
)
from numpyro_gpx.program.numpy_values import numpy_values, placed
from numpyro_gpx.sites.gp_calls import recorded_calls
from numpyro_gpx.sites.marks import GPMark, marked
from numpyro_gpx.sites.observation import made_here, observation
from numpyro_gpx.uncertain import InputBelief

__all__ = ["Look", "Unit", "plate_sizes"]


class Unit(NamedTuple):
    """What a plate subsamples.

    Attributes:
        size: How many there are: rows, or blocks of rows.
        arguments: Labels of the array arguments that follow the plate.
    """

    size: int
    arguments: frozenset[str]


def plate_sizes(trace: Trace) -> dict[str, int]:
    """Sizes of all plates."""
    return {
        name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"
    }


class Look:
    """The trace of a call with the jaxpr of everything that it computes."""

    def __init__(self, call: Call):
        self.call = call
        self.trace: Trace = {}
        arrays, static = eqx.partition(call, eqx.is_array)
        _, self._tree = jax.tree.flatten(arrays)

        def everything(flat, key):
            here = eqx.combine(jax.tree.unflatten(self._tree, flat), static)
            moving = _MovingParams(key=key)
            with handlers.block(), moving, _MarkedPlates(), recorded_calls() as seen:
                self.trace.update(here.trace({}, key))
            # What the user's own `jit` computes has no value out here.
            calls = {c: r for c, r in seen.calls.items() if not _is_inner(r, key)}
            return _outputs(self.trace, calls, list(seen.calls))

        flat = jax.tree.leaves(arrays)
        look = jax.make_jaxpr(everything, return_shape=True)
        with one_at_a_time():
            self.jaxpr, shapes = look(flat, jr.key(0))
        self._flat = [*flat, jr.key(0)]
        self._num_arguments = len(flat)
        paths = jax.tree_util.tree_leaves_with_path(shapes)
        self._places: dict[tuple[str, str], list[int]] = {}
        for number, (path, _) in enumerate(paths):
            place = (path[0].key, path[1].key)
            self._places.setdefault(place, []).append(number)
        self._shapes = shapes
        self.indexed: list[Indexed] = indexed_by_plates(self.jaxpr)
        self._depends = dependencies(self.jaxpr)
        constants = list(map(placed, self.jaxpr.consts))
        # Inside `jit`, as where plain SVI is compiled, they have no values.
        known = all(not_jax_tracer(c) for c in constants)
        # Those that only say where parameters start are not read by a fit.
        reads = constants_read(self.jaxpr)
        self._digests = [
            array_digest(c) if read else ""
            for c, read in zip(constants if known else [], reads, strict=False)
        ]
        self._values: dict[str, tuple] | None = None
        self._text: str | None = None

    @property
    def values(self) -> dict[str, tuple]:
        """Concrete targets of the observed sites, with their checkers."""
        if self._values is None:
            self._values = self._concrete("observed")
        return self._values

    @property
    def takes_columns(self) -> bool:
        """Whether rows take columns of latents, `f(X).take(group)`."""
        return any(checker.taken for checker in self._shapes["taken"].values())

    def check_taken(self) -> None:
        """Raise if rows take columns of latents that are not there."""
        if any(not not_jax_tracer(x) for x in self._flat) or not self.takes_columns:
            return
        for name, checker in self._concrete("taken").items():
            checker.check(name)

    def _concrete(self, kind: str) -> dict:
        """Outputs of a kind by name, computed."""
        wanted = self._shapes[kind]
        numbers = [i for name in wanted for i in self._places.get((kind, name), [])]
        found = _evaluate(only(self.jaxpr, numbers), self._flat)
        tree = jax.tree.structure(wanted)
        return jax.tree.unflatten(tree, [np.asarray(x) for x in found])

    @property
    def read_by_inducing(self) -> dict[str, list[int]]:
        """GP site to the arguments that its inducing variables depend on."""
        return {
            name: sorted(self._arguments_of("inducing", name))
            for name in self._shapes["inducing"]
        }

    @property
    def targets(self) -> dict[str, str]:
        labels = self.call.labels()
        found = {}
        for name in self._shapes["observed"]:
            numbers = self._places.get(("observed", name), [])[:1]
            read = sorted(set().union(*(self._depends[i] for i in numbers)))
            read = [i for i in read if i < self._num_arguments]
            if len(read) == 1:
                found[name] = labels[read[0]]
        return found

    @property
    def units(self) -> dict[str, Unit]:
        lengths = [np.shape(x)[:1] for x in self._flat[: self._num_arguments]]
        indexed = {
            i.argument: i.plate
            for i in self.indexed
            if i.argument is not None and i.axis == 0
        }
        tables = looked_up(self.jaxpr) - set(indexed)
        labels = self.call.labels()
        found = {}
        for plate, size in plate_sizes(self.trace).items():
            sites = [
                name
                for name, site in self.trace.items()
                if site["type"] == "sample"
                and any(frame.name == plate for frame in site["cond_indep_stack"])
            ]
            read = frozenset().union(*(self._arguments_of("terms", n) for n in sites))
            follows = {
                i
                for i, length in enumerate(lengths)
                if length == (size,)
                and (indexed[i] == plate if i in indexed else i in read - tables)
            }
            found[plate] = Unit(size, frozenset(labels[i] for i in follows))
        return found

    @property
    def fingerprint(self) -> str:
        if self._text is None:
            # The arguments are not part of the model: only their shapes are.
            def program(constants, flat):
                return jax.core.eval_jaxpr(self.jaxpr.jaxpr, constants, *flat)

            constants = list(map(placed, self.jaxpr.consts))
            self._text = jax.jit(program).lower(constants, self._flat).as_text()
        found = hashlib.sha256(self._text.encode())
        found.update("".join(self._digests).encode())
        return found.hexdigest()

    @property
    def arrays_read(self) -> tuple[str, ...]:
        """Shapes and digests of the arrays that the model has closed over, sorted."""
        shapes = [str(np.shape(x)) for x in self.jaxpr.consts]
        pairs = zip(shapes, self._digests, strict=False)
        return tuple(sorted(f"{shape} {digest}" for shape, digest in pairs))

    def difference(self, other: Look) -> str | None:
        """What another look at the same call found to be different, in words."""
        pairs = zip(self._digests, other._digests, strict=False)
        for number, (before, after) in enumerate(pairs):
            if before != after:
                shape = np.shape(self.jaxpr.consts[number])
                return f"constant of shape {shape}"
        same = len(self._digests) == len(other._digests)
        if same and self.fingerprint == other.fingerprint:
            return None
        return "a number or a shape in it"

    def at_own_rows(self) -> Call:
        """The call, told which GPs are asked for at their own rows alone.

        Only where the rows are the same numbers, whatever the sites' values are.
        """
        own = set()
        for call in self._shapes["calls"]:
            pair = self._rows_and_own(call)
            if pair is not None and np.array_equal(*pair):
                own.add(call)
        others = {call.site for call in self._shapes["every_call"] if call not in own}
        sites = {call.site for call in own} - others
        return dataclasses.replace(
            self.call, own_rows=frozenset(own), multiply_only=frozenset(sites)
        )

    @functools.cached_property
    def gps_are_exact(self) -> bool:
        """Whether every GP was asked for at rows of its inducing variables alone."""
        if set(self._shapes["every_call"]) != set(self._shapes["calls"]):
            return False
        found = map(self._rows_and_own, self._shapes["calls"])
        return all(pair is not None and _are_among(*pair) for pair in found)

    def _rows_and_own(self, call) -> tuple | None:
        """The rows of a GP call and the inducing rows, where both have values.

        Not where they depend on what is drawn.
        """
        numbers = self._places[("calls", call)]
        drawn = any(self._num_arguments in self._depends[i] for i in numbers)
        if drawn or any(not not_jax_tracer(x) for x in self._flat):
            return None
        X, *rest = _evaluate(only(self.jaxpr, numbers), self._flat)
        return (np.asarray(X), np.asarray(rest[0])) if len(rest) == 1 else None

    def _arguments_of(self, kind: str, name: str) -> frozenset[int]:
        numbers = self._places.get((kind, name), [])
        read = frozenset().union(*(self._depends[i] for i in numbers))
        return frozenset(i for i in read if i < self._num_arguments)


def _are_among(rows, others) -> bool:
    """Whether every row is one of the others."""
    known = {row.tobytes() for row in others}
    return all(row.tobytes() in known for row in rows)


def _is_inner(tree, outer) -> bool:
    """Whether something in it belongs to another trace than `outer` does."""
    return any(
        isinstance(x, jax.core.Tracer) and x._trace is not outer._trace
        for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    )


def _outputs(trace: Trace, calls: dict, every: list) -> dict[str, dict[Any, Any]]:
    """What a look wants to know the origin of."""
    samples = {n: s for n, s in trace.items() if s["type"] == "sample"}
    return {
        "observed": {
            name: (site["value"], observation(site).checker())
            for name, site in samples.items()
            if site["is_observed"]
        },
        "taken": {
            name: observation(site).taken()
            for name, site in samples.items()
            if site["is_observed"] or made_here(site["fn"])
        },
        "inducing": {
            name: mark.prior.inducing for name, mark in marked(trace, GPMark).items()
        },
        "terms": {name: _term(name, site) for name, site in samples.items()},
        "calls": {
            call: (record.X, record.gp.prior.inducing)
            for call, record in calls.items()
            if record.gp.prior.inducing.target == "exact"
            and not isinstance(record.X, InputBelief)
        },
        "every_call": {call: () for call in every},
    }


def _term(name: str, site):
    fn, value = site["fn"], site["value"]
    expected = tuple(fn.batch_shape) + tuple(fn.event_shape)
    # A plain site may have more targets than it has parameters, as `Normal(0, 1)` has.
    given = jnp.shape(value)
    plain = not made_here(fn) and given[len(given) - len(expected) :] == expected
    if site["is_observed"] and given != expected and not plain:
        raise ValueError(
            f"Targets of site `{name}` have shape {given}; the site has "
            f"{expected}. `X` and `y` must have the same number of rows."
        )
    return jnp.sum(fn.log_prob(value))


def _evaluate(program, flat) -> list:
    # Any draw of what the targets or their checks depend on serves.
    found = numpy_values(program, flat, draws=True)
    if found is not None:
        return found

    def run(constants, flat):
        return jax.core.eval_jaxpr(program.jaxpr, constants, *flat)

    constants = list(map(placed, program.consts))
    return compiled(run, constants, flat, optimise=False)(constants, flat)


class _MovingParams(Messenger):
    """Makes parameters out of the key: they move, wherever they start."""

    def __init__(self, fn=None, *, key):
        self.key = key
        super().__init__(fn)

    def postprocess_message(self, msg):
        value = msg.get("value")
        if msg["type"] == "param" and value is not None:
            anything = jr.uniform(self.key)
            msg["value"] = jax.tree.map(
                lambda x: (
                    jnp.broadcast_to(anything, x.shape).astype(x.dtype)
                    if eqx.is_inexact_array(x)
                    else x
                ),
                value,
            )


class _MarkedPlates(Messenger):
    """Marks the indices of plates, so that the jaxpr tells who is indexed by them."""

    def process_message(self, msg):
        if msg["type"] == "plate":
            chosen = msg["value"]
            if chosen is None:  # a subsample, any will do
                chosen = jnp.arange(msg["args"][1])
            msg["value"] = plate_indices(msg["name"], chosen)
