"""What a fit was made to match: the support of its targets, its treatment of noise."""

from __future__ import annotations

from numpyro.distributions import constraints

from numpyro_gpx.results.fit import Fit

__all__ = ["is_binary", "labels", "noise_target", "target_support"]


def target_support(fit: Fit, site: str | None = None):
    """The support of the targets, one number at a time, as a NumPyro constraint."""
    return fit.program.observation(fit.structure.observed_site(site)).support


def is_binary(fit: Fit, site: str | None = None) -> bool:
    """Whether the targets are labels 0 and 1."""
    return isinstance(target_support(fit, site), type(constraints.boolean))


def labels(fit: Fit, site: str | None = None) -> bool:
    """Whether the targets are labels of classes, of which predictions give shares."""
    likelihood = fit.program.observation(fit.structure.observed_site(site)).likelihood
    return likelihood is not None and likelihood.num_classes is not None


def noise_target(fit: Fit) -> str:
    """How noise between layers enters the fit's target; empty if there is none.

    Engines with fresh noise at each gradient work on A, its average over the noise;
    a sampler that was told nothing else moves it with the other sites: B.
    """
    if not fit.structure.noise:
        return ""
    default = "B" if fit.approximation == "asymptotically exact" else "A"
    return str(fit.info.get("noise", default))
