r"""Replicates of a row that share one draw of the functions between layers.

Importance weighting evaluates the model at S replicates of each row's latent input, one
for each entry of a mapped axis. The S values of an inner layer must be those of *one*
function: independent ones would not give a bound. So inside this context
`gpx.propagate` looks across the axis and draws the replicates of a row jointly.

References:
    Tutorial eq. 82; Salimbeni et al. (2019).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array

from numpyro_gpx.conditionals import replicate_covariances
from numpyro_gpx.latents import GaussianLatent
from numpyro_gpx.linalg import safe_cholesky

__all__ = ["current_axis", "shared_draw", "sharing_functions"]

_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "replicates", default=None
)


@contextlib.contextmanager
def sharing_functions(axis: str) -> Iterator[None]:
    """Let layers inside the `with` block be drawn jointly across the mapped `axis`."""
    token = _AXIS.set(axis)
    try:
        yield
    finally:
        _AXIS.reset(token)


def current_axis() -> str | None:
    """Name of the mapped axis over replicates, or `None` outside the context."""
    return _AXIS.get()


def shared_draw(name: str, latent: GaussianLatent, noise: Array, axis: str) -> Array:
    """This replicate's deviation from its mean, `(N,)` or `(N, P)`.

    Args:
        name: Of the layer, for messages.
        latent: `f(X)` of this replicate.
        noise: Standard normal noise of all replicates, `(S, N)` or `(S, N, P)`.
        axis: The mapped axis.
    """
    if latent.cov is not None or not latent.sources:
        raise ValueError(
            f"Replicates of layer `{name}` can be drawn jointly only for `f(X)` of "
            "GPs or sums of them, without `full_cov`. Use `gpx.infer.ELBO()`."
        )
    covs, scales = zip(
        *(
            replicate_covariances(gp.prior, jax.lax.all_gather(X, axis), gp.whitened)
            for gp, X in latent.sources
        ),
        strict=True,
    )
    L = safe_cholesky(sum(covs), sum(scales))  # (N, S, S) or (P, N, S, S)
    subscripts = "nst,tn->sn" if noise.ndim == 2 else "pnst,tnp->snp"
    return jnp.einsum(subscripts, L, noise)[jax.lax.axis_index(axis)]
