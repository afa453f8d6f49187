"""What a fit knows of the posterior: chains of draws, or a guide with parameters.

Both give draws, and both give *components* for predictions: a dictionary of site
values, draws or beliefs, with a leading axis over components that are averaged.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_gpx import checks
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call, site_log_prob
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.latent_inputs import LatentInput
from numpyro_gpx.sites.marks import Held, find, held_beliefs, is_auxiliary

__all__ = ["ChainPosterior", "GuidePosterior", "Moments", "Posterior"]

# Draws of the hyperparameters that predictions average over when q(theta) is Gaussian.
_NUM_COMPONENTS = 100
# Draws of a chain that predictions average over, evenly thinned.
_MAX_CHAIN_COMPONENTS = 1000


class Moments(NamedTuple):
    """Posterior means and standard deviations, of the shape of a site."""

    mean: np.ndarray
    sd: np.ndarray


class Posterior(abc.ABC):
    """Draws by chain, and components for predictions."""

    independent: bool

    @abc.abstractmethod
    def chains(self, num_draws: int | None = None) -> dict[str, np.ndarray]:
        """Draws `(chains, draws, ...)` by site."""

    @abc.abstractmethod
    def components(
        self, num_components: int | None = None, *, random_rows: bool = False
    ) -> dict[str, Any]:
        """Site values with a leading axis; the same at each call.

        Args:
            num_components: How many.
            random_rows: Whether the model draws anything for each component, so that
                one would not do even if the posterior has nothing random.
        """

    @abc.abstractmethod
    def sample(self, key, num_draws: int) -> dict[str, Any]:
        """Draws `(num_draws, ...)` by site, chosen by `key`."""

    def moments(self, site: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each entry of a site."""
        draws = self.chains()[site]
        return draws.mean(axis=(0, 1)), draws.std(axis=(0, 1))

    @abc.abstractmethod
    def weighted(self, num_draws: int) -> tuple[dict, np.ndarray | None]:
        """Draws `(S, ...)` with the log density `(S,)` they were drawn from.

        `None` for samplers, whose draws come from the target itself.
        """


class ChainPosterior(Posterior):
    """Draws of a sampler.

    Args:
        draws: `(chains, draws, ...)` by site.
        independent: Whether they are independent draws of a saved guide.
        fixed: Sites that were not sampled but fixed.
    """

    def __init__(
        self, draws: dict, *, independent: bool = False, fixed: tuple[str, ...] = ()
    ):
        self.draws = {name: np.asarray(x) for name, x in draws.items()}
        self.independent = independent
        self.fixed = fixed

    def chains(self, num_draws=None):
        if num_draws is None or not self.draws:
            return self.draws
        checks.at_least("num_draws", num_draws, 1)
        num_chains, length = next(iter(self.draws.values())).shape[:2]
        index = _evenly(length, -(-num_draws // num_chains))
        return {name: x[:, index] for name, x in self.draws.items()}

    def components(self, num_components=None, *, random_rows=False):
        if not self.draws:  # a model without latent sites
            return {}
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in self.draws.items()}
        total = next(iter(flat.values())).shape[0]
        index = _evenly(total, _number(num_components, _MAX_CHAIN_COMPONENTS))
        return {name: jnp.asarray(x[index]) for name, x in flat.items()}

    def sample(self, key, num_draws):
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in self.draws.items()}
        total = next(iter(flat.values())).shape[0] if flat else 1
        index = jr.choice(key, total, (num_draws,), replace=num_draws > total)
        return {name: jnp.asarray(x)[index] for name, x in flat.items()}

    def weighted(self, num_draws):
        return self.components(num_draws), None


class GuidePosterior(Posterior):
    """A guide and its trained parameters.

    Args:
        guide: Any NumPyro guide.
        params: Values of its parameters, and of the model's.
        call: The call that it was trained on, with the jitter of the fit.
        key: Fixes the draws.
    """

    independent = True

    def __init__(self, guide, params: dict, call: Call, *, key):
        self.guide = guide
        self.params = params
        self.call = call
        self.key = key

    def _run(self, fn, *args):
        return run(fn, self.guide, self.params, self.call, *args)

    def chains(self, num_draws=None):
        num_draws = 1000 if num_draws is None else num_draws
        checks.at_least("num_draws", num_draws, 1)
        num_chains = 4  # diagnostics compare chains; these are independent draws
        length = -(-num_draws // num_chains)
        keys = jr.split(self.key, num_chains * length)
        draws, _ = self._run(_draw, keys)
        return {
            name: np.asarray(x).reshape(num_chains, length, *x.shape[1:])
            for name, x in draws.items()
        }

    def components(self, num_components=None, *, random_rows=False):
        number = _number(num_components, _NUM_COMPONENTS)
        kinds = self._kinds
        if not random_rows and all(k.latent is not None or not k.drawn for k in kinds):
            number = 1
        keys = jr.split(self.key, number)
        return self._run(_beliefs, keys)

    def deterministic_given_beliefs(self) -> bool:
        """Whether nothing but beliefs is random: one component then says it all."""
        return not any(kind.drawn for kind in self._kinds)

    def deterministic_objective(self) -> bool:
        """Whether the bound has no noise: latent inputs are integrated by a rule."""
        return not any(
            kind.drawn if kind.latent is None else kind.latent == "random"
            for kind in self._kinds
        )

    def integrates(self) -> bool:
        """Whether the bound has expectations that are not averages over draws."""
        return any(kind.belief or kind.latent is not None for kind in self._kinds)

    def integrates_latents(self) -> bool:
        """Whether the guide has latent inputs and a rule for them."""
        return any(kind.latent is not None for kind in self._kinds)

    def closed_form_latents(self) -> bool:
        """Whether expectations over all latent inputs are closed forms."""
        return all(kind.latent in (None, "closed") for kind in self._kinds)

    @functools.cached_property
    def _kinds(self) -> list[_Kind]:
        """What the guide does with each of its sites; traced once."""
        kinds: list[_Kind] = []

        def look(key):
            trace = _guide_trace(self.guide, self.params, self.call, key)
            kinds.extend(_Kind.of(s) for s in trace.values() if s["type"] == "sample")

        with one_at_a_time():
            jax.eval_shape(look, self.key)
        return kinds

    def moments(self, site):
        known = self._run(_latent_moments, self.key, site)
        return super().moments(site) if known is None else known

    def sample(self, key, num_draws):
        return self._run(_draw, jr.split(key, num_draws))[0]

    def weighted(self, num_draws):
        if not getattr(self.guide, "has_density", True):  # NumPyro's own have one
            raise ValueError(
                f"{type(self.guide).__name__} has no density, which weights of its "
                "draws (`loo`) need. Compare fits by `fit.predict(X_test).log_prob("
                "y_test)`, or use `gpx.guides.WhitenedGaussian` or a sampler."
            )
        keys = jr.split(self.key, num_draws)
        return self._run(_draw, keys)


class _Kind(NamedTuple):
    """How a guide treats a site.

    Attributes:
        drawn: Whether its value is random and no belief stands for it.
        belief: Whether one does.
        latent: For latent inputs whether their rule has `"fixed"` or `"random"` points,
            or a `"closed"` form; else `None`.
    """

    drawn: bool
    belief: bool
    latent: str | None

    @classmethod
    def of(cls, site) -> _Kind:
        point = isinstance(_innermost(site["fn"]), dist.Delta)
        latent = find(site, LatentInput)
        points = None
        if latent is not None:
            points = "random" if latent.random else "fixed"
            points = "closed" if latent.points is None else points
        belief = find(site, Held) is not None
        return cls(not belief and not point, belief, points)


def _innermost(fn):
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def _number(num_components, default):
    if num_components is None:
        return default
    checks.at_least("num_components", num_components, 1)
    return num_components


def _evenly(length, number):
    return np.unique(
        np.linspace(0, length - 1, min(number, length)).round().astype(int)
    )


def _guide_trace(guide, params, call, key):
    with handlers.block():
        return call.trace(params, key, model=guide)


def _visible(trace):
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and not is_auxiliary(site)
    }


def _latent_moments(guide, params, call, key, site):
    """Moments of a latent input that the guide has a Gaussian belief about."""
    found = _guide_trace(guide, params, call, key)[site]
    latent = find(found, LatentInput)
    if latent is None or not latent.unconstrained:
        return None
    shape = found["value"].shape
    belief = latent.belief
    return belief.mean.reshape(shape), jnp.sqrt(belief.var).reshape(shape)


def _draw(guide, params, call, keys):
    """Draws of every site, with the log density of the whole draw."""

    def one(key):
        trace = _guide_trace(guide, params, call, key)
        log_q = sum(
            jnp.sum(site_log_prob(site))
            for site in trace.values()
            if site["type"] == "sample"
        )
        return {n: site["value"] for n, site in _visible(trace).items()}, log_q

    return jax.lax.map(one, keys)  # without `vmap`: see `_map` in `predict`


def _beliefs(guide, params, call, keys):
    """Beliefs where the guide has them, draws elsewhere."""

    def one(key):
        trace = _guide_trace(guide, params, call, key)
        return {n: site["value"] for n, site in _visible(trace).items()} | held_beliefs(
            trace
        )

    return jax.lax.map(one, keys)  # without `vmap`: see `_map` in `predict`
