"""The examples run from end to end at tiny sizes, and leave their figures."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize(
    "name",
    [
        "counts",
        "exact_posterior",
        "deep_gp",
        pytest.param("two_modes", marks=pytest.mark.slow),
        pytest.param("freyface", marks=pytest.mark.slow),
        "free_simulation",
        pytest.param("gplvm", marks=pytest.mark.slow),
        "heteroscedastic",
        pytest.param("latent_regression", marks=pytest.mark.slow),
        "learnt_link",
        "multiclass",
    ],
)
def test_an_example_draws_its_figure(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delenv("NUMPYRO_GPX_DATA", raising=False)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--quick", "--out", str(tmp_path)])
    module.plt.close("all")
    sys.modules.pop("options", None)
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000
