r"""A GP seen through its inducing variables.

With whitened inducing variables `v` and a root :math:`R R^\top = K_{uu}`,
:math:`u = m_u + R v`, and with :math:`A = R^{-1} K_{uf}`

.. math:: f \mid v \sim \mathcal N(m(X) + A^\top v,\; K_{ff} - A^\top A).
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_gpx.beliefs import Belief
from numpyro_gpx.inducing import Inducing, Kuf, psi, root
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.means import Mean
from numpyro_gpx.numerics.factor import Factor, Triangular, cholesky
from numpyro_gpx.processes.psi import Psi
from numpyro_gpx.uncertain import InputBelief

__all__ = ["SparsePrior"]


class SparsePrior(eqx.Module):
    """A GP seen through its inducing variables.

    Attributes:
        kernels: One kernel shared by all outputs, or one for each of P outputs.
        inducing: What the GP is summarised by.
        mean: Mean function.
        factor: Root of `Kuu`; with kernels of their own, the outputs' along a leading
            axis.
    """

    kernels: tuple[Kernel, ...]
    inducing: Inducing
    mean: Mean
    factor: Factor

    @classmethod
    def create(
        cls, kernels, inducing: Inducing, mean: Mean, *, multiplies: bool = False
    ) -> SparsePrior:
        """Factorise `Kuu` once for everything that follows.

        Args:
            kernels: One, or one for each output.
            inducing: Inducing variables.
            mean: Mean function.
            multiplies: Whether nothing will be solved with the root, as where the GP is
                asked for at its own rows alone.
        """
        kernels = tuple(inducing.prior(kernel) for kernel in kernels)
        if multiplies:
            factors = [
                Triangular(cholesky(kernel(inducing.coordinates())))
                for kernel in kernels
            ]
        else:
            factors = [root(inducing, kernel) for kernel in kernels]
        factor = factors[0]
        if len(kernels) > 1:
            factor = jax.tree.map(lambda *x: jnp.stack(x), *factors)
        return cls(kernels, inducing, mean, factor)

    @property
    def has_own_kernels(self) -> bool:
        """Whether each output has a kernel of its own."""
        return len(self.kernels) > 1

    def project(self, X, kernels=None, *, accurate=False) -> Float[Array, "*P M N"]:
        r""":math:`A = R^{-1} K_{uf}`, `(M, N)`, or `(P, M, N)`.

        Args:
            X: Inputs `(N, D)`.
            kernels: Take the cross-covariance from these instead: a summand of the
                kernel gives the projection of that part of the function.
            accurate: Needed where :math:`K_{ff} - A^\top A` must stay positive
                definite; slower.
        """
        kernels = self.kernels if kernels is None else kernels
        Ks = [Kuf(self.inducing, kernel, X) for kernel in kernels]
        if not self.has_own_kernels:
            return self.factor.solve(Ks[0], accurate=accurate)

        def one(factor, K):
            return factor.solve(K, accurate=accurate)

        return jax.vmap(one)(self.factor, jnp.stack(Ks))

    def gram(
        self, X: Float[Array, "N D"], roots: Float[Array, " N"]
    ) -> tuple[Float[Array, "M M"], Float[Array, "M N"]]:
        r"""Sums :math:`\sum_n r_n^2 a_n a_n^\top` over known rows, and `r_n k(u, x_n)`.

        Of the one kernel, with :math:`a_n = R^{-1} k(u, x_n)`; `roots` are the square
        roots :math:`r_n` of the rows' weights.
        """
        K = roots * Kuf(self.inducing, self.kernels[0], X)  # (M, N)
        total = jnp.sum(roots**2 * self.kernels[0].diag(X))
        return self.factor.gram(K, total), K

    def psi(self, inputs: InputBelief, weights: Float[Array, " N"]) -> Psi:
        """Psi statistics of the one kernel, in terms of `v`: `psi1` is `(N, M)`."""
        if self.has_own_kernels:
            raise ValueError(
                "Closed-form expectations of outputs with kernels of their own are not "
                "there; use a rule with points, such as `gpx.cubature.Unscented()`."
            )
        found = psi(self.inducing, self.kernels[0], inputs, weights)
        psi1 = self.factor.solve(found.psi1.T).T
        return Psi(found.psi0, psi1, self.factor.congruence(found.psi2))

    def inducing_mean(self, num_outputs: int | None) -> Array:
        """Prior mean of `u`, `(M,)`, or `(P, M)`."""
        mean = self.inducing.mean(self.mean)
        if num_outputs is None:
            return mean
        shape = (mean.shape[0], num_outputs)
        mean = mean[:, None] if mean.ndim == 1 else mean
        return jnp.broadcast_to(mean, shape).T

    def condition(self) -> Float[Array, "*P"]:
        """An estimate of the condition of `Kuu`."""
        return self._each(lambda factor: factor.condition())

    def lower(self) -> Float[Array, "*P M M"]:
        """A lower triangular root of `Kuu`, for a prior of `u` itself."""
        return self._each(lambda factor: factor.lower())

    def whiten(self, value):
        """The value of an unwhitened site, `u`, as one of `v`: a draw or a belief."""
        draw = value.mean if isinstance(value, Belief) else value
        num_outputs = None if draw.ndim == 1 else draw.shape[0]
        eye = jnp.eye(draw.shape[-1], dtype=draw.dtype)
        W = self._each(lambda factor: factor.solve(eye))
        shift = -jnp.einsum("...ij,...j->...i", W, self.inducing_mean(num_outputs))
        if isinstance(value, Belief):
            return value.affine(shift, W)
        return shift + jnp.einsum("...ij,...j->...i", W, value)

    def variance(self, X, kernels=None) -> Float[Array, "*P N"]:
        """Prior variances, `(N,)`, or `(P, N)`."""
        kernels = self.kernels if kernels is None else kernels
        found = [kernel.diag(X) for kernel in kernels]
        return found[0] if len(found) == 1 else jnp.stack(found)

    def covariance(self, X, kernels=None) -> Float[Array, "*P N N"]:
        """Prior covariances, `(N, N)`, or `(P, N, N)`."""
        kernels = self.kernels if kernels is None else kernels
        found = [kernel(X) for kernel in kernels]
        return found[0] if len(found) == 1 else jnp.stack(found)

    def _each(self, fn):
        """`fn` of the root, or of each output's."""
        return jax.vmap(fn)(self.factor) if self.has_own_kernels else fn(self.factor)
