"""Leave-one-out scores that fit an expected likelihood."""

from __future__ import annotations

import warnings

import numpy as np
from scipy.special import logsumexp

from numpyro_gpx.notes import FitWarning
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.results.arviz import observed_rows
from numpyro_gpx.results.fit import Fit

__all__ = ["loo"]


def loo(fit: Fit, *, num_draws: int = 1000, site: str | None = None):
    r"""Leave-one-out log predictive density by Pareto-smoothed importance sampling.

    A posterior without row `n` differs by :math:`e^{-\mathrm{ELL}_n}`, and a new row is
    scored by :math:`\log\int p(y_n \mid f)\,p(f \mid v, \theta)\,df`: with weights
    :math:`w_{sn} \propto e^{-\mathrm{ELL}_n(s)}`, times :math:`\pi_s / q_s` for draws
    of a guide,

    .. math:: \mathrm{elpd}_n = \log\sum_s w_{sn} \int p(y_n \mid f)\,p(f \mid s)\,df.

    `arviz.loo` on the site's own log density would use one number for both. A row with
    `weights=` leaves the posterior with its weight, and is scored without it; rows that
    are masked, or have weight 0, are no data.

    Args:
        fit: The fit.
        num_draws: Draws to use.
        site: Observed site; may be left out if there is one.

    Returns:
        `arviz.ELPDData`, which `arviz.compare` takes.

    References:
        Vehtari, Gelman & Gabry (2017).
    """
    import arviz as az
    import xarray as xr

    _check_posterior(fit)
    if fit.structure.noise:
        raise ValueError(
            "`loo` needs a density of each row; the model draws noise at "
            f"{sorted(fit.structure.noise)}, over which it would have to be averaged. "
            "Compare fits by `fit.predict(X_test).log_prob(y_test)`."
        )
    with one_at_a_time():
        draws, log_q = fit.posterior.weighted(num_draws)
    rows = observed_rows(fit, draws, fit.structure.observed_site(site))
    log_ratios = -rows.expected_log_likelihood  # (S, N)
    if log_q is not None:
        log_ratios = log_ratios + (rows.log_joint - np.asarray(log_q))[:, None]
    log_weights, pareto_k = az.psislw(log_ratios.T.copy())
    elpd = logsumexp(np.asarray(log_weights).T + rows.log_likelihood, axis=0)  # (N,)
    # The same draws without leaving anything out, weighted towards the target likewise.
    log_whole = (
        np.zeros(rows.log_joint.shape) if log_q is None else rows.log_joint - log_q
    )
    log_whole = log_whole - logsumexp(log_whole)
    lpd = logsumexp(rows.log_likelihood + log_whole[:, None], axis=0)
    num_rows = elpd.shape[0]
    good_k = min(1.0 - 1.0 / np.log10(log_ratios.shape[0]), 0.7)
    _warn_of(np.asarray(pareto_k), good_k)
    entries = {
        "elpd_loo": float(elpd.sum()),
        "se": float(np.sqrt(num_rows * elpd.var())),
        "p_loo": float(lpd.sum() - elpd.sum()),
        "n_samples": log_ratios.shape[0],
        "n_data_points": num_rows,
        "warning": bool(np.any(np.asarray(pareto_k) > good_k)),
        "loo_i": xr.DataArray(elpd, dims="row", name="loo_i"),
        "pareto_k": xr.DataArray(np.asarray(pareto_k), dims="row", name="pareto_shape"),
        "scale": "log",
        "good_k": good_k,
    }
    return az.ELPDData(data=list(entries.values()), index=list(entries))


_GUIDE = " (on most rows: draws of a guide may be far from the posterior's)"


def _check_posterior(fit: Fit) -> None:
    if fit.is_prior:
        raise ValueError(
            "`loo` needs a posterior; these are draws of the prior, which knows of no "
            "row that could be left out."
        )


def _warn_of(pareto_k, good_k: float) -> None:
    """Say where the weights are too uneven, in ArviZ's terms."""
    number = int(np.sum(pareto_k > good_k))
    if number:
        warnings.warn(
            f"Pareto k above {good_k:.2g} on {number} of {pareto_k.size} rows: the "
            f"estimate is not reliable{_GUIDE if number > pareto_k.size / 2 else ''}. "
            "Hold out rows and look at `fit.predict(X_test).log_prob(y_test)`.",
            FitWarning,
            stacklevel=3,
        )
