"""Several fits side by side: posterior marginals, test scores, what was fitted."""

from numpyro_gpx.comparison.entries import entry_labels, scalar_entries
from numpyro_gpx.comparison.result import Comparison, compare
from numpyro_gpx.comparison.targets import target_support

__all__ = ["Comparison", "compare", "entry_labels", "scalar_entries", "target_support"]
