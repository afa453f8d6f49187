"""Compiled programs of models: `clear()`, `num_compiled()`, and `to_disk(folder)`."""

from numpyro_gpx.program.compile_cache import clear, num_compiled
from numpyro_gpx.program.disk_cache import to_disk

__all__ = ["clear", "num_compiled", "to_disk"]
