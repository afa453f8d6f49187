"""A table of a fit's posterior, site by site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numpyro_gpx import checks

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["summary"]


def summary(fit: Fit, sites, num_draws):
    """See `Fit.summary`."""
    import arviz as az

    chains = fit.chains(num_draws)
    latents = fit.structure.latents
    if sites is None:
        sites = [n for n in chains if n not in latents or _is_listed(latents[n])]
    sites = [sites] if isinstance(sites, str) else list(sites)
    for site in sites:
        checks.one_of("sites", site, tuple(chains))
    # Of independent draws, R-hat and ESS say nothing.
    kept = {site: chains[site] for site in sites}
    return az.summary(kept, kind="all" if fit.is_mcmc else "stats")


def _is_listed(site) -> bool:
    return not (site.is_gp or site.row_local)
