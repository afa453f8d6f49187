"""The model at posterior values: predictive distributions, densities, the bound.

Functions here are jitted at module level and take the model as a static argument, so
that repeated calls with equal shapes compile once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro.distributions as dist

from numpyro_gpx.distributions import ExactRegression, ExpectedLikelihood
from numpyro_gpx.functions import drawing_functions
from numpyro_gpx.infer.structure import inspect_model
from numpyro_gpx.infer.target import draw_batch, log_terms, trace_model
from numpyro_gpx.latents import GaussianLatent, MixtureLatent
from numpyro_gpx.linalg import jitter

__all__ = [
    "Pointwise",
    "Problem",
    "bound_estimates",
    "latent_draws",
    "parts_at",
    "pointwise",
    "replicated_draws",
    "row_densities",
    "sites_at",
]

# Components evaluated at once: enough to keep the cores busy, and bounded memory.
_BATCH = 16


class Problem(NamedTuple):
    """A model with what is needed to call it at new arguments.

    Attributes:
        model: The NumPyro function.
        params: Values of its `numpyro.param`s.
        train: Training arguments `(args, kwargs)`; only `gpx.exact` looks at them.
        site: The observed site in question.
        jitter: Relative jitter of the fit; `None` for the default.
    """

    model: Any
    params: dict
    train: tuple[tuple, dict]
    site: str
    jitter: float | None


class Pointwise(NamedTuple):
    """Densities of the training rows under S draws.

    Attributes:
        log_likelihood: Log predictive density of each row given the draw, `(S, N)`.
        expected_log_likelihood: What the target density sums over, `(S, N)`.
        log_joint: Log target density on the supports, `(S,)`.
        observed: Whether the row counts: any entry left in by `mask=`, and a weight
            above 0, `(S, N)`.
    """

    log_likelihood: jax.Array
    expected_log_likelihood: jax.Array
    log_joint: jax.Array
    observed: jax.Array


@eqx.filter_jit
def sites_at(problem: Problem, components, args, kwargs, key, *, latent: bool):
    """The observed site's distribution at new arguments, one for each component.

    Args:
        problem: The model.
        components: Site values with a leading axis.
        args: New arguments; targets left out.
        kwargs: New keyword arguments.
        key: For noise and row-local sites, which are drawn from their prior.
        latent: The distribution of the latent function instead of the targets.
    """

    def one(component, key):
        fn = _site(problem, component, args, kwargs, key)
        return _latent_marginals(fn) if latent else _without_sources(fn)

    return _map(one, components, key)


@eqx.filter_jit
def replicated_draws(problem: Problem, draws, key):
    """New targets at the training rows, one set for each draw, `(S, N, ...)`."""
    args, kwargs = problem.train

    def one(draw, key):
        key_site, key_target = jr.split(key)
        return _site(problem, draw, args, kwargs, key_site).sample(key_target)

    return _map(one, draws, key)


@eqx.filter_jit
def latent_draws(problem: Problem, components, args, kwargs, key):
    """Coherent draws of the latent function, one for each component, `(S, N, ...)`."""

    def one(component, key):
        key_functions, key_model = jr.split(key)
        with drawing_functions(key_functions):
            trace = _trace(problem, component, args, kwargs, key_model)
            fn = trace[problem.site]["fn"]
            if isinstance(fn, ExactRegression):
                train, y = _exact_training(problem, component, key_model)
                return fn.latent_given(train, y, full_cov=True).sample(key_functions)
            return _latent(problem.site, fn).mean

    return _map(one, components, key)


@eqx.filter_jit
def parts_at(problem: Problem, components, args, kwargs, key):
    """Marginals of each summand of the latent function, by label."""

    def one(component, key):
        trace = _trace(problem, component, args, kwargs, key)
        fn = trace[problem.site]["fn"]
        if isinstance(fn, ExactRegression):
            train, y = _exact_training(problem, component, key)
            parts = {
                f"{problem.site}[{j}]": fn.latent_given(train, y, part=j)
                for j in range(len(fn.kernel.parts))
            }
        else:
            parts = _gp_parts(_latent(problem.site, fn), problem.site)
        return {label: _normal(latent) for label, latent in parts.items()}

    return _map(one, components, key)


@eqx.filter_jit
def pointwise(problem: Problem, draws, key) -> Pointwise:
    """Densities of each training row under each draw."""
    args, kwargs = problem.train

    def one(draw, key):
        trace = _trace(problem, draw, args, kwargs, key)
        site = trace[problem.site]
        fn, y = site["fn"], site["value"]
        log_prior, log_likelihood = log_terms(trace)
        log_joint = log_prior + log_likelihood
        rows = expected = _row_densities(fn, y)
        if isinstance(fn, ExpectedLikelihood):
            scale = 1.0 if site["scale"] is None else site["scale"]
            expected = scale * fn.log_prob(y)
        return Pointwise(rows, expected, log_joint, _observed_rows(fn, rows))

    return _map(one, draws, key)


@eqx.filter_jit
def row_densities(problem: Problem, components, key):
    """Log predictive density of each training row by component, `(S, N)`.

    Components may be beliefs, unlike the draws of `pointwise`.
    """
    args, kwargs = problem.train

    def one(component, key):
        site = _trace(problem, component, args, kwargs, key)[problem.site]
        return _row_densities(site["fn"], site["value"])

    return _map(one, components, key)


def _row_densities(fn, y):
    if isinstance(fn, ExpectedLikelihood):
        return fn.predictive_log_prob(y)
    if isinstance(fn, ExactRegression):
        return fn.leave_one_out_log_prob(y)
    return fn.log_prob(y)


@eqx.filter_jit
def bound_estimates(model, guide, params, args, kwargs, relative_jitter, keys, loss):
    """One estimate of the bound for each key, on a fresh minibatch if there are any."""
    structure = inspect_model(model, args, kwargs)

    def one(key):
        key_batch, key_loss = jr.split(key)
        data = {**params, **draw_batch(key_batch, structure)}
        with jitter(relative_jitter):
            return -loss.loss(key_loss, data, model, guide, *args, **kwargs)

    return jax.lax.map(one, keys)


def _map(fn, components, key):
    """Evaluate `fn(component, key)` for each component, a bounded number at once."""
    leaves = jax.tree.leaves(components)
    number = leaves[0].shape[0] if leaves else 1  # a model without latent sites
    keys = jr.split(key, number)
    if number <= _BATCH:
        return jax.vmap(fn, axis_size=number)(components, keys)
    # Filled up to whole batches: `lax.map` would compile a remainder separately.
    rounds = -(-number // _BATCH)
    index = jnp.arange(rounds * _BATCH) % number
    batches = jax.tree.map(
        lambda x: x[index].reshape(rounds, _BATCH, *x.shape[1:]), (components, keys)
    )
    out = jax.lax.map(lambda pair: jax.vmap(fn)(*pair), batches)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:number], out)


def _trace(problem, component, args, kwargs, key):
    with jitter(problem.jitter):
        data = {**problem.params, **component}
        return trace_model(problem.model, args, kwargs, data, key)


def _site(problem, component, args, kwargs, key):
    fn = _trace(problem, component, args, kwargs, key)[problem.site]["fn"]
    if isinstance(fn, ExactRegression):
        train, y = _exact_training(problem, component, key)
        return fn.predictive(fn.latent_given(train, y))
    return fn


def _exact_training(problem, component, key):
    args, kwargs = problem.train
    site = _trace(problem, component, args, kwargs, key)[problem.site]
    return site["fn"], site["value"]


def _observed_rows(fn, rows):
    observed = jnp.ones(rows.shape, bool)
    if not isinstance(fn, ExpectedLikelihood):
        return observed
    if fn.keep is not None:
        keep = fn.keep if fn.keep.ndim == rows.ndim else jnp.any(fn.keep, axis=-1)
        observed = observed & keep
    return observed if fn.weights is None else observed & (fn.weights > 0.0)


def _latent(name, fn):
    if not isinstance(fn, ExpectedLikelihood):
        raise ValueError(
            f"Site `{name}` is a plain {type(fn).__name__}; its latent function is "
            "only known for sites made by `gpx.observe` or `gpx.exact`."
        )
    return fn.latent


def _latent_marginals(fn):
    return _normal(_latent("", fn))


def _normal(latent):
    if isinstance(latent, MixtureLatent):
        mixing = dist.Categorical(logits=latent.log_weights)
        means = jnp.moveaxis(latent.means, 0, -1)
        sds = jnp.sqrt(jnp.moveaxis(latent.variances, 0, -1))
        return dist.MixtureSameFamily(mixing, dist.Normal(means, sds))
    return dist.Normal(latent.mean, jnp.sqrt(latent.var))


def _without_sources(fn):
    if not isinstance(fn, ExpectedLikelihood):
        return fn
    latent = fn.latent
    if isinstance(latent, GaussianLatent):
        latent = GaussianLatent(latent.mean, latent.var)
    return ExpectedLikelihood(latent, fn.likelihood)


def _gp_parts(latent, site):
    if not isinstance(latent, GaussianLatent) or not latent.sources:
        raise ValueError(
            f"The latent function at site `{site}` is not a sum of GPs; only sums and "
            "sum kernels can be taken apart."
        )
    parts = {}
    for gp, X in latent.sources:
        number = len(gp.prior.kernels[0].parts)
        for j in range(number):
            label = gp.name if number == 1 else f"{gp.name}[{j}]"
            parts[label] = gp.part(j, X)
    return parts
