"""The table of posterior marginals, a row for each scalar and fit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["site_table"]

# Hyperparameters with at most so many entries (an ARD lengthscale, say) are listed
# entry by entry; longer ones and the GP sites are summarised.
_MAX_LISTED = 8
# Mean Wasserstein distance between n draws of N(0, 1) and N(0, 1) itself, times
# sqrt(n): sqrt(2 / pi) times the integral of sqrt(Phi (1 - Phi)).
_FLOOR = 1.288


def site_table(fits, entries, reference):
    """Moments, ESS, R-hat and distances to the reference; see `Comparison.sites`."""
    import pandas as pd

    sites = dict.fromkeys(name for group in entries.values() for name in group)
    rows: dict[str, dict[str, dict[str, float]]] = {}  # by entry, then by fit
    for site in sites:
        marginals = {
            label: {entry: _Marginal.of(fits[label], x) for entry, x in group.items()}
            for label, group in ((n, g[site]) for n, g in entries.items() if site in g)
        }
        long = any(
            _summarised(fits[label], site, marginals[label]) for label in marginals
        )
        for label, group in marginals.items():
            table = _rows(group, marginals.get(reference, {}))
            if long:
                table = _summary(site, table, _size(fits[label], site, group))
            for entry, row in table.items():
                rows.setdefault(entry, {})[label] = row
    flat = {
        (entry, n): row for entry, group in rows.items() for n, row in group.items()
    }
    index = pd.MultiIndex.from_tuples(flat, names=["site", "fit"])
    return pd.DataFrame(list(flat.values()), index=index)


def _summarised(fit, site, entries):
    latent = fit.structure.latents.get(site)
    is_gp = latent is not None and latent.is_gp
    return is_gp or _size(fit, site, entries) > _MAX_LISTED


def _size(fit, site, entries):
    """Number of entries of a site, of which long ones show some; or of a summary."""
    latent = fit.structure.latents.get(site)
    return len(entries) if latent is None else int(np.prod(latent.shape))


class _Marginal(NamedTuple):
    """Draws `(chains, draws)` of one scalar; ESS and R-hat, NaN if they say nothing."""

    draws: np.ndarray
    sd: float
    ess: float
    r_hat: float

    @classmethod
    def of(cls, fit, draws):
        import arviz as az

        if np.ptp(draws) == 0:  # a point estimate; `std` would leave rounding errors
            return cls(draws, 0.0, np.nan, np.nan)
        sd = float(draws.std())
        if not fit.is_mcmc or draws.shape[1] < 4:
            return cls(draws, sd, np.nan, np.nan)
        # Chains that stand where they started have no variance to divide by.
        with np.errstate(divide="ignore", invalid="ignore"):
            r_hat = float(az.rhat(draws)) if draws.shape[0] > 1 else np.nan
            ess = float(az.ess(draws, method="bulk"))
        return cls(draws, sd, ess, r_hat)

    @property
    def num_effective(self):
        return self.draws.size if np.isnan(self.ess) else self.ess

    def distance(self, reference):
        """Wasserstein distance to the reference, and what equal posteriors show."""
        from scipy.stats import wasserstein_distance

        if self is reference:
            return 0.0, np.nan
        distance = wasserstein_distance(self.draws.ravel(), reference.draws.ravel())
        variance = 1.0 / self.num_effective + 1.0 / reference.num_effective
        return distance / reference.sd, _FLOOR * np.sqrt(variance)


def _rows(marginals, reference):
    table = {}
    for entry, marginal in marginals.items():
        distance = floor = np.nan
        if set(reference) == set(marginals) and reference[entry].sd > 0:
            distance, floor = marginal.distance(reference[entry])
        table[entry] = {
            "mean": float(marginal.draws.mean()),
            "sd": marginal.sd,
            "ess": marginal.ess,
            "r_hat": marginal.r_hat,
            "distance": distance,
            "floor": floor,
        }
    return table


def _summary(site, table, total):
    """Two rows for a long site: the mean over its entries, and the worst of them."""
    number = len(table)
    of = f"{number}" if number == total else f"{number} of {total}"
    columns = {
        name: np.array([row[name] for row in table.values()])
        for name in next(iter(table.values()))
    }
    furthest = columns["distance"].argmax()
    worst = {
        "mean": np.nan,
        "sd": np.nan,
        "ess": columns["ess"].min(),
        "r_hat": columns["r_hat"].max(),
        "distance": columns["distance"][furthest],
        "floor": columns["floor"][furthest],
    }
    mean = {name: column.mean() for name, column in columns.items()}
    return {f"{site}: mean of {of}": mean, f"{site}: worst of {of}": worst}
