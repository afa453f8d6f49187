"""Fixed-node rules for expectations under a Gaussian."""

from numpyro_gpx.cubature.gauss_hermite import (
    expectation,
    gauss_hermite,
    log_expectation_exp,
    nodes,
    peak,
)
from numpyro_gpx.cubature.rules import (
    Analytic,
    GaussHermite,
    MonteCarlo,
    Nodes,
    Rule,
    SphericalRadial,
    Unscented,
    default_rule,
)
from numpyro_gpx.cubature.tensor import tensor_nodes

__all__ = [
    "Analytic",
    "GaussHermite",
    "MonteCarlo",
    "Nodes",
    "Rule",
    "SphericalRadial",
    "Unscented",
    "default_rule",
    "expectation",
    "gauss_hermite",
    "log_expectation_exp",
    "nodes",
    "peak",
    "tensor_nodes",
]
