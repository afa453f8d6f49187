r"""The target in a guide's coordinates, estimated from a minibatch.

.. math:: U_B(x) = -\log\pi_B(T(x)) - \log|\det T'(x)| - \sum_n c_n(x)
    + \frac{N}{|B|} \sum_{n \in B} c_n(x),

with :math:`\pi_B` the target density on the minibatch as every sampler sees it, and
:math:`c_n` the control variates of the guide. Its mean over minibatches is `U(x)`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.engines.control_variates import Rows, RowSites
from numpyro_gpx.engines.coordinates import Coordinates

__all__ = ["MinibatchEnergy"]


class MinibatchEnergy:
    """Made anew inside each program.

    Args:
        here: The target in the guide's coordinates.
        rows: The rows of a minibatch; `None` where all rows are used.
        sites: Their control variates.
    """

    def __init__(
        self, here: Coordinates, rows: Rows | None = None, sites: RowSites | None = None
    ):
        self.here, self.rows, self.sites = here, rows, sites

    def __call__(self, x: Float[Array, " K"], batch: dict[str, Array]) -> Array:
        z, log_det = self.here.transport.forward(x)
        density = self.here.target.log_density(z, batch=batch) + log_det
        if self.rows is None or self.sites is None:
            return -density
        index, centre = batch[self.rows.plate], self.sites.centre
        values = self.here.target.constrain(z)
        v = self.rows.inducing(values, centre, index)
        e = x[: self.here.transport.num_theta]
        some = self.rows.variates(v, e, self.sites, index)
        of_all = self.sites.total(v, e)
        return -(density + of_all - self.rows.weight(index) * jnp.sum(some))
