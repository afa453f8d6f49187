"""What is installed is what the layout promises, with none of this source tree."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Loaded on first use: together they take 2 s to import.
HEAVY = (
    "arviz", "blackjax", "flowjax", "matplotlib", "pandas", "scipy.optimize",
    "scipy.stats", "sklearn", "xarray",
)  # fmt: skip


def run(*command, cwd, **environment):
    """Output of a command that must succeed, free of our own path settings."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: setuptools leaves `build/` and reuses it."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("numpyro_gpx", "models", "guides"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of an environment with our wheel, and its site-packages."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    scheme = {"base": str(home), "platbase": str(home)}
    site_packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=scheme))
    python = Path(sysconfig.get_path("scripts", scheme="venv", vars=scheme)) / "python"
    install = ("-m", "pip", "--python", python, "install", "--no-deps", wheel)
    run(sys.executable, *install, cwd=home)
    # The dependencies are those of this session. Lines of a .pth file that are paths
    # are searched after ours and their own .pth files, such as an editable install of
    # this very tree, are not read.
    (site_packages / "session.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python, site_packages


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    names = {
        name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name
    }
    places = {"numpyro_gpx": "numpyro_gpx"} | {
        name: f"numpyro_gpx/{name}" for name in ("models", "guides")
    }
    expected = {
        f"{place}/{path.relative_to(ROOT / name).as_posix()}"
        for name, place in places.items()
        for path in (ROOT / name).rglob("*.py")
    }
    assert names == expected | {"numpyro_gpx/py.typed"}


def test_models_and_guides_come_from_the_installed_wheel(installed, tmp_path):
    python, site_packages = installed
    code = (
        "import importlib.util, json, numpyro_gpx.guides, numpyro_gpx.models;"
        "print(json.dumps({"
        "'files': [numpyro_gpx.__file__, numpyro_gpx.models.__file__,"
        " numpyro_gpx.guides.__file__],"
        "'bare': [name for name in ('models', 'guides')"
        " if importlib.util.find_spec(name)]}))"
    )
    found = json.loads(run(python, "-c", code, cwd=tmp_path).splitlines()[-1])
    for file in found["files"]:
        assert Path(file).resolve().is_relative_to(site_packages.resolve())
        assert not Path(file).resolve().is_relative_to(ROOT)
    assert found["bare"] == []
    assert (site_packages / "numpyro_gpx" / "py.typed").is_file()


def test_importing_the_package_leaves_heavy_libraries_alone(tmp_path):
    code = (
        "import json, sys, numpyro_gpx, numpyro_gpx.models, numpyro_gpx.guides;"
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    loaded = json.loads(run(sys.executable, "-c", code, cwd=tmp_path).splitlines()[-1])
    assert loaded == []


def test_a_bare_models_is_not_imported():
    import numpyro_gpx.guides
    import numpyro_gpx.models

    assert numpyro_gpx.models.__name__ == "numpyro_gpx.models"
    assert numpyro_gpx.guides.__name__ == "numpyro_gpx.guides"
    for name in ("models", "guides"):
        module = sys.modules.get(name)
        assert module is None or not Path(module.__file__).is_relative_to(ROOT)
