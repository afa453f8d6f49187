"""Files that are whole or not there: kills, full disks, damage, odd values."""

import enum
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from numpyro_gpx.results import archive as module
from numpyro_gpx.results.archive import Arrays, read_archive, write_archive

SERVER = Path(__file__).with_name("archive_server.py")
RECORD = {"name": "a fit", "numbers": [1, 0.1, None, True, float("inf")]}
ARRAYS = {
    "params/f": np.random.default_rng(0).normal(size=(3, 4)),
    "empty": np.zeros((0, 2)),
    "text": np.array(["ä", "b"]),
}


def partials(folder):
    return [path.name for path in folder.iterdir() if path.suffix == ".partial"]


def is_whole(path, record=RECORD, arrays=ARRAYS):
    found, known = read_archive(path)
    assert record.items() <= found.items() and known.keys() == arrays.keys()
    for name, x in arrays.items():
        np.testing.assert_array_equal(known[name], x, strict=True)
    return True


@pytest.fixture
def path(tmp_path):
    write_archive(tmp_path / "fit.npz", RECORD, ARRAYS)
    return tmp_path / "fit.npz"


def serve(*args):
    done = subprocess.run(
        [sys.executable, SERVER, *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_the_old_file_or_the_new_one(kills, tmp_path):
    found = serve("kill", tmp_path, kills)
    assert found["old_or_new"] == [True] * kills
    # What a killed save leaves, the next one removes.
    assert found["most_left"] <= 1 and found["left"] == ["fit.npz"]


def test_a_full_disk_leaves_the_old_file_alone(tmp_path):
    found = serve("full", tmp_path)
    assert found == {"refused": True, "kept": "old", "left": ["fit.npz"]}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("where", ["savez_compressed", "fsync", "replace"])
def test_a_save_that_fails_anywhere_leaves_the_old_file(
    path, where, error, monkeypatch
):
    def fail(*args, **kwargs):
        raise error

    owner = module.np if where == "savez_compressed" else module.os
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(owner, where, fail)
        write_archive(path, {"name": "another"}, {})
    assert is_whole(path) and not partials(path.parent)


def test_contents_are_synced_before_they_get_the_name(path, monkeypatch):
    """Else a loss of power leaves the new name with nothing in it."""
    calls = []

    def noted(name):
        before = getattr(os, name)

        def call(*args, **kwargs):
            calls.append(name)
            return before(*args, **kwargs)

        monkeypatch.setattr(module.os, name, call)

    noted("fsync")
    noted("replace")
    write_archive(path, RECORD, ARRAYS)
    assert calls == ["fsync", "replace", "fsync"]  # of the folder at the end


@pytest.mark.parametrize("name", ["fit.npz", "fit [1]"])
def test_what_dead_saves_have_left_is_removed_and_no_more(name, tmp_path):
    dead, alive, other = f".{name}.0.partial", f".{name}.1.partial", ".x.2.partial"
    for each in (dead, alive, other):
        (tmp_path / each).write_text("half of a fit")
    with open(tmp_path / alive, "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_archive(tmp_path / name, RECORD, ARRAYS)
    assert sorted(partials(tmp_path)) == sorted([alive, other])


def test_threads_that_save_to_one_place_do_not_disturb_each_other(path):
    errors = []

    def save(number):
        try:
            for _ in range(10):
                write_archive(path, {"number": number}, {"x": np.full(999, number)})
                record, arrays = read_archive(path)
                assert np.all(arrays["x"] == record["number"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not partials(path.parent)


@pytest.mark.parametrize("kind", [str, Path])
def test_names_are_kept_as_they_are(kind, tmp_path):
    write_archive(kind(tmp_path / "fit [1]"), RECORD, ARRAYS)
    assert [found.name for found in tmp_path.iterdir()] == ["fit [1]"]
    assert is_whole(kind(tmp_path / "fit [1]"))


def test_names_may_end_as_numpys_files_do_and_may_be_long(tmp_path):
    arrays = Arrays()
    entries = [arrays.store(name, np.full(1, i)) for i, name in enumerate(AWKWARD)]
    place = tmp_path / ("n" * 251 + ".npz")
    write_archive(place, {"entries": entries}, arrays.known)
    record, known = read_archive(place)
    found = [Arrays(known).restore(entry)[0] for entry in record["entries"]]
    assert found == list(range(len(AWKWARD)))
    assert list(tmp_path.iterdir()) == [place]


AWKWARD = ("a", "a.npy", "a.npy.npy", "a.npy'", "a")


def test_links_are_followed(path, tmp_path):
    (tmp_path / "folder").mkdir()
    os.rename(path, tmp_path / "folder" / "real")
    path.symlink_to("folder/real")
    write_archive(path, {}, {})
    assert path.is_symlink() and is_whole(tmp_path / "folder" / "real", {}, {})


def test_permissions_are_those_of_any_new_file_or_of_the_old_one(path, tmp_path):
    (tmp_path / "new").touch()
    mode = stat.S_IMODE((tmp_path / "new").stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    path.chmod(0o640)
    write_archive(path, RECORD, ARRAYS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_places_that_are_none_are_refused_in_words(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder `.*nowhere`. Make"):
        write_archive(tmp_path / "nowhere" / "fit.npz", RECORD, ARRAYS)
    with pytest.raises(ValueError, match="it is there and is no file"):
        write_archive(tmp_path, RECORD, ARRAYS)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="it is there and is no file"):
        write_archive(tmp_path / "pipe", RECORD, ARRAYS)
    with pytest.raises(ValueError, match="is a folder; a fit is saved as one file"):
        read_archive(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_archive(tmp_path / "nothing")


def test_truncated_files_are_refused(path):
    whole = path.read_bytes()
    for length in range(0, len(whole), 17):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"fit.npz` is damaged .* use a copy"):
            read_archive(path)


def test_a_flipped_bit_is_refused_or_changes_nothing(path):
    """Zip files have slack: dates, for instance."""
    whole, refused = path.read_bytes(), 0
    rng = np.random.default_rng(0)
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.integers(8)
        path.write_bytes(flipped)
        try:
            assert is_whole(path)
        except ValueError as error:
            assert "is damaged" in str(error) and "Fit again" in str(error)
            refused += 1
    assert refused > 0.6 * len(whole)


def rewritten(path, change):
    """The file with some of its arrays changed, digest and all else as before."""
    with np.load(path) as found:
        arrays = dict(found)
    change(arrays)
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def _another_number(arrays):
    arrays["params/f"][0, 0] += 1e-12


def _another_shape(arrays):
    arrays["params/f"] = arrays["params/f"].reshape(4, 3)


def _another_dtype(arrays):
    arrays["params/f"] = arrays["params/f"].view(np.int64)


def _another_name(arrays):
    arrays["params/g"] = arrays.pop("params/f")


def _one_more(arrays):
    arrays["more"] = np.zeros(1)


def _one_less(arrays):
    del arrays["empty"]


def _another_text(arrays):
    arrays["record"] = np.array(str(arrays["record"]).replace("a fit", "no fit"))


EDITS = (
    _another_number, _another_shape, _another_dtype, _another_name, _one_more,
    _one_less, _another_text,
)  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edited_files_are_refused(path, edit):
    rewritten(path, lambda arrays: None)
    assert is_whole(path)
    rewritten(path, edit)
    with pytest.raises(ValueError, match="fit.npz` is damaged or was edited"):
        read_archive(path)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder / "sprung",)


FOREIGN = {
    "text": lambda path: path.write_text("a fit"),
    "npz": lambda path: np.savez(path, x=np.zeros(3)),
    "npy": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00" + bytes(200)),
    "pickle": lambda path: np.savez(path, record=np.array([Trap(path.parent)])),
    "record": lambda path: np.savez(path, record="[1, 2]"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused(kind, tmp_path):
    FOREIGN[kind](tmp_path / "it.npz")
    with pytest.raises(ValueError, match="damaged or was not written by `Fit.save`"):
        read_archive(tmp_path / "it.npz")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("number", [1, 3])
def test_other_formats_are_refused_by_their_number(number, path):
    np.savez(path, record=json.dumps({"format": number, "engine": "svi"}))
    with pytest.raises(ValueError, match=rf"has format {number}, of another version"):
        read_archive(path)


VALUES = {
    "plain": [None, True, 3, 0.1, "text", float("inf"), 10**30],
    "numpy_scalars": (np.float32(0.1), np.float64(0.1), np.int8(3), np.bool_(1)),
    "nested": {"a": [{"b": (1, [np.arange(3)])}], "c": {}, "d": [], "e": ()},
    "keys": {1: "int", "1": "text", (1, "a"): "tuple", None: "none"},
    "same_names": {"a/b": np.zeros(2), "a": {"b": np.ones(2)}},
    "shapes": [np.array(2.5), np.zeros((0, 3)), np.asfortranarray(np.eye(3)[:2])],
    "dtypes": [np.arange(3, dtype=t) for t in ("int16", ">f8", "float16", "complex64")],
    "texts": np.array(["a", "bc"]),
    "bfloat16": [jnp.arange(3.0, dtype="bfloat16"), jnp.zeros((), "float8_e4m3fn")],
    "random_keys": [jr.key(1), jr.split(jr.key(2, impl="rbg"), 3), jr.PRNGKey(1)],
    "weak": jnp.asarray(0.5),
}


def assert_same(x, other):
    if isinstance(x, dict):
        assert list(x) == list(other)
        x, other = list(x.values()), list(other.values())
    if isinstance(x, list | tuple):
        assert len(x) == len(other) and type(x) is type(other)
        for one, two in zip(x, other, strict=True):
            assert_same(one, two)
    elif hasattr(x, "dtype"):
        assert x.dtype == other.dtype and np.shape(x) == np.shape(other)
        assert isinstance(x, np.generic) == isinstance(other, np.generic)
        assert getattr(x, "weak_type", False) == getattr(other, "weak_type", False)
        if jnp.issubdtype(x.dtype, jr.key(0).dtype.type):
            x, other = jr.key_data(x), jr.key_data(other)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(other))
    else:
        assert type(x) is type(other) and x == other


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were(name, tmp_path):
    arrays = Arrays()
    entry = arrays.store(name, VALUES[name])
    write_archive(tmp_path / "it", {"entry": entry}, arrays.known)
    record, known = read_archive(tmp_path / "it")
    assert_same(Arrays(known).restore(record["entry"]), VALUES[name])


class Mode(enum.IntEnum):
    FAST = 1


REFUSED = {
    "object": object(),
    "set": {1, 2},
    "enumeration": Mode.FAST,
    "objects": np.array([{}, None]),
    "function": len,
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_be_saved_are_named(name):
    with pytest.raises(ValueError, match=r"`info/x/1` of the fit cannot be saved"):
        Arrays().store("info", {"x": [0, REFUSED[name]]})
