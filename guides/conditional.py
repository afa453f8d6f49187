r"""The conditional Gaussian guide: :math:`q(\theta)\,q(v \mid \theta)`.

`v` and θ are strongly dependent a posteriori: the data pin down `u`, not `v`. The guide
therefore holds a θ-free pseudo-observation of `u` and lets each θ turn it into its own
belief about `v`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array

from numpyro_gpx.guides.parts.factors import dense_factor
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.guides.parts.transport import PlacingTransport
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.numerics.cholesky import lower_cholesky
from numpyro_gpx.processes.collapse import from_precision
from numpyro_gpx.program.starts import init_to_prior_median
from numpyro_gpx.sites.marks import GPMark, marked

__all__ = ["ConditionalGaussian"]


class ConditionalGaussian(GaussianGuide):
    r"""A Gaussian pseudo-observation of `u`, seen from every θ.

    With a pseudo-target `t` of precision :math:`\Lambda = RR^\top`, both free of θ,

    .. math:: q(v \mid \theta) \propto \mathcal N(v; 0, I)\,
        \mathcal N(t; u, \Lambda^{-1}), \qquad u = m(Z) + L_{uu} v,

    that is precision :math:`P = I + L_{uu}^\top \Lambda L_{uu}` and mean
    :math:`P^{-1} L_{uu}^\top \Lambda (t - m(Z))`. At a fixed θ every Gaussian `q(v)`
    with a precision above that of the prior is of this form.

    The parameters `{site}_auto_loc` and `{site}_auto_precision_tril` hold `t` and `R`.
    (Tried instead: the linear term :math:`\Lambda t` as a parameter, whose mean moves
    with every change of :math:`\Lambda`, so that L-BFGS needs over ten times the steps;
    and units in which `Kuu` at the start is the identity, which are ill conditioned as
    soon as θ moves.)

    Args:
        model: The model.
        theta: `"full"`, `"mean_field"` or `"point"`.
        prefix: Names parameters.
        init_loc_fn: Where the hyperparameters start.

    References:
        The dual parameterisation of SVGP (Adam, Chang, Khan & Solin 2021), made joint
        with the hyperparameters.
    """

    factorised = True
    transport_kind = PlacingTransport
    can_weaken = True
    # Its pseudo-observation is of `u`, whose prior has the mean.
    follows_means = True

    def __init__(
        self, model, *, theta="full", prefix="auto", init_loc_fn=init_to_prior_median
    ):
        super().__init__(model, theta=theta, prefix=prefix, init_loc_fn=init_loc_fn)

    def beliefs(self, theta, call):
        gps = marked(self.trace_given(theta, call), GPMark)
        return tuple(
            Group.alone(name, self._belief(name, gps[name]))
            for name in self.structure.gps
        )

    def weakened(self, params, strength):
        names = {f"{name}_{self.prefix}_precision_tril" for name in self.structure.gps}
        root = jnp.sqrt(strength)
        return {n: root * x if n in names else x for n, x in params.items()}

    def push(self, name: str, gp: GPMark, params: dict, w: Array):
        r"""A GP site from a standard normal vector, and the log determinant.

        With :math:`P = CC^\top` and linear term `b` of :math:`q(v \mid \theta)`,
        :math:`v = C^{-\top}(C^{-1} b + w)`: nothing is inverted.

        Args:
            name: The site.
            gp: Its prior at the hyperparameters.
            params: Parameters of the guide.
            w: Of the site's shape.
        """

        def one(factor, m, loc, precision_tril, w):
            C, centre = _root_and_centre(factor, m, loc, precision_tril)
            v = solve_triangular(C, centre + w, lower=True, trans=1)
            log_det = -jnp.sum(jnp.log(jnp.diagonal(C)))
            if gp.whiten:
                return v, log_det
            return m + factor.multiply(v[:, None])[:, 0], log_det + factor.log_det()

        value, log_det = gp.each_output(one, *self._pseudo_in(name, params), w)
        return value, jnp.sum(log_det)

    def pull(self, name: str, gp: GPMark, params: dict, value: Array) -> Array:
        """The vector that `push` takes to a value."""

        def one(factor, m, loc, precision_tril, value):
            C, centre = _root_and_centre(factor, m, loc, precision_tril)
            v = value if gp.whiten else factor.solve((value - m)[:, None])[:, 0]
            return C.T @ v - centre

        return gp.each_output(one, *self._pseudo_in(name, params), value)

    def _belief(self, name, gp: GPMark):
        site = self.structure.latents[name]
        size = site.shape[-1]
        loc = numpyro.param(
            f"{name}_{self.prefix}_loc", jnp.zeros(site.shape, site.dtype)
        )
        precision_tril = numpyro.param(
            f"{name}_{self.prefix}_precision_tril",
            jnp.broadcast_to(jnp.eye(size, dtype=site.dtype), (*site.shape, size)),
            constraint=dense_factor,
        )

        def one(factor, m, loc, precision_tril):
            return from_precision(*_natural(factor, m, loc, precision_tril))

        belief = gp.each_output(one, loc, precision_tril)
        m = gp.prior.inducing_mean(gp.num_outputs)
        return belief if gp.whiten else belief.affine(m, gp.prior.lower())

    def _pseudo_in(self, name: str, params: dict):
        """Pseudo-target and root of its precision."""
        return tuple(
            params[f"{name}_{self.prefix}_{part}"] for part in ("loc", "precision_tril")
        )


def _natural(factor, m, loc, precision_tril):
    """Precision and linear term of `q(v | theta)`."""
    # C = precision_tril^T R, so that the precision is I + C^T C.
    C = factor.multiply_t(precision_tril).T
    precision = jnp.eye(C.shape[-1], dtype=C.dtype) + C.T @ C
    return precision, C.T @ (precision_tril.T @ (loc - m))


def _root_and_centre(factor, m, loc, precision_tril):
    """Lower root `C` of the precision, and `C^-1 b`."""
    precision, linear = _natural(factor, m, loc, precision_tril)
    C = lower_cholesky(precision)
    return C, solve_triangular(C, linear, lower=True)
