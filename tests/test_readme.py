"""Every snippet of the README runs, in order: shortened, and under `slow` as it is."""

import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest

README = Path(__file__).parent.parent / "README.md"


def run_snippets(folder, monkeypatch, shorten):
    matplotlib.use("Agg")
    monkeypatch.chdir(folder)
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(snippets) >= 4
    names: dict = {}
    for number, code in enumerate(snippets):
        exec(compile(shorten(code), f"README snippet {number}", "exec"), names)
    matplotlib.pyplot.close("all")
    return names


def shortened(code):
    """Chains and optimisation a tenth as long."""
    code = code.replace(
        "fit_guided(model, X, y", "fit_guided(model, X, y, num_proposals=200"
    )
    lengths = r"\b(num_samples|num_warmup|num_steps|num_integration_steps)=(\d+)"
    code = re.sub(lengths, lambda m: f"{m[1]}={max(int(m[2]) // 10, 2)}", code)
    # Where the README leaves the warm-up at its default.
    return re.sub(r"\b(num_samples=\d+)(?=,?\s*\))", r"\1, num_warmup=50", code)


def test_snippets_run(tmp_path, monkeypatch):
    names = run_snippets(tmp_path, monkeypatch, shortened)
    assert set(names["fits"]) == {"svi", "nuts", "sghmc"}
    assert names["values"].shape == (20, 100)


@pytest.mark.slow
def test_snippets_run_as_they_are(tmp_path, monkeypatch):
    names = run_snippets(tmp_path, monkeypatch, lambda code: code)
    np.testing.assert_allclose(
        names["again"].predict(names["X_test"]).mean, names["prediction"].mean
    )
    # 80 rows of a sine with noise 0.5: the fit must have found it.
    residual = names["original"].mean - (20.0 + 5.0 * np.sin(names["x"][:, 0] / 30.0))
    assert np.sqrt(np.mean(residual**2)) < 0.5


def test_method_table_names_things_that_exist():
    import numpyro_gpx as gpx

    rows = [r for r in README.read_text().splitlines() if r.startswith("| ")]
    named = re.findall(r"`gpx\.([\w.]+)", "\n".join(rows))
    assert named
    for path in named:
        thing = gpx
        for part in path.split("."):
            thing = getattr(thing, part)
