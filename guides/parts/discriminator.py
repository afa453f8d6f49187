r"""What tells draws of a guide from those of a contrast: :math:`T_\Psi(v, Z)`.

Blocks are arrays `(P, M)`: P outputs at M inputs `(M, D)`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from numpyro_gpx.guides.parts.networks import Network

__all__ = ["Blocks", "Discriminator", "Moments", "gaussian_log_density"]

Blocks = dict[str, Any]  # arrays by block


class Moments(NamedTuple):
    """Mean `(P, M)` and lower factors `(P, M, M)` of the covariances of a block."""

    mean: Float[Array, "P M"]
    scale_tril: Float[Array, "P M M"]

    def standardise(self, x: Float[Array, "P M"]) -> Float[Array, "P M"]:
        """Deviations from the mean, over the factor."""
        solve = jax.vmap(lambda root, x: solve_triangular(root, x, lower=True))
        return solve(self.scale_tril, x - self.mean)

    def apply(self, x: Float[Array, "P M"]) -> Float[Array, "P M"]:
        """The inverse of `standardise`: `mean + scale_tril x`."""
        return self.mean + jnp.einsum("pmn,pn->pm", self.scale_tril, x)

    def after(self, first: Moments) -> Moments:
        """Moments of `apply(x)` where `x` has those of `first`."""
        return Moments(self.apply(first.mean), self.scale_tril @ first.scale_tril)


class Discriminator(eqx.Module):
    r"""Features of each inducing variable, summed over them, then joined by a head.

    .. math:: T(v, Z) = h\Big(\Big[M_\ell^{-1/2} \sum_m \phi_\ell(z_{\ell m}, v_{\ell
        m})\Big]_\ell\Big)

    with one network :math:`\phi_\ell` a block, tied to its inputs. The head starts at
    0: nothing is known before training.

    Args:
        sizes: Columns `D + P` that each block's network sees, by block.
        widths: Hidden widths; the last is the number of features.
        prefix: Names parameters.
    """

    sizes: dict[str, int] = eqx.field(static=True)
    widths: tuple[int, ...] = eqx.field(static=True)
    prefix: str = eqx.field(static=True)

    @property
    def networks(self) -> dict[str, Network]:
        """Networks by the name of the parameter that holds their weights."""
        *hidden, last = self.widths
        found = {
            self._name(block): Network(size, tuple(hidden), last, silent=False)
            for block, size in self.sizes.items()
        }
        found[self._name("joint")] = Network(last * len(self.sizes), (last,), 1)
        return found

    def __call__(
        self, weights: dict, whitened: Blocks, inputs: Blocks
    ) -> Float[Array, ""]:
        """The log ratio.

        Args:
            weights: Weights of `networks`, by name.
            whitened: Blocks, standardised by the contrast's moments.
            inputs: Inputs `(M, D)` by block.
        """
        networks, features = self.networks, []
        for block, x in whitened.items():
            name = self._name(block)
            rows = jnp.concatenate([inputs[block], x.T], axis=1)  # (M, D + P)
            found = networks[name](weights[name], rows)
            features.append(jnp.sum(found, axis=0) / math.sqrt(x.shape[1]))
        head = self._name("joint")
        return networks[head](weights[head], jnp.concatenate(features)[None])[0, 0]

    def _name(self, block: str) -> str:
        return f"{block}_{self.prefix}_discriminator"


def gaussian_log_density(
    whitened: Blocks, moments: dict[str, Moments]
) -> Float[Array, ""]:
    """Log density of Gaussian blocks, given their standardised values."""
    terms = []
    for name, x in whitened.items():
        roots = jnp.diagonal(moments[name].scale_tril, axis1=-2, axis2=-1)
        log_norm = 0.5 * math.log(2.0 * math.pi) * x.size + jnp.sum(jnp.log(roots))
        terms.append(-0.5 * jnp.sum(x**2) - log_norm)
    return jnp.sum(jnp.stack(terms))
