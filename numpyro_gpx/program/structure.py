"""What a model consists of, found by tracing it without computing anything."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.distributions import Unit, biject_to
from numpyro.distributions.transforms import IdentityTransform, IndependentTransform

from numpyro_gpx.program.call import Call, Trace
from numpyro_gpx.sites.marks import GPMark, Integrable, Noise, find, marked
from numpyro_gpx.sites.observation import made_here

__all__ = [
    "LatentSite",
    "Plate",
    "Structure",
    "structure_of",
]


class LatentSite(NamedTuple):
    """A latent site: how its value looks and where it lives.

    Attributes:
        shape: Shape of the value.
        unconstrained_shape: Shape of the value on the real line.
        dtype: Of the value.
        transform: From the real line to the site's support.
        target: For GP sites what their inducing variables make of the model:
            `"exact"`, `"sparse"`, `"basis"`; else `None`.
        whitened: Whether it is a GP site that holds `v`.
        integrated: Whether it is no GP site but asks Gaussian guides for a belief.
        inner: Whether it is a GP site whose function is passed on to another layer.
        row_local: Whether it shares a plate with an observed site, so that its rows are
            those of the data.
        plates: Names of the subsampled plates around it, with their axis in the value
            counted from the left.
        discrete: Whether its values are labels or counts, which nothing transforms.
    """

    shape: tuple[int, ...]
    unconstrained_shape: tuple[int, ...]
    dtype: Any
    transform: Any
    target: str | None
    whitened: bool
    integrated: bool
    inner: bool
    row_local: bool
    plates: dict[str, int]
    discrete: bool = False

    @property
    def is_gp(self) -> bool:
        return self.target is not None

    @property
    def is_real(self) -> bool:
        """Whether the support is the real line, so that nothing is transformed."""
        if self.discrete:
            return False
        transform = self.transform
        while isinstance(transform, IndependentTransform):
            transform = transform.base_transform
        return isinstance(transform, IdentityTransform)


class Plate(NamedTuple):
    """A plate and how much of it one call of the model sees."""

    size: int
    subsample_size: int


class Structure(NamedTuple):
    """The sites of a model.

    Attributes:
        latents: Latent sites by name, noise sites left out.
        noise: Shapes of the sites that are drawn afresh (`gpx.propagate`).
        observed: Names of the observed sites that hold data.
        params: Names of `numpyro.param`s.
        plates: The subsampled plates.
        row_plates: The plates around observed sites, subsampled or not.
    """

    latents: dict[str, LatentSite]
    noise: dict[str, tuple[int, ...]]
    observed: tuple[str, ...]
    params: tuple[str, ...]
    plates: dict[str, Plate]
    row_plates: dict[str, Plate]

    @property
    def gps(self) -> tuple[str, ...]:
        """Names of the GP sites."""
        return tuple(name for name, site in self.latents.items() if site.is_gp)

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the latent sites that guides draw: all but GPs and integrated."""
        return tuple(
            name
            for name, site in self.latents.items()
            if not (site.is_gp or site.integrated)
        )

    @property
    def discrete(self) -> tuple[str, ...]:
        """Names of the latent sites whose values are labels or counts."""
        return tuple(name for name, site in self.latents.items() if site.discrete)

    @property
    def integrated(self) -> tuple[str, ...]:
        """Names of the other sites that Gaussian guides hold a belief about."""
        return tuple(name for name, site in self.latents.items() if site.integrated)

    @property
    def global_sites(self) -> tuple[str, ...]:
        """Names of the latent sites that new data share with the training data."""
        return tuple(n for n, site in self.latents.items() if not site.row_local)

    @property
    def row_sites(self) -> tuple[str, ...]:
        """Names of the latent sites that each row of the data has of its own."""
        return tuple(n for n, site in self.latents.items() if site.row_local)

    def observed_site(self, site: str | None = None) -> str:
        """The observed site called `site`, or the only one."""
        names = self.observed
        if site is None and len(names) == 1:
            return names[0]
        if not names:
            raise ValueError(
                "The model observes no data that could be predicted or scored; use "
                "`fit.draws()`."
            )
        if site not in names:
            raise ValueError(
                f"`site` must be one of the observed sites {list(names)}; got {site!r}."
            )
        return site

    def unravel(self, names, vector) -> dict:
        """Values of these sites on the real line, from one vector."""
        sites = {name: self.latents[name] for name in names}
        template = {
            n: jnp.zeros(site.unconstrained_shape, site.dtype)
            for n, site in sites.items()
        }
        return ravel_pytree(template)[1](vector)

    def without_rows(self) -> Structure:
        """The structure without the latent sites of the rows."""
        kept = {name: self.latents[name] for name in self.global_sites}
        return self._replace(latents=kept)

    @property
    def local(self) -> dict[str, dict[str, int]]:
        """Latent sites inside a subsampled plate, with the axes of these plates."""
        return {n: site.plates for n, site in self.latents.items() if site.plates}

    def constrain(self, unconstrained: dict) -> dict:
        """Values on their supports from values on the real line."""
        return {n: self.latents[n].transform(z) for n, z in unconstrained.items()}

    def unconstrain(self, values: dict) -> dict:
        """The inverse of `constrain`."""
        return {n: self.latents[n].transform.inv(x) for n, x in values.items()}


def structure_of(found: Call | Trace, *, discrete: bool = False) -> Structure:
    """The sites of a call, or of its trace; nothing is computed.

    Args:
        found: The call or its trace.
        discrete: Whether latent sites may be discrete: where there are draws of them
            already. What is to be fitted here may have none.
    """
    trace = found.abstract_trace() if isinstance(found, Call) else found
    every = _plates(trace)
    plates = {n: p for n, p in every.items() if p.subsample_size < p.size}
    targets = _targets(trace)
    row_plates = {
        frame.name: every[frame.name]
        for name in targets
        for frame in trace[name]["cond_indep_stack"]
        if frame.name in every
    }
    inner = frozenset().union(*(m.inner for m in marked(trace, Noise).values()))
    latents, noise, observed, params = {}, {}, [], []
    for name, site in trace.items():
        if site["type"] == "param":
            params.append(name)
        if site["type"] != "sample":
            continue
        if site["is_observed"]:
            if name in targets:
                observed.append(name)
        elif find(site, Noise):
            noise[name] = jnp.shape(site["value"])
        else:
            if not discrete:
                _check_continuous(name, site["fn"])
            latents[name] = _latent_site(name, site, plates, row_plates, inner)
    names = tuple(observed), tuple(params)
    return Structure(latents, noise, *names, plates, row_plates)


def _targets(trace) -> list[str]:
    """Observed sites that hold data: made here, or inside a plate.

    Others, such as hyperparameters fixed by `handlers.condition`, count only if there
    is nothing else; a `numpyro.factor` never does.
    """
    observed = {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and not isinstance(site["fn"], Unit)
    }
    data = [
        name
        for name, site in observed.items()
        if made_here(site["fn"]) or site["cond_indep_stack"]
    ]
    return data or list(observed)


def _plates(trace):
    plates = {}
    for name, site in trace.items():
        if site["type"] == "plate":
            size, subsample_size = site["args"]
            plates[name] = Plate(
                size, size if subsample_size is None else subsample_size
            )
    return plates


def _check_continuous(name: str, fn) -> None:
    if not made_here(fn) and fn.support.is_discrete:
        raise ValueError(
            f"Site `{name}` is discrete ({type(fn).__name__}); the engines here need "
            "continuous latent sites. Marginalise it, or sample it with "
            "`numpyro.infer.DiscreteHMCGibbs` and make a fit of its draws: "
            "`gpx.Fit.from_mcmc(mcmc, X, y)`."
        )


def _latent_site(name, site, plates, row_plates, inner) -> LatentSite:
    fn, value = site["fn"], site["value"]
    if made_here(fn):
        raise ValueError(
            f"Site `{name}` has no targets. Pass them to the model, and to its `obs=`."
        )
    support = fn.support
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(support)):
        raise ValueError(
            f"The support of site `{name}` depends on other sites. Reparameterise it, "
            "for example as a scaled unit-interval variable."
        )
    transform = IdentityTransform() if support.is_discrete else biject_to(support)
    shape = jnp.shape(value)
    batch_ndim = len(shape) - len(fn.event_shape)
    axes = {
        frame.name: batch_ndim + frame.dim
        for frame in site["cond_indep_stack"]
        if frame.name in plates
    }
    gp = find(site, GPMark)
    return LatentSite(
        shape,
        transform.inverse_shape(shape),
        jnp.result_type(value),
        transform,
        None if gp is None else gp.prior.inducing.target,
        gp is not None and gp.whiten,
        find(site, Integrable) is not None,
        name in inner,
        any(frame.name in row_plates for frame in site["cond_indep_stack"]),
        axes,
        support.is_discrete,
    )
