"""Latent inputs: where they start, those of new rows, what rotations leave alone."""

from numpyro_gpx.comparison.distances import pairwise_distances
from numpyro_gpx.projection import project
from numpyro_gpx.row_model import row_model
from numpyro_gpx.starting import pca

__all__ = ["pairwise_distances", "pca", "project", "row_model"]
