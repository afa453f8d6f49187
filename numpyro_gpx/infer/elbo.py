r"""The evidence lower bound, with beliefs integrated instead of drawn.

For a guide that marks sites with a Gaussian belief :math:`q(v \mid \theta)`,

.. math:: \mathrm{ELBO} = \mathbb E_{q(\theta)}\Big[\sum_n \mathbb E_{q(f_n)}[\log p(y_n
    \mid f_n)] - \mathrm{KL}(q(v \mid \theta) \,\|\, p(v))
    + \log p(\theta) - \log q(\theta)\Big]

with both inner terms in closed form (tutorial eq. 59, 67): the estimate has no noise
from `v`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro
from jaxtyping import Array
from numpyro import handlers

from numpyro_gpx.beliefs import kl_to_prior

__all__ = ["ELBO"]


class ELBO(numpyro.infer.elbo.ELBO):
    """Loss for `numpyro.infer.SVI`: the negative bound, for any guide.

    Sites that the guide marks with a belief (`infer={"belief": ...}`) are integrated;
    all others are reparameterised draws. Noise between layers (`gpx.propagate`) is
    drawn afresh and left out of the sum.

    Args:
        num_particles: Draws of the guide that the estimate averages over.
    """

    def __init__(self, num_particles: int = 1):
        super().__init__(num_particles=num_particles)

    def loss_with_mutable_state(
        self, rng_key, param_map, model, guide, *args, **kwargs
    ):
        def particle(key):
            return _single_elbo(key, param_map, model, guide, args, kwargs)

        if self.num_particles == 1:
            elbo = particle(rng_key)
        else:
            elbo = jnp.mean(jax.vmap(particle)(jr.split(rng_key, self.num_particles)))
        return {"loss": -elbo, "mutable_state": None}


def _single_elbo(key, params, model, guide, args, kwargs) -> Array:
    key_guide, key_model = jr.split(key)
    guide_trace = _trace(handlers.seed(guide, key_guide), params, args, kwargs)
    replayed = handlers.replay(handlers.seed(model, key_model), _believing(guide_trace))
    model_trace = _trace(replayed, params, args, kwargs)
    _check_match(model_trace, guide_trace)
    elbo = jnp.zeros(())
    for name, site in model_trace.items():
        if site["type"] != "sample" or site["infer"].get("noise"):
            continue
        belief = _belief(guide_trace.get(name))
        if belief is None:
            term = _log_prob(site)
        else:
            term = -_scaled(site, kl_to_prior(belief, site["fn"]))
        elbo = elbo + term
    for site in guide_trace.values():
        if site["type"] == "sample" and _belief(site) is None:
            elbo = elbo - _log_prob(site)
    return elbo


def _trace(fn, params, args, kwargs):
    return handlers.trace(handlers.substitute(fn, data=params)).get_trace(
        *args, **kwargs
    )


def _believing(guide_trace):
    """The guide's trace with beliefs in the place of the draws they stand for."""
    replaced = dict(guide_trace)
    for name, site in guide_trace.items():
        belief = _belief(site)
        if belief is not None:
            replaced[name] = {**site, "value": belief}
    return replaced


def _belief(site):
    if site is None or site["type"] != "sample":
        return None
    return site["infer"].get("belief")


def _log_prob(site):
    return _scaled(site, jnp.sum(site["fn"].log_prob(site["value"])))


def _scaled(site, term):
    return term if site["scale"] is None else site["scale"] * term


def _check_match(model_trace, guide_trace):
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
        if site["type"] == "sample"
        and not site["is_observed"]
        and not site["infer"].get("noise")
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
