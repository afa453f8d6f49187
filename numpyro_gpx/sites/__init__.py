"""The NumPyro sites of a GP model, and what can be read off them."""

from numpyro_gpx.sites.deep_layers import propagate
from numpyro_gpx.sites.expected_likelihood import observe
from numpyro_gpx.sites.marginals import exact
from numpyro_gpx.sites.process import GP, gp

__all__ = ["GP", "exact", "gp", "observe", "propagate"]
