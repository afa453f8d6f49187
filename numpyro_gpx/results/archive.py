"""Files of arrays and one JSON text: written whole or not at all, checked when read.

A file is a NumPy archive (no pickle). It is written beside its place, synced and then
renamed, so that at any moment the old file or the new one is there. It holds a digest
of its own contents, which tells what was damaged or edited.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Arrays", "read_archive", "write_archive"]

_FORMAT = 2
# Saved as they stand; what is derived from them (enumerations, say) is not.
_PLAIN = (type(None), bool, int, float, str)
_CONTAINERS = {"list": list, "tuple": tuple}


class Arrays:
    """Arrays put aside by name, with JSON entries in their place.

    Args:
        known: Arrays of a file that was read.
    """

    def __init__(self, known: dict[str, np.ndarray] | None = None):
        self.known = known or {}

    def store(self, name: str, x) -> dict[str, Any]:
        """A JSON entry for arrays, plain values and containers of these."""
        if type(x) in _PLAIN:
            return {"plain": x}
        if isinstance(x, jax.Array):
            return self._store_jax(name, x)
        if isinstance(x, np.ndarray):
            return {"array": self._put(name, x)}
        if isinstance(x, np.generic):
            return {"scalar": self._put(name, np.asarray(x))}
        if type(x) is dict:
            # Pairs, since JSON would make texts of all keys.
            return {
                "dict": [
                    [self.store(f"{name} (key)", k), self.store(f"{name}/{k}", v)]
                    for k, v in x.items()
                ]
            }
        for kind, container in _CONTAINERS.items():
            if type(x) is container:
                return {kind: [self.store(f"{name}/{i}", v) for i, v in enumerate(x)]}
        raise _cannot_be_saved(name, type(x).__name__)

    def _store_jax(self, name: str, x) -> dict[str, Any]:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self._put(name, np.asarray(jr.key_data(x)))
            return {"key": [str(jr.key_impl(x)), data]}
        # `jnp.asarray(0.5)` takes the precision of what it meets, as 0.5 itself does.
        if x.weak_type and x.ndim == 0 and type(x.item()) in _PLAIN:
            return {"weak": x.item()}
        return {"array": self._put(name, np.asarray(x))}

    def _put(self, name: str, x: np.ndarray) -> Any:
        """Put an array aside; returns what it is found by."""
        if x.dtype.hasobject:
            raise _cannot_be_saved(name, f"an array of dtype {x.dtype}")
        # A dictionary may have `a/b`, and `b` in `a`; NumPy's files take `.npy` off.
        while name in self.known or name.endswith(".npy"):
            name += "'"
        if x.dtype.isbuiltin != 2:
            self.known[name] = x
            return name
        # NumPy's files do not know bfloat16 and its like.
        self.known[name] = x.view(f"u{x.dtype.itemsize}")
        return [name, x.dtype.name]

    def restore(self, entry: dict[str, Any]) -> Any:
        """What a JSON entry stands for; arrays as NumPy's."""
        ((kind, value),) = entry.items()
        if kind == "plain":
            return value
        if kind == "array":
            return self._get(value)
        if kind == "scalar":
            return self._get(value)[()]
        if kind == "weak":
            return jnp.asarray(value)
        if kind == "key":
            impl, name = value
            return jr.wrap_key_data(jnp.asarray(self._get(name)), impl=impl)
        if kind == "dict":
            return {self.restore(name): self.restore(x) for name, x in value}
        return _CONTAINERS[kind](map(self.restore, value))

    def _get(self, found) -> np.ndarray:
        if isinstance(found, str):
            return self.known[found]
        name, dtype = found
        return self.known[name].view(dtype)


def _cannot_be_saved(name: str, what: str) -> ValueError:
    return ValueError(
        f"`{name}` of the fit cannot be saved: only arrays, numbers, texts, None, and "
        f"lists, tuples and dictionaries of these can; got {what}. Close over it in "
        "the model instead."
    )


def write_archive(path, record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Put a file in the place of `path`; if that fails, the old one is left alone.

    A link is followed; an older file keeps its permissions.
    """
    place = _place(path)
    record = {"format": _FORMAT, **record}
    text = json.dumps({**record, "digest": _digest(record, arrays)})
    _remove_abandoned(place)
    file = _new_partial(place)
    try:
        np.savez_compressed(
            file,
            record=text,
            **arrays,  # type: ignore[arg-type]  # the stub: may be `allow_pickle`
        )
        file.flush()
        os.fsync(file.fileno())
        if place.exists():
            os.chmod(file.name, stat.S_IMODE(place.stat().st_mode))
        if fcntl is None:  # no locks to keep, and no renaming of open files
            file.close()
        os.replace(file.name, place)
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise
    file.close()
    _sync_folder(place.parent)


def read_archive(path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON text and the arrays of a file; see `write_archive`.

    Raises:
        ValueError: If it is not such a file, or is damaged.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"`{path}` is a folder; a fit is saved as one file.")
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            record = json.loads(str(arrays.pop("record")))
            found, digest = record.get("format"), record.pop("digest", None)
        # Nearly anything: a flipped bit may ask for a password, or for terabytes.
        except Exception as error:
            raise ValueError(
                f"`{path}` is damaged or was not written by `Fit.save` "
                f"({type(error).__name__}: {error}). Fit again, or use a copy."
            ) from None
    if found != _FORMAT:
        raise ValueError(
            f"`{path}` has format {found}, of another version of numpyro_gpx; this one "
            f"reads {_FORMAT}. Fit again, or load it with the version that wrote it."
        )
    if digest != _digest(record, arrays):
        raise ValueError(
            f"`{path}` is damaged or was edited: its contents are not those that "
            "`Fit.save` wrote. Fit again, or use a copy."
        )
    return record, arrays


def _place(path) -> Path:
    """Where a file of this name goes; raises where none can."""
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        raise FileNotFoundError(
            f"`{path}` cannot be written: there is no folder `{place.parent}`. Make it "
            "first."
        )
    if place.exists() and not place.is_file():
        raise ValueError(
            f"`{path}` cannot be written: it is there and is no file. Name a file, "
            "such as `fit.npz`."
        )
    return place


def _new_partial(place: Path):
    """A new file beside `place`: a rename is one step only within a file system.

    It is locked as long as it is open, so that no other save takes it for abandoned.
    """
    while True:
        name = f".{_short(place.name)}.{secrets.token_hex(4)}.partial"
        file = open(place.with_name(name), "xb")
        if _locked(file) and os.path.exists(file.name):
            return file
        file.close()  # another save was quicker, and removes it


def _short(name: str) -> str:
    """A name that leaves room for an ending: names may have 255 bytes."""
    if len(name.encode()) < 200:
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _remove_abandoned(place: Path) -> None:
    """Remove what saves to this place have left that were killed."""
    if fcntl is None:
        return
    for path in place.parent.glob(glob.escape(f".{_short(place.name)}.") + "*.partial"):
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _locked(file) -> bool:
    """Lock a file; `False` if somebody else has."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: nobody removes anything
            pass
    return True


def _digest(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """Of everything in the file."""
    # Numbers as JSON has them.
    found = hashlib.sha256(json.dumps(json.loads(json.dumps(record))).encode())
    for name, x in sorted(arrays.items()):
        found.update(f"{name} {x.dtype} {x.shape}".encode())
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Let the new name outlive a loss of power, where the system can say so."""
    with contextlib.suppress(OSError, AttributeError):
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
