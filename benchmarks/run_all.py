"""Run every benchmark; results go to `benchmarks/results/`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("speed.py", "hyperparameter_posteriors.py")


def main():
    folder = Path(__file__).parent
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        subprocess.run([sys.executable, str(folder / script)], check=True)


if __name__ == "__main__":
    main()
