"""Run every benchmark; results go to `benchmarks/results/`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = (
    "speed.py",
    "hyperparameter_posteriors.py",
    "piecewise_link.py",
    "gplvm_speed.py",
    "latent_posteriors.py",
    "deep_speed.py",
    "flow_energies.py",
    "flow_modes.py",
    "multimodal_posterior.py",
    "sghmc.py",
)
# These read real data, and run where NUMPYRO_GPX_DATA names its folder.
DATA_SCRIPTS = (
    "free_simulation.py",
    "piecewise_tables.py",
    "unscented_tables.py",
    "deep_times.py",
    "deep_uci.py",
    "deep_mnist.py",
    "deep_letters.py",
    "face_posteriors.py",
    "samplers.py",
)


def main():
    folder = Path(__file__).parent
    has_data = "NUMPYRO_GPX_DATA" in os.environ
    for script in SCRIPTS + (DATA_SCRIPTS if has_data else ()):
        print(f"== {script}", flush=True)
        subprocess.run([sys.executable, str(folder / script)], check=True)


if __name__ == "__main__":
    main()
