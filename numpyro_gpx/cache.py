"""Compiled programs of models: `gpx.cache.clear()`, `gpx.cache.num_compiled()`."""

from numpyro_gpx.program.compile_cache import clear, num_compiled

__all__ = ["clear", "num_compiled"]
