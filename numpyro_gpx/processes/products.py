"""Products and sums of latents: exact moments, components on demand."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from numpyro_gpx.cubature.gauss_hermite import gauss_hermite
from numpyro_gpx.cubature.tensor import tensor_nodes
from numpyro_gpx.processes.latent import (
    Components,
    Gaussian,
    Latent,
    as_latent,
)

__all__ = [
    "Product",
    "Total",
    "factor_nodes",
    "independent",
    "not_held_together",
    "refuse_moments_only",
]

# Exact for Gaussian likelihoods (polynomials), and enough for smooth links.
_PRODUCT_NODES = 20
# Quasi-random nodes of three factors or more, 1024 of them.
_LOG2_NODES = 10
# Components of a mixture, at most: more would take minutes and gigabytes.
_MOST_COMPONENTS = 20**3


class _Combined(Latent):
    """What combinations share: columns by mixtures, arithmetic by further nodes."""

    def _plus(self, other):
        return Total((self, Gaussian.known(jnp.broadcast_to(other, self.shape))))

    def _times(self, other):
        return Product.entrywise(
            self, Gaussian.known(jnp.broadcast_to(other, self.shape))
        )


class Product(_Combined):
    r"""A product of independent latents.

    Entry by entry, :math:`(f g)_n = f_n g_n`, or of matrices,
    :math:`h_{np} = \sum_q W_{npq} f_{nq}`, whose entries are all independent:

    .. math:: \mathbb E h_p = \sum_q \bar W_{pq} \bar f_q, \qquad
        \mathrm{cov}(h_p, h_{p'}) = \sum_q \bar W_{pq} \bar W_{p'q} s_q
        + \delta_{pp'} \sum_q t_{pq} (\bar f_q^2 + s_q)

    with variances `s` of `f` and `t` of `W` (Wilson, Knowles & Ghahramani 2012).
    """

    left: Latent
    right: Latent
    is_matrix: bool = eqx.field(static=True)

    @classmethod
    def entrywise(cls, left: Latent, right: Latent) -> Product:
        """`left * right`."""
        independent(left, right, "multiplied")
        not_held_together(left, right, "product")
        refuse_moments_only((left, right), "multiplied")
        return cls(left, right, False)

    @classmethod
    def matrix(cls, left: Latent, right) -> Product:
        """`left @ right`, of `(N, P, Q)` and `(N, Q)`."""
        right = as_latent(right)
        if len(left.shape) != 3 or right.shape != left.shape[::2]:
            raise ValueError(
                "`W @ f` needs latents of shapes (N, P, Q) and (N, Q); got "
                f"{left.shape} and {right.shape}."
            )
        if left.outputs_depend or right.outputs_depend:
            raise ValueError(
                "`W @ f` needs factors with independent outputs; those of `A @ g(X)` "
                "depend on each other."
            )
        independent(left, right, "multiplied")
        not_held_together(left, right, "product")
        refuse_moments_only((left, right), "multiplied")
        return cls(left, right, True)

    @property
    def sites(self) -> frozenset:  # type: ignore[override]
        return self.left.sites | self.right.sites

    @property
    def mean(self) -> Array:  # type: ignore[override]
        if self.is_matrix:
            return jnp.einsum("npq,nq->np", self.left.mean, self.right.mean)
        return self.left.mean * self.right.mean

    @property
    def var(self) -> Array:  # type: ignore[override]
        a, s = self.left.mean, self.left.var
        b, t = self.right.mean, self.right.var
        if self.is_matrix:
            b, t = b[:, None], t[:, None]
        entries = s * t + s * b**2 + t * a**2
        return jnp.sum(entries, axis=-1) if self.is_matrix else entries

    @property
    def outputs_depend(self):
        return self.is_matrix or self.left.outputs_depend or self.right.outputs_depend

    @property
    def taken(self):  # type: ignore[override]
        return self.left.taken + self.right.taken

    @property
    def groups(self):
        return self.left.groups | self.right.groups

    def __getitem__(self, index):
        if self.is_matrix:
            raise ValueError(
                "A column of `W(X) @ f(X)` is not there; observe all of its outputs."
            )
        return Product(self.left[index], self.right[index], False)

    def take(self, group):
        if self.is_matrix:
            return self[:, 0]  # refused
        return Product(self.left.take(group), self.right.take(group), False)

    def output_cov(self):
        if not self.is_matrix:
            return _product_cov(self.left, self.right)
        W, f = self.left, self.right
        shared = jnp.einsum("npq,nrq,nq->npr", W.mean, W.mean, f.var)
        own = jnp.einsum("npq,nq->np", W.var, f.mean**2 + f.var)
        return shared + jax.vmap(jnp.diag)(own)

    def components(self):
        if self.is_matrix:
            raise ValueError(
                "Outputs of `W(X) @ f(X)` depend on each other through `f`: only their "
                "mean and covariance are known. Use a Gaussian likelihood, with the "
                "identity as link."
            )
        log_v, means, variances = self.left.components()
        nodes, weights = gauss_hermite(_PRODUCT_NODES)
        dtype = means.dtype
        x = jnp.asarray(nodes, dtype).reshape((-1,) + (1,) * means.ndim)
        # Given the first factor the product is Gaussian: g = a f, f ~ N(m, s).
        a = means[None] + x * jnp.sqrt(variances)[None]  # (Q, S, N, *P)
        a = a.reshape((-1,) + self.shape)
        log_v = (jnp.log(jnp.asarray(weights, dtype))[:, None] + log_v[None]).reshape(
            -1, 1
        )
        log_w, m, s = self.right.components()
        _check_number(len(a) * len(log_w))
        return Components(
            (log_v + log_w[None]).reshape(-1),
            (a[:, None] * m[None]).reshape((-1,) + self.shape),
            (a[:, None] ** 2 * s[None]).reshape((-1,) + self.shape),
        )

    def entry_components(self):
        if not (self.is_matrix and isinstance(self.right, Gaussian)):
            return self.components()
        mean, sd = self.right.mean[None], jnp.sqrt(self.right.var)[None]
        nodes, log_weights = factor_nodes(mean.shape[2], mean.dtype)
        f = mean + sd * nodes[:, None]  # (S, N, Q)
        return Components(
            log_weights,
            jnp.einsum("npq,snq->snp", self.left.mean, f),
            jnp.einsum("npq,snq->snp", self.left.var, f**2),
        )

    def bare(self):
        return Product(self.left.bare(), self.right.bare(), self.is_matrix)

    def sample(self, key, sample_shape=()):
        key_left, key_right = jr.split(key)
        a = self.left.sample(key_left, sample_shape)
        b = self.right.sample(key_right, sample_shape)
        return jnp.einsum("...npq,...nq->...np", a, b) if self.is_matrix else a * b


class Total(_Combined):
    """A sum of independent latents that are not all Gaussian."""

    parts: tuple[Latent, ...]

    @property
    def sites(self) -> frozenset:  # type: ignore[override]
        return frozenset().union(*(part.sites for part in self.parts))

    @property
    def mean(self) -> Array:  # type: ignore[override]
        return sum(part.mean for part in self.parts)  # type: ignore[return-value]

    @property
    def var(self) -> Array:  # type: ignore[override]
        return sum(part.var for part in self.parts)  # type: ignore[return-value]

    @property
    def outputs_depend(self):
        return any(part.outputs_depend for part in self.parts)

    @property
    def taken(self):  # type: ignore[override]
        return tuple(taken for part in self.parts for taken in part.taken)

    @property
    def groups(self):
        return frozenset().union(*(part.groups for part in self.parts))

    def __getitem__(self, index):
        return Total(tuple(part[index] for part in self.parts))

    def take(self, group):
        return Total(tuple(part.take(group) for part in self.parts))

    def output_cov(self):
        return sum(part.output_cov() for part in self.parts)

    def components(self):
        found = self.parts[0].components()
        for part in self.parts[1:]:
            found = _pairs(found, part.components())
        return found

    def entry_components(self):
        found = self.parts[0].entry_components()
        for part in self.parts[1:]:
            found = _pairs(found, part.entry_components())
        return found

    def bare(self):
        return Total(tuple(part.bare() for part in self.parts))

    def sample(self, key, sample_shape=()):
        keys = jr.split(key, len(self.parts))
        pairs = zip(self.parts, keys, strict=True)
        return sum(part.sample(k, sample_shape) for part, k in pairs)


def factor_nodes(number: int, dtype) -> tuple[Array, Array]:
    """Nodes `(S, Q)` of Q standard normals, and their log weights.

    All pairs of Gauss-Hermite's for up to two, quasi-random ones for more.
    """
    if number <= 2:
        x, w = (jnp.asarray(a, dtype) for a in gauss_hermite(_PRODUCT_NODES))
        points, weights = tensor_nodes([x] * number, [w] * number)
        return points, jnp.log(weights)
    points = jnp.asarray(_quasi_random(number), dtype)
    return points, jnp.full(len(points), -np.log(len(points)), dtype)


@functools.cache
def _quasi_random(number: int) -> np.ndarray:
    """Fixed quasi-random standard normals, `(S, Q)`."""
    import scipy.stats  # half a second, which most models need not pay

    points = scipy.stats.qmc.Sobol(number, rng=0).random_base2(_LOG2_NODES)
    return scipy.stats.norm.ppf(points)


def _pairs(first: Components, second: Components) -> Components:
    """All pairs of components, added."""
    _check_number(len(first.log_weights) * len(second.log_weights))
    means = first.means[:, None] + second.means[None]
    variances = first.variances[:, None] + second.variances[None]
    return Components(
        (first.log_weights[:, None] + second.log_weights[None]).reshape(-1),
        means.reshape((-1,) + means.shape[2:]),
        variances.reshape((-1,) + variances.shape[2:]),
    )


def _check_number(number: int) -> None:
    if number > _MOST_COMPONENTS:
        raise ValueError(
            f"A likelihood that is not Gaussian needs a sum of products as a mixture "
            f"of {number} components, more than {_MOST_COMPONENTS}. Use a Gaussian "
            "likelihood, or fewer products."
        )


def refuse_moments_only(latents, verb: str) -> None:
    for latent in latents:
        if isinstance(latent, Gaussian) and latent.moments_only:
            raise ValueError(
                "Latents at uncertain inputs, and mixed products as `A @ (f * g)`, "
                f"cannot be {verb}: only the mean and variance of each are known. At "
                "uncertain inputs use a rule with points, such as "
                "`gpx.cubature.Unscented()`, or put the sum into the kernel; of "
                "products mix the sum, `A @ (f * g + h)`."
            )


def not_held_together(first: Latent, second: Latent, what: str) -> None:
    if first.groups & second.groups:
        raise ValueError(
            f"The guide holds {sorted(first.sites)} and {sorted(second.sites)} "
            f"together, so that their {what} has no closed moments. Use a guide that "
            "holds them apart, such as WhitenedGaussian."
        )


def _product_cov(left: Latent, right: Latent):
    """Covariance between the outputs of `left * right`, exact for any law of each."""
    a, b = (jnp.einsum("np,nq->npq", x.mean, x.mean) for x in (left, right))
    return (left.output_cov() + a) * (right.output_cov() + b) - a * b


def independent(first: Latent, second: Latent, verb: str) -> None:
    shared = first.sites & second.sites
    if shared:
        raise ValueError(
            f"Latents that are {verb} must come from different GP sites; both use "
            f"{sorted(shared)}. Evaluate the GP once and scale it (`2.0 * f(X)`), or "
            "write the combination into the kernel."
        )
