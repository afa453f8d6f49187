"""What an observed site says of its rows, whatever its distribution.

`observation(site)` is read off a site of a trace: one made by `gpx.observe` or
`gpx.exact`, or any other of NumPyro's, with or without `handlers.mask` and
`handlers.scale` around it. Nobody else asks what kind of site it is.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float
from numpyro.distributions import constraints

from numpyro_gpx.likelihoods import Gaussian as GaussianLikelihood
from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.processes.collapse import GaussianRows
from numpyro_gpx.processes.latent import Gaussian, Latent
from numpyro_gpx.sites.expected_likelihood import ExpectedLikelihood
from numpyro_gpx.sites.marginals import Conditioned, ExactRegression
from numpyro_gpx.sites.predictive import (
    FromDistribution,
    FromLikelihood,
    Predictive,
)
from numpyro_gpx.sites.target_checks import (
    Checker,
    FiniteChecker,
    LikelihoodChecker,
    PlainChecker,
    TakenChecker,
)

__all__ = ["Observation", "made_here", "observation"]


class Observation(eqx.Module):
    """What an observed site says of its rows, given a value of every other site.

    Attributes:
        name: Of the site, for messages.
        scale: Factor of the site's term: `handlers.scale`, subsampled plates.
        mask: What `handlers.mask` lets through; `None` for everything.
    """

    if TYPE_CHECKING:
        name: str
        scale: Any
        mask: Any

    # The likelihood, where there is one.
    likelihood: ClassVar[Likelihood | None] = None
    # Whether predictions condition on the training rows.
    needs_training: ClassVar[bool] = False

    @abc.abstractmethod
    def _terms(self, y) -> Float[Array, " N"]: ...

    @abc.abstractmethod
    def _log_density(self, y) -> Float[Array, " N"]: ...

    @abc.abstractmethod
    def _counts(self) -> Bool[Array, " N"]: ...

    @abc.abstractmethod
    def latent(self) -> Latent:
        """The latent function at the rows."""

    def joint_latent(self) -> Latent:
        """The latent function with its rows jointly, for draws of functions."""
        return self.latent()

    def gaussian_rows(self, asker: str) -> GaussianRows:
        """What a closed form needs of rows with Gaussian noise.

        Args:
            asker: Who asks, for messages.
        """
        raise ValueError(
            f"{asker} needs `gpx.observe` with a Gaussian likelihood at site "
            f"`{self.name}`; got {self._described}. Use WhitenedGaussian or "
            "ConditionalGaussian."
        )

    @property
    @abc.abstractmethod
    def _described(self) -> str: ...

    @abc.abstractmethod
    def predictive(self) -> Predictive:
        """The distribution of new targets, row by row."""

    @abc.abstractmethod
    def checker(self) -> Checker:
        """What knows whether concrete targets are such as the site can hold."""

    def taken(self) -> TakenChecker:
        """What knows whether the rows take columns that are there."""
        return TakenChecker(())

    @property
    @abc.abstractmethod
    def support(self) -> constraints.Constraint:
        """Where one target lives."""

    def terms(self, y) -> Float[Array, " N"]:
        """What the target density sums over the rows: weights, mask and plate scale."""
        rows = self._terms(y)
        if self.mask is not None:
            rows = jnp.where(self._row_mask(rows.shape), rows, 0.0)
        return rows if self.scale is None else self.scale * rows

    def log_density(self, y) -> Float[Array, " N"]:
        """Log density of each row, `f` integrated inside the logarithm; no weights."""
        return self._log_density(y)

    def counts(self) -> Bool[Array, " N"]:
        """Which rows are data, and not left out by a mask or a weight of 0."""
        counts = self._counts()
        if self.mask is None:
            return counts
        return counts & self._row_mask(counts.shape)

    def parts(self) -> dict[str, Latent]:
        """The summands of the latent function by label."""
        latent = self.latent()
        if not isinstance(latent, Gaussian) or not latent.origin:
            raise ValueError(
                f"The latent function at site `{self.name}` is not a sum of GPs; only "
                "sums and sum kernels can be taken apart."
            )
        parts: dict[str, Latent] = {}
        for gp, X in latent.origin:
            number = len(gp.prior.kernels[0].parts)
            for j in range(number):
                label = gp.name if number == 1 else f"{gp.name}[{j}]"
                parts[label] = gp.part(j, X)
        return parts

    def condition(self, y) -> Any:
        """What predictions need of the training rows, once; `None` if nothing."""
        return None

    def untrained(self) -> Any:
        """As `condition` of no rows at all."""
        return None

    def given(self, state) -> Observation:
        """This site at new rows, given what the training rows came to."""
        return self

    def leave_one_out(self, y) -> Float[Array, " N"] | None:
        """Log density of each row given the others in closed form, if there is one."""
        return None

    def _row_mask(self, shape):
        mask = jnp.asarray(self.mask)
        return jnp.broadcast_to(mask, shape) if mask.ndim <= len(shape) else mask


class FromExpectedLikelihood(Observation):
    """A site of `gpx.observe`."""

    name: str = eqx.field(static=True)
    fn: ExpectedLikelihood
    scale: Any
    mask: Any

    @property
    def likelihood(self):  # type: ignore[override]
        return self.fn.likelihood

    @property
    def support(self):
        return self.fn.likelihood.support

    @property
    def _described(self):
        return type(self.fn.likelihood).__name__

    def gaussian_rows(self, asker):
        likelihood, latent = self.fn.likelihood, self.fn.latent
        if not isinstance(likelihood, GaussianLikelihood):
            return super().gaussian_rows(asker)
        if not likelihood.is_conjugate:
            raise ValueError(
                f"{asker} needs a Gaussian likelihood with the identity as link at "
                f"site `{self.name}`; got {type(likelihood.link).__name__}. Use "
                "WhitenedGaussian or ConditionalGaussian."
            )
        if not isinstance(latent, Gaussian) or len(latent.origin) != 1:
            raise ValueError(
                f"{asker} needs the plain `f(X)` of one GP at site `{self.name}`; got "
                "sums, products or a known function. Use WhitenedGaussian."
            )
        factors = (self.scale, self.fn.weights, self.fn.keep, self.mask)
        known = tuple(x for x in factors if x is not None)
        ((gp, X),) = latent.origin
        return GaussianRows(gp, X, latent.shift, known, likelihood.scale)

    def _terms(self, y):
        return self.fn.log_prob(y)

    def _log_density(self, y):
        return self.fn.predictive_log_prob(y)

    def _counts(self):
        return self.fn.counts()

    def latent(self):
        return self.fn.latent

    def predictive(self):
        return FromLikelihood(self.fn.latent.bare(), self.fn.likelihood)

    def taken(self):
        return TakenChecker(self.fn.latent.taken)

    def checker(self):
        fn = self.fn
        keep, weights, offset = fn.keep, fn.weights, fn.offset
        return LikelihoodChecker(fn.likelihood, keep, weights, self.mask, offset)


class FromExactRegression(Observation):
    """A site of `gpx.exact`."""

    name: str = eqx.field(static=True)
    fn: ExactRegression
    scale: Any
    mask: Any
    state: Conditioned | None = None
    needs_training: ClassVar[bool] = True

    @property
    def support(self):
        return constraints.real

    @property
    def _described(self):
        return "`gpx.exact`, which has no function left to believe in"

    def _terms(self, y):
        # The rows depend on each other: what each adds given all others.
        return self.fn.leave_one_out_log_prob(y)

    def _log_density(self, y):
        return self.fn.leave_one_out_log_prob(y)

    def _counts(self):
        return jnp.ones(self.fn.event_shape, bool)

    def condition(self, y):
        return self.fn.conditioned(y)

    def untrained(self):
        return self.fn.no_rows()

    def given(self, state):
        return dataclasses.replace(self, state=state)

    def latent(self):
        return self.fn.latent_given(self._state)

    def joint_latent(self):
        return self.fn.latent_given(self._state, full_cov=True)

    @property
    def _state(self) -> Conditioned:
        if self.state is None:
            raise ValueError(
                "The latent function of `gpx.exact` is known given its training rows: "
                "`given(condition(y))`."
            )
        return self.state

    def parts(self):
        number = len(self.fn.kernel.parts)
        return {
            f"{self.name}[{j}]": self.fn.latent_given(self._state, part=j)
            for j in range(number)
        }

    def predictive(self):
        return FromLikelihood(self.latent(), GaussianLikelihood(self.fn.scale))

    def leave_one_out(self, y):
        return self.fn.leave_one_out_log_prob(y)

    def checker(self):
        return FiniteChecker()


class FromPlainSite(Observation):
    """Any other site of NumPyro's."""

    name: str = eqx.field(static=True)
    fn: dist.Distribution
    scale: Any
    mask: Any

    @property
    def _described(self):
        return f"a plain {type(self.fn).__name__}"

    @property
    def support(self):
        return self.predictive().support

    def _terms(self, y):
        return self.fn.log_prob(y)

    def _log_density(self, y):
        return self.fn.log_prob(y)

    def _counts(self):
        return jnp.ones(self.fn.batch_shape, bool)

    def latent(self):
        raise ValueError(
            f"Site `{self.name}` is a plain {type(self.fn).__name__}; its latent "
            "function is only known for sites made by `gpx.observe` or `gpx.exact`."
        )

    def predictive(self):
        return FromDistribution(self.fn)

    def checker(self):
        return PlainChecker(self.mask)


def made_here(fn: dist.Distribution) -> bool:
    """Whether a distribution is that of `gpx.observe` or `gpx.exact`."""
    found = observation({"name": "", "fn": fn, "scale": None})
    return not isinstance(found, FromPlainSite)


def observation(site: dict[str, Any]) -> Observation:
    """What an observed site of a trace says of its rows."""
    fn, mask = site["fn"], None
    while isinstance(fn, dist.MaskedDistribution | dist.ExpandedDistribution):
        if isinstance(fn, dist.MaskedDistribution):
            mask = fn._mask if mask is None else mask & fn._mask
        elif tuple(fn.batch_shape) != tuple(fn.base_dist.batch_shape):
            break  # really expanded: a plain site
        fn = fn.base_dist
    about = {"name": site["name"], "scale": site["scale"], "mask": mask}
    if isinstance(fn, ExpectedLikelihood):
        return FromExpectedLikelihood(fn=fn, **about)
    if isinstance(fn, ExactRegression):
        return FromExactRegression(fn=fn, **about)
    return FromPlainSite(fn=fn, **about)
