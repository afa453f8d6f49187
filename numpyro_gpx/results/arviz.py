"""Fits for ArviZ, and the densities of training rows under draws."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.results.predict import Pointwise, pointwise, replicated_draws
from numpyro_gpx.results.site_draws import with_deterministic

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["observed_rows", "to_arviz"]

# By how many nats two densities of a row may differ and be one.
_SAME = 1e-4


def to_arviz(fit: Fit, num_draws, log_likelihood: bool, posterior_predictive: bool):
    """See `Fit.to_arviz`."""
    import arviz as az

    posterior = fit.posterior.chains(num_draws)
    shape = next(iter(posterior.values())).shape[:2]
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in posterior.items()}
    when = "prior" if fit.is_prior else "posterior"
    groups: dict[str, Any] = {
        when: with_deterministic(fit.program, fit.params, posterior)
    }
    names = fit.structure.observed
    if posterior_predictive and names:
        groups[f"{when}_predictive"] = _predictive_draws(fit, flat, shape)
    densities = {}
    if not fit.is_prior:
        groups |= _records(fit, shape)
        if log_likelihood and names:
            densities = _densities(fit, flat, shape)
    with warnings.catch_warnings():
        # Dimensions without coordinates, more draws than chains, groups that are not
        # in ArviZ's schema: as intended.
        warnings.simplefilter("ignore", UserWarning)
        idata = az.from_dict(**groups)
        if densities:
            idata.add_groups(densities)
    return idata


def _records(fit: Fit, shape) -> dict[str, dict]:
    """What was observed, and what the sampler has recorded of each draw."""
    stats = {n: x for n, x in fit.sample_stats.items() if x.shape[:2] == shape}
    observed = {name: fit.program.observed[name] for name in fit.structure.observed}
    groups = {"sample_stats": stats, "observed_data": observed}
    return {name: group for name, group in groups.items() if group}


def _densities(fit: Fit, flat: dict, shape) -> dict[str, Any]:
    """Groups of pointwise densities, `(chains, draws, rows)`.

    `arviz.loo` and `arviz.waic` take `log_likelihood` for what the target sums over and
    for the score of a new row at once. Where these are two, or draws are not of the
    target, that group has another name, so that nobody is led astray.
    """
    import xarray as xr

    scores, terms = {}, {}
    for name in fit.structure.observed:
        rows = observed_rows(fit, flat, name)
        axes = ("chain", "draw", f"{name}_dim_0")
        scores[name] = axes, rows.log_likelihood.reshape(*shape, -1)
        terms[name] = axes, rows.expected_log_likelihood.reshape(*shape, -1)
    coords = {"chain": np.arange(shape[0]), "draw": np.arange(shape[1])}
    for axes, values in scores.values():
        coords[axes[2]] = np.arange(values.shape[2])
    same = [np.allclose(scores[n][1], terms[n][1], atol=_SAME) for n in scores]
    usual = fit.is_mcmc and all(same)
    return {
        "log_likelihood" if usual else "log_predictive_density": xr.Dataset(
            scores, coords
        ),
        "expected_log_likelihood": xr.Dataset(terms, coords),
    }


def observed_rows(fit: Fit, draws: dict, site: str) -> Pointwise:
    """Densities of the training rows of a site that are data, not masked."""
    with one_at_a_time():
        draws = {name: jnp.asarray(x) for name, x in draws.items()}
        rows = pointwise(fit.site_view(site), draws, fit.key)
    rows = jax.tree.map(np.asarray, rows)
    kept = rows.observed[0]
    return rows._replace(
        log_likelihood=rows.log_likelihood[:, kept],
        expected_log_likelihood=rows.expected_log_likelihood[:, kept],
    )


def _predictive_draws(fit: Fit, flat: dict, shape):
    """New targets at the training rows, one set for each draw of the posterior."""
    drawn = {}
    for name in fit.structure.observed:
        with one_at_a_time():
            draws = {site: jnp.asarray(x) for site, x in flat.items()}
            x = np.asarray(replicated_draws(fit.site_view(name), draws, fit.key))
        drawn[name] = x.reshape(*shape, *x.shape[1:])
    return drawn
