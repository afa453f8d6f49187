"""Inverse links: from a latent function to the parameter of a distribution."""

from numpyro_gpx.links.errors import (
    exp_error,
    lipschitz_error,
    pieces_for_error,
)
from numpyro_gpx.links.learnt import learnt_link, random_link
from numpyro_gpx.links.named import get_link
from numpyro_gpx.links.normal import (
    interval_probabilities,
    log_interval,
    log_normal_cdf,
)
from numpyro_gpx.links.piecewise import PiecewiseConstant, even_edges, places, step
from numpyro_gpx.links.smooth import (
    Exp,
    Identity,
    Link,
    Logit,
    ProbabilityLink,
    Probit,
    Proportion,
    Softplus,
    WithFlips,
)

__all__ = [
    "Exp",
    "Identity",
    "Link",
    "Logit",
    "PiecewiseConstant",
    "ProbabilityLink",
    "Probit",
    "Proportion",
    "Softplus",
    "WithFlips",
    "even_edges",
    "exp_error",
    "get_link",
    "interval_probabilities",
    "learnt_link",
    "lipschitz_error",
    "log_interval",
    "log_normal_cdf",
    "pieces_for_error",
    "places",
    "random_link",
    "step",
]
