"""Targets seen through a likelihood: `observe`, and the distribution of its site."""

from __future__ import annotations

import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions import constraints
from numpyro.primitives import _PYRO_STACK

from numpyro_gpx import checks
from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.processes.expectations import (
    check_latent,
    expected_log_prob,
    predictive_log_prob,
    predictive_moments,
)
from numpyro_gpx.processes.joint_density import row_log_prob
from numpyro_gpx.processes.latent import Latent, as_latent

__all__ = ["ExpectedLikelihood", "observe"]


def observe(
    name: str,
    latent: Latent | Array,
    likelihood: Likelihood,
    obs: Array | None = None,
    *,
    rows: Array | None = None,
    offset: Array | None = None,
    weights: Array | None = None,
    mask: Array | None = None,
    missing: bool = False,
) -> Array:
    r"""Observe `y` through a likelihood, in expectation over the latent function.

    Registers `name` with
    :math:`\log\pi(y_n) = w_n\,\mathbb E_{p(f_n \mid v)}[\log p(y_n \mid f_n + o_n)]`;
    drawing from the site draws `f`, then `y`.

    Each row draws its own `f` given :math:`v`, so that `Predictive(model)(key, X)`
    gives rows that are independent given :math:`v`: the right marginals, but between
    the inducing inputs a function that is too rough. Coherent draws from the prior come
    from `gpx.Fit.from_prior(model, X, key=key)`.

    Args:
        name: Name of the site.
        latent: `f(X)`, or sums, products and stacks of such; or an array, a known
            function. `(N,)` or `(N, P)`; a likelihood of several latent functions, such
            as `HeteroscedasticGaussian`, takes a row's P latents for one target.
        likelihood: `gpx.likelihoods.Gaussian(scale)` and the like.
        obs: Targets `(N,)` or `(N, P)`; `None` to draw them.
        rows: The rows `(N,)` of the innermost plate, `with numpyro.plate(...) as i:`,
            that `latent` is at. `obs` then has all rows of the plate, of which these
            are taken; `offset`, `weights` and `mask` are those of `rows` already, as in
            `offset=offset[i]`.
        offset: Added to the latent function, e.g. a log exposure; `(N,)` or `(N, P)`.
        weights: Multiplies each row's term, `(N,)`.
        mask: `False` leaves an entry out, `(N,)` or `(N, P)`; it may then be NaN.
        missing: Whether NaN in `obs` stands for a missing entry, to be left out.

    Returns:
        The observed or drawn targets.
    """
    checks.instance("likelihood", likelihood, Likelihood, "of gpx.likelihoods")
    if rows is not None:
        obs = checks.rows_of(name, obs, rows, _innermost_plate())
    if not isinstance(latent, Latent):
        checks.numbers(f"latent` of site `{name}", latent)
    f = as_latent(latent)
    checks.fills_plate(name, f.shape[0], _PYRO_STACK)
    checks.finite(f"latent` of site `{name}", f.mean, hint="")
    checks.latents(name, f.shape, likelihood)
    check_latent(name, likelihood, f)
    if offset is not None:
        # One number for the mean and the noise of a row would make no sense.
        spread = likelihood.latent_ndim == 0
        offset = checks.rowwise("offset", name, offset, f.shape, spread=spread)
        f = f + offset
    if weights is not None:
        weights = checks.rowwise("weights", name, weights, f.shape[:1])
        checks.not_negative("weights", name, weights)
    if mask is not None:
        mask = checks.rowwise("mask", name, mask, likelihood.target_shape(f.shape))
    if missing and obs is not None:
        present = ~jnp.isnan(jnp.asarray(obs))
        mask = present if mask is None else mask & present
    known = {"weights": weights, "keep": mask, "offset": offset}
    fn = ExpectedLikelihood(f, likelihood, **known)
    if obs is not None:
        obs = checks.targets(name, obs, fn, likelihood)
    return numpyro.sample(name, fn, obs=obs)


def _innermost_plate() -> numpyro.plate | None:
    plates = [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]
    return plates[-1] if plates else None


class ExpectedLikelihood(dist.Distribution):
    r"""`log_prob(y)` is :math:`\mathbb E_{q(f_n)}[\log p(y_n \mid f_n)]` of each row.

    It is not the log density of what `sample` draws (`f`, then `y`); that one is
    `predictive_log_prob`. Batch shape `(N,)`, event shape `()` or `(P,)`.

    Args:
        latent: Marginals of the latent function, `(N,)` or `(N, P)`.
        likelihood: The likelihood.
        weights: Multiplies each row's terms, `(N,)`.
        keep: Entries that count, of the shape of the targets; `mask` is NumPyro's own.
        offset: What was added to the latent function already, to be looked at.
    """

    pytree_data_fields = ("latent", "likelihood", "weights", "keep", "offset")

    def __init__(
        self, latent, likelihood, *, weights=None, keep=None, offset=None,
        validate_args=None,
    ):  # fmt: skip
        self.latent = latent
        self.likelihood = likelihood
        self.weights = weights
        self.keep = keep
        self.offset = offset
        target_shape = likelihood.target_shape(latent.shape)
        batch, event = target_shape[:1], target_shape[1:]
        # Targets are checked at the door (`checks.targets`), with better words.
        super().__init__(batch, event, validate_args=False)

    @property
    def support(self):
        return constraints.independent(self.likelihood.support, len(self.event_shape))

    def log_prob(self, value):
        """Expected log likelihood of each row, weighted, `(N,)`."""
        rows = self._rows(value, expected_log_prob)
        return rows if self.weights is None else self.weights * rows

    def predictive_log_prob(self, value):
        r""":math:`\log\int p(y_n \mid f_n)\,q(f_n)\,df_n` of each row, `(N,)`.

        Joint over the outputs of a row. Without the weights: they say how much a row
        counts in the posterior, not what its density is.
        """
        if value.ndim == 2:
            joint = row_log_prob(self.likelihood, self.latent, value, self._kept(value))
            if joint is not None:
                return joint
        return self._rows(value, predictive_log_prob)

    def _kept(self, value):
        """Which entries count, of the shape of the targets; `None` for all."""
        if self.keep is None:
            return None
        keep = self.keep if self.keep.ndim == value.ndim else self.keep[:, None]
        return jnp.broadcast_to(keep, value.shape)

    def counts(self):
        """Which rows are data, `(N,)`: unmasked in part, and of a weight above 0."""
        counts = jnp.ones(self.batch_shape, bool)
        if self.keep is not None:
            keep = self.keep if self.keep.ndim == 1 else jnp.any(self.keep, axis=-1)
            counts = counts & keep
        return counts if self.weights is None else counts & (self.weights > 0.0)

    def sample(self, key, sample_shape=()):
        key_latent, key_target = jr.split(key)
        f = self.latent.sample(key_latent, sample_shape)
        return self.likelihood.distribution(f).sample(key_target)

    @property
    def mean(self):
        return predictive_moments(self.likelihood, self.latent)[0]

    @property
    def variance(self):
        return predictive_moments(self.likelihood, self.latent)[1]

    def _rows(self, value, log_density):
        """Sum `log_density` over the outputs of each row, masked."""
        if self.keep is None:
            rows = log_density(self.likelihood, self.latent, value)
        else:
            keep = jnp.broadcast_to(self.keep, value.shape)
            # Masked entries may be NaN: put a legal value there before they spread.
            filled = jnp.where(keep, value, _legal_value(self.support, value))
            found = log_density(self.likelihood, self.latent, filled)
            rows = jnp.where(keep, found, 0.0)
        if rows.shape != value.shape:
            raise ValueError(
                f"Parameters of {type(self.likelihood).__name__} must be scalars, or "
                f"have one entry for each of the targets {value.shape}; with them the "
                f"densities have shape {rows.shape}."
            )
        return rows.sum(-1) if rows.ndim > len(self.batch_shape) else rows


def _legal_value(support, value):
    """A number inside the support, in the dtype of `value`."""
    return jnp.asarray(support.feasible_like(jnp.zeros(())), value.dtype)
