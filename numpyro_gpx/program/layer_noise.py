"""Fixed quasi-random noise for densities that average over the noise between layers."""

from __future__ import annotations

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.primitives import Messenger

from numpyro_gpx.program.call import Call
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.sites.marks import Noise, find, without

__all__ = ["as_latent_noise", "noise_sets"]


def as_latent_noise(call: Call) -> Call:
    """The call with its noise sites as ordinary latent sites (target B)."""
    return call.with_model(_Unmarked(call.model))


class _Unmarked(Messenger):
    """Takes the mark off noise sites."""

    def process_message(self, msg):
        if msg["type"] == "sample" and find(msg, Noise):
            msg.update(without(msg, Noise))


def noise_sets(key, structure: Structure, num_sets: int) -> dict:
    """Standard normal noise `(S, N, ...)` for every noise site.

    A Sobol sequence over the entries of one row (all layers together), shifted at
    random and separately for each row, so that the S values of a row fill its space
    evenly while rows stay independent.

    Args:
        key: Fixes the sets.
        structure: Of the model.
        num_sets: Number of sets S; a power of two serves best.
    """
    import scipy.stats  # half a second, which most fits need not pay

    sizes = {name: int(np.prod(shape[1:])) for name, shape in structure.noise.items()}
    rows = {name: shape[0] for name, shape in structure.noise.items()}
    seed = int(jr.randint(key, (), 0, 2**31 - 1))
    rng = np.random.default_rng(seed)
    sobol = scipy.stats.qmc.Sobol(sum(sizes.values()), rng=rng)
    points = sobol.random_base2(int(np.ceil(np.log2(num_sets))))[:num_sets]
    noise, start = {}, 0
    for name, size in sizes.items():
        columns = points[:, None, start : start + size]  # (S, 1, K)
        shifted = (columns + rng.random((1, rows[name], size))) % 1.0
        normal = scipy.stats.norm.ppf(np.clip(shifted, 1e-12, 1 - 1e-12))
        noise[name] = jnp.asarray(normal.reshape(num_sets, *structure.noise[name]))
        start += size
    return noise
