"""The demonstration runs from end to end at tiny sizes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def demo():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import demo
    finally:
        sys.path.remove(str(EXAMPLES))
    return demo


def made_up_fit(engine, *, guide):
    """Stands in for an engine: draws from nowhere, without its compilation."""

    def fit(model, *args, **options):
        args = args[1:] if guide else args
        rng = np.random.default_rng(4)
        draws = {"variance": np.exp(rng.normal(size=(2, 5)))}
        draws["lengthscale"] = np.exp(rng.normal(size=(2, 5)))
        draws["f"] = rng.normal(size=(2, 5, 4))
        posterior = ChainPosterior(draws, independent=guide)
        return gpx.Fit(
            Program.unchecked(Call(model, args)),
            posterior,
            facts=gpx.engines.Facts(
                engine, "asymptotically exact" if engine == "nuts" else "unknown"
            ),
            seconds=0.1,
        )

    return fit


def check_output(demo, out, text):
    import arviz as az

    written = {path.name for path in out.iterdir()}
    figures = {"comparison.png", "predictions.png"}
    names = ("svi", "guided", "nuts", "sghmc")
    assert written == figures | {f"{name}.nc" for name in names}
    for name in names:
        fit = az.from_netcdf(out / f"{name}.nc")
        assert {"variance", "lengthscale", "f"} == set(fit.posterior.data_vars)
        assert fit.log_predictive_density["y"].shape[-1] == demo.QUICK.num_data
    assert "reference: nuts" in text and "sparse" in text


def test_the_demo_leaves_figures_and_fits(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpx, "fit_svi", made_up_fit("svi", guide=True))
    monkeypatch.setattr(gpx, "fit_nuts", made_up_fit("nuts", guide=False))
    monkeypatch.setattr(gpx, "fit_guided", made_up_fit("guided", guide=False))
    monkeypatch.setattr(gpx, "fit_sghmc", made_up_fit("sghmc", guide=False))
    demo.main(["--quick", "--out", str(tmp_path / "out")])
    check_output(demo, tmp_path / "out", capsys.readouterr().out)


@pytest.mark.slow  # compiles every engine
def test_the_demo_runs_every_engine(demo, tmp_path, capsys):
    demo.main(["--quick", "--out", str(tmp_path / "out")])
    check_output(demo, tmp_path / "out", capsys.readouterr().out)


def test_the_demo_speaks_before_it_loads_anything_heavy():
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import demo;"
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
