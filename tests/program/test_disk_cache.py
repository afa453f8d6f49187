"""Programs on disk: a second process compiles none."""

import json
import os
import subprocess
import sys

import jax
import pytest

import numpyro_gpx as gpx

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)

FIT = """
import json, sys, warnings
import jax
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
import jax.random as jr
import numpy as np
import numpyro_gpx as gpx

gpx.cache.to_disk(sys.argv[1])
X = np.linspace(-2.0, 2.0, 12)[:, None]
kernel = gpx.kernels.RBF(1.3, 0.7)
f = lambda: gpx.gp("f", kernel, inducing=gpx.inducing.Points(X[::3]))

def model(X, y=None):
    gpx.observe("y", f()(X), gpx.likelihoods.Gaussian(0.3), obs=y)

warnings.simplefilter("ignore", gpx.FitWarning)
guide = gpx.guides.WhitenedGaussian
fit = gpx.fit_svi(
    model, guide, X, np.sin(X[:, 0]), key=jr.key(0), num_steps=2, progress=False
)
ends = [name.split("/")[-1] for name in events]
counts = [ends.count(name) for name in ("cache_hits", "cache_misses")]
print(json.dumps([*counts, list(map(float, fit.info["losses"]))]))
"""


@pytest.fixture
def settings():
    """JAX's settings, which `to_disk` must put back."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield before
    gpx.cache.to_disk(None)
    assert {name: getattr(jax.config, name) for name in SETTINGS} == before


def test_the_cache_is_switched_on_and_off(settings, tmp_path):
    folder = tmp_path / "new" / "cache"
    for _ in range(2):  # twice on is once off
        gpx.cache.to_disk(folder)
    assert folder.is_dir()
    on = [getattr(jax.config, name) for name in SETTINGS]
    assert on == [str(folder), 0.0, -1]
    jax.jit(lambda x: 3.0 * x + 0.123)(jax.device_put(2.0))
    written = len(list(folder.iterdir()))
    assert written
    gpx.cache.to_disk(None)
    assert getattr(jax.config, SETTINGS[0]) == settings[SETTINGS[0]]
    jax.jit(lambda x: 3.0 * x + 0.456)(jax.device_put(2.0))
    assert len(list(folder.iterdir())) == written


def test_a_folder_that_cannot_be_written_is_named(settings, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "inside"):
        with pytest.raises(ValueError, match="`folder` must be a folder that can be w"):
            gpx.cache.to_disk(folder)
    with pytest.raises(TypeError, match="`folder` must be a path, or `None`"):
        gpx.cache.to_disk(3)


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    def run():
        done = subprocess.run(
            [sys.executable, "-c", FIT, str(tmp_path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    hits, misses, losses = run()
    assert hits == 0 and misses >= 1
    assert run() == [misses, 0, losses]
