"""Links that are learnt: step functions whose values are parameters or have priors.

Call them inside a model; each registers what it says and returns a
`gpx.links.PiecewiseConstant` for a likelihood.

References:
    Seitz, "A piece-wise constant approximation for non-conjugate GP models", 3.5.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import OrderedTransform
from numpyro.primitives import _PYRO_STACK

from numpyro_gpx.beliefs import Integrable, as_infer
from numpyro_gpx.links.named import get_link
from numpyro_gpx.links.piecewise import PiecewiseConstant, even_edges, places
from numpyro_gpx.links.smooth import Link

__all__ = ["learnt_link", "random_link"]


def learnt_link(
    name: str,
    link: Link | str,
    *,
    num_pieces: int = 20,
    lower: float = -3.0,
    upper: float = 3.0,
    at: str = "upper",
    penalty: float = 0.0,
    towards: float | None = None,
    monotone: bool = False,
) -> PiecewiseConstant:
    r"""A piecewise-constant link whose values are `numpyro.param`s.

    Registers `name` `(K,)`, the points :math:`r_k` with values
    :math:`g_k = \text{link}(r_k)`, which start at `link` itself; and, with a penalty,
    `name/penalty`, a factor
    :math:`-\lambda\sum_k (g_k - c)^2` (eq. 22) or
    :math:`-\lambda\sum_k (g_k - \text{link}(x_k))^2` (eq. 23).

    MCMC does not move parameters; use `random_link` there.

    Args:
        name: Name of the parameter.
        link: The link to start from; its range is that of the values.
        num_pieces: Number of pieces K.
        lower: Upper edge of the first piece.
        upper: Lower edge of the last piece.
        at: Where in a piece `link` is evaluated, see `PiecewiseConstant.of`.
        penalty: Weight :math:`\lambda`.
        towards: The constant `c`; `None` for `link` itself.
        monotone: Whether the values must rise with the latent function.
    """
    _outside_plates(name)
    start = PiecewiseConstant.of(
        link, num_pieces=num_pieces, lower=lower, upper=upper, at=at
    )
    constraint = constraints.ordered_vector if monotone else constraints.real_vector
    # The two outermost places may coincide, which an ordered vector must not.
    initial = places(start.edges, "middle") if monotone else start.points
    points = numpyro.param(name, initial, constraint=constraint)
    learnt = PiecewiseConstant(points, start.edges, start.base)
    if penalty > 0.0:
        target = start.values if towards is None else towards
        distance = jnp.sum((learnt.values - target) ** 2)
        numpyro.factor(f"{name}/penalty", -penalty * distance)
    return learnt


def random_link(
    name: str,
    link: Link | str = "identity",
    *,
    num_pieces: int = 20,
    lower: float = -3.0,
    upper: float = 3.0,
    at: str = "upper",
    scale: float = 1.0,
    monotone: bool = False,
    integrate: bool = False,
) -> PiecewiseConstant:
    r"""A piecewise-constant link whose values have a prior.

    Registers `name` `(K,)` with :math:`r_k \sim \mathcal N(x_k, s^2)`, so that the link
    is `link` on average, and the values are :math:`g_k = \text{link}(r_k)`. With
    `monotone=True` the points are the ordered transform of
    :math:`\mathcal N(\cdot, s^2)` variables centred at those of `link`: the first point
    and the logarithms of the steps.

    Every engine can use it: guides draw the points (or, with `integrate=True`, hold a
    Gaussian belief about them, eq. 24); NUTS, HMC and SGHMC move them along with
    everything else, on a sparse GP (on the full GP the density jumps).

    Args:
        name: Name of the site.
        link: What the link is a priori; `"identity"`, a name, or a link.
        num_pieces: Number of pieces K.
        lower: Upper edge of the first piece.
        upper: Lower edge of the last piece.
        at: Where in a piece `link` is evaluated, see `PiecewiseConstant.of`.
        scale: Prior standard deviation `s`.
        monotone: Whether the values must rise with the latent function.
        integrate: Whether Gaussian guides integrate the points in closed form; needs a
            Gaussian likelihood and the identity.
    """
    _outside_plates(name)
    base = get_link(link)
    edges = even_edges(num_pieces, lower, upper)
    x = places(edges, "middle" if monotone else at)
    if monotone:
        if integrate:
            raise ValueError("`integrate` needs Gaussian values: leave out `monotone`.")
        order = OrderedTransform()
        prior = dist.TransformedDistribution(
            dist.Normal(order.inv(x), scale).to_event(1), order
        )
    else:
        prior = dist.Normal(x, scale).to_event(1)
    infer = as_infer(Integrable()) if integrate else {}
    return PiecewiseConstant(numpyro.sample(name, prior, infer=infer), edges, base)


def _outside_plates(name):
    """Raise inside a plate, where every row would have a link, and pay the penalty."""
    plates = [h.name for h in _PYRO_STACK if isinstance(h, numpyro.plate)]
    if plates:
        raise ValueError(
            f"The link `{name}` is shared by all rows: make it outside the plates "
            f"{plates}."
        )
