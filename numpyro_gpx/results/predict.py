"""The model at posterior values: predictive distributions, densities, the bound.

All of them are run through the one door for compiled code, so that repeated calls with
equal shapes compile once and a model that has changed is seen.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from numpyro_gpx.processes.latent import Gaussian, Latent
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.density import log_terms
from numpyro_gpx.program.structure import structure_of
from numpyro_gpx.sites.gp_calls import drawn_functions, joint_rows, recorded_calls
from numpyro_gpx.sites.observation import Observation, observation
from numpyro_gpx.sites.predictive import FromLatent

__all__ = [
    "Pointwise",
    "SiteView",
    "bound_estimates",
    "latent_cov",
    "latent_draws",
    "parts_at",
    "pointwise",
    "replicated_draws",
    "row_densities",
    "sites_at",
    "sites_in_chunks",
    "sites_in_pieces",
]


class SiteView(NamedTuple):
    """A fitted model seen from one observed site: what new arguments must meet.

    Attributes:
        train: The call that was fitted; only `gpx.exact` looks at its targets.
        params: Values of the model's `numpyro.param`s.
        site: The observed site in question.
        from_prior: Whether draws are of the prior, which knows of no training rows.
    """

    train: Call
    params: dict
    site: str
    from_prior: bool = False


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


def sites_at(view: SiteView, components, call: Call, key, *, of: str | None):
    """The observed site's distribution at new arguments, one for each component.

    Args:
        view: The fitted model and the site.
        components: Site values with a leading axis.
        call: The model at new arguments; targets left out.
        key: For noise and row-local sites, which are drawn from their prior.
        of: `None` for the targets, `"latent"` for the site's latent function, or the
            name of a GP that enters it.
    """
    return run(_sites_at, view, components, call, key, of)


def sites_in_pieces(
    view: SiteView, components, pieces: list, key, *, of, trained: bool
):
    """The observed site's distributions, one for each of `row_chunks`' pieces.

    Args:
        view: The fitted model and the site.
        components: Site values with a leading axis.
        pieces: Calls, values of the rows' own sites, and numbers of rows.
        key: For noise and row-local sites; each piece has its own.
        of: As in `sites_at`.
        trained: Whether the site needs the training rows.
    """
    calls = [call for call, *_ in pieces]
    given = any(values for _, values, _ in pieces)
    if trained and len(pieces) > 1 and not given:
        return sites_in_chunks(view, components, calls, key, of=of)
    found = []
    for i, (call, values, _) in enumerate(pieces):
        known = view._replace(params={**view.params, **values})
        found.append(sites_at(known, components, call, jr.fold_in(key, i), of=of))
    return found


def sites_in_chunks(view: SiteView, components, calls: list[Call], key, *, of):
    """As `sites_at` at several calls of one shape, for sites that need training rows.

    Each component is conditioned on these once, whatever the number of calls, and its
    state is gone before the next one's is made.
    """
    split = [eqx.partition(call, eqx.is_array) for call in calls]
    arrays = jax.tree.map(lambda *x: jnp.stack(x), *(arrays for arrays, _ in split))
    stacked = eqx.combine(arrays, split[0][1])
    found = run(_sites_in_chunks, view, components, stacked, key, of)
    return [jax.tree.map(lambda x, i=i: x[:, i], found) for i in range(len(calls))]


def replicated_draws(view: SiteView, draws, key):
    """New targets at the training rows, one set for each draw, `(S, N, ...)`."""
    return run(_replicated_draws, view, draws, key)


def latent_draws(view: SiteView, components, call: Call, key):
    """Coherent draws of the latent function, one for each component, `(S, N, ...)`."""
    return run(_latent_draws, view, components, call, key)


def latent_cov(view: SiteView, components, call: Call, key):
    """Mean `(S, N, *P)` and covariance between rows `(S, *P, N, N)` by component."""
    return run(_latent_cov, view, components, call, key)


def parts_at(view: SiteView, components, call: Call, key):
    """Marginals of each summand of the latent function, by label."""
    return run(_parts_at, view, components, call, key)


def pointwise(view: SiteView, draws, key) -> Pointwise:
    """Densities of each training row under each draw."""
    return run(_pointwise, view, draws, key)


def row_densities(view: SiteView, components, key):
    """Log predictive density of each training row by component, `(S, N)`.

    Components may be beliefs, unlike the draws of `pointwise`.
    """
    return run(_row_densities_at, view, components, key)


def bound_estimates(call: Call, guide, params, keys, loss):
    """One estimate of the bound for each key, on a fresh minibatch if there are any."""
    return run(_bound_estimates, call, guide, params, keys, loss)


def _sites_at(view, components, call, key, of):
    def one(component, key):
        with recorded_calls() as seen:
            found = _observed(view, component, call, key)
        if of is None:
            return found.predictive()
        return FromLatent(_function(of, view.site, found, seen.calls).bare())

    return _map(one, components, key)


def _sites_in_chunks(view, components, stacked, key, of):
    arrays, static = eqx.partition(stacked, eqx.is_array)

    def one(component, key):
        state = None
        if not view.from_prior:
            state = _training_state(view, component, key)

        def chunk(arrays):
            call = eqx.combine(arrays, static)
            values = {**view.params, **component}
            found = observation(call.trace(values, key)[view.site])
            found = found.given(found.untrained() if state is None else state)
            if of is None:
                return found.predictive()
            return FromLatent(_function(of, view.site, found, {}).bare())

        return jax.lax.map(chunk, arrays)

    return _map(one, components, key)


def _replicated_draws(view, draws, key):
    def one(draw, key):
        key_site, key_target = jr.split(key)
        found = _observed(view, draw, view.train, key_site)
        return found.predictive().sample(key_target)

    return _map(one, draws, key)


def _latent_draws(view, components, call, key):
    def one(component, key):
        key_functions, key_model = jr.split(key)
        with drawn_functions(key=key_functions):
            found = _observed(view, component, call, key_model)
            # GPs inside were drawn, so that nothing is left to draw; a function that
            # was marginalised is drawn here.
            return found.joint_latent().sample(key_functions)

    return _map(one, components, key)


def _latent_cov(view, components, call, key):
    def one(component, key):
        with joint_rows():
            latent = _observed(view, component, call, key).joint_latent()
        if not isinstance(latent, Gaussian) or latent.moments_only:
            raise ValueError(
                f"The latent function at site `{view.site}` is a product; the "
                "covariance between its rows is that of draws: `fit.functions(key, "
                "1000)(X)`."
            )
        if latent.row_cov is None and latent.outputs_depend:
            raise ValueError(
                f"Outputs of the latent function at site `{view.site}` depend on "
                "each other, as in `A @ g(X)`; the covariance between rows is that of "
                "draws: `fit.functions(key, 1000)(X)`."
            )
        if latent.row_cov is None:  # nothing random in it
            var = jnp.moveaxis(latent.var, 0, -1)
            return latent.mean, var[..., None] * jnp.eye(var.shape[-1], dtype=var.dtype)
        return latent.mean, latent.row_cov

    return _map(one, components, key)


def _parts_at(view, components, call, key):
    def one(component, key):
        found = _observed(view, component, call, key)
        parts = found.parts()
        return {label: FromLatent(latent.bare()) for label, latent in parts.items()}

    return _map(one, components, key)


def _pointwise(view, draws, key):
    def one(draw, key):
        trace = view.train.trace({**view.params, **draw}, key)
        found, y = observation(trace[view.site]), trace[view.site]["value"]
        log_prior, log_likelihood = log_terms(trace)
        rows = found.log_density(y)
        return Pointwise(
            rows, found.terms(y), log_prior + log_likelihood, found.counts()
        )

    return _map(one, draws, key)


def _row_densities_at(view, components, key):
    def one(component, key):
        site = view.train.trace({**view.params, **component}, key)[view.site]
        return observation(site).log_density(site["value"])

    return _map(one, components, key)


def _bound_estimates(call, guide, params, keys, loss):
    structure = structure_of(call)

    def one(key):
        key_batch, key_loss = jr.split(key)
        data = {**params, **draw_batch(key_batch, structure)}
        return loss.mean(key_loss, data, guide, call)

    return jax.lax.map(one, keys)


def _map(fn, components, key):
    """Evaluate `fn(component, key)` for each component, one after the other.

    Not `vmap`: where a batch of matrices is factorised, jaxlib 0.10 waits for its own
    threads, and two such batches at once never end (tests/test_hang.py).
    """
    leaves = jax.tree.leaves(components)
    number = leaves[0].shape[0] if leaves else 1  # a model without latent sites
    return jax.lax.map(lambda pair: fn(*pair), (components, jr.split(key, number)))


def _function(of: str, site: str, found: Observation, calls: dict) -> Latent:
    """The latent function at a site, or the GP called `of` that enters it."""
    latent = found.latent()
    if of == "latent":
        return latent
    if of not in latent.sites:
        possible = ["latent", *sorted(latent.sites)]
        raise ValueError(
            f"`of` must be None for the targets `{site}`, or one of {possible}, their "
            f"latent function and the GPs that enter it; got {of!r}."
        )
    origin = [t for t in getattr(latent, "origin", ()) if t.gp.name == of]
    entered = origin or [record for call, record in calls.items() if call.site == of]
    if len(entered) > 1:
        raise ValueError(
            f"The model calls `{of}` {len(entered)} times, and which of them enters "
            f"`{site}` is not known; predict `of='latent'`."
        )
    return entered[0].gp(entered[0].X)


def _observed(view: SiteView, component, call: Call, key) -> Observation:
    """The observed site at a call, given the training rows where they matter."""
    values = {**view.params, **component}
    found = observation(call.trace(values, key)[view.site])
    if not found.needs_training:
        return found
    if view.from_prior:
        return found.given(found.untrained())
    return found.given(_training_state(view, component, key))


def _training_state(view: SiteView, component, key):
    """What predictions need of the training rows, at one component."""
    values = {**view.params, **component}
    site = view.train.trace(values, key)[view.site]
    return observation(site).condition(site["value"])
