r"""What all Gaussian guides share: sites, :math:`q(\theta)`, draws and quantiles.

A guide says what it believes of each GP site given :math:`\theta`; this file does the
rest. Hyperparameters are Gaussian on the real line, or points.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_gpx import checks
from numpyro_gpx.beliefs import Belief, DiagonalBelief
from numpyro_gpx.guides.parts.base import SiteGuide
from numpyro_gpx.guides.parts.factors import dense_factor
from numpyro_gpx.guides.parts.transport import GaussianTransport
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.starts import init_to_prior_median, initial_values
from numpyro_gpx.sites.marks import AUXILIARY, Held, as_infer

__all__ = ["GaussianGuide"]

# Standard deviation of q(theta) on the real line before training: small enough that
# early draws stay near the starting point.
_INITIAL_SCALE = 0.1


class GaussianGuide(SiteGuide):
    r"""Base of the guides with :math:`q(\theta)\,q(v \mid \theta)`, all Gaussian.

    Args:
        model: The model.
        theta: Family of :math:`q(\theta)` on the real line: `"point"` (a MAP estimate
            on the support), `"mean_field"` or `"full"`.
        prefix: Names parameters: `{site}_{prefix}_{part}`.
        init_loc_fn: Where the hyperparameters start (a NumPyro init strategy).
    """

    can_transport = True
    # What it is as a map.
    transport_kind: type[GaussianTransport] = GaussianTransport
    # Whether its beliefs about GPs know nothing of what is added to these.
    factorised = False
    # Whether its beliefs about GPs follow hyperparameters of their mean functions.
    follows_means = False

    def __init__(
        self, model, *, theta, prefix="auto", init_loc_fn=init_to_prior_median
    ):
        checks.one_of("theta", theta, ("point", "mean_field", "full"))
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self.theta = theta

    @classmethod
    def named(cls, name: str) -> type[GaussianGuide]:
        """The Gaussian guide of this name, for saved fits."""
        # A user's class may have the same name.
        ours = __name__.rpartition(".parts")[0]
        kinds = [k for k in cls.__subclasses__() if k.__module__.startswith(ours)]
        return {kind.__name__: kind for kind in kinds}[name]

    @property
    def config(self) -> dict[str, Any]:
        return {"theta": self.theta, "prefix": self.prefix}

    @property
    def local_advice(self):
        wrapped = f"`gpx.guides.UnscentedLatent({type(self).__name__}(model))`"
        return f"Fit without `batch_size`, or wrap it: {wrapped}."

    @abc.abstractmethod
    def beliefs(self, theta: dict, call: Call) -> tuple[Group, ...]:
        """What is believed of all GP sites, given the hyperparameters."""

    def held(self, theta: dict, call: Call, latents: dict) -> tuple[Held, ...]:
        """What the bound may know of the GP sites: beliefs, and more.

        Args:
            theta: Hyperparameters.
            call: The model with its arguments.
            latents: `LatentInput`s by site; only guides that look at the data need it.
        """
        return tuple(Held(group) for group in self.beliefs(theta, call))

    def transport(self, params, call, root=None):
        if self.structure.row_sites:
            return None
        return self.transport_kind(self, params, call, root)

    def held_of(self, theta: dict, call: Call) -> tuple[Held, ...]:
        """What is held of all sites but hyperparameters, where rows have none."""
        return tuple(self._held(theta, call, {}))

    def theta_root(self, call) -> tuple[Array, Array | None]:
        """Mean of the hyperparameters on the real line, and a root of their covariance.

        Points have none.
        """
        loc, scale = self._theta_params(call)
        return loc, jnp.diag(scale) if self.theta == "mean_field" else scale

    def __call__(self, *args, **kwargs):
        call = self._heard(*args, **kwargs)
        theta = self._sample_theta(call)
        rows, latents = self._sample_rows(call)
        values = {**theta, **rows}
        for held in self._held(theta, call, latents):
            values |= self._sample_held(held)
        return values

    def _sample_held(self, held: Held) -> dict:
        """Draw the sites of a group: each by itself, or all of them jointly."""
        group = held.group
        if not group.is_joint:
            ((name, belief),) = group.beliefs.items()
            fn = belief.distribution()
            return {name: numpyro.sample(name, fn, infer=as_infer(held))}
        name = f"_{self.prefix}_{'_'.join(group.beliefs)}"
        marks = {**AUXILIARY, **as_infer(held)}
        drawn = group.split(numpyro.sample(name, group.distribution(), infer=marks))
        # The joint draw carries the density.
        return {
            site: numpyro.sample(site, dist.Delta(x, event_dim=x.ndim))
            for site, x in drawn.items()
        }

    def quantiles(self, params, quantiles, *args, **kwargs):
        """Quantiles `(Q, ...)` of each site's entries.

        For hyperparameters these are the marginal ones; for GP sites those of
        `q(v | theta)` at the median hyperparameters.
        """
        call = self._recall(*args, **kwargs)
        levels = jnp.asarray(quantiles)
        with handlers.block(), handlers.seed(rng_seed=0):
            with handlers.substitute(data=params):
                q = self._theta_distribution(call)
                if q is None:
                    found, middle = {}, {}
                else:
                    loc, sd = q
                    found = self._theta_quantiles(loc, sd, levels)
                    middle = self.unravel(loc)
                with handlers.seed(rng_seed=0):
                    _, latents = self._sample_rows(call)
                for held in self._held(middle, call, latents):
                    for name, belief in held.group.beliefs.items():
                        spread = jnp.sqrt(belief.variances())
                        shape = (-1,) + (1,) * spread.ndim
                        step = jax.scipy.special.ndtri(levels).reshape(shape)
                        found[name] = belief.mean + step * spread
        return found

    def _sample_rows(self, call) -> tuple[dict, dict]:
        """Draws of the rows' own latent sites, and their `LatentInput`s; none here."""
        return {}, {}

    def _held(self, theta, call, latents):
        """What is held of GP sites, and of others that ask for a belief."""
        yield from self.held(theta, call, latents)
        yield from self.integrated_held(call)

    def integrated_held(self, call) -> tuple[Held, ...]:
        """What is held of sites that ask for a belief and are no GPs."""
        return tuple(
            Held(Group.alone(name, self._plain_belief(name, call)))
            for name in self.structure.integrated
        )

    def _plain_belief(self, name, call) -> Belief:
        """Independent Gaussians that start at the site's starting value."""

        def start(key):
            found = initial_values(
                call, self.structure, key,
                init_strategy=self.init_loc_fn,
            )  # fmt: skip
            return found[name]

        loc = numpyro.param(f"{name}_{self.prefix}_loc", jax.jit(start))
        scale = numpyro.param(
            f"{name}_{self.prefix}_scale",
            jnp.full_like(loc, _INITIAL_SCALE),
            constraint=constraints.softplus_positive,
        )
        return DiagonalBelief(loc, scale)

    def _theta_quantiles(self, loc, sd, levels) -> dict:
        """Quantiles on the supports; a falling transform turns the levels around."""
        steps = jax.scipy.special.ndtri(levels)[:, None]
        rising = jax.vmap(self.unravel)(loc + sd * steps)
        falling = jax.vmap(self.unravel)(loc - sd * steps)
        low, high = self.unravel(loc - 1.0), self.unravel(loc + 1.0)
        return {
            name: jnp.where(high[name] >= low[name], rising[name], falling[name])
            for name in rising
        }

    def _sample_theta(self, call) -> dict:
        """Register the hyperparameters; one joint draw, then a `Delta` for each."""
        names = self.structure.hyperparameters
        if not names:
            return {}
        loc, scale = self._theta_params(call)
        if self.theta == "point":
            z = loc
        else:
            # Their constraints hold by construction; NumPyro's check of them would
            # compile dozens of small programs where they are concrete.
            q = (
                dist.Normal(loc, scale, validate_args=False).to_event(1)
                if self.theta == "mean_field"
                else dist.MultivariateNormal(loc, scale_tril=scale, validate_args=False)
            )
            z = numpyro.sample(f"_{self.prefix}_theta", q, infer=AUXILIARY)
        drawn = self.unravel_unconstrained(names, z)
        # The joint draw carries the density; the change of variables is left.
        return self.register(drawn, with_density=self.theta != "point")

    def _theta_params(self, call):
        loc = self.theta_loc(call)
        if self.theta == "point":
            return loc, None
        if self.theta == "mean_field":
            return loc, numpyro.param(
                f"theta_{self.prefix}_scale",
                jnp.full_like(loc, _INITIAL_SCALE),
                constraint=constraints.softplus_positive,
            )
        return loc, numpyro.param(
            f"theta_{self.prefix}_scale_tril",
            _INITIAL_SCALE * jnp.eye(loc.shape[0], dtype=loc.dtype),
            constraint=dense_factor,
        )

    def _theta_distribution(self, call):
        """Mean and standard deviation of the hyperparameters on the real line."""
        if not self.structure.hyperparameters:
            return None
        loc, scale = self._theta_params(call)
        if scale is None:
            return loc, jnp.zeros_like(loc)
        sd = scale if scale.ndim == 1 else jnp.linalg.norm(scale, axis=-1)
        return loc, sd

    def unravel(self, z) -> dict:
        """Hyperparameters on their supports from the unconstrained vector."""
        names = self.structure.hyperparameters
        return self.structure.constrain(self.unravel_unconstrained(names, z))
