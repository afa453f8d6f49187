"""blackjax samplers on NumPyro models.

Three kinds, told apart by what they are built from: a log density (`hmc`, `mala`,
`nuts`, ...), a Gaussian prior with a likelihood (`elliptical_slice`), and a gradient
estimator (`sgld`, `sghmc`, ...).
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.starts import init_to_prior_median
from numpyro_gpx.results.facts import (
    BIASED,
    EXACT,
    UNKNOWN,
    Facts,
    kernel_facts,
    kernel_params,
)

__all__ = ["Blackjax", "BlackjaxState", "algorithm_name", "approximation_of"]

# What is known of blackjax's algorithms, by the names of their modules.
_APPROXIMATIONS = {
    **dict.fromkeys(
        (
            "adjusted_mclmc", "adjusted_mclmc_dynamic", "barker", "dynamic_hmc",
            "elliptical_slice", "ghmc", "hmc", "mala", "marginal_latent_gaussian",
            "nuts", "periodic_orbital", "random_walk", "rmhmc", "slice",
        ),
        EXACT,
    ),
    **dict.fromkeys(("csgld", "mclmc", "sghmc", "sgld", "sgnht"), BIASED),
}  # fmt: skip


class BlackjaxState(NamedTuple):
    """State of one chain.

    Attributes:
        z: Unconstrained values by site.
        inner: The algorithm's own state.
        tuned: Parameters that adaptation found for this chain.
        key: Random key.
    """

    z: dict
    inner: Any
    tuned: dict
    key: jax.Array


class Blackjax(MCMCKernel):
    """A blackjax algorithm as a kernel for `numpyro.infer.MCMC`.

    Args:
        model: A NumPyro function.
        algorithm: A blackjax algorithm, e.g. `blackjax.hmc`.
        parameters: Its parameters, e.g. `{"step_size": 0.1, ...}`. For algorithms that
            `blackjax.window_adaptation` can tune (`hmc`, `nuts`), those left out are
            found in an adaptation of `num_warmup` steps before the first draw. For
            stochastic-gradient algorithms `step_size` is required.
        thinning: Steps of the algorithm for each recorded draw.
        init_strategy: Where chains start.
        init_values: Starting values by site, on their supports.
        params: Values of the model's `numpyro.param`s.

    Elliptical slice sampling needs every latent site to be a whitened GP site: fix the
    hyperparameters with `numpyro.handlers.condition`, or use it in
    `numpyro.infer.Gibbs`.
    """

    sample_field = "z"

    def __init__(
        self, model, algorithm, *, parameters: dict | None = None, thinning: int = 1,
        init_strategy=init_to_prior_median, init_values=None, params=None,
    ):  # fmt: skip
        self.model = model
        self.algorithm = algorithm
        self.parameters = dict(parameters or {})
        self.thinning = thinning
        self.init_strategy = init_strategy
        self.init_values = init_values or {}
        self.params = params
        self._kind = _kind(algorithm)

    @property
    def name(self) -> str:
        """Name of the algorithm, as blackjax calls its module."""
        return algorithm_name(self.algorithm)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        target = self._target(Call(self.model, model_args, model_kwargs or {}))
        if not is_prng_key(rng_key):
            raise ValueError(
                "Blackjax kernels run chains one after the other: pass "
                "`chain_method='sequential'` to MCMC."
            )
        key_init, key_adapt, key_inner, key_chain = jr.split(rng_key, 4)
        z = target.initial(key_init, self.init_strategy, self.init_values)
        z = {**z, **(init_params or {})}
        tuned: dict = {}
        if self._kind == "log_density" and self._adaptable():
            z, tuned = self._adapt(target, key_adapt, z, num_warmup)
        inner = self._inner_init(target, z, tuned, key_inner)
        return BlackjaxState(z, inner, tuned, key_chain)

    def sample(self, state, model_args, model_kwargs):
        target = self._target(Call(self.model, model_args, model_kwargs or {}))

        def step(_, state):
            key, key_step = jr.split(state.key)
            z, inner = self._inner_step(target, key_step, state)
            return BlackjaxState(z, inner, state.tuned, key)

        return jax.lax.fori_loop(0, self.thinning, step, state)

    def postprocess_fn(self, model_args, model_kwargs):
        call = Call(self.model, model_args, model_kwargs or {})
        return self._target(call).constrain

    def get_diagnostics_str(self, state):
        return self._kind.replace("_", " ")

    def _target(self, call: Call) -> Target:
        target = Target(call, params=self.params)
        if target.structure.plates and self._kind != "gradient":
            raise ValueError(
                "Only stochastic-gradient algorithms take minibatches; the model "
                f"subsamples {sorted(target.structure.plates)}. Leave `batch_size` out."
            )
        if target.structure.noise and self._kind != "gradient":
            raise ValueError(
                "The target must be deterministic; the model draws noise at "
                f"{sorted(target.structure.noise)}. Use `fit_nuts(noise_sets=...)`, "
                "SGHMC, or a stochastic-gradient algorithm."
            )
        return target

    def _build(self, target, tuned):
        if self._kind == "elliptical":
            _check_whitened(target)
            sizes = {n: target.structure.latents[n].shape for n in target.structure.gps}
            zeros, unravel = ravel_pytree(
                {n: jnp.zeros(shape) for n, shape in sizes.items()}
            )
            return self.algorithm(
                lambda flat: target.terms(unravel(flat))[1],
                mean=zeros,
                cov=jnp.ones_like(zeros),
                **self.parameters,
            )
        if self._kind == "gradient":
            return self.algorithm(_gradient_estimator(target), **self._built_from)
        return self.algorithm(target.log_density, **{**self.parameters, **tuned})

    def _inner_init(self, target, z, tuned, key):
        position = ravel_pytree(z)[0] if self._kind == "elliptical" else z
        algorithm = self._build(target, tuned)
        if "rng_key" in inspect.signature(algorithm.init).parameters:
            return algorithm.init(position, key)
        return algorithm.init(position)

    def _inner_step(self, target, key, state):
        algorithm = self._build(target, state.tuned)
        if self._kind == "gradient":
            key_batch, key_noise, key_step = jr.split(key, 3)
            batch = {"rows": draw_batch(key_batch, target.structure), "key": key_noise}
            inner = algorithm.step(key_step, state.inner, batch, **self._stepped_with)
        else:
            inner, _ = algorithm.step(key, state.inner)
        if self._kind == "elliptical":
            return ravel_pytree(state.z)[1](inner.position), inner
        return inner if isinstance(inner, dict) else inner.position, inner

    @property
    def _built_from(self):
        """The parameters that a stochastic-gradient algorithm is built from."""
        names = _arguments(self.algorithm)
        return {n: x for n, x in self.parameters.items() if n in names}

    @property
    def _stepped_with(self):
        """The parameters that its steps take: step size and temperature."""
        built = self._built_from
        return {n: x for n, x in self.parameters.items() if n not in built}

    def _adaptable(self):
        names = _arguments(self.algorithm)
        return "step_size" not in self.parameters and "inverse_mass_matrix" in names

    def _adapt(self, target, key, z, num_warmup):
        import blackjax

        warmup = blackjax.window_adaptation(
            self.algorithm, target.log_density, **self.parameters
        )
        (state, tuned), _ = warmup.run(key, z, num_steps=max(num_warmup, 100))
        # What was not tuned (numbers of steps and the like) is configuration, no array.
        names = ("step_size", "inverse_mass_matrix")
        return state.position, {name: tuned[name] for name in names}


def _kind(algorithm) -> str:
    """What the algorithm is built from, read off its first argument's name."""
    parameters = _arguments(algorithm)
    first = parameters[0]
    if first in ("logdensity_fn", "log_density_fn"):
        return "log_density"
    if first in ("loglikelihood_fn", "loglikelihood"):
        return "elliptical"
    if first in ("grad_estimator", "gradient_estimator"):
        return "gradient"
    raise ValueError(
        "`algorithm` must be a blackjax sampler built from a log density, a log "
        f"likelihood with a Gaussian prior, or a gradient estimator; its arguments are "
        f"{parameters}."
    )


def approximation_of(algorithm) -> str:
    """How the draws of a blackjax algorithm relate to the target density."""
    return _APPROXIMATIONS.get(algorithm_name(algorithm), UNKNOWN)


def algorithm_name(algorithm) -> str:
    """Name of an algorithm, as blackjax calls its module."""
    return _inner(algorithm).__module__.rsplit(".", 1)[-1]


@kernel_facts.register
def _(kernel: Blackjax) -> Facts:
    settings = {
        n: x for n, x in kernel.parameters.items() if isinstance(x, int | float)
    }
    settings["thinning"] = kernel.thinning
    return Facts(kernel.name, approximation_of(kernel.algorithm), settings)


@kernel_params.register
def _(kernel: Blackjax) -> dict:
    return dict(kernel.params or {})


def _arguments(algorithm) -> list[str]:
    return list(inspect.signature(_inner(algorithm)).parameters)


def _inner(algorithm):
    # blackjax wraps its samplers; the function with the real arguments is inside.
    return getattr(algorithm, "differentiable", algorithm)


def _gradient_estimator(target):
    def estimate(z, batch):
        def log_density(z):
            return target.log_density(z, key=batch["key"], batch=batch["rows"])

        return jax.grad(log_density)(z)

    return estimate


def _check_whitened(target):
    others = [n for n, site in target.structure.latents.items() if not site.whitened]
    if others:
        raise ValueError(
            "Elliptical slice sampling needs whitened GP sites only; the model also "
            f"has {others}. Leave `whiten=True`, fix hyperparameters with "
            "`numpyro.handlers.condition`, or sample in turns with "
            "`numpyro.infer.Gibbs`."
        )
