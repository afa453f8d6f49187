"""A digest of what a function reads: its code, and the values it has closed over.

Compiled code that was made for a model is right as long as the model reads the same
values. Tracing it again would tell, and takes a tenth of a second; this takes a
millisecond, and says nothing (`None`) where it meets something it cannot look into.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from typing import Any

import jax
import numpy as np

__all__ = ["array_digest", "contents"]

# Objects looked into before giving up.
_MOST = 20_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype)


def contents(*values) -> str | None:
    """Digest of functions and objects, globals and closures included.

    Equal digests mean that nothing which the functions read has changed. `None` if
    something cannot be looked into.
    """
    walk = _Walk()
    try:
        for value in values:
            walk.add(value)
    except _Unknown:
        return None
    return walk.digest.hexdigest()


def array_digest(x) -> str:
    """Digest of an array's shape, dtype and numbers."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.ascontiguousarray(x)
    found = hashlib.blake2b(f"{x.shape} {x.dtype}".encode(), digest_size=16)
    found.update(x.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


class _Unknown(Exception):
    """Something that cannot be looked into."""


class _Walk:
    def __init__(self):
        self.digest = hashlib.blake2b(digest_size=16)
        self.seen: dict[int, Any] = {}  # holds on to them: ids are used again

    def add(self, value) -> None:
        """Look into `value`, once."""
        if isinstance(value, _PLAIN):
            return self._note(type(value).__name__, repr(value))
        if isinstance(value, jax.core.Tracer):
            raise _Unknown
        if isinstance(value, np.ndarray | jax.Array):
            return self._note(array_digest(value))
        if id(value) in self.seen:
            return self._note("again", str(list(self.seen).index(id(value))))
        if len(self.seen) > _MOST:
            raise _Unknown
        self.seen[id(value)] = value
        self._note(type(value).__qualname__)
        self._open(value)

    def _note(self, *words: str) -> None:
        for word in words:
            self.digest.update(word.encode() + b"\0")

    def _open(self, value) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.MethodType):
            self.add(value.__self__)
            self.add(value.__func__)
        elif isinstance(value, functools.partial):
            self.add((value.func, value.args, value.keywords))
        elif isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
            self._note(str(id(value)))  # what a function reads of a module: `_names`
        elif isinstance(value, dict):
            for name, x in value.items():
                self.add(name)
                self.add(x)
        elif isinstance(value, tuple | list | set | frozenset):
            self._note(str(len(value)))
            for x in value:
                self.add(x)
        elif hasattr(value, "__wrapped__"):  # `jax.jit` and the like
            self.add(value.__wrapped__)
        elif hasattr(value, "__dict__"):
            self.add(vars(value))
        else:
            raise _Unknown

    def _function(self, fn: types.FunctionType) -> None:
        if _is_installed(fn.__module__):
            # A library's own function changes with the library only; not so what it
            # was given: closures of factories, such as `gpx.models.svgp(...)`.
            self._note(str(id(fn.__code__)))
        else:
            self.add(fn.__code__)
            self._names(fn.__code__, fn.__globals__)
        for cell in fn.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not filled yet
                self._note("empty")
        self.add(fn.__defaults__)
        self.add(fn.__kwdefaults__)

    def _code(self, code: types.CodeType) -> None:
        self._note(code.co_code.hex())
        self.add(code.co_names)
        self.add(code.co_consts)  # nested functions among them

    def _names(self, code: types.CodeType, scope: dict) -> None:
        """The globals that the code and functions inside it may read."""
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                self._names(const, scope)
        for name in code.co_names:
            if name not in scope:
                continue
            value = scope[name]
            self._note(name)
            self.add(value)
            if isinstance(value, types.ModuleType) and not _is_installed(
                value.__name__
            ):
                for attribute in code.co_names:  # `settings.scale` in a user's module
                    self.add(getattr(value, attribute, None))


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module is a library's, which nobody changes between two calls."""
    root = (module or "").split(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    known = root in sys.stdlib_module_names or root == __name__.split(".")[0]
    return known or "site-packages" in file or "dist-packages" in file
