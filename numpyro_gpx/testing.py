"""Contracts: what every kernel, likelihood, inducing variable, guide, engine must do.

For those who write their own: `gpx.testing.check_kernel(MyKernel())` raises an
`AssertionError` that names what does not hold.
"""

from numpyro_gpx.contracts.engines import check_engine
from numpyro_gpx.contracts.guides import check_guide
from numpyro_gpx.contracts.inducing import check_inducing
from numpyro_gpx.contracts.kernels import check_kernel
from numpyro_gpx.contracts.likelihoods import check_likelihood

__all__ = [
    "check_engine",
    "check_guide",
    "check_inducing",
    "check_kernel",
    "check_likelihood",
]
