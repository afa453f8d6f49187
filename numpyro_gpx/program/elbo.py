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
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro
from jaxtyping import Array
from numpyro import handlers
from numpyro.distributions import Unit

from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.program.call import Call, Trace, site_log_prob
from numpyro_gpx.program.latent_inputs import LatentInput, integration
from numpyro_gpx.sites.marks import (
    Held,
    Noise,
    find,
    held_beliefs,
    is_auxiliary,
    marked,
)

__all__ = [
    "ELBO",
    "Loss",
    "check_match",
    "counts",
    "group_kl",
    "replayed_values",
    "scaled",
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
    def particle(self, key, params, guide, call: Call) -> Array:
        """One estimate of what is maximised."""

    def loss_with_mutable_state(
        self, rng_key, param_map, model, guide, *args, **kwargs
    ):
        value = self.mean(rng_key, param_map, guide, Call(model, args, kwargs))
        return {"loss": -value, "mutable_state": None}

    def mean(self, key, params, guide, call: Call) -> Array:
        """The mean of `num_particles` estimates."""

        def one(key):
            return self.particle(key, params, guide, call)

        if self.num_particles == 1:
            return one(key)
        return jnp.mean(jax.vmap(one)(jr.split(key, self.num_particles)))

    def __eq__(self, other) -> bool:
        return type(self) is type(other) and self.config == other.config

    def __hash__(self) -> int:
        return hash((type(self), *self.config.values()))


class ELBO(Loss):
    """Loss for `numpyro.infer.SVI`: the negative bound, for any guide.

    Sites about which the guide holds a belief are integrated, latent inputs by their
    rule; all others are reparameterised draws. Noise between layers (`gpx.propagate`)
    is drawn afresh and left out of the sum.

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

    def particle(self, key, params, guide, call):
        key_guide, key_model = jr.split(key)
        guide_trace = call.trace(params, key_guide, model=guide)
        latents = marked(guide_trace, LatentInput)
        held = marked(guide_trace, Held)
        beliefs = held_beliefs(guide_trace)
        collapsed = {} if self.draw_latents else _collapsed(guide_trace, call.model)
        closed: set[str] = set()  # latent inputs whose divergence is known
        factors: dict[str, Any] = {}  # of the model's plates around latent inputs

        def model_terms(values):
            replayed = handlers.substitute(
                call.model, data=replayed_values(guide_trace, beliefs | values)
            )
            trace = call.trace(params, key_model, model=replayed)
            check_match(trace, guide_trace)
            closed.update(
                n for n in latents if latents[n].has_closed_kl(trace[n]["fn"])
            )
            factors.update({name: trace[name]["scale"] for name in latents})
            terms = {
                name: -group_kl(mark.group, trace)
                for name, mark in held.items()
                if name not in collapsed
            }
            done = {*beliefs, *collapsed}
            return terms | {
                name: _model_term(site, guide_trace.get(name), name in closed)
                for name, site in trace.items()
                if counts(site) and name not in done
            }

        terms = _average(model_terms, {} if self.draw_latents else latents)
        elbo = sum(terms.values(), start=jnp.zeros(()))
        for name, site in guide_trace.items():
            if site["type"] == "sample" and name not in held and name not in closed:
                site = {**site, "scale": factors.get(name, site["scale"])}
                elbo = elbo - _guide_term(site, self.draw_latents)
        return elbo + sum(collapsed.values())


def _average(terms, latents: dict[str, LatentInput]):
    """`terms` at the beliefs about latent inputs, or averaged over their points."""
    axis, beliefs = integration(latents)
    return terms(beliefs) if axis is None else axis.average(terms)


def group_kl(group: Group, trace: Trace) -> Array:
    """Divergence of what a guide holds to the priors in a trace of the model."""
    priors = {name: trace[name]["fn"] for name in group.beliefs}
    return scaled(trace[next(iter(priors))], group.kl(priors))


def _model_term(site, guide_site, closed):
    latent = None if guide_site is None else find(guide_site, LatentInput)
    if closed and latent is not None:
        return -scaled(site, latent.kl(site["fn"]))
    return scaled(site, jnp.sum(site_log_prob(site)))


def _guide_term(site, draw_latents):
    latent = find(site, LatentInput)
    if latent is None or latent.weights is None or draw_latents:
        return scaled(site, jnp.sum(site_log_prob(site)))
    log_q = jax.vmap(site["fn"].log_prob)(latent.points)  # (S, N)
    return scaled(site, latent.weights @ jnp.sum(log_q, axis=-1))


def _collapsed(guide_trace, model):
    """Bounds that the guide has worked out, in the place of two sites' terms each.

    Only where the guide's model is the one asked about: a handler around it may have
    changed what it says.
    """
    terms: dict[str, Any] = {}
    for name, mark in marked(guide_trace, Held).items():
        found = mark.collapsed
        if found is not None and found.model is model:
            terms[name] = found.bound
            terms[found.observed] = 0.0
    return terms


def replayed_values(guide_trace: Trace, values: dict) -> dict:
    """What the model's sites and plates are set to: the guide's values, or others.

    Handed over by `substitute`: NumPyro's `replay` would put the guide's marks in the
    place of the model's.
    """
    found = {
        name: site["value"]
        for name, site in guide_trace.items()
        if site["type"] == "plate"
        or (
            site["type"] == "sample"
            and not site["is_observed"]
            and not is_auxiliary(site)
        )
    }
    return {**found, **values}


def counts(site) -> bool:
    """Whether a site of the model has a term in the sum."""
    return site["type"] == "sample" and find(site, Noise) is None


def scaled(site, term):
    """`term` times the factor of the plates around the site."""
    return term if site["scale"] is None else site["scale"] * term


def check_match(model_trace, guide_trace) -> None:
    """Raise, naming them, if sites are in the model or the guide only."""
    observed = sorted(
        name
        for name, site in guide_trace.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and not isinstance(site["fn"], Unit)  # a `numpyro.factor`, as in `AutoDAIS`
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
        and not is_auxiliary(site)
    }
    if in_model != in_guide:
        raise ValueError(
            "The guide must have the latent sites of the model; only in the model: "
            f"{sorted(in_model - in_guide)}, only in the guide: "
            f"{sorted(in_guide - in_model)}. Build the guide from the same model."
        )
