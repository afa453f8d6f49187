r"""The conditional Gaussian guide: :math:`q(\theta)\,q(v \mid \theta)`.

`v` and θ are strongly dependent a posteriori: the data pin down `u`, not `v`. The guide
therefore holds a θ-free pseudo-observation of `u` and lets each θ turn it into its own
belief about `v`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
from numpyro.distributions import constraints
from numpyro.infer import init_to_median

from numpyro_gpx.conditionals import from_precision
from numpyro_gpx.guides.base import GaussianGuide

__all__ = ["ConditionalGaussian"]


class ConditionalGaussian(GaussianGuide):
    r"""A Gaussian pseudo-observation of `u`, seen from every θ.

    With precision :math:`\Lambda = RR^\top` and linear term `b`, both free of θ,

    .. math:: q(v \mid \theta) \propto \mathcal N(v; 0, I)
        \exp\{b^\top u - \tfrac12 u^\top \Lambda u\}, \qquad u = m(Z) + L_{uu} v,

    that is precision :math:`P = I + L_{uu}^\top \Lambda L_{uu}` and mean
    :math:`P^{-1} L_{uu}^\top (b - \Lambda m(Z))`. At a fixed θ every Gaussian `q(v)`
    with precision at least that of the prior is of this form. Parameters
    `{site}_auto_linear` and `{site}_auto_precision_tril`.

    Args:
        model: The model.
        theta: `"full"`, `"mean_field"` or `"point"`.
        prefix: Names parameters.
        init_loc_fn: Where the hyperparameters start.

    References:
        The dual parameterisation of SVGP (Adam, Chang, Khan & Solin 2021), made joint
        with the hyperparameters.
    """

    def __init__(
        self, model, *, theta="full", prefix="auto", init_loc_fn=init_to_median
    ):
        super().__init__(model, theta=theta, prefix=prefix, init_loc_fn=init_loc_fn)

    def belief(self, name, theta, args, kwargs):
        site = self.structure.latents[name]
        size = site.shape[-1]
        b = numpyro.param(
            f"{name}_{self.prefix}_linear", jnp.zeros(site.shape, site.dtype)
        )
        R = numpyro.param(
            f"{name}_{self.prefix}_precision_tril",
            jnp.broadcast_to(jnp.eye(size, dtype=site.dtype), (*site.shape, size)),
            constraint=constraints.scaled_unit_lower_cholesky,
        )
        gp = self.trace_given(theta, args, kwargs)[name]["infer"]["gp"]
        L = gp.prior.factor.L  # (M, M) or (P, M, M)
        m = gp.prior.inducing_mean(gp.num_outputs)  # (M,) or (P, M)

        def one_output(L, m, b, R):
            C = R.T @ L  # so that the precision is I + C^T C
            precision = jnp.eye(size, dtype=L.dtype) + C.T @ C
            return from_precision(precision, L.T @ (b - R @ (R.T @ m)))

        if gp.num_outputs is None:
            belief = one_output(L, m, b, R)
        else:
            axes = (0 if L.ndim == 3 else None, 0, 0, 0)
            belief = jax.vmap(one_output, in_axes=axes)(L, m, b, R)
        return belief if gp.whiten else belief.affine(m, L)
