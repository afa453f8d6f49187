"""Fits for ArviZ, and the densities of training rows under draws."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_gpx.numerics.threads import single_blas_thread
from numpyro_gpx.results.predict import Pointwise, pointwise, replicated_draws

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["observed_rows", "to_arviz"]


def to_arviz(fit: Fit, num_draws, log_likelihood: bool, posterior_predictive: bool):
    """See `Fit.to_arviz`."""
    import arviz as az
    import xarray as xr

    chains = fit.chains(num_draws)
    shape = next(iter(chains.values())).shape[:2]
    groups: dict = {"posterior": chains}
    stats = {n: x for n, x in fit.sample_stats.items() if x.shape[:2] == shape}
    if stats:
        groups["sample_stats"] = stats
    names = fit.structure.observed
    observed = fit.program.observed
    if names:
        groups["observed_data"] = {name: observed[name] for name in names}
    expected = {}
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in chains.items()}
    if log_likelihood and names:
        groups["log_likelihood"] = {}
        for name in names:
            rows = observed_rows(fit, flat, name)
            groups["log_likelihood"][name] = rows.log_likelihood.reshape(*shape, -1)
            expected[name] = rows.expected_log_likelihood.reshape(*shape, -1)
    if posterior_predictive and names:
        groups["posterior_predictive"] = _predictive_draws(fit, flat, shape)
    with warnings.catch_warnings():
        # Dimensions without coordinates, and draws more than chains: as intended.
        warnings.simplefilter("ignore", UserWarning)
        idata = az.from_dict(**groups)
        if expected:
            # The dimensions of `log_likelihood`, so that the two can be subtracted.
            dims = idata.log_likelihood.dims
            dataset = xr.Dataset(
                {n: (("chain", "draw", f"{n}_dim_0"), x) for n, x in expected.items()},
                coords={d: idata.log_likelihood[d] for d in dims},
            )
            idata.add_groups(expected_log_likelihood=dataset)
    return idata


def observed_rows(fit: Fit, draws: dict, site: str) -> Pointwise:
    """Densities of the training rows of a site that are data, not masked."""
    with single_blas_thread():
        draws = {name: jnp.asarray(x) for name, x in draws.items()}
        rows = pointwise(fit.problem(site), draws, fit.key)
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
        with single_blas_thread():
            draws = {site: jnp.asarray(x) for site, x in flat.items()}
            x = np.asarray(replicated_draws(fit.problem(name), draws, fit.key))
        drawn[name] = x.reshape(*shape, *x.shape[1:])
    return drawn
