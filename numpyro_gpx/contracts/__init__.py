"""Contracts, one kind a file; `numpyro_gpx.testing` is their face."""
