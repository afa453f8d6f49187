"""Inputs of a GP that are more than an array: `gpx.inputs.join(X, H)`."""

from numpyro_gpx.uncertain import join

__all__ = ["join"]
