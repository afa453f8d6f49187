"""What small programs compute, by NumPy: nothing is compiled.

XLA takes about a second for a program of a few hundred operations, however little they
do. What a fit asks once (targets as the model hands them over, where parameters start,
parameters on their supports) is elementwise and small: NumPy has done it before XLA has
begun. Programs with anything else in them are left to XLA.

Keys are JAX's own threefry generator, so that a split gives the same keys as there.
Random numbers are left to XLA too where they matter to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.random as jr
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_gpx.program.numpy_primitives import (
    ELEMENTWISE,
    RANDOM,
    SHAPED,
    Unknown,
    packed,
    unpacked,
)

__all__ = ["numpy_values", "placed"]

# Passes of a loop; longer ones are XLA's.
_MOST_PASSES = 100
# Programs inside an equation, by the parameter that holds them.
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
_CALLS = (
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vmap_call", "remat", "checkpoint",
)  # fmt: skip


def numpy_values(
    closed: ClosedJaxpr, arrays: Sequence, *, draws: bool = False
) -> list | None:
    """What a program returns for these arrays; `None` if it is one for XLA.

    Args:
        closed: The program.
        arrays: Its arguments; keys may be among them.
        draws: Whether it may draw random numbers: the same bits as JAX's, normals to
            rounding.
    """
    given = [*closed.consts, *arrays]
    if any(isinstance(x, jax.core.Tracer) for x in given):
        return None
    inside = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    results = closed.jaxpr.outvars
    runner = _Runner(draws)
    try:
        runner.check(closed.jaxpr)
        values = [_taken(x, var) for x, var in zip(given, inside, strict=True)]
        with np.errstate(all="ignore"):
            found = runner.run(closed.jaxpr, values)
    except Unknown:
        return None
    return [_handed(x, var) for x, var in zip(found, results, strict=True)]


def placed(x):
    """`jnp.asarray(x)` without the program that JAX compiles for each new shape."""
    if isinstance(x, np.ndarray):
        x = np.array(x)  # JAX may go on reading NumPy's memory
    return jax.device_put(x)


class _Runner:
    """Runs programs equation by equation."""

    def __init__(self, draws: bool):
        self.draws = draws

    def check(self, jaxpr: Jaxpr) -> None:
        """Raise if an operation is not known here, before any work is done."""
        if jaxpr.effects:
            raise Unknown
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            if name in _CALLS:
                self.check(_inner(eqn).jaxpr)
            elif name == "scan":
                if params["length"] > _MOST_PASSES:
                    raise Unknown
                self.check(params["jaxpr"].jaxpr)
            elif name not in _KNOWN or (name == "random_bits" and not self.draws):
                raise Unknown

    def run(self, jaxpr: Jaxpr, values: Sequence) -> list:
        """The results; `values` are those of constants and arguments."""
        inside = [*jaxpr.constvars, *jaxpr.invars]
        known = dict(zip(inside, values, strict=True))

        def of(var):
            return _literal(var) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            found = self._apply(eqn, [of(var) for var in eqn.invars])
            for var, x in zip(eqn.outvars, found, strict=True):
                known[var] = np.asarray(x, _dtype(var))
        return [of(var) for var in jaxpr.outvars]

    def _closed(self, closed: ClosedJaxpr, values: Sequence) -> list:
        return self.run(closed.jaxpr, [*map(np.asarray, closed.consts), *values])

    def _apply(self, eqn, values: list) -> Sequence:
        """What an equation returns."""
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            return self._closed(_inner(eqn), values)
        if name == "cond":
            last = len(params["branches"]) - 1
            branch = params["branches"][int(np.clip(values[0], 0, last))]
            self.check(branch.jaxpr)
            return self._closed(branch, values[1:])
        if name == "scan":
            return self._scan(params, values)
        if name == "platform_index":
            return [_platform(params["platforms"])]
        if name in ELEMENTWISE:
            return [ELEMENTWISE[name](*values)]
        if name in RANDOM:
            return [RANDOM[name](params, *values)]
        found = SHAPED[name](eqn, *values)
        return found if isinstance(found, list) else [found]

    def _scan(self, params, values: list) -> list:
        """A loop: constants, what is carried, and slices along the leading axis."""
        first = params["num_consts"]
        second = first + params["num_carry"]
        consts, carry, slices = values[:first], values[first:second], values[second:]
        length = params["length"]
        reports: list[list] = []
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            rows = [x[i] for x in slices]
            found = self._closed(params["jaxpr"], [*consts, *carry, *rows])
            carry = found[: len(carry)]
            reports.append(found[len(carry) :])
        if length == 0:
            raise Unknown  # whose reports have shapes that nothing here shows
        if params["reverse"]:
            reports.reverse()
        return [*carry, *map(np.stack, zip(*reports, strict=True))]


def _platform(platforms) -> int:
    """Which of several platforms this one is; a group without names is for the rest."""
    here = jax.default_backend()
    for number, names in enumerate(platforms):
        if names is None or here in names:
            return number
    raise Unknown


def _inner(eqn) -> ClosedJaxpr:
    """The program inside an equation that calls one."""
    found = next((eqn.params[n] for n in _INNER if n in eqn.params), None)
    if isinstance(found, ClosedJaxpr):
        return found
    if isinstance(found, Jaxpr) and not found.constvars:
        return ClosedJaxpr(found, ())
    raise Unknown


def _is_key(var) -> bool:
    return jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key)


def _dtype(var):
    """NumPy's for a value; keys are numbers of 64 bits here."""
    return np.uint64 if _is_key(var) else var.aval.dtype


def _literal(var: Literal):
    return np.asarray(var.val, _dtype(var))


def _taken(x, var) -> np.ndarray:
    """An argument as NumPy's, of the dtype that the program knows it by."""
    if _is_key(var):
        if str(var.aval.dtype) != "key<fry>":
            raise Unknown
        return packed(np.asarray(jr.key_data(x)))
    if np.dtype(var.aval.dtype).kind not in "biuf":
        raise Unknown
    return np.asarray(x, var.aval.dtype)


def _handed(x, var):
    """A result as JAX's, in memory of its own, which XLA may write over."""
    if _is_key(var):
        return jr.wrap_key_data(unpacked(x), impl="threefry2x32")
    return jax.device_put(np.array(x, var.aval.dtype, order="C"))


_KNOWN = frozenset([*ELEMENTWISE, *SHAPED, *RANDOM, "cond", "platform_index"])
