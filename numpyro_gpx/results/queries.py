"""What a fit is asked at rows: predictions, parts, functions, covariances."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_gpx import checks
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.results.mixtures import shape_of
from numpyro_gpx.results.predict import (
    latent_cov,
    latent_draws,
    parts_at,
    sites_at,
    sites_in_pieces,
)
from numpyro_gpx.results.prediction import Prediction
from numpyro_gpx.results.row_chunks import row_chunks, row_values

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["functions", "parts", "predicted", "replicated", "row_covariance"]


@one_at_a_time()
def predicted(
    fit: Fit, call: Call, *, of, site, num_components, given, chunk_rows
) -> Prediction:
    """See `Fit.predict`."""
    if not (of is None or isinstance(of, str)):
        raise TypeError(
            f"`of` must be one name, such as 'latent'; got {type(of).__name__}."
        )
    view = fit.site_view(site)
    given = row_values(fit.structure, given, call.num_rows)
    components = fit.global_components(num_components, given)
    pieces = list(row_chunks(fit.program, call, view.site, chunk_rows, given))
    trained = fit.program.observation(view.site).needs_training
    found = sites_in_pieces(view, components, pieces, fit.key, of=of, trained=trained)
    return Prediction(found, [size for *_, size in pieces], fit.key)


@one_at_a_time()
def replicated(fit: Fit, site, components: dict[str, Any]) -> Prediction:
    """See `Fit.replicate`."""
    fn = sites_at(fit.site_view(site), components, fit.call, fit.key, of=None)
    return Prediction([fn], [shape_of(fn)[0]], fit.key)


@one_at_a_time()
def parts(fit: Fit, call: Call, *, site, num_components) -> dict[str, Prediction]:
    """See `Fit.parts`."""
    view = fit.site_view(site)
    components = fit.global_components(num_components)
    found = parts_at(view, components, call, fit.key)
    return {
        name: Prediction([fn], [fn.latent.mean.shape[1]], fit.key)
        for name, fn in found.items()
    }


@one_at_a_time()
def functions(fit: Fit, key, num_draws: int, *, site) -> Callable:
    """See `Fit.functions`."""
    view = fit.site_view(site)
    checks.key(key)
    checks.at_least("num_draws", num_draws, 1)
    key_draws, key_rest = jr.split(key)
    drawn = fit.posterior.sample(key_draws, num_draws)
    draws = {name: drawn[name] for name in fit.structure.global_sites}

    @one_at_a_time()
    def values(*args, **kwargs):
        call = fit.new_call(*args, **kwargs)
        return _on_host(latent_draws(view, draws, call, key_rest))

    return values


@one_at_a_time()
def row_covariance(fit: Fit, call: Call, *, site, num_components):
    """See `Fit.full_cov`."""
    components = fit.global_components(num_components)
    means, covs = latent_cov(fit.site_view(site), components, call, fit.key)
    apart = jnp.moveaxis(means - jnp.mean(means, axis=0), 1, -1)  # (S, *P, N)
    between = jnp.mean(apart[..., :, None] * apart[..., None, :], axis=0)
    return _on_host(jnp.mean(covs, axis=0) + between)


def _on_host(x):
    """As NumPy's array, unless it is a tracer's."""
    return np.asarray(x) if not_jax_tracer(x) else x
