r"""The evidence lower bound, with beliefs integrated instead of drawn.

For a guide that marks sites with a Gaussian belief :math:`q(v \mid \theta)`,

.. math:: \mathrm{ELBO} = \mathbb E_{q(\theta)}\Big[\sum_n \mathbb E_{q(f_n)}[\log p(y_n
    \mid f_n)] - \mathrm{KL}(q(v \mid \theta) \,\|\, p(v))
    + \log p(\theta) - \log q(\theta)\Big]

with both inner terms in closed form (tutorial eq. 59, 67): the estimate has no noise
from `v`. Latent inputs are integrated by cubature over the model: it is evaluated at
each point set of the guide's rule and the expected log likelihoods are averaged.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro
from jaxtyping import Array
from numpyro import handlers

from numpyro_gpx.beliefs import kl_to_prior
from numpyro_gpx.infer.latent_site import LatentInput, integration

__all__ = [
    "ELBO",
    "CollapsedBound",
    "Loss",
    "check_match",
    "counts",
    "marked",
    "run_traced",
    "scaled",
    "with_values",
]


class Loss(numpyro.infer.elbo.ELBO, abc.ABC):
    """What the losses here share: particles, and equality.

    A loss equals another with the same settings, so that jit knows it again.
    """

    @property
    @abc.abstractmethod
    def config(self) -> dict:
        """Constructor arguments that a saved fit needs to rebuild it."""

    @abc.abstractmethod
    def bound(self) -> Loss:
        """The loss whose expectation is a bound, whatever the rule."""

    @abc.abstractmethod
    def particle(self, key, params, model, guide, args, kwargs) -> Array:
        """One estimate of what is maximised."""

    def loss_with_mutable_state(
        self, rng_key, param_map, model, guide, *args, **kwargs
    ):
        def one(key):
            return self.particle(key, param_map, model, guide, args, kwargs)

        if self.num_particles == 1:
            value = one(rng_key)
        else:
            value = jnp.mean(jax.vmap(one)(jr.split(rng_key, self.num_particles)))
        return {"loss": -value, "mutable_state": None}

    def __eq__(self, other) -> bool:
        return type(self) is type(other) and self.config == other.config

    def __hash__(self) -> int:
        return hash((type(self), *self.config.values()))


class ELBO(Loss):
    """Loss for `numpyro.infer.SVI`: the negative bound, for any guide.

    Sites that the guide marks with a belief (`infer={"belief": ...}`) are integrated;
    latent inputs (`infer={"latent": ...}`) by their rule; all others are
    reparameterised draws. Noise between layers (`gpx.propagate`) is drawn afresh and
    left out of the sum.

    With a rule of low order this is an objective, not a bound.

    Args:
        num_particles: Draws of the guide that the estimate averages over.
        draw_latents: Whether to draw latent inputs instead of using their rule: the
            estimate is then unbiased for the bound, whatever the rule.
    """

    def __init__(self, num_particles: int = 1, *, draw_latents: bool = False):
        super().__init__(num_particles=num_particles)
        self.draw_latents = draw_latents

    @property
    def config(self):
        return {
            "num_particles": self.num_particles,
            "draw_latents": self.draw_latents,
        }

    def bound(self):
        return ELBO(draw_latents=True)

    def particle(self, key, params, model, guide, args, kwargs):
        key_guide, key_model = jr.split(key)
        guide_trace = run_traced(guide, key_guide, params, args, kwargs)
        latents = marked(guide_trace, "latent")
        collapsed = {} if self.draw_latents else _collapsed(guide_trace, model)
        closed: set[str] = set()  # latent inputs whose divergence is known
        factors: dict[str, Any] = {}  # of the model's plates around latent inputs

        def model_terms(values):
            values = {**marked(guide_trace, "belief"), **values}
            replayed = handlers.replay(model, with_values(guide_trace, values))
            trace = run_traced(replayed, key_model, params, args, kwargs)
            check_match(trace, guide_trace)
            closed.update(
                n for n in latents if latents[n].has_closed_kl(trace[n]["fn"])
            )
            factors.update({name: trace[name]["scale"] for name in latents})
            return {
                name: _model_term(site, guide_trace.get(name), name in closed)
                for name, site in trace.items()
                if counts(site) and name not in collapsed
            }

        terms = _average(model_terms, {} if self.draw_latents else latents)
        elbo = sum(terms.values(), start=jnp.zeros(()))
        for name, site in guide_trace.items():
            if site["type"] == "sample" and "belief" not in site["infer"]:
                if name not in closed:
                    site = {**site, "scale": factors.get(name, site["scale"])}
                    elbo = elbo - _guide_term(site, self.draw_latents)
        return elbo + sum(collapsed.values())


def _average(terms, latents: dict[str, LatentInput]):
    """`terms` at the beliefs about latent inputs, or averaged over their points."""
    points, weights, beliefs = integration(latents)
    if not points:
        return terms(beliefs)
    return {name: weights @ x for name, x in jax.vmap(terms)(points).items()}


def _model_term(site, guide_site, closed):
    mark = {} if guide_site is None else guide_site["infer"]
    if "belief" in mark:
        return -scaled(site, kl_to_prior(mark["belief"], site["fn"]))
    if closed:
        return -scaled(site, mark["latent"].kl(site["fn"]))
    return scaled(site, jnp.sum(site["fn"].log_prob(site["value"])))


def _guide_term(site, draw_latents):
    latent = site["infer"].get("latent")
    if latent is None or draw_latents:
        return scaled(site, jnp.sum(site["fn"].log_prob(site["value"])))
    log_q = jax.vmap(site["fn"].log_prob)(latent.points)  # (S, N)
    return scaled(site, latent.weights @ jnp.sum(log_q, axis=-1))


def _collapsed(guide_trace, model):
    """Bounds that the guide has worked out, in the place of two sites' terms each.

    Only where the guide's model is the one asked about: a handler around it may have
    changed what it says.
    """
    terms = {}
    for name, found in marked(guide_trace, "collapsed").items():
        if found.model is model:
            terms[name] = found.bound
            terms[found.observed] = 0.0
    return terms


class CollapsedBound(NamedTuple):
    """The mark of a guide that knows the bound of one GP site and its data.

    Attributes:
        model: The model that it was worked out for.
        observed: The observed site whose term it includes.
        bound: Expected log likelihood less divergence.
    """

    model: Callable
    observed: str
    bound: Array


def run_traced(fn, key, params, args, kwargs):
    """Trace `fn` with its parameters substituted."""
    seeded = handlers.substitute(handlers.seed(fn, key), data=params)
    return handlers.trace(seeded).get_trace(*args, **kwargs)


def marked(trace, mark: str) -> dict:
    """What the sites with this mark in their `infer` dictionary carry there."""
    return {
        name: site["infer"][mark]
        for name, site in trace.items()
        if site["type"] == "sample" and mark in site["infer"]
    }


def with_values(trace, values: dict):
    """The trace with other values at some sites."""
    return {
        name: {**site, "value": values[name]} if name in values else site
        for name, site in trace.items()
    }


def counts(site) -> bool:
    """Whether a site of the model has a term in the sum."""
    return site["type"] == "sample" and not site["infer"].get("noise")


def scaled(site, term):
    """`term` times the factor of the plates around the site."""
    return term if site["scale"] is None else site["scale"] * term


def check_match(model_trace, guide_trace) -> None:
    """Raise, naming them, if sites are in the model or the guide only."""
    observed = sorted(
        name
        for name, site in guide_trace.items()
        if site["type"] == "sample" and site["is_observed"]
    )
    if observed:
        raise ValueError(
            f"The guide observes {observed}, which only a model does. Build the guide "
            "from the model, as in `gpx.guides.WhitenedGaussian(model)`."
        )
    in_model = {
        name
        for name, site in model_trace.items()
        if counts(site) and not site["is_observed"]
    }
    in_guide = {
        name
        for name, site in guide_trace.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and not site["infer"].get("is_auxiliary")
    }
    if in_model != in_guide:
        raise ValueError(
            "The guide must have the latent sites of the model; only in the model: "
            f"{sorted(in_model - in_guide)}, only in the guide: "
            f"{sorted(in_guide - in_model)}. Build the guide from the same model."
        )
