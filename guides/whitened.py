r"""The whitened Gaussian guide: :math:`q(v) = \mathcal N(m, SS^\top)`, free of θ."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro
from numpyro.distributions import constraints

from numpyro_gpx.beliefs import DiagonalBelief, GaussianBelief
from numpyro_gpx.guides.parts.base import INNER_SCALE
from numpyro_gpx.guides.parts.factors import dense_factor
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.program.starts import init_to_prior_median

__all__ = ["WhitenedGaussian"]


class WhitenedGaussian(GaussianGuide):
    r"""The guide of whitened SVGP: a Gaussian over `v`, independent of the rest.

    .. math:: q(\theta, v) = q(\theta) \prod_p \mathcal N(v_p; m_p, S_p S_p^\top)

    Parameters `{site}_auto_loc` and `{site}_auto_scale_tril` (or `_scale`).

    Args:
        model: The model.
        covariance: `"full"` or `"diagonal"`, for each output of each GP site.
        theta: `"point"`, `"mean_field"` or `"full"`.
        prefix: Names parameters.
        init_loc_fn: Where the hyperparameters start.

    References:
        Hensman, Matthews & Ghahramani (2015); tutorial 4.1, eq. 67.
    """

    factorised = True

    def __init__(
        self, model, *, covariance="full", theta="point", prefix="auto",
        init_loc_fn=init_to_prior_median,
    ):  # fmt: skip
        if covariance not in ("full", "diagonal"):
            raise ValueError(
                f"`covariance` must be 'full' or 'diagonal'; got {covariance!r}."
            )
        super().__init__(model, theta=theta, prefix=prefix, init_loc_fn=init_loc_fn)
        self.covariance = covariance

    @property
    def config(self):
        return {**super().config, "covariance": self.covariance}

    def beliefs(self, theta, call):
        return tuple(Group.alone(n, self._belief(n)) for n in self.structure.gps)

    def natural_pairs(self):
        part = "scale_tril" if self.covariance == "full" else "scale"
        return tuple(
            (f"{name}_{self.prefix}_loc", f"{name}_{self.prefix}_{part}")
            for name in self.structure.gps
        )

    def _belief(self, name):
        site = self.structure.latents[name]
        start = INNER_SCALE if site.inner else 1.0
        loc = numpyro.param(
            f"{name}_{self.prefix}_loc", jnp.zeros(site.shape, site.dtype)
        )
        if self.covariance == "diagonal":
            scale = numpyro.param(
                f"{name}_{self.prefix}_scale",
                jnp.full(site.shape, start, site.dtype),
                constraint=constraints.softplus_positive,
            )
            return DiagonalBelief(loc, scale)
        size = site.shape[-1]
        eye = jnp.broadcast_to(jnp.eye(size, dtype=site.dtype), (*site.shape, size))
        scale_tril = numpyro.param(
            f"{name}_{self.prefix}_scale_tril",
            start * eye,
            constraint=dense_factor,
        )
        return GaussianBelief(loc, scale_tril)
