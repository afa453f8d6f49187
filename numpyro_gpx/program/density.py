r"""The target density of a model, as every sampler here sees it.

.. math:: \log\pi(v, \theta) = \log p(v) + \log p(\theta) + \sum_n \mathrm{ELL}_n

on the real line (log Jacobians included), with minibatches through plate indices and
noise between layers averaged over (target A of the design) or drawn afresh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from numpyro_gpx.program.call import Call, Trace, site_log_prob
from numpyro_gpx.program.starts import init_to_prior_median, initial_values
from numpyro_gpx.program.structure import Structure, structure_of
from numpyro_gpx.sites.marks import Noise, find

__all__ = [
    "Target",
    "log_terms",
    "require_params",
]


# Standard deviation of the chains' starting points on the real line.
_SPREAD = 0.3


class Target:
    """The log density of a call.

    Args:
        call: The model with its arguments.
        params: Values of the model's `numpyro.param`s.
        noise: Fixed values `(S, ...)` of the noise sites, averaged over; `None` to draw
            them afresh from `key`.
        structure: The model's sites, if they are known already.
    """

    def __init__(self, call: Call, *, params=None, noise=None, structure=None):
        self.call = call
        self.structure = structure_of(call) if structure is None else structure
        require_params(self.structure, params)
        self.params = params or {}
        self.noise = noise

    def log_density(
        self, z: dict, *, key=None, batch: dict | None = None, model=None
    ) -> Array:
        """Log density at unconstrained values `z` of all latent sites.

        Args:
            z: Values by site. A site inside a subsampled plate holds all its rows.
            key: For noise sites that are not fixed.
            batch: Plate indices by name; `None` if nothing is subsampled.
            model: The model with its GP sites placed; `z` then lacks these.
        """
        prior, likelihood = self.terms(z, key=key, batch=batch, model=model)
        return prior + likelihood

    def terms(self, z: dict, *, key=None, batch: dict | None = None, model=None):
        """Log prior (with Jacobians) and expected log likelihood, apart."""
        placed = self.structure.gps if model is not None else ()
        missing = sorted(set(self.structure.latents) - set(z) - set(placed))
        if missing:
            raise ValueError(
                f"`z` must have a value of every site; it lacks {missing}."
            )
        key = jr.key(0) if key is None else key
        if self.noise is None:
            return self._terms(z, key, batch or {}, {}, model)
        prior, likelihood = jax.vmap(
            lambda noise: self._terms(z, key, batch or {}, noise, model)
        )(self.noise)
        return jnp.mean(prior), jnp.mean(likelihood)

    def constrain(self, z: dict) -> dict:
        """Values on their supports."""
        return self.structure.constrain(z)

    def initial(self, key, init_strategy=init_to_prior_median, values=None) -> dict:
        """Unconstrained starting values; sites in `values` start there.

        The others are spread about the median of their prior, so that chains start
        apart and R-hat can see whether they have met. A strategy of the user's own is
        taken at its word.
        """
        key, key_spread = jr.split(key)
        start = initial_values(
            self.call, self.structure, key,
            init_strategy=init_strategy, params=self.params,
        )  # fmt: skip
        for name, value in (values or {}).items():
            if name in start:
                start[name] = jnp.asarray(value, start[name].dtype)
        z = self.structure.unconstrain(start)
        z = {
            name: x if name in (values or {}) else _all_rows(self.structure, name, x)
            for name, x in z.items()
        }
        if init_strategy is not init_to_prior_median:
            return z
        flat, unravel = ravel_pytree(z)
        moved = flat + _SPREAD * jr.normal(key_spread, flat.shape, flat.dtype)
        moved = unravel(moved)
        return {n: x if n in (values or {}) else moved[n] for n, x in z.items()}

    def _terms(self, z, key, batch, noise, model):
        rows = {
            name: _batch_rows(self.structure, name, x, batch) for name, x in z.items()
        }
        values = self.structure.constrain(rows)
        data = {**self.params, **batch, **noise, **values}
        trace = self.call.trace(data, key, model=model)
        prior, likelihood = log_terms(trace)
        for name, x in rows.items():
            log_det = self.structure.latents[name].transform.log_abs_det_jacobian(
                x, values[name]
            )
            scale = trace[name]["scale"]
            prior = prior + jnp.sum(log_det) * (1.0 if scale is None else scale)
        return prior, likelihood


def log_terms(trace: Trace) -> tuple[Array, Array]:
    """Log prior and log likelihood of a trace; noise sites count as neither."""
    prior, likelihood = jnp.zeros(()), jnp.zeros(())
    for site in trace.values():
        if site["type"] != "sample" or find(site, Noise):
            continue
        term = jnp.sum(site_log_prob(site))
        term = term if site["scale"] is None else site["scale"] * term
        if site["is_observed"]:
            likelihood = likelihood + term
        else:
            prior = prior + term
    return prior, likelihood


def require_params(structure: Structure, params: dict | None) -> None:
    """Raise if the model has `numpyro.param`s without a value."""
    missing = sorted(set(structure.params) - set(params or {}))
    if missing:
        raise ValueError(
            f"The model has parameters without a value: {missing}. MCMC does not move "
            "`numpyro.param`s; NumPyro would freeze them at their initial value. Pass "
            "`params=svi_fit` (or a dict), or give them a prior with `numpyro.sample`."
        )


def _batch_rows(structure, name, x, batch):
    for plate, axis in structure.latents[name].plates.items():
        if plate in batch:
            x = jnp.take(x, batch[plate], axis=axis)
    return x


def _all_rows(structure, name, x):
    """Repeat the rows of one batch until there is one for each row of the plate."""
    for plate, axis in structure.latents[name].plates.items():
        size, subsample_size = structure.plates[plate]
        x = jnp.take(x, jnp.arange(size) % subsample_size, axis=axis)
    return x
