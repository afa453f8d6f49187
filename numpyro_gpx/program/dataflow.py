"""What depends on what inside a traced model: read off its jaxpr, nothing computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = [
    "Indexed",
    "constants_read",
    "dependencies",
    "indexed_by_plates",
    "looked_up",
    "only",
    "plate_indices",
]

# Names of the marks around plates' indices.
_MARK = "gpx_plate:"
# What jax.numpy does to an index, or to an array on its way to being indexed.
_SAME = ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy")


class Indexed(NamedTuple):
    """An array that is indexed by the rows of a plate.

    Attributes:
        plate: Name of the plate.
        argument: Which input of the program it is; `None` if it was computed.
        length: How long it is along the indexed axis.
        axis: Which axis that is.
    """

    plate: str
    argument: int | None
    length: int
    axis: int


def plate_indices(name: str, indices):
    """`indices`, marked in the jaxpr as those of a plate."""

    def identity(x):
        return x

    identity.__name__ = _MARK + name
    return jax.jit(identity)(indices)


def indexed_by_plates(closed: ClosedJaxpr) -> list[Indexed]:
    """All arrays that the program indexes by the marked rows of a plate."""
    return list(dict.fromkeys(_Gathers(closed.jaxpr).found))


def looked_up(closed: ClosedJaxpr) -> frozenset[int]:
    """Inputs of the program that are indexed by something else, as tables are."""
    return frozenset(_Gathers(closed.jaxpr).tables)


class _Gathers:
    """Follows arguments, and indices by plates, to where arrays are indexed.

    An index array has a column for each axis that it indexes; `plates` holds, for each
    of them, the plate that it comes from.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.found: list[Indexed] = []
        self.tables: set[int] = set()
        self._scan(jaxpr, {var: i for i, var in enumerate(jaxpr.invars)}, {})

    def _scan(self, jaxpr: Jaxpr, arguments: dict, plates: dict) -> None:
        known = (arguments, plates)
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            label = str(eqn.params.get("name", ""))
            if label.startswith(_MARK):
                plates[eqn.outvars[0]] = (label.removeprefix(_MARK),)
            elif name == "gather":
                self._gather(eqn, *known)
            elif name == "dynamic_slice":  # one row, as in a loop over them
                self._slice(eqn, *known)
            elif name in _SAME:
                for table in known:
                    if _get(table, eqn.invars[0]) is not None:
                        table[eqn.outvars[0]] = table[eqn.invars[0]]
            elif name == "select_n":  # negative indices count from the end
                columns = [_get(plates, var) for var in eqn.invars[1:]]
                if any(columns):
                    plates[eqn.outvars[0]] = next(c for c in columns if c is not None)
            elif name == "concatenate":  # one index for each of several axes
                if any(_get(plates, var) for var in eqn.invars):
                    plates[eqn.outvars[0]] = tuple(
                        column
                        for var in eqn.invars
                        for column in _get(plates, var) or _no_plates(var)
                    )
            for inner, outer in _inside(eqn):
                self._enter(eqn, inner, outer, known)
                if name == "scan":
                    self._enter_slices(eqn, inner, known)

    def _enter(self, eqn, inner: Jaxpr, outer, known) -> None:
        inside: tuple[dict, dict] = ({}, {})
        for theirs, ours in zip(inner.invars, outer, strict=False):
            for table, mine in zip(inside, known, strict=True):
                if _get(mine, ours) is not None:
                    table[theirs] = mine[ours]
        self._scan(inner, *inside)
        if len(inner.outvars) != len(eqn.outvars):
            return
        for mine_out, their_out in zip(eqn.outvars, inner.outvars, strict=True):
            for table, mine in zip(inside, known, strict=True):
                if _get(table, their_out) is not None:
                    mine.setdefault(mine_out, table[their_out])

    def _enter_slices(self, eqn, inner: Jaxpr, known) -> None:
        """Follow indices into a loop over them, which has one at a time."""
        arguments, plates = known
        given = eqn.params["num_consts"]
        first = given + eqn.params["num_carry"]
        consts = zip(inner.invars[:given], eqn.invars[:given], strict=True)
        slices = zip(inner.invars[first:], eqn.invars[first:], strict=True)
        inside = {i: arguments[o] for i, o in consts if _get(arguments, o) is not None}
        moving = {i: plates[o] for i, o in slices if _get(plates, o) is not None}
        if moving:
            self._scan(inner, inside, moving)

    def _gather(self, eqn, arguments, plates) -> None:
        operand, indices = eqn.invars[:2]
        argument = _get(arguments, operand)
        columns = _get(plates, indices) or ()
        axes = eqn.params["dimension_numbers"].start_index_map
        shape = operand.aval.shape  # type: ignore[attr-defined]
        pairs = [
            (plate, axis) for plate, axis in zip(columns, axes, strict=False) if plate
        ]
        for plate, axis in pairs:
            self.found.append(Indexed(plate, argument, shape[axis], axis))
        if argument is not None and 0 not in [axis for _, axis in pairs] and 0 in axes:
            self.tables.add(argument)

    def _slice(self, eqn, arguments, plates) -> None:
        operand, *starts = eqn.invars
        shape = operand.aval.shape  # type: ignore[attr-defined]
        for axis, start in enumerate(starts):
            for plate in _get(plates, start) or ():
                found = Indexed(plate, _get(arguments, operand), shape[axis], axis)
                self.found.append(found)


def _no_plates(var) -> tuple[None, ...]:
    return (None,) * var.aval.shape[-1]


def _get(table: dict, var):
    return None if isinstance(var, Literal) else table.get(var)


def _inside(eqn) -> list[tuple[Jaxpr, list]]:
    """Programs inside an equation, with what is handed to their first arguments."""
    if str(eqn.params.get("name", "")).startswith(_MARK):
        return []
    if eqn.primitive.name == "cond":
        return [(branch.jaxpr, eqn.invars[1:]) for branch in eqn.params["branches"]]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is None:
        return []
    inner = getattr(inner, "jaxpr", inner)
    if eqn.primitive.name == "scan":  # the rest are slices
        return [(inner, eqn.invars[: eqn.params["num_consts"]])]
    return [(inner, eqn.invars)] if len(inner.invars) == len(eqn.invars) else []


def dependencies(closed: ClosedJaxpr) -> list[frozenset[int]]:
    """For each output the inputs that it depends on."""
    known = {var: frozenset([i]) for i, var in enumerate(closed.jaxpr.invars)}

    def of(var):
        return frozenset() if isinstance(var, Literal) else known.get(var, frozenset())

    for eqn in closed.jaxpr.eqns:
        every = frozenset().union(*map(of, eqn.invars))
        for var in eqn.outvars:
            known[var] = every
    return [of(var) for var in closed.jaxpr.outvars]


def only(closed: ClosedJaxpr, outputs: Iterable[int]) -> ClosedJaxpr:
    """The program of some of the outputs, without what only others need."""
    wanted = set(outputs)
    used = [i in wanted for i in range(len(closed.jaxpr.outvars))]
    jaxpr, _ = dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def constants_read(closed: ClosedJaxpr) -> list[bool]:
    """For each constant of the program whether its results depend on it."""
    jaxpr = only(closed, range(len(closed.jaxpr.outvars))).jaxpr
    used = [var for eqn in jaxpr.eqns for var in eqn.invars] + jaxpr.outvars
    names = {id(var) for var in used}
    return [id(var) in names for var in closed.jaxpr.constvars]
