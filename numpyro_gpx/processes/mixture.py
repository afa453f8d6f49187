"""A latent that is a mixture of Gaussians in each row."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from numpyro_gpx.processes.columns import columns_of, taken
from numpyro_gpx.processes.latent import Components, Latent

__all__ = ["Mixture"]


class Mixture(Latent):
    """A mixture of S Gaussians in each row; means and variances `(S, N, *P)`."""

    log_weights: Float[Array, " S"]
    means: Float[Array, "S N *P"]
    variances: Float[Array, "S N *P"]
    sites: frozenset = eqx.field(static=True, default=frozenset())

    @property
    def mean(self) -> Array:  # type: ignore[override]
        return jnp.tensordot(jnp.exp(self.log_weights), self.means, axes=1)

    @property
    def var(self) -> Array:  # type: ignore[override]
        spread = self.variances + (self.means - self.mean[None]) ** 2
        return jnp.tensordot(jnp.exp(self.log_weights), spread, axes=1)

    @property
    def outputs_depend(self):
        return self.mean.ndim > 1

    @property
    def groups(self):
        return frozenset()

    def output_cov(self):
        weights = jnp.exp(self.log_weights)
        apart = self.means - self.mean[None]
        between = jnp.einsum("s,snp,snq->npq", weights, apart, apart)
        own = jnp.tensordot(weights, self.variances, axes=1)
        return between + jax.vmap(jnp.diag)(own)

    def components(self):
        return Components(self.log_weights, self.means, self.variances)

    def sample(self, key, sample_shape=()) -> Array:
        key_component, key_noise = jr.split(key)
        shape = sample_shape + self.shape
        k = jr.categorical(
            key_component, self.log_weights, shape=shape
        )  # component of each entry
        pick = jax.vmap(lambda rows, index: rows[index], (1, -1), -1)
        flat = (self.means.shape[0], -1)
        index = k.reshape(sample_shape + (-1,))
        means = pick(self.means.reshape(flat), index).reshape(shape)
        variances = pick(self.variances.reshape(flat), index).reshape(shape)
        noise = jr.normal(key_noise, shape, self.means.dtype)
        return means + jnp.sqrt(variances) * noise

    def bare(self):
        return self

    def __getitem__(self, index):
        place = (slice(None), slice(None), *columns_of(index, self.shape))
        return dataclasses.replace(
            self, means=self.means[place], variances=self.variances[place]
        )

    def take(self, group):
        each = jax.vmap(lambda x: taken(x, group))
        return dataclasses.replace(
            self, means=each(self.means), variances=each(self.variances)
        )

    def _plus(self, other):
        return dataclasses.replace(self, means=self.means + other)

    def _times(self, other):
        return dataclasses.replace(
            self, means=self.means * other, variances=self.variances * other**2
        )
