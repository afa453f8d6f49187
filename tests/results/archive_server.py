"""Saves in child processes that are killed or run out of space, for `test_archive.py`.

Children are forks of this process, which has loaded the one module and little else:
starting Python anew for each would take seconds.

    python archive_server.py kill FOLDER 200
    python archive_server.py full FOLDER
"""

import importlib.util
import json
import mmap
import os
import random
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
# As from a save of some MB that takes a while.
NUMBERS = np.random.default_rng(0).normal(size=20_000)


def load_module():
    """The module alone, without the package around it."""
    place = ROOT / "numpyro_gpx" / "results" / "archive.py"
    spec = importlib.util.spec_from_file_location("archive", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


archive = load_module()
# Of JAX, whose threads have not been started here.
warnings.filterwarnings("ignore", message="os.fork")


def contents(version):
    return {"version": version}, {"x": NUMBERS + version, "y": np.arange(version % 7)}


def save_on_and_on(path, shared, version):
    while True:
        version += 1
        shared[:8] = version.to_bytes(8, "little")  # begun
        archive.write_archive(path, *contents(version))
        shared[8:16] = version.to_bytes(8, "little")  # done


def in_child(function, *args) -> int:
    """The process id of a fork that runs `function`; it ends with 1 if that raises."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        function(*args)
        status = 0
    finally:
        os._exit(status)


def version_in(path):
    """The version that a file holds whole."""
    record, arrays = archive.read_archive(path)
    expected_record, expected = contents(record["version"])
    assert expected_record.items() <= record.items()
    assert expected.keys() == arrays.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(arrays[name], x)
    return record["version"]


def kill(folder, number):
    """Kill saves at random moments; what was found after each."""
    path, shared = folder / "fit.npz", mmap.mmap(-1, 16)
    archive.write_archive(path, *contents(0))
    version, found, most = 0, [], 0
    for _ in range(number):
        child = in_child(save_on_and_on, path, shared, version)
        while int.from_bytes(shared[:8], "little") <= version:
            time.sleep(1e-4)
        time.sleep(random.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        begun, done = (int.from_bytes(shared[i : i + 8], "little") for i in (0, 8))
        version = version_in(path)
        found.append(version in (begun, done))
        most = max(most, len(list(folder.iterdir())) - 1)
        version = begun
        shared[8:16] = version_in(path).to_bytes(8, "little")
    archive.write_archive(path, *contents(1))
    return {"old_or_new": found, "most_left": most, "left": names(folder)}


def full(folder):
    """Save where files can have 50 kB and no more, over a smaller file."""
    path = folder / "fit.npz"
    archive.write_archive(path, {"version": "old"}, {})

    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            archive.write_archive(path, *contents(1))
        except OSError:
            return
        raise AssertionError

    _, status = os.waitpid(in_child(save), 0)
    record, _ = archive.read_archive(path)
    return {"refused": status == 0, "kept": record["version"], "left": names(folder)}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    run = {"kill": kill, "full": full}[what]
    print(json.dumps(run(Path(folder), *map(int, rest))))
