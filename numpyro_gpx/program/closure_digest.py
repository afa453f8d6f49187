"""A digest of what a function reads: its code, and the values it has closed over.

Compiled code that was made for a model is right as long as the model reads the same
values. Tracing it again would tell, and takes a tenth of a second; this takes a
millisecond. It looks into plain things only: where it meets anything else, or code that
may read what it does not name, it says nothing (`None`), and the caller traces.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import os
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

__all__ = ["array_digest", "contents"]

# Objects looked into before giving up.
_MOST = 20_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype)
_SEQUENCES = (tuple, list, set, frozenset)
_DICTS = (dict, OrderedDict, defaultdict)
# Functions that read what the code around them does not name.
_READERS = {"globals", "locals", "vars", "getattr", "eval", "exec", "__import__"}
# Of a class, what says nothing about its behaviour.
_BOOKKEEPING = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__slots__",
    "__abstractmethods__", "_abc_impl", "__annotations__", "__firstlineno__",
    "__static_attributes__",
}  # fmt: skip


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
        # By id, with the number; holds on to them, since ids are used again.
        self.seen: dict[int, tuple[int, Any]] = {}

    def add(self, value) -> None:
        """Look into `value`, once."""
        if isinstance(value, _PLAIN):
            return self._note(type(value).__name__, repr(value))
        if isinstance(value, jax.core.Tracer):
            raise _Unknown
        if isinstance(value, np.ndarray | jax.Array):
            if isinstance(value, np.ndarray) and (
                type(value) is not np.ndarray or value.dtype.hasobject
            ):
                raise _Unknown
            return self._note(array_digest(value))
        if id(value) in self.seen:
            return self._note("again", str(self.seen[id(value)][0]))
        if len(self.seen) > _MOST:
            raise _Unknown
        self.seen[id(value)] = len(self.seen), value
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
            self.add((value.__self__, value.__func__))
        elif isinstance(value, functools.partial):  # JAX has one of its own
            self.add(type(value))
            self.add((value.func, value.args, value.keywords, vars(value)))
        elif isinstance(value, np.ufunc):
            self._note(value.__name__)
        elif isinstance(value, types.BuiltinFunctionType):
            self._note(value.__name__)
            self.add(value.__self__)
        elif isinstance(value, types.ModuleType):
            # Of others the code that reads them must be known: `_names`.
            if not _is_library(value.__name__):
                raise _Unknown
            self._note(value.__name__)
        elif isinstance(value, type):
            self._class(value)
        elif type(value) in _DICTS:
            self._note(str(len(value)))
            for name, x in value.items():
                self.add(name)
                self.add(x)
        elif type(value) in _SEQUENCES:
            self._note(str(len(value)))
            for x in value:
                self.add(x)
        elif isinstance(value, property):
            self.add((value.fget, value.fset, value.fdel))
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__)
        elif isinstance(value, weakref.ref):  # NumPyro's inverse transforms
            self.add(value())
        elif _is_jitted(value):
            self.add(value.__wrapped__)
        else:
            self._instance(value)

    def _instance(self, value) -> None:
        kind = type(value)
        self.add(kind)
        if issubclass(kind, dict):  # what it holds, whatever its methods say
            self.add(dict(dict.items(value)))
        elif issubclass(kind, _SEQUENCES):
            base = next(base for base in _SEQUENCES if issubclass(kind, base))
            self.add(list(base.__iter__(value)))
            if not hasattr(value, "__dict__"):  # named tuples have no more
                return
        elif _hides_state(kind):
            raise _Unknown
        slots = [s for base in kind.__mro__ for s in _slots_of(base)]
        if not hasattr(value, "__dict__") and not slots:
            raise _Unknown
        self.add(dict(vars(value)) if hasattr(value, "__dict__") else {})
        for slot in slots:
            self.add(getattr(value, slot, None))

    def _class(self, kind: type) -> None:
        self._note(kind.__module__, kind.__qualname__)
        if _is_installed(kind):
            return
        self.add(kind.__bases__)
        for name, x in sorted(vars(kind).items()):
            if name not in _BOOKKEEPING and not isinstance(
                x, types.MemberDescriptorType | types.GetSetDescriptorType
            ):
                self._note(name)
                self.add(x)

    def _function(self, fn: types.FunctionType) -> None:
        if _is_library_code(fn.__code__):
            # A library's own function changes with the library only; not so what it
            # was given: closures of factories, such as `gpx.models.svgp(...)`.
            self._note(fn.__module__ or "", fn.__qualname__)
            self._note(fn.__code__.co_filename, str(fn.__code__.co_firstlineno))
        else:
            self.add(fn.__code__)
            self._names(fn.__code__, fn.__globals__)
        for cell in fn.__closure__ or ():
            try:
                self._named(cell.cell_contents, _every_name(fn.__code__))
            except ValueError:  # not filled yet
                self._note("empty")
        self.add(fn.__defaults__)
        self.add(fn.__kwdefaults__)
        self.add(dict(vars(fn)))

    def _code(self, code: types.CodeType) -> None:
        if _imports_others(code):
            raise _Unknown
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
        self._note(code.co_code.hex(), f"{counts} {code.co_flags}")
        self.add((code.co_names, code.co_varnames))
        self.add(code.co_consts)  # nested functions among them

    def _names(self, code: types.CodeType, scope: dict) -> None:
        """The globals that the code and functions inside it may read."""
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                self._names(const, scope)
        for name in code.co_names:
            if name in scope:
                self._note(name)
                self._named(scope[name], code.co_names)
            elif name in _READERS and hasattr(builtins, name):
                raise _Unknown

    def _named(self, value, names: tuple[str, ...], seen: tuple = ()) -> None:
        """Something that code calls by a name, and what else of its names it may read.

        As in `settings.scale`, or `project.settings.scale`.
        """
        if not isinstance(value, types.ModuleType) or _is_library(value.__name__):
            return self.add(value)
        self._note(value.__name__)
        if value in seen:
            return
        for name in names:
            if hasattr(value, name):
                self._note(name)
                self._named(getattr(value, name), names, (*seen, value))


def _every_name(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or functions inside it, may look up."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return code.co_names + tuple(name for c in inner for name in _every_name(c))


@functools.lru_cache(maxsize=4096)
def _imports_others(code: types.CodeType) -> bool:
    """Whether it imports anything but libraries, whose values nobody changes."""
    found = [i for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"]
    return not all(_is_library(i.argval) for i in found)


def _is_jitted(value) -> bool:
    """Whether it is what `jax.jit` makes: the function inside is all that it reads."""
    return type(value).__name__ == "PjitFunction"


def _hides_state(kind: type) -> bool:
    """Whether it is written in C and may hold more than `__dict__` and slots show."""
    slots = sum(len(_slots_of(base)) for base in kind.__mro__)
    pointer = np.dtype(np.intp).itemsize
    shown = slots + 2  # where `__dict__` and `__weakref__` are
    return kind.__basicsize__ > object.__basicsize__ + shown * pointer


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(s for s in slots if s not in ("__dict__", "__weakref__"))


def _is_installed(kind: type) -> bool:
    return _is_library(kind.__module__)


def _is_library_code(code: types.CodeType) -> bool:
    """Whether code stands in a library's file, whatever the function is called."""
    return _is_library_file(code.co_filename)


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module is a library's, which nobody changes between two calls."""
    root = (module or "").split(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return True
    return _is_library_file(getattr(sys.modules.get(root), "__file__", None) or "")


# This package, and its two folders that stand beside it in a clone.
_PACKAGE = Path(__file__).resolve().parent.parent
_OURS = tuple(
    f"{folder}{os.sep}"
    for folder in (_PACKAGE, _PACKAGE.parent / "models", _PACKAGE.parent / "guides")
)
_STANDARD = (f"{Path(types.__file__).resolve().parent}{os.sep}", "<frozen")


@functools.cache
def _is_library_file(file: str) -> bool:
    found = str(Path(file).resolve()) if file and not file.startswith("<") else file
    if found.startswith((*_OURS, *_STANDARD)):
        return True
    return "site-packages" in found or "dist-packages" in found
