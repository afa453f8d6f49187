r"""The importance-weighted bound over the latent inputs of the rows.

.. math:: \sum_n \mathbb E\Big[\log\frac1S\sum_{s=1}^S
    \exp\Big(\mathbb E_{q(f)}[\log p(y_n \mid f(x_n, h_n^{(s)}))]\Big)
    \frac{p(h_n^{(s)})}{q(h_n^{(s)})}\Big] - \mathrm{KL}(q(v) \,\|\, p(v))

with :math:`h_n^{(s)} \sim q(h_n)`. In a deep GP the function of the last layer is
averaged inside the exponential, and the layers below are drawn, jointly for the S
replicates of a row (eq. 82-83). The average over the S replicates is taken for each
row, *inside* the sum over rows, so that minibatches stay unbiased; beliefs about global
sites are outside the logarithm. It is a lower bound for every S and tightens with S.

References:
    Tutorial eq. 75-77, 82-83; Salimbeni et al. (2019); Burda, Grosse & Salakhutdinov
    (2016).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from numpyro import handlers

from numpyro_gpx import checks
from numpyro_gpx.program.call import site_log_prob
from numpyro_gpx.program.elbo import (
    Loss,
    check_match,
    counts,
    group_kl,
    replayed_values,
    scaled,
)
from numpyro_gpx.program.latent_inputs import LatentInput
from numpyro_gpx.sites.gp_calls import shared_replicates
from numpyro_gpx.sites.marks import Held, held_beliefs, marked

__all__ = ["ImportanceWeighted"]

_AXIS = "replicates"


class ImportanceWeighted(Loss):
    """Loss for `numpyro.infer.SVI`: the negative importance-weighted bound.

    For guides of latent inputs (`gpx.guides.UnscentedLatent`), whose rule it ignores:
    replicates are draws. Other sites are treated as in `gpx.infer.ELBO`.

    Args:
        num_replicates: Replicates S of each row's latent input.
        num_particles: Draws of everything that the estimate averages over.
    """

    def __init__(self, num_replicates: int, num_particles: int = 1):
        checks.at_least("num_replicates", num_replicates, 1)
        super().__init__(num_particles=num_particles)
        self.num_replicates = num_replicates

    @property
    def config(self):
        return {
            "num_replicates": self.num_replicates,
            "num_particles": self.num_particles,
        }

    def bound(self):
        return ImportanceWeighted(self.num_replicates)

    def particle(self, key, params, guide, call):
        key_guide, key_model, key_rows = jr.split(key, 3)
        guide_trace = call.trace(params, key_guide, model=guide)
        latents = marked(guide_trace, LatentInput)
        if not latents:
            raise ValueError(
                "ImportanceWeighted weighs draws of latent inputs; the guide has none. "
                "Use `gpx.guides.UnscentedLatent`, or `gpx.infer.ELBO()`."
            )
        held = marked(guide_trace, Held)
        beliefs = held_beliefs(guide_trace)

        def replicate(key):
            keys = dict(zip(latents, jr.split(key, len(latents)), strict=True))
            drawn = {n: guide_trace[n]["fn"].rsample(keys[n]) for n in latents}
            values = {**beliefs, **drawn}
            replayed = handlers.substitute(
                call.model, data=replayed_values(guide_trace, values)
            )
            with shared_replicates(axis=_AXIS):
                trace = call.trace(params, key_model, model=replayed)
            check_match(trace, guide_trace)
            # Subtract log q row by row: the weights belong to rows, not to the batch.
            log_q = sum(guide_trace[n]["fn"].log_prob(x) for n, x in drawn.items())
            rows, factor, rest = _split(trace, {*beliefs}, latents, log_q)
            kl = sum(group_kl(mark.group, trace) for mark in held.values())
            return rows, factor, rest - kl

        keys = jr.split(key_rows, self.num_replicates)
        log_weights, scale, rest = jax.vmap(replicate, axis_name=_AXIS)(keys)
        log_mean = logsumexp(log_weights, axis=0) - jnp.log(self.num_replicates)
        bound = scale[0] * jnp.sum(log_mean) + jnp.mean(rest)
        for name, site in guide_trace.items():
            if site["type"] == "sample" and name not in {*latents, *held}:
                log_q = jnp.sum(site_log_prob(site))
                bound = bound - scaled(site, log_q)
        return bound


def _split(trace, held: set[str], latents, log_q):
    """Log weights of the rows, the factor of their plate, and everything else's terms.

    Other factors than the plate's belong to the row, inside the logarithm.
    """
    plates = {f.name for n in latents for f in trace[n]["cond_indep_stack"]}
    factor = jnp.ones(())
    for name in plates:
        size, batch = trace[name]["args"]
        factor = factor * (size / (size if batch is None else batch))
    rows, rest = -log_q, jnp.zeros(())
    for name, site in trace.items():
        if not counts(site) or name in held:
            continue
        if plates & {frame.name for frame in site["cond_indep_stack"]}:
            own = scaled(site, jnp.ones(())) / factor
            rows = rows + own * site_log_prob(site)
        else:
            log_p = jnp.sum(site_log_prob(site))
            rest = rest + scaled(site, log_p)
    return rows, factor, rest
