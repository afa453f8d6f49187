"""Fits for ArviZ, and leave-one-out scores that fit an expected likelihood."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from numpyro_gpx.infer.evaluate import pointwise, replicated_draws
from numpyro_gpx.infer.threads import single_blas_thread
from numpyro_gpx.results.fit import Fit

__all__ = ["loo", "pairwise_distances", "to_arviz"]


def pairwise_distances(site: str = "h", lengthscale: str | None = None) -> Callable:
    r"""Distances between the latent inputs of all pairs of rows, as a summary.

    Rotations and reflections leave them alone. With `lengthscale` they are in its
    units, :math:`\sqrt{\sum_q (h_{nq} - h_{mq})^2/\ell_q^2}`, and may be compared
    where the scale of the latent space is not known either.

    Args:
        site: The latent input, `(N, Q)`.
        lengthscale: Name of the site of the lengthscales, `()` or `(Q,)`.

    Returns:
        A function of draws by site, `(S, ...)`, with values `(S, N (N - 1) / 2)`: for
        `compare(..., summaries={"distance": ...})`, or for `fit.draws()`.
    """

    def distances(draws: dict) -> np.ndarray:
        H = np.asarray(draws[site])
        H = H[..., None] if H.ndim == 2 else H
        if lengthscale is not None:
            scales = np.asarray(draws[lengthscale]).reshape(len(H), 1, -1)
            H = H / scales
        first, second = np.triu_indices(H.shape[1], k=1)
        return np.sqrt(np.sum((H[:, first] - H[:, second]) ** 2, axis=-1))

    return distances


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
            rows = _observed_rows(_pointwise(fit, flat, name))
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

    if fit.structure.noise:
        raise ValueError(
            "`loo` needs a density of each row; the model draws noise at "
            f"{sorted(fit.structure.noise)}, over which it would have to be averaged. "
            "Compare fits by `fit.predict(X_test).log_prob(y_test)`."
        )
    with single_blas_thread():
        draws, log_q = fit.posterior.weighed(num_draws)
    rows = _observed_rows(_pointwise(fit, draws, fit.observed_site(site)))
    log_ratios = -rows.expected_log_likelihood  # (S, N)
    if log_q is not None:
        log_ratios = log_ratios + (rows.log_joint - np.asarray(log_q))[:, None]
    log_weights, pareto_k = az.psislw(log_ratios.T.copy())
    elpd = logsumexp(np.asarray(log_weights).T + rows.log_likelihood, axis=0)  # (N,)
    # The same draws without leaving anything out, weighed towards the target likewise.
    log_whole = (
        np.zeros(rows.log_joint.shape) if log_q is None else rows.log_joint - log_q
    )
    log_whole = log_whole - logsumexp(log_whole)
    lpd = logsumexp(rows.log_likelihood + log_whole[:, None], axis=0)
    num_rows = elpd.shape[0]
    good_k = min(1.0 - 1.0 / np.log10(log_ratios.shape[0]), 0.7)
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


def _pointwise(fit: Fit, draws: dict, site: str):
    with single_blas_thread():
        draws = {name: jnp.asarray(x) for name, x in draws.items()}
        rows = pointwise(fit.problem(site), draws, fit.key)
    return jax.tree.map(np.asarray, rows)


def _observed_rows(rows):
    """Without the rows that `mask=` leaves out altogether: they are no data."""
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
