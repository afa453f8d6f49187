"""What depends on what inside a traced model: read off its jaxpr, nothing computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = ["Indexed", "dependencies", "indexed_by_plates", "only", "plate_indices"]

# Names of the marks around plates' indices.
_MARK = "gpx_plate:"
# What jax.numpy does to an index, or to an array on its way to being indexed.
_SAME = ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy")


class Indexed(NamedTuple):
    """An array that is indexed by the rows of a plate.

    Attributes:
        plate: Name of the plate.
        argument: Which input of the program it is; `None` if it was computed.
        length: How many rows it has.
    """

    plate: str
    argument: int | None
    length: int


def plate_indices(name: str, indices):
    """`indices`, marked in the jaxpr as those of a plate."""

    def identity(x):
        return x

    identity.__name__ = _MARK + name
    return jax.jit(identity)(indices)


def indexed_by_plates(closed: ClosedJaxpr) -> list[Indexed]:
    """All arrays that the program indexes by the marked rows of a plate."""
    found: list[Indexed] = []
    numbers = {var: i for i, var in enumerate(closed.jaxpr.invars)}
    _scan(closed.jaxpr, dict(numbers), {}, found)
    return list(dict.fromkeys(found))


def _scan(jaxpr: Jaxpr, arguments: dict, plates: dict, found: list[Indexed]) -> list:
    """Follow arguments and plates' indices; the plates of the outputs."""

    def get(table, var):
        return None if isinstance(var, Literal) else table.get(var)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = eqn.params.get("jaxpr")
        if name in ("jit", "pjit") and inner is not None:
            label = str(eqn.params.get("name", ""))
            if label.startswith(_MARK):
                plates[eqn.outvars[0]] = label.removeprefix(_MARK)
                continue
            pairs = list(zip(inner.jaxpr.invars, eqn.invars, strict=True))
            inside: tuple[dict, dict] = ({}, {})
            for theirs, ours in pairs:
                for table, mine in zip(inside, (arguments, plates), strict=True):
                    if get(mine, ours) is not None:
                        table[theirs] = get(mine, ours)
            _scan(inner.jaxpr, *inside, found)
            for ours, theirs in zip(eqn.outvars, inner.jaxpr.outvars, strict=True):
                for table, mine in zip(inside, (arguments, plates), strict=True):
                    if get(table, theirs) is not None:
                        mine[ours] = get(table, theirs)
        elif name == "gather":
            operand, indices = eqn.invars[:2]
            plate = get(plates, indices)
            rows = eqn.params["dimension_numbers"].start_index_map == (0,)
            if plate is not None and rows:
                length = operand.aval.shape[0]  # type: ignore[attr-defined]
                found.append(Indexed(plate, get(arguments, operand), length))
        elif name in _SAME:
            for table in (arguments, plates):
                if get(table, eqn.invars[0]) is not None:
                    table[eqn.outvars[0]] = get(table, eqn.invars[0])
        elif name == "select_n":  # negative indices count from the end
            known = [get(plates, var) for var in eqn.invars[1:]]
            if any(known):
                plates[eqn.outvars[0]] = next(p for p in known if p is not None)
    return found


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
