"""Optimisers for `gpx.fit_svi`, beside those of optax."""

from numpyro_gpx.engines.natural import natural

__all__ = ["natural"]
