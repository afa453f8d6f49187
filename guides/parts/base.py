"""What all guides here share: the model's sites, arguments, draws and quantiles."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide
from numpyro.util import not_jax_tracer

from numpyro_gpx.guides.parts.transport import Transport
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.starts import init_to_prior_median, initial_values
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.sites.marks import GPMark, marked

__all__ = [
    "INNER_SCALE",
    "SiteGuide",
    "check_draws_all_rows",
    "set_up",
]

# Inner layers of a deep GP start nearly deterministic, in units of the prior's spread,
# so that the layers above see what the first one passes on (tutorial 4.4; Salimbeni &
# Deisenroth 2017, section 4).
INNER_SCALE = 1e-3

# Draws behind the quantiles of guides that have no closed form for them.
_QUANTILE_DRAWS = 1000


class SiteGuide(AutoGuide):
    """Base of the guides: an `AutoGuide` that knows the model's sites.

    Subclasses say in `__call__` how the sites are drawn.

    Args:
        model: The model.
        prefix: Names parameters: `{site}_{prefix}_{part}`.
        init_loc_fn: Where the hyperparameters start (a NumPyro init strategy).
    """

    # Whether the log densities of its sites are those of its draws, or a guess.
    has_density = True
    # Whether it is a map from standard normal vectors (`transport`).
    can_transport = False
    # Whether its beliefs can be weakened towards the prior.
    can_weaken = False
    # Where the learning rate of the default optimiser starts: 0.1 takes the fewest
    # steps on sparse regression, classification and a deep GP.
    learning_rate = 0.1
    # What it makes of the hyperparameters, where it has a choice.
    theta: str | None = None

    def __init__(self, model, *, prefix="auto", init_loc_fn=init_to_prior_median):
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self._structure: Structure | None = None
        self._call: Call | None = None

    @property
    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """Constructor arguments that a saved fit needs to rebuild the guide."""

    @classmethod
    def rebuild(cls, model, config: dict[str, Any]) -> SiteGuide:
        """The guide that has this `config`."""
        return cls(model, **config)

    @property
    def can_be_rebuilt(self) -> bool:
        """Whether `config` says it all."""
        return True

    def meaning(self, parameter: str) -> tuple:
        """What a parameter stands for: equal in guides that may start from each other.

        A mean of `v` and one of `u` have the same name, and so have a pseudo-target
        and a mean in different guides.
        """
        sites = self.structure
        whitened = tuple((name, sites.latents[name].whitened) for name in sites.gps)
        return type(self).__name__, parameter, sites.hyperparameters, whitened

    @property
    def local_advice(self) -> str:
        """What to do about latent sites inside a subsampled plate, for a message."""
        return "Fit without `batch_size`."

    @property
    def structure(self) -> Structure:
        """The model's sites; known once the guide was called or set up."""
        if self._structure is None:
            raise ValueError(
                "The guide does not know the model's sites yet; call "
                "`guide.setup(X, y)` with the model's arguments first."
            )
        return self._structure

    def setup(self, *args, **kwargs) -> None:
        """Learn the sites of the model; done by the first call. Computes nothing."""
        self.adopt(Program.unchecked(Call(self.model, args, kwargs)))

    def adopt(self, program: Program) -> None:
        """Learn the sites from a look at the model that was taken already."""
        structure = program.batched_structure
        if structure.local:
            raise ValueError(
                f"Sites {sorted(structure.local)} live inside a subsampled plate; "
                f"{type(self).__name__} covers global sites only. {self.local_advice}"
            )
        self.learn(structure, program.batched)

    def learn(self, structure: Structure, call: Call) -> None:
        """Take these sites for the model's; raise if the guide cannot serve them."""
        if "theta" in structure.gps:
            raise ValueError(
                "A GP site must not be called `theta`, the name of guides for the "
                "hyperparameters; call it `f`, say."
            )
        self._structure = structure
        if all(not_jax_tracer(leaf) for leaf in jax.tree.leaves(call)):
            self._call = call

    def sample_posterior(self, rng_key, params, *args, sample_shape=(), **kwargs):
        """Draws of all latent sites; see `numpyro.infer.autoguide.AutoGuide`."""
        call = self._recall(*args, **kwargs)

        def draw(key):
            return call.run(handlers.substitute(handlers.seed(self, key), data=params))

        if not sample_shape:
            return run(draw, rng_key)
        keys = jr.split(rng_key, jnp.zeros(sample_shape).size)
        draws = run(lambda keys: jax.lax.map(draw, keys), keys)
        return {n: x.reshape(sample_shape + x.shape[1:]) for n, x in draws.items()}

    def median(self, params, *args, **kwargs):
        """Median of each site's entries, as in `quantiles`."""
        return {
            n: x[0] for n, x in self.quantiles(params, [0.5], *args, **kwargs).items()
        }

    def quantiles(self, params, quantiles, *args, **kwargs):
        """Quantiles `(Q, ...)` of each site's entries, of 1000 draws."""
        draws = self.sample_posterior(
            jr.key(0), params, *args, sample_shape=(_QUANTILE_DRAWS,), **kwargs
        )
        levels = jnp.asarray(quantiles)
        return {n: jnp.quantile(x, levels, axis=0) for n, x in draws.items()}

    def transport(self, params: dict, call: Call, root=None) -> Transport | None:
        """The guide as a map from standard normal vectors; `None` if it is none.

        Args:
            params: Parameters of the guide and of the model.
            call: The model with its arguments.
            root: Of the hyperparameters' covariance, if the guide has none of its own.
        """
        return None

    def natural_pairs(self) -> tuple[tuple[str, str], ...]:
        """Parameters of Gaussian beliefs that natural gradients can move.

        Names of a mean `(*P, M)` and of a lower factor `(*P, M, M)` with the constraint
        `dense_factor`, or of standard deviations `(*P, M)`.
        """
        return ()

    def weakened(self, params: dict, strength) -> dict:
        """Parameters of the same guide that believes the data less.

        Args:
            params: Its parameters.
            strength: What its pseudo-observations count, between 0 and 1.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be weakened.")

    def start(self, names, key, call: Call) -> dict:
        """Where these sites start, on the real line."""
        found = initial_values(
            call, self.structure, key,
            init_strategy=self.init_loc_fn,
        )  # fmt: skip
        return self.structure.unconstrain({name: found[name] for name in names})

    @property
    def theta_name(self) -> str:
        """Name of the parameter that says where the hyperparameters are."""
        return f"theta_{self.prefix}_loc"

    def initial_theta(self, key, call):
        """Starting values of the hyperparameters on the real line, as one vector."""
        return ravel_pytree(self.start(self.structure.hyperparameters, key, call))[0]

    def theta_loc(self, call):
        """Where the hyperparameters are, a parameter: one vector on the real line."""
        start = jax.jit(lambda key: self.initial_theta(key, call))
        return numpyro.param(self.theta_name, start)

    def trace_given(self, values: dict, call):
        """The model's trace at `values` of its sites, GP sites without one at 0.

        Only the model's parameters are visible outside, so that they follow training.
        """
        zeros = {
            name: jnp.zeros(site.shape, site.dtype)
            for name, site in self.structure.latents.items()
            if site.is_gp or site.integrated
        }
        return self._trace({**zeros, **values}, call)

    def _trace(self, values: dict, call, key=None):
        key = jr.key(0) if key is None else key
        with handlers.block(hide_fn=lambda site: site["type"] != "param"):
            return call.trace(values, key)

    def inducing_inputs(self, values: dict, call) -> dict[str, Array]:
        """Inducing inputs `(M, D)` by GP site, columns of mean 0 and scale 1.

        Args:
            values: Hyperparameters on their supports, on which they may depend.
            call: The model with its arguments.
        """
        trace = self.trace_given(values, call)
        return {name: _standardised(Z) for name, Z in self._coordinates(trace).items()}

    def _coordinates(self, trace) -> dict[str, Array]:
        """Where the inducing variables are, by GP site; unit vectors if nowhere."""
        found = {}
        for name, mark in marked(trace, GPMark).items():
            Z = mark.prior.inducing.coordinates()
            found[name] = jnp.eye(mark.prior.inducing.size) if Z is None else Z
        return found

    def unravel_unconstrained(self, names, z) -> dict:
        """Values of these sites on the real line, from one vector."""
        return self.structure.unravel(names, z)

    def register(self, unconstrained: dict, *, with_density: bool = True) -> dict:
        """Register values drawn on the real line at their sites, as `Delta`s.

        Args:
            unconstrained: Values by site, whose joint density an auxiliary site has.
            with_density: Whether to add the density of the change of variables, or to
                treat the values as points.
        """
        values = {}
        for name, x in unconstrained.items():
            site = self.structure.latents[name]
            value = site.transform(x)
            log_density: ArrayLike = 0.0
            if with_density:
                log_density = -jnp.sum(site.transform.log_abs_det_jacobian(x, value))
            values[name] = numpyro.sample(
                name, dist.Delta(value, log_density, event_dim=jnp.ndim(value))
            )
        return values

    def _heard(self, *args, **kwargs) -> Call:
        """The model with these arguments; the first ones say what its sites are."""
        if self._structure is None:
            self.setup(*args, **kwargs)
        return Call(self.model, args, kwargs)

    def _recall(self, *args, **kwargs) -> Call:
        """The model with these arguments, or those the guide was first called with."""
        if args or kwargs:
            return self._heard(*args, **kwargs)
        if self._call is None:
            raise ValueError(
                "The guide does not know the model's arguments; pass them, as in "
                "`guide.sample_posterior(key, params, X, y, sample_shape=(100,))`."
            )
        return self._call


def check_draws_all_rows(guide: AutoGuide, batched: Structure) -> None:
    """Raise if a guide of NumPyro's would be trained on minibatches of the rows' sites.

    It keeps the plates of its first call, and draws the rows of a minibatch for ever.
    Ours say for themselves what they can do.
    """
    foreign = isinstance(guide, AutoGuide) and not isinstance(guide, SiteGuide)
    if foreign and batched.local:
        raise ValueError(
            f"Sites {sorted(batched.local)} live inside a subsampled plate, and "
            f"{type(guide).__name__} draws those of a minibatch alone. Fit without "
            "`batch_size`, or use `gpx.guides.UnscentedLatent(gpx.guides."
            "WhitenedGaussian(model))`."
        )


def set_up(guide: AutoGuide, program: Program) -> None:
    """Let a guide, NumPyro's own too, learn the model's sites from concrete arguments.

    NumPyro's keep the values of their first call, which must not be tracers of a
    compiled `init`.
    """
    check_draws_all_rows(guide, program.batched_structure)
    if isinstance(guide, SiteGuide):
        guide.adopt(program)
    elif isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        with handlers.block(), handlers.seed(rng_seed=0):
            program.batched.run(guide)


def _standardised(Z):
    """Columns of mean 0 and scale 1; a column without spread becomes 0."""
    centred = Z - jnp.mean(Z, axis=0)[None]
    var = jnp.mean(centred**2, axis=0)[None]
    # Means round, so that what is left of equal numbers need not be 0. The root has no
    # slope there: such columns are set aside before it.
    rounding = (10.0 * jnp.finfo(Z.dtype).eps) ** 2 * jnp.mean(Z**2, axis=0)[None]
    spread = var > rounding
    return jnp.where(spread, centred / jnp.sqrt(jnp.where(spread, var, 1.0)), 0.0)
