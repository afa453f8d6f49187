"""Every snippet of the README runs, in order, as a user would paste it."""

import re
from pathlib import Path

import matplotlib
import numpy as np

README = Path(__file__).parent.parent / "README.md"


def test_snippets_run(tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) >= 4
    names: dict = {}
    for number, code in enumerate(snippets):
        exec(compile(code, f"README snippet {number}", "exec"), names)
    assert set(names["fits"]) == {"svi", "nuts", "sghmc"}
    assert names["values"].shape == (20, 100)
    np.testing.assert_allclose(
        names["again"].predict(names["X_test"]).mean, names["prediction"].mean
    )
    # 80 rows of a sine with noise 0.5: the fit must have found it.
    residual = names["original"].mean - (20.0 + 5.0 * np.sin(names["x"][:, 0] / 30.0))
    assert np.sqrt(np.mean(residual**2)) < 0.5
    matplotlib.pyplot.close("all")


def test_method_table_names_things_that_exist():
    import numpyro_gpx as gpx

    rows = [r for r in README.read_text().splitlines() if r.startswith("| ")]
    named = re.findall(r"`gpx\.([\w.]+)", "\n".join(rows))
    assert named
    for path in named:
        thing = gpx
        for part in path.split("."):
            thing = getattr(thing, part)
