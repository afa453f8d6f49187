"""What every test runs under: float64, annotations enforced, ranks spelled out."""

import os
import time
from importlib.metadata import version
from pathlib import Path

# As in the Makefile, for a bare `pytest`; before JAX is imported, which reads them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nearly all the time of the tests is compilation, and optimising what runs once or for
# a few seconds does not pay: a third of the time.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The older emitters of CPU code compile in two thirds of the time. XLA stops the
# process at a flag that it does not know, so only where it is known.
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

import jax
import jax.random as jr
import pytest
from jaxtyping import install_import_hook

# Tests compare with formulas to many digits, so float64 is their default; before
# anything makes an array. Tests of float32 say so in their dtypes.
jax.config.update("jax_enable_x64", True)

# The parts that are only about arrays. Models and inference are left out: NumPyro's
# own distributions broadcast ranks and pass what they like.
ARRAY_CODE = ("kernels", "likelihoods", "numerics", "processes")

# Annotations of shape and dtype hold at run time; must precede the first import.
install_import_hook(
    [f"numpyro_gpx.{module}" for module in ARRAY_CODE], "beartype.beartype"
)


# Few tests, but long ones: last, they would leave the other worker idle.
LONG_FILES = (
    "test_implicit.py",
    "test_readme.py",
    "test_flow.py",
    "test_deep_gp.py",
    "test_examples.py",
    "test_demo.py",
    "test_gplvm.py",
    "test_loo.py",
    "test_frozen.py",
    "test_hang.py",
)


# A run may be told when to end, in seconds since 1970, as that of continuous
# integration is: on a machine ten times slower than usual it would be killed, and say
# nothing. What is not reached by then is counted at the end of the run.
UNTIL = float(os.environ.get("NUMPYRO_GPX_TESTS_UNTIL", "inf"))
NOT_REACHED = "not reached in the time that this run was given"


def pytest_collection_modifyitems(items):
    """Long files first; where time may not suffice, last."""
    rank = {name: i for i, name in enumerate(LONG_FILES)}
    sign = 1 if UNTIL == float("inf") else -1
    items.sort(key=lambda item: sign * rank.get(item.path.name, len(rank)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.time() > UNTIL:
        pytest.skip(NOT_REACHED)


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    number = sum(NOT_REACHED in str(report.longrepr) for report in skipped)
    if number:
        terminalreporter.write_line(
            f"{number} TESTS WERE NOT REACHED: this machine is too slow for the whole "
            "suite in the time that it was given.",
            red=True,
        )


@pytest.fixture(scope="session")
def patience():
    """How many times slower than usual this machine is, at least 1: for watchdogs."""
    before = time.process_time()
    sum(range(10**6))
    for _ in range(10**6):
        pass
    return max(1.0, (time.process_time() - before) / 0.04)


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Forget compiled programs before there are too many.

    Each takes some memory maps, of which Linux allows a process 65530: in a single
    process the tests would end in a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 30_000:
        jax.clear_caches()


def _forbids_promotion(path: Path) -> bool:
    """Whether a test file is about array code, which spells ranks out."""
    return path.relative_to(Path(__file__).parent).parts[0] in ARRAY_CODE


@pytest.fixture(autouse=True)
def explicit_ranks(request):
    """Make `(N,) - (N, 1)` an error in tests of array code."""
    if _forbids_promotion(request.path):
        with jax.numpy_rank_promotion("raise"):
            yield
    else:
        yield


@pytest.fixture
def forbids_promotion():
    return _forbids_promotion


@pytest.fixture
def array_code():
    return ARRAY_CODE


@pytest.fixture
def long_files():
    return LONG_FILES


@pytest.fixture
def key():
    """A fixed random key; a test that draws twice splits it."""
    return jr.key(20240229)
