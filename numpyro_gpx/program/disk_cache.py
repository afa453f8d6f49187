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
    A later process that calls it finds the programs there, and only traces them.
    An entry is as large as its machine code (about 10 kB to 1 MB); nothing is ever
    deleted, so now and then delete the folder yourself. Other versions of JAX, other
    settings and other programs have other entries; another processor must have another
    folder, as the code is made for this one.

    Processes may share a folder, but JAX does not write entries atomically: one that
    reads what another has not finished warns, and compiles for itself. An entry that
    was cut short, as by a crash, stays broken and is warned of each time: delete it.
    Writing entries once ended a long run of many processes' tests with a segmentation
    fault, whose cause is not known: this is for work whose results are saved.

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
