r"""Replicates of a row that share one draw of the functions between layers.

Importance weighting evaluates the model at S replicates of each row's latent input, one
for each entry of a mapped axis. The S values of an inner layer must be those of *one*
function: independent ones would not give a bound. So under `shared_replicates`
`gpx.propagate` looks across the axis and draws the replicates of a row jointly.

References:
    Tutorial eq. 82; Salimbeni et al. (2019).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from numpyro_gpx.numerics.factor import cholesky
from numpyro_gpx.processes.conditional import replicate_covariances
from numpyro_gpx.processes.latent import Gaussian

__all__ = ["shared_draw"]


def shared_draw(name: str, latent: Gaussian, noise: Array, axis: str) -> Array:
    """This replicate's deviation from its mean, `(N,)` or `(N, P)`.

    Args:
        name: Of the layer, for messages.
        latent: `f(X)` of this replicate.
        noise: Standard normal noise of all replicates, `(S, N)` or `(S, N, P)`.
        axis: The mapped axis.
    """
    if latent.row_cov is not None or not latent.origin:
        raise ValueError(
            f"Replicates of layer `{name}` can be drawn jointly only for `f(X)` of "
            "GPs or sums of them, without `full_cov`. Use `gpx.infer.ELBO()`."
        )
    covs, scales = zip(
        *(
            replicate_covariances(gp.prior, jax.lax.all_gather(X, axis), gp.whitened)
            for gp, X in latent.origin
        ),
        strict=True,
    )
    L = cholesky(sum(covs), sum(scales))  # (N, S, S) or (P, N, S, S)
    subscripts = "nst,tn->sn" if noise.ndim == 2 else "pnst,tnp->snp"
    return jnp.einsum(subscripts, L, noise)[jax.lax.axis_index(axis)]
