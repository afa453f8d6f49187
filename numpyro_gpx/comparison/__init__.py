"""Fits laid side by side: `compare`, leave-one-out scores, distances."""

from numpyro_gpx.comparison.result import Comparison, compare

__all__ = ["Comparison", "compare"]
