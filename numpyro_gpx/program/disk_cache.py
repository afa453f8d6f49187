"""Compiled programs on disk: JAX's persistent compilation cache, opt in."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

__all__ = ["to_disk"]

_FOLDER = "jax_compilation_cache_dir"
# JAX would keep only what took a second to compile; a first fit has much that is
# shorter.
_LIMITS: dict[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# JAX's settings before the first `to_disk`.
_BEFORE: dict[str, Any] = {}


def to_disk(folder: str | os.PathLike[str] | None) -> None:
    """Keep compiled programs in a folder, for later processes that need the same ones.

    This switches JAX's persistent compilation cache on for the whole process, for all
    that is compiled from now on, yours and ours: call it once, before the first fit.
    A later process that calls it finds the programs there and only traces them; those
    with callbacks are never kept. An entry is as large as its machine code, mostly 2
    to 200 kB, and nothing is ever deleted: delete the folder now and then. Other
    versions of JAX and other programs have other entries. Another kind of processor
    must have another folder: the code is made for this one.

    XLA writes lines about `+prefer-no-gather` to the terminal for programs that it has
    loaded: these settings of its compiler are no features of a processor.

    Processes may share a folder, but JAX does not write entries atomically: one that
    reads what another has not finished warns, and compiles for itself. An entry that
    was cut short, as by a crash, stays so and is warned of each time: delete it. A run
    of our tests once ended with a segmentation fault while an entry was written; the
    cause is not known.

    Args:
        folder: The folder, made if there is none; `None` switches the cache off again
            and puts JAX's settings back.
    """
    if folder is None:
        found = dict(_BEFORE)
        _BEFORE.clear()
    else:
        found = {_FOLDER: str(_writable(folder)), **_LIMITS}
        for name in found:
            _BEFORE.setdefault(name, getattr(jax.config, name))
    for name, value in found.items():
        jax.config.update(name, value)
    # JAX looks at its settings once, at the first program.
    reset_cache()


def _writable(folder) -> Path:
    """The folder's full path, if files can be written there."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            "`folder` must be a path, or `None` to switch the cache off; got "
            f"{type(folder).__name__} {folder!r}."
        )
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"`folder` must be a folder that can be written; got {str(folder)!r} "
            f"({error.strerror}). Name another, such as `~/.cache/numpyro_gpx`."
        ) from None
    return path
