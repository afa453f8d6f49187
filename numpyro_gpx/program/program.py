"""One look at a call: what the model consists of, its targets, who reads what."""

from __future__ import annotations

import copy
import dataclasses
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

from numpyro_gpx import checks
from numpyro_gpx.program import data
from numpyro_gpx.program.call import Call, Trace, signature
from numpyro_gpx.program.compile import compiled
from numpyro_gpx.program.contents import array_digest, contents
from numpyro_gpx.program.dataflow import (
    Indexed,
    dependencies,
    indexed_by_plates,
    only,
    plate_indices,
)
from numpyro_gpx.program.structure import Structure, structure_of
from numpyro_gpx.sites.effects import recorded_calls
from numpyro_gpx.sites.marks import GPMark, marked
from numpyro_gpx.sites.observation import made_here, observation
from numpyro_gpx.uncertain import InputBelief

__all__ = ["Program", "Unit"]


class Unit(NamedTuple):
    """What a plate subsamples.

    Attributes:
        size: How many there are: rows, or blocks of rows.
        arguments: Labels of the array arguments that follow the plate.
    """

    size: int
    arguments: frozenset[str]


class Program:
    """What one look at a call found; made by `Program.of`, never inside `jit`.

    Attributes:
        call: The call on all rows.
        batched: The call on minibatches, or `call` again.
        structure: The model's sites on all rows.
        batched_structure: The same under minibatches.
        observed: Targets of the observed sites, as the model hands them over.
        targets: Observed site to the argument that holds its targets.
        units: What each plate subsamples.
    """

    def __init__(self, call: Call):
        self.call = self.batched = call
        self._look = _Look(call)
        self.structure: Structure = structure_of(self._look.trace)
        self.batched_structure = self.structure
        self._read = contents(call.model)

    @classmethod
    def of(cls, call: Call, batch_size: int | None = None) -> Program:
        """Look at a call and check its data.

        Args:
            call: The model with its arguments, targets included.
            batch_size: Rows of a minibatch, if it is to be fitted on such.

        Raises:
            ValueError: With the argument or site, what came and what was expected.
        """
        program = cls(call.batched(None))
        look = program._look
        data.check_indexed(program.call, look.indexed, plate_sizes(look.trace))
        data.check_observed(program.call, look.values)
        data.check_inducing(program.call, look.trace, look.read_by_inducing)
        program.call = look.at_own_rows()
        program.batched = program.call
        if batch_size is not None:
            data.check_batch_size(program.call, batch_size)
            program.batched = program.call.batched(batch_size)
            trace = program.batched.abstract_trace()
            program.batched_structure = structure_of(trace)
            data.check_batched(program.batched, trace, program.batched_structure)
        return program

    @classmethod
    def unchecked(cls, call: Call) -> Program:
        """Look at a call whose data somebody else has answered for."""
        program = cls(call.batched(None))
        if call.batch_size is not None:
            program.batched = call
            program.batched_structure = structure_of(call)
        return program

    @property
    def model(self):
        """The NumPyro function."""
        return self.call.model

    @property
    def trace(self) -> Trace:
        """Sites of the call on all rows; values are abstract."""
        return self._look.trace

    @property
    def observed(self) -> dict[str, np.ndarray]:
        return {name: found[0] for name, found in self._look.values.items()}

    @property
    def targets(self) -> dict[str, str]:
        return self._look.targets

    @property
    def units(self) -> dict[str, Unit]:
        return self._look.units

    @property
    def fingerprint(self) -> str:
        """Digest of the lowered program and the arrays that it has closed over."""
        return self._look.fingerprint

    def with_jitter(self, relative: float | None) -> Program:
        """The same program, traced with this jitter."""
        if relative == self.call.jitter:
            return self
        other = copy.copy(self)
        other.call = self.call.with_jitter(relative)
        other.batched = self.batched.with_jitter(relative)
        return other

    def unit_of(self, site: str) -> Unit:
        """The rows of an observed site: how many, and which arguments follow them."""
        for frame in self.trace[site]["cond_indep_stack"]:
            if frame.dim == -1:
                return self.units[frame.name]
        # Without a plate, as `gpx.exact`: what is as long as the first argument.
        size = self.call.num_rows
        pairs = zip(self.call.labels(), self.call.arrays(), strict=True)
        return Unit(size, frozenset(n for n, x in pairs if np.shape(x)[:1] == (size,)))

    def check_unchanged(self) -> None:
        """Raise if the model reads other values than when it was looked at."""
        now = contents(self.call.model)
        if now is not None and now == self._read:
            return
        look = _Look(self._look.call)
        changed = self._look.difference(look)
        if changed is not None:
            raise ValueError(
                f"The model reads values that have changed since the fit ({changed}). "
                "Fit again, or pass them as arguments."
            )
        self._read = now

    def at(self, *args, **kwargs) -> Call:
        """The model at new arguments, targets left out; the inputs come first.

        A model without inputs takes the number of rows by name.
        """
        first = next(iter(signature(self.model).parameters), None)
        if self.call.takes_inputs and not args and first not in kwargs:
            raise ValueError(
                "Pass the model's arguments, inputs first, as in `fit.predict(X_test)`."
            )
        call = Call.create(self.model, args, kwargs, function="predict")
        call = call.with_jitter(self.call.jitter)
        if call.batch_size is not None:
            raise ValueError("`predict` needs all rows; leave `batch_size` out.")
        if not call.takes_inputs:
            _check_takes_rows(call)
            return call
        if np.ndim(call.args[0]) == 0:
            raise ValueError(
                f"The inputs must have shape (N, D); got {call.args[0]!r}. Pass them "
                "first, as in `fit.predict(X_test)`."
            )
        if call.num_rows == 0:
            raise ValueError(
                "The inputs must have at least one row; got shape "
                f"{np.shape(call.args[0])}."
            )
        checks.finite("X", call.args[0])
        return call

    def check_new(self, call: Call) -> None:
        """Raise if arguments of a new call have other numbers of rows than its plates.

        The model itself complains of other shapes.
        """
        look = _Look(call)
        data.check_indexed(call, look.indexed, plate_sizes(look.trace))


def plate_sizes(trace: Trace) -> dict[str, int]:
    """Sizes of all plates."""
    return {
        name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"
    }


class _Look:
    """The trace of a call with the jaxpr of everything that it computes."""

    def __init__(self, call: Call):
        self.call = call
        self.trace: Trace = {}
        arrays, static = eqx.partition(call, eqx.is_array)
        _, self._tree = jax.tree.flatten(arrays)

        def everything(flat, key):
            here = eqx.combine(jax.tree.unflatten(self._tree, flat), static)
            with handlers.block(), _MarkedPlates(), recorded_calls() as seen:
                self.trace.update(here.trace({}, key))
            return _outputs(self.trace, seen.calls)

        flat = jax.tree.leaves(arrays)
        self.jaxpr, shapes = jax.make_jaxpr(everything, return_shape=True)(
            flat, jr.key(0)
        )
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
        constants = list(map(jnp.asarray, self.jaxpr.consts))
        # Inside `jit`, as where plain SVI is compiled, they have no values.
        known = all(not_jax_tracer(c) for c in constants)
        self._digests = [array_digest(c) for c in constants] if known else []
        self._values: dict[str, tuple] | None = None
        self._text: str | None = None

    @property
    def values(self) -> dict[str, tuple]:
        """Concrete targets of the observed sites, with their checkers."""
        if self._values is None:
            wanted = {n: self._shapes["observed"][n] for n in self._shapes["observed"]}
            numbers = [
                i for name in wanted for i in self._places.get(("observed", name), [])
            ]
            program = only(self.jaxpr, numbers)
            found = _evaluate(program, self._flat)
            tree = jax.tree.structure(wanted)
            self._values = jax.tree.unflatten(tree, [np.asarray(x) for x in found])
        return self._values

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
        indexed = {i.argument: i.plate for i in self.indexed if i.argument is not None}
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
                and (indexed[i] == plate if i in indexed else i in read)
            }
            found[plate] = Unit(size, frozenset(labels[i] for i in follows))
        return found

    @property
    def fingerprint(self) -> str:
        if self._text is None:
            # The arguments are not part of the model: only their shapes are.
            def program(constants, flat):
                return jax.core.eval_jaxpr(self.jaxpr.jaxpr, constants, *flat)

            constants = list(map(jnp.asarray, self.jaxpr.consts))
            self._text = jax.jit(program).lower(constants, self._flat).as_text()
        found = hashlib.sha256(self._text.encode())
        found.update("".join(self._digests).encode())
        return found.hexdigest()

    def difference(self, other: _Look) -> str | None:
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
            numbers = self._places[("calls", call)]
            drawn = any(self._num_arguments in self._depends[i] for i in numbers)
            if drawn or any(not not_jax_tracer(x) for x in self._flat):
                continue
            X, *rest = _evaluate(only(self.jaxpr, numbers), self._flat)
            if len(rest) == 1 and np.array_equal(X, rest[0]):
                own.add(call)
        others = {call.site for call in self._shapes["every_call"] if call not in own}
        sites = {call.site for call in own} - others
        return dataclasses.replace(
            self.call, own_rows=frozenset(own), multiply_only=frozenset(sites)
        )

    def _arguments_of(self, kind: str, name: str) -> frozenset[int]:
        numbers = self._places.get((kind, name), [])
        read = frozenset().union(*(self._depends[i] for i in numbers))
        return frozenset(i for i in read if i < self._num_arguments)


def _outputs(trace: Trace, calls: dict) -> dict[str, dict[Any, Any]]:
    """What a look wants to know the origin of."""
    samples = {n: s for n, s in trace.items() if s["type"] == "sample"}
    return {
        "observed": {
            name: (site["value"], observation(site).checker())
            for name, site in samples.items()
            if site["is_observed"]
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
        "every_call": {call: () for call in calls},
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
    if not program.jaxpr.eqns:  # targets that are arguments: nothing to compile
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *flat)

    def run(constants, flat):
        return jax.core.eval_jaxpr(program.jaxpr, constants, *flat)

    constants = list(map(jnp.asarray, program.consts))
    return compiled(run, constants, flat, optimise=False)(constants, flat)


class _MarkedPlates(Messenger):
    """Marks the indices of plates, so that the jaxpr tells who is indexed by them."""

    def process_message(self, msg):
        if msg["type"] == "plate":
            chosen = msg["value"]
            if chosen is None:  # a subsample, any will do
                chosen = jnp.arange(msg["args"][1])
            msg["value"] = plate_indices(msg["name"], chosen)


def _check_takes_rows(call: Call) -> None:
    if "num_rows" not in signature(call.model).parameters:
        raise ValueError(
            "The model has no inputs, so that it must be told how many rows to draw: "
            "give it a keyword argument, `def model(y=None, *, num_rows=None)`."
        )
    if call.args or call.kwargs.get("num_rows") is None:
        raise ValueError(
            "The model has no inputs: pass the number of new rows alone, as in "
            "`fit.predict(num_rows=10)`; for the latent inputs of new data use "
            "`gpx.latent_space.project(fit, y)`."
        )
    checks.at_least("num_rows", call.kwargs["num_rows"], 1)
