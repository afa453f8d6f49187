r"""Back-projection: the latent inputs of new rows, all or part of which was observed.

The global posterior stays as it was fitted. For each new row :math:`q(h_*) = \mathcal
N(m_*, S_*)` maximises

.. math:: \mathbb E_{q(h_*)}\big[\mathbb E[\log p(y_* \mid f(h_*))]\big]
    - \mathrm{KL}(q(h_*) \,\|\, p(h_*)),

where missing entries of :math:`y_*` have no term. A posterior of several modes needs
several starts: each row keeps the best.

References:
    Titsias & Lawrence (2010), section 4; thesis C.4.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float

from numpyro_gpx import checks, cubature
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.predict import SiteView, sites_at
from numpyro_gpx.results.prediction import Prediction
from numpyro_gpx.uncertain import InputBelief

__all__ = ["Projection", "project"]

# Latent inputs that are looked at before choosing where each row starts.
_NUM_CANDIDATES = 128
# Components of the global posterior that the search averages over.
_NUM_COMPONENTS = 4
# Standard deviation of the beliefs before the search.
_INITIAL_SCALE = 0.3
# Entropy of a standard normal.
_ENTROPY = 0.5 * np.log(2.0 * np.pi * np.e)


class Projection:
    """Posterior of the latent inputs of new rows.

    Attributes:
        mean: Posterior means `(N, Q)`.
        sd: Posterior standard deviations `(N, Q)`.
        objective: What each row's belief attains, `(N,)`: a lower bound of the log
            density of its observed entries if the rule is accurate.
        starts: The same for all starts, with their means: `(K, N)` and `(K, N, Q)`;
            rows where several are close have several modes.
    """

    def __init__(self, fit, site, belief, objective, starts, call):
        self._fit, self._site, self._belief = fit, site, belief
        self._call = call
        self.mean = np.asarray(belief.mean)
        self.sd = np.asarray(jnp.sqrt(belief.var))
        self.objective = np.asarray(objective)
        self.starts = starts

    def __repr__(self) -> str:
        rows, columns = self.mean.shape
        return f"Projection of {rows} rows to `{self._site}`, {columns} columns"

    def draws(self, key, num_draws: int) -> np.ndarray:
        """Draws of the latent inputs, `(num_draws, N, Q)`."""
        checks.key(key)
        return np.asarray(self._draws(key, num_draws))

    def reconstruct(
        self, *, num_draws: int = 32, of: str | None = None, site: str | None = None
    ) -> Prediction:
        """Predictive distribution of whole rows, their missing entries included.

        Args:
            num_draws: Draws of the latent inputs to average over.
            of: `"latent"` or a GP instead of the targets; see `Fit.predict`.
            site: Observed site; may be left out if there is one.
        """
        view = self._fit.site_view(site)
        components = self._fit.global_components(_NUM_COMPONENTS, (self._site,))
        count = jax.tree.leaves(components)[0].shape[0]
        index = jnp.arange(num_draws) % count
        components = jax.tree.map(lambda x: x[index], components)
        drawn = self._draws(self._fit.key, num_draws)
        components = {**components, self._site: drawn}
        with one_at_a_time():
            fn = sites_at(view, components, self._call, self._fit.key, of=of)
        return Prediction([fn], [self.mean.shape[0]], self._fit.key)

    def _draws(self, key, num_draws):
        return cubature.MonteCarlo(num_draws).nodes(self._belief, key).points


def project(
    fit: Fit,
    *args,
    key,
    rule: cubature.Rule | None = None,
    num_starts: int = 4,
    num_steps: int = 300,
    learning_rate: float = 0.05,
    **kwargs,
) -> Projection:
    """The posterior of the latent inputs of new rows; missing entries are NaN.

    Args:
        fit: A variational fit of a model with one latent input of the rows.
        args: The model's arguments for the new rows, targets included: `y`, or `X, y`.
            Models of `gpx.models` take NaN in the targets for missing entries if
            called with `missing=True` (see `kwargs`); others must pass it to
            `gpx.observe`.
        key: Random key.
        rule: How expectations over the latent input are taken, with points; if left out
            `Unscented()`, or `GaussHermite(5)` in one dimension.
        num_starts: Starts of each row: the best of 128 candidates, taken from the
            training rows and the prior.
        num_steps: Steps of Adam.
        learning_rate: Of Adam.
        kwargs: Keyword arguments of the model.

    Returns:
        A `Projection`: `.mean`, `.sd`, `.draws(key, n)`, `.reconstruct()`.
    """
    checks.key(key)
    checks.at_least("num_starts", num_starts, 1)
    checks.at_least("num_steps", num_steps, 1)
    site = latent_site(fit, "project")
    if rule is None:
        rule = cubature.default_rule(fit.structure.latents[site].shape[1])
    if isinstance(rule, cubature.Analytic):
        raise ValueError(
            "`rule` must have points; got the analytic one. Leave it out, or use "
            "`gpx.cubature.GaussHermite(5)`."
        )
    call = new_rows(fit, *args, **kwargs)
    observed = fit.structure.observed
    components = fit.global_components(_NUM_COMPONENTS, (site,))
    search = _Search(fit.site_view(observed[0]), site, observed, components, rule)
    num_rows = call.num_rows
    with one_at_a_time():
        key_candidates, key_points = jr.split(key)
        candidates = _candidates(key_candidates, fit, site)
        first = run(_best, search, candidates, call, num_rows, num_starts)
        found = run(_climb, search, first, call, num_steps, learning_rate, key_points)
    means, scales, objectives = found
    if not np.all(np.isfinite(objectives)):
        raise FloatingPointError(
            "Back-projection of rows "
            f"{np.flatnonzero(~np.isfinite(objectives).all(0))[:5].tolist()} is not "
            "finite. Are they on the scale of the training data?"
        )
    best = jnp.argmax(objectives, axis=0)  # (N,)
    rows = jnp.arange(num_rows)
    belief = InputBelief(means[best, rows], scales[best, rows])
    starts = (np.asarray(objectives), np.asarray(means))
    new = _without_targets(call)
    return Projection(fit, site, belief, objectives[best, rows], starts, new)


class _Search(NamedTuple):
    """The objective of new rows."""

    view: SiteView
    site: str
    observed: tuple[str, ...]
    components: Any
    rule: cubature.Rule

    def log_density(self, h: Float[Array, "N Q"], call: Call) -> Float[Array, " N"]:
        """Expected log likelihood plus log prior of each row at latent inputs `h`."""

        def one(component):
            data = {**self.view.params, **component, self.site: h}
            trace = call.trace(data, jr.key(0))
            seen = (trace[name] for name in self.observed)
            log_p = sum(site["fn"].log_prob(site["value"]) for site in seen)
            return log_p + trace[self.site]["fn"].log_prob(h)

        return jnp.mean(jax.vmap(one)(self.components), axis=0)


def _best(
    search: _Search, candidates: Float[Array, "C Q"], call: Call, num_rows, number
):
    """The candidates `(K, N, Q)` at which each row's density is highest."""

    def one(h):
        everywhere = jnp.broadcast_to(h, (num_rows, *h.shape))
        return search.log_density(everywhere, call)

    found = jax.lax.map(one, candidates)  # (C, N)
    top = jax.lax.top_k(found.T, min(number, len(candidates)))[1]  # (N, K)
    return candidates[top.T]


def _climb(search: _Search, start: Float[Array, "K N Q"], call: Call, steps, rate, key):
    """Adam from all starts at once; every row has a search of its own.

    Returns means, scales and objectives, all with the leading axes `(K, N)`.
    """
    optimiser = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def objective(params):
        def one(mean, log_scale):
            belief = InputBelief(mean, jnp.exp(log_scale))
            points, weights = search.rule.nodes(belief, key)
            log_p = jax.vmap(lambda h: search.log_density(h, call))(points)
            return weights @ log_p + jnp.sum(log_scale + _ENTROPY, axis=-1)

        return jax.vmap(one)(*params)  # (K, N)

    slope = jax.grad(lambda params: -jnp.sum(objective(params)))

    def step(_, carry):
        params, state = carry
        updates, state = optimiser.update(slope(params), state)
        return optax.apply_updates(params, updates), state

    params = (start, jnp.full_like(start, jnp.log(_INITIAL_SCALE)))
    carry = (params, optimiser.init(params))
    params, _ = jax.lax.fori_loop(0, steps, step, carry)
    means, log_scale = params
    return means, jnp.exp(log_scale), objective(params)


def latent_site(fit: Fit, function: str) -> str:
    """The latent input of the rows, which `function` needs."""
    if fit.is_mcmc:
        raise ValueError(
            f"`{function}` needs a variational fit: the draws of a sampler have latent "
            "spaces of different orientation, which cannot be averaged over."
        )
    names = fit.structure.row_sites
    if len(names) != 1:
        raise ValueError(
            f"`{function}` needs a model with one latent input of its rows; this one "
            f"has {list(names)}."
        )
    site = fit.structure.latents[names[0]]
    if len(site.shape) != 2 or not site.is_real:
        raise ValueError(
            f"`{function}` needs a latent input with real rows (Q,); site "
            f"`{names[0]}` has shape {site.shape} or another support."
        )
    return names[0]


def new_rows(fit: Fit, *args, **kwargs) -> Call:
    """The model called with new rows, targets included, checked."""
    fit.program.check_unchanged()
    call = Call.create(fit.model, args, kwargs).with_jitter(fit.jitter)
    if not call.takes_inputs:
        checks.matrix("y", call.args[0] if call.args else 0.0, "(N, P)")
    return Program.of(call).call


def _candidates(key, fit, site) -> Array:
    """Places to start from: posterior means of training rows, and draws around them."""
    key_rows, key_prior = jr.split(key)
    means = jnp.asarray(fit.latent_inputs(site).mean)
    number = _NUM_CANDIDATES - _NUM_CANDIDATES // 4
    index = jr.choice(key_rows, len(means), (min(number, len(means)),), replace=False)
    spread = jnp.std(means, axis=0)
    drawn = jr.normal(key_prior, (_NUM_CANDIDATES // 4, means.shape[1]), means.dtype)
    return jnp.concatenate([means[index], jnp.mean(means, axis=0) + spread * drawn])


def _without_targets(call: Call) -> Call:
    """The call that draws whole rows: inputs kept, targets left out."""
    if call.takes_inputs:
        return call.at((call.args[0], None, *call.args[2:]), call.kwargs)
    kwargs = {**call.kwargs, "num_rows": call.num_rows}
    return call.at((), kwargs)
