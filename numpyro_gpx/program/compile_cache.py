"""One door for compiled code.

Compiled code must not outlive what it was compiled for. `jax.jit` knows a program by
the identity of the function: a model that reads a global `Z` gives old answers after
`Z` has changed, and every new closure compiles anew. Here closed-over arrays become
arguments, and a program is known by its lowered text: another `Z` of the same shape is
the same program, another number inside it is another one.

(The text of the jaxpr would not do: constants inside an inner `jit` do not show there.
Programs with callbacks are not kept: their text does not name the function.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpyro.primitives import _PYRO_STACK

from numpyro_gpx.numerics.jitter import explicit_jitter
from numpyro_gpx.numerics.threads import batches_hang, one_at_a_time
from numpyro_gpx.program.closure_digest import contents
from numpyro_gpx.program.dataflow import only
from numpyro_gpx.program.numpy_values import numpy_values, placed

__all__ = [
    "clear",
    "compiled",
    "lowered",
    "num_compiled",
    "once",
    "run",
    "seconds_compiling",
    "without_arrays",
]

# Programs kept. Each takes some memory maps, of which Linux allows 65530 a process.
_MOST = 64

# Where batches of matrices hang they do so less often if XLA runs one operation after
# the other.
_SCHEDULER = "xla_cpu_enable_concurrency_optimized_scheduler"


class _Kept:
    """The most recent entries."""

    def __init__(self):
        self.entries: OrderedDict = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key):
        with self.lock:
            if key not in self.entries:
                return None
            self.entries.move_to_end(key)
            return self.entries[key]

    def put(self, key, value) -> None:
        with self.lock:
            self.entries[key] = value
            while len(self.entries) > _MOST:
                self.entries.popitem(last=False)


_EXECUTABLES = _Kept()  # by lowered text
_CALLS = _Kept()  # by function, shapes, and what the model reads
_COUNT = [0]
_SECONDS = [0.0]  # spent on tracing and compiling


def clear() -> None:
    """Forget all compiled programs of models."""
    _EXECUTABLES.entries.clear()
    _CALLS.entries.clear()


def num_compiled() -> int:
    """How many programs were compiled so far."""
    return _COUNT[0]


def seconds_compiling() -> float:
    """How long tracing and compiling have taken so far."""
    return _SECONDS[0]


def run(fn: Callable, *args):
    """`fn(*args)`, compiled.

    Inside another transformation (`jit`, `grad`, `vmap`) it is evaluated as it stands.

    Args:
        fn: A function of arrays and settings, best at module level: then a second
            call need not trace it, as long as all that the arguments hold (models,
            guides, likelihoods) reads the same values.
        args: Its arguments; arrays are traced, everything else is static.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        with one_at_a_time(), _no_handlers():
            return fn(*args)
    key = _call_key(fn, args)
    program = None if key is None else _CALLS.get(key)
    if program is None:
        program = compiled(fn, *args)
        if key is not None:
            _CALLS.put(key, program)
    return program(*args)


def compiled(
    fn: Callable, *args, donate: tuple[int, ...] = (), optimise: bool = True
) -> Callable:
    """`fn` compiled for arguments like these; call it with others of their shapes.

    Args:
        fn: A function of arrays and settings.
        args: Example arguments; arrays are traced, everything else is static.
        donate: Positions of arguments whose memory the result may take.
        optimise: Whether to spend time on fast code; not for what runs once.
    """
    with _timed():
        traced = _Traced(fn, args)
        return _Program(traced, traced.lowered(donate), optimise)


def lowered(fn: Callable, *args) -> jax.stages.Lowered:
    """The program that `run(fn, *args)` compiles, for those who want to read it."""
    with _timed():
        return _Traced(fn, args).lowered(())


def once(fn: Callable) -> Callable:
    """`fn` for what runs once: by NumPy if it is that small.

    Else compiled at its first call, with little optimisation.
    """

    @functools.wraps(fn)
    def call(*args):
        with _timed():
            traced = _Traced(fn, args)
            found = numpy_values(traced.closed, traced.flat)
            if found is not None:
                return jax.tree.unflatten(traced.out_tree, found)
            program = _Program(traced, traced.lowered(()), optimise=False)
        return program(*args)

    return call


class _Traced:
    """A function as its jaxpr, with the arrays that it has closed over."""

    def __init__(self, fn, args):
        self.args = args
        self.flat, self.tree, static = _split(args)
        tree = self.tree

        def traced(*flat):
            with _no_handlers():
                return fn(*_join(tree, flat, static))

        with one_at_a_time():
            closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*self.flat)
        self.out_tree = jax.tree.structure(shapes)
        # What nobody asked for is not lowered: models compute a lot on the way.
        self.closed = only(closed, range(len(closed.jaxpr.outvars)))
        self.constants = [placed(c) for c in closed.consts]

    def lowered(self, donate) -> jax.stages.Lowered:
        # Positions of leaves, behind the constants, that may be overwritten.
        given: list[int] = []
        start = 0
        for position, arg in enumerate(self.args):
            number = len(_arrays(arg))
            if position in donate:
                given += range(1 + start, 1 + start + number)
            start += number
        jaxpr = self.closed.jaxpr

        def program(constants, *flat):
            return jax.core.eval_jaxpr(jaxpr, constants, *flat)

        jitted = jax.jit(program, donate_argnums=tuple(given), keep_unused=True)
        return jitted.lower(self.constants, *self.flat)


class _Program:
    """An executable with the arrays that its function has closed over."""

    def __init__(self, traced: _Traced, low: jax.stages.Lowered, optimise: bool):
        self.tree, self.out_tree = traced.tree, traced.out_tree
        self.constants = traced.constants
        self.executable = _executable(low, _options(optimise))

    def __call__(self, *args):
        flat, tree, _ = _split(args)
        if tree != self.tree:
            raise ValueError(
                f"The program was compiled for arguments {self.tree}; got {tree}."
            )
        return jax.tree.unflatten(self.out_tree, self.executable(self.constants, *flat))


@contextlib.contextmanager
def _timed():
    """What runs inside is tracing and compiling."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _SECONDS[0] += time.perf_counter() - started


@contextlib.contextmanager
def _no_handlers():
    """Out of reach of NumPyro's handlers around the caller, which a key cannot see."""
    outside = _PYRO_STACK[:]
    _PYRO_STACK.clear()
    try:
        yield
    finally:
        _PYRO_STACK[:] = outside


def _executable(low, options):
    text = low.as_text()
    # The text does not say which of its arguments are constants.
    known = f"{sorted(options.items())}{low.in_tree}{text}"
    key = hashlib.sha256(known.encode()).hexdigest()
    found = None if "callback" in text else _EXECUTABLES.get(key)
    if found is None:
        _COUNT[0] += 1
        found = low.compile(compiler_options=options)
        if "callback" not in text:
            _EXECUTABLES.put(key, found)
    return found


def _options(optimise: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if batches_hang():
        options[_SCHEDULER] = False
    if not optimise:
        options["xla_backend_optimization_level"] = 0
    return options


def _is_traced(x) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _arrays(arg) -> list:
    return [x for x in jax.tree.leaves(arg) if _is_traced(x)]


def without_arrays(tree):
    """The same with `None` in the place of arrays: what a program is compiled for."""
    return jax.tree.map(lambda x: None if _is_traced(x) else x, tree)


def _split(args):
    """Arrays, the tree, and the leaves that are none (`None` where an array is)."""
    leaves, tree = jax.tree.flatten(args)
    static = tuple(None if _is_traced(x) else x for x in leaves)
    return [x for x in leaves if _is_traced(x)], tree, static


def _join(tree, flat, static):
    arrays = iter(flat)
    leaves = [next(arrays) if x is None else x for x in static]
    return jax.tree.unflatten(tree, leaves)


def _call_key(fn, args):
    """What the first level knows a call by; `None` if it cannot."""
    if "<locals>" in getattr(fn, "__qualname__", "<locals>"):
        return None
    read = contents(without_arrays(args))
    if read is None:
        return None
    flat, tree, static = _split(args)
    shapes = tuple((np.shape(x), _dtype(x)) for x in flat)
    key = (fn, tree, static, shapes, read, _context())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _dtype(x):
    return x.dtype, getattr(x, "weak_type", False)


def _context():
    """Settings outside the arguments that a trace depends on."""
    config = jax.config.values
    precision = config["jax_default_matmul_precision"]
    keys = config["jax_default_prng_impl"]
    return explicit_jitter(), config["jax_enable_x64"], precision, keys
