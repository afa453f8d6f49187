"""One look at a call: what the model consists of, its targets, who reads what."""

from __future__ import annotations

import copy

import jax
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_gpx import checks
from numpyro_gpx.program.batches import check_batch_size, check_batched
from numpyro_gpx.program.call import Call, Trace, drawable, signature
from numpyro_gpx.program.closure_digest import array_digest, contents
from numpyro_gpx.program.compile_cache import without_arrays
from numpyro_gpx.program.data_checks import (
    check_indexed,
    check_inducing,
    check_observed,
    check_subsampled,
)
from numpyro_gpx.program.inspection import Look, Unit, plate_sizes
from numpyro_gpx.program.structure import Structure, structure_of
from numpyro_gpx.sites.observation import Observation, observation

__all__ = ["Program"]


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
        checked: Whether its data were checked.
    """

    def __init__(self, call: Call, *, discrete: bool = False):
        self.call = self.batched = call
        with drawable():
            self._look = Look(call)
        self.structure: Structure = structure_of(self._look.trace, discrete=discrete)
        self.batched_structure = self.structure
        self._read = contents(without_arrays(call))
        self.checked = False
        self._known_shapes: set[str] = set()

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
        check_indexed(program.call, look.indexed, plate_sizes(look.trace))
        check_subsampled(look.trace, look.indexed)
        check_observed(program.call, look.values)
        look.check_taken()
        check_inducing(program.call, look.trace, look.read_by_inducing)
        program.call = look.at_own_rows()
        program.batched = program.call
        if batch_size is not None:
            check_batch_size(program.call, batch_size)
            program.batched = program.call.batched(batch_size)
            trace = program.batched.abstract_trace()
            program.batched_structure = structure_of(trace)
            check_batched(program.batched, trace, program.batched_structure)
        program.checked = True
        return program

    @classmethod
    def unchecked(cls, call: Call, *, discrete: bool = False) -> Program:
        """Look at a call whose data somebody else has answered for.

        Args:
            call: The model with its arguments.
            discrete: Whether latent sites may be discrete, as draws may be.
        """
        program = cls(call.batched(None), discrete=discrete)
        if call.batch_size is not None:
            program.batched = call
            program.batched_structure = structure_of(call, discrete=discrete)
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

    @property
    def arrays_read(self) -> tuple[str, ...]:
        """Shapes and digests of the arrays that the model has closed over."""
        return self._look.arrays_read

    @property
    def target(self) -> str:
        """What the density is: `"exact"`, or the `"sparse"` approximation.

        `gpx.inducing.Data` is exact if all rows that the GP was asked for are among
        its own.
        """
        return "exact" if self._look.gps_are_exact else "sparse"

    def with_jitter(self, relative: float | None) -> Program:
        """The same program, traced with this jitter."""
        if relative == self.call.jitter:
            return self
        other = copy.copy(self)
        other.call = self.call.with_jitter(relative)
        other.batched = self.batched.with_jitter(relative)
        return other

    def observation(self, site: str) -> Observation:
        """What an observed site says of its rows; values are abstract."""
        return observation(self.trace[site])

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
        now = contents(without_arrays(self._look.call))
        if now is not None and now == self._read:
            return
        look = Look(self._look.call)
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
        given = set(call.labels()) & set(self.targets.values())
        if given:
            raise ValueError(
                f"`predict` takes the model's arguments without targets; got "
                f"`{min(given)}`, which holds them. Pass other arguments by name."
            )
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

        The model itself complains of other shapes. Once for arguments of the same
        shapes, or of the same numbers where these say which columns are taken.
        """
        known = str(jax.tree.map(np.shape, (call.args, call.kwargs)))
        arrays = call.arrays()
        if self._look.takes_columns and all(map(not_jax_tracer, arrays)):
            known += "".join(map(array_digest, arrays))
        if known in self._known_shapes:
            return
        look = Look(call)
        check_indexed(call, look.indexed, plate_sizes(look.trace))
        look.check_taken()
        self._known_shapes.add(known)


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
