"""Simulation-based calibration of draws through a guide: benchmarks/calibration.py."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def calibration():
    import sys

    sys.path.insert(0, str(BENCHMARKS))
    try:
        path = BENCHMARKS / "calibration.py"
        spec = importlib.util.spec_from_file_location("calibration", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def test_ranks_that_are_uniform_pass_and_others_do_not(calibration):
    rng = np.random.default_rng(3)
    uniform = rng.integers(0, calibration.NUM_DRAWS + 1, (200, 3))
    narrow = (50 + 1.6 * (uniform - 50)).clip(0, calibration.NUM_DRAWS).astype(int)
    shifted = np.minimum(uniform + 15, calibration.NUM_DRAWS)
    assert np.all(calibration.p_values(uniform) > 0.01)
    assert np.all(calibration.p_values(narrow) < 0.001)
    assert np.all(calibration.p_values(shifted) < 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["importance", "hmc"])
@pytest.mark.parametrize("name", ["classifier", "counts"])
def test_the_truth_has_a_uniform_rank(calibration, name, way):
    """200 replicates; 4 numbers in 4 cases at 0.001: false alarms below 0.016."""
    found = calibration.ranks(calibration.CASES[name], way, 200)
    assert np.all(calibration.p_values(found) > 0.001)


@pytest.mark.slow
def test_a_guide_of_half_the_spread_fails(calibration):
    found = calibration.ranks(calibration.CASES["counts"], "halved guide", 200)
    assert np.min(calibration.p_values(found)[:2]) < 0.001
