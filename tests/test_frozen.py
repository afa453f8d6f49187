"""Numbers of nine models are those of before the house was laid anew."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "golden" / "frozen.py"


@pytest.fixture(scope="module")
def frozen():
    spec = importlib.util.spec_from_file_location("frozen", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXPECTED = json.loads(SCRIPT.with_suffix(".json").read_text())
# Steps and transitions add up rounding; densities, beliefs and predictions do not.
LOOSE = {"losses": 1e-6, "transition": 1e-6, "minibatches": 1e-6}


def compare(found, expected, name, tolerance=1e-9):
    tolerance = LOOSE.get(name.split("/")[-1], LOOSE.get(name.split("/")[0], tolerance))
    if isinstance(expected, dict):
        assert sorted(found) == sorted(expected), name
        for key in expected:
            compare(found[key], expected[key], f"{name}/{key}", tolerance)
        return
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(
        found, expected, rtol=tolerance, atol=tolerance * scale, err_msg=name
    )


@pytest.mark.parametrize("case", EXPECTED)
def test_numbers_are_as_before(frozen, case):
    compare(frozen.compute(case), EXPECTED[case], case)
