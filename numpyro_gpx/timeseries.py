"""Time series: rows of lags, and free simulation with what was predicted."""

from numpyro_gpx.simulation import lagged, simulate, simulate_paths

__all__ = ["lagged", "simulate", "simulate_paths"]
