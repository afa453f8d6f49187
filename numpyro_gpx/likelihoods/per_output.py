"""A likelihood of its own for each column of the targets."""

__all__ = ["PerOutput"]

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_gpx.likelihoods.base import Likelihood, Moments


class PerOutput(Likelihood):
    """Targets `(N, P)` whose columns have different likelihoods.

    The latent functions are handed out in order: each likelihood takes as many columns
    of the latents as it needs (a `HeteroscedasticGaussian` two, a `Categorical` one a
    class, most of them one).

    Args:
        likelihoods: One likelihood for each column of the targets.
    """

    latent_ndim: ClassVar[int] = 1
    likelihoods: tuple[Likelihood, ...] = eqx.field(converter=tuple)

    def __check_init__(self):
        for one in self.likelihoods:
            if not isinstance(one, Likelihood) or isinstance(one, PerOutput):
                raise TypeError(
                    "`likelihoods` must hold one plain likelihood per column; got "
                    f"{type(one).__name__}."
                )

    @property
    def support(self):
        return _Columns(tuple(one.support for one in self.likelihoods))

    @property
    def num_latent(self):
        return sum(one.num_latent for one in self.likelihoods)

    @property
    def discontinuous(self):
        return any(one.discontinuous for one in self.likelihoods)

    def target_shape(self, latent_shape):
        return (*latent_shape[:-1], len(self.likelihoods))

    def distribution(self, f):
        parts = [one.distribution(g) for one, (g,) in self._each(f)]
        return _Joined(parts)

    def log_prob(self, y, f):
        return self._columns(lambda one, j, f: one.log_prob(y[..., j], f), f)

    def expected_log_prob(self, y, f_mean, f_var):
        """Expected log density of each column, `(N, P)`."""
        return self._columns(
            lambda one, j, m, v: one.expected_log_prob(y[..., j], m, v), f_mean, f_var
        )

    def predictive_log_prob(self, y, f_mean, f_var):
        """Log predictive density of each column, `(N, P)`."""
        return self._columns(
            lambda one, j, m, v: one.predictive_log_prob(y[..., j], m, v), f_mean, f_var
        )

    def predictive_cdf(self, y, f_mean, f_var):
        return self._columns(
            lambda one, j, m, v: one.predictive_cdf(y[..., j], m, v), f_mean, f_var
        )

    def predictive_moments(self, f_mean, f_var):
        pairs = [
            one.predictive_moments(m, v) for one, (m, v) in self._each(f_mean, f_var)
        ]
        return Moments(
            *(jnp.stack(column, axis=-1) for column in zip(*pairs, strict=True))
        )

    def check(self, y, name="obs", mask=None):
        for j, one in enumerate(self.likelihoods):
            column = mask if mask is None or jnp.ndim(mask) < 2 else mask[..., j]
            one.check(y[..., j], name=f"{name}[:, {j}]", mask=column)

    def _each(self, *latents):
        """Each likelihood with its own columns of the latents."""
        start = 0
        for one in self.likelihoods:
            stop = start + one.num_latent
            own = tuple(
                f[..., start:stop] if one.latent_ndim else f[..., start]
                for f in latents
            )
            yield one, own
            start = stop

    def _columns(self, fn, *latents):
        columns = [
            fn(one, j, *own) for j, (one, own) in enumerate(self._each(*latents))
        ]
        return jnp.stack(columns, axis=-1)


class _Columns(constraints.Constraint):
    """Each column in its own support."""

    event_dim = 0

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, y):
        return jnp.stack([c(y[..., j]) for j, c in enumerate(self.parts)], axis=-1)

    def feasible_like(self, prototype):
        # A number that lies in all the supports that likelihoods here have.
        return jnp.full_like(prototype, 0.5)

    def tree_flatten(self):
        return (self.parts,), (("parts",), {})


class _Joined(dist.Distribution):
    """Independent columns; only drawn from."""

    support = constraints.real_vector

    def __init__(self, parts: Sequence[dist.Distribution]):
        self.parts = parts
        super().__init__(parts[0].batch_shape, (len(parts),), validate_args=False)

    def sample(self, key, sample_shape=()):
        keys = jr.split(key, len(self.parts))
        drawn = [
            p.sample(k, sample_shape) for p, k in zip(self.parts, keys, strict=True)
        ]
        dtype = jnp.result_type(float, *drawn)
        return jnp.stack([jnp.asarray(x, dtype) for x in drawn], axis=-1)
