"""Sums, products and mixings of latents: exact moments, components on demand."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from numpyro_gpx.cubature.gauss_hermite import gauss_hermite
from numpyro_gpx.processes.latent import (
    Components,
    Gaussian,
    Latent,
    Mixture,
    as_latent,
)

__all__ = ["Product", "Total", "mixed", "stack", "summed"]

# Exact for Gaussian likelihoods (polynomials), and enough for smooth links.
_PRODUCT_NODES = 20
# Components of a mixture, at most: more would take minutes and gigabytes.
_MOST_COMPONENTS = 20**3


class _Combined(Latent):
    """What combinations share: columns by mixtures, arithmetic by further nodes."""

    def __getitem__(self, index):
        return _mixture(self)[index]

    def take(self, group):
        return _mixture(self).take(group)

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
        _independent(left, right, "multiplied")
        _not_held_together(left, right)
        _refuse_moments_only((left, right), "multiplied")
        return cls(left, right, False)

    @classmethod
    def matrix(cls, left: Latent, right) -> Product:
        """`left @ right`, of `(N, P, Q)` and `(N, Q)`."""
        right = as_latent(right)
        if len(left.shape) != 3 or right.shape != left.shape[::2]:
            raise ValueError(
                "`W @ f` needs latents of shapes (N, P, Q) and (N, Q); got "
                f"{left.shape} and {right.shape}. Make the first with "
                "`gpx.gp(..., num_outputs=(P, Q))`."
            )
        _independent(left, right, "multiplied")
        _not_held_together(left, right)
        _refuse_moments_only((left, right), "multiplied")
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

    def output_cov(self):
        if not self.is_matrix:
            return _mixture(self).output_cov()
        W, f = self.left, self.right
        shared = jnp.einsum("npq,nrq,nq->npr", W.mean, W.mean, f.var)
        own = jnp.einsum("npq,nq->np", W.var, f.mean**2 + f.var)
        return shared + jax.vmap(jnp.diag)(own)

    def components(self):
        if self.is_matrix:
            raise ValueError(
                "Outputs of `W(X) @ f(X)` depend on each other through `f`: only their "
                "mean and covariance are known. Use a Gaussian likelihood."
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

    def output_cov(self):
        return sum(part.output_cov() for part in self.parts)

    def components(self):
        found = self.parts[0].components()
        for part in self.parts[1:]:
            found = _pairs(found, part.components())
        return found

    def bare(self):
        return Total(tuple(part.bare() for part in self.parts))

    def sample(self, key, sample_shape=()):
        keys = jr.split(key, len(self.parts))
        pairs = zip(self.parts, keys, strict=True)
        return sum(part.sample(k, sample_shape) for part, k in pairs)


def summed(first: Latent, second: Latent) -> Latent:
    """The sum of independent latents."""
    _independent(first, second, "added")
    if isinstance(first, Gaussian) and isinstance(second, Gaussian):
        return _gaussian_sum(first, second)
    parts: list[Latent] = []
    for one in (first, second):
        parts += one.parts if isinstance(one, Total) else (one,)
    return Total(tuple(parts))


def mixed(A, latent: Latent) -> Latent:
    """`A @ latent`, with a known matrix `(P, Q)` or one for each row `(N, P, Q)`."""
    A = jnp.asarray(A, latent.mean.dtype)
    if A.ndim not in (2, 3) or len(latent.shape) != 2 or A.shape[-1] != latent.shape[1]:
        raise ValueError(
            "`A @ g(X)` needs a matrix (P, Q), or one for each row (N, P, Q), and a "
            f"latent (N, Q); got {A.shape} and {latent.shape}."
        )
    A = jnp.broadcast_to(A, (latent.shape[0], *A.shape[-2:]))
    mean = jnp.einsum("npq,nq->np", A, latent.mean)
    if isinstance(latent, Gaussian) and latent.between is None:
        between = jnp.einsum("npq,nrq,nq->npr", A, A, latent.var)
    else:
        between = jnp.einsum("npq,nqs,nrs->npr", A, latent.output_cov(), A)
    var = jnp.diagonal(between, axis1=1, axis2=2)
    known = isinstance(latent, Gaussian) and latent.is_known
    gaussian = isinstance(latent, Gaussian) and not latent.moments_only
    return Gaussian(
        mean, var, between=between, sites=latent.sites, moments_only=not gaussian,
        is_known=known,
        roots={
            group: jnp.einsum("npq,nqr->npr", A, x)
            for group, x in getattr(latent, "roots", {}).items()
        },
    )  # fmt: skip


def stack(*latents) -> Gaussian:
    """Join latent functions into the columns of one latent, `(N, P)`.

    For likelihoods of several latent functions whose GPs have different kernels,
    inducing points or inputs: `gpx.stack(f(X), g(X))`.

    Args:
        latents: Latents `(N,)` or `(N, P)` of different GP sites, or known functions.
    """
    parts: list[Gaussian] = []
    sites: frozenset = frozenset()
    for one in map(as_latent, latents):
        if not isinstance(one, Gaussian):
            raise TypeError(
                "`stack` joins Gaussian latents, such as f(X) or f(X) + g(X); got "
                f"{type(one).__name__}, a product."
            )
        if sites & one.sites:
            raise ValueError(
                "Latents that are stacked must come from different GP sites; several "
                f"use {sorted(sites & one.sites)}. For one kernel and several "
                "independent functions use `gpx.gp(..., num_outputs=...)`."
            )
        sites = sites | one.sites
        parts.append(one)

    def columns(x):
        return x[:, None] if x.ndim == 1 else x

    if any(one.roots or one.between is not None for one in parts):
        raise ValueError(
            f"`stack` joins independent functions; the guide holds {sorted(sites)} "
            "together, or outputs were mixed. Use a guide that holds them apart, such "
            "as WhitenedGaussian."
        )
    return Gaussian(
        jnp.concatenate([columns(one.mean) for one in parts], axis=1),
        jnp.concatenate([columns(one.var) for one in parts], axis=1),
        sites=sites,
        moments_only=any(one.moments_only for one in parts),
        is_known=all(one.is_known for one in parts),
    )


def _gaussian_sum(first: Gaussian, second: Gaussian) -> Gaussian:
    if first.moments_only:  # both may depend on the same input
        _refuse_moments_only((second,), "added")
    row_cov = cov_scale = between = None
    if first.row_cov is not None and second.row_cov is not None:
        row_cov = first.row_cov + second.row_cov
        cov_scale = _both(first.cov_scale, second.cov_scale)
    if first.between is not None or second.between is not None:
        between = first.output_cov() + second.output_cov()
    known = first.origin and second.origin
    mean, var = first.mean + second.mean, first.var + second.var
    for group in set(first.roots) & set(second.roots):
        one, other = first.roots[group], second.roots[group]
        var = var + 2.0 * jnp.sum(one * other, axis=-1)
        if row_cov is not None:
            row_cov = row_cov + _twice(*(jnp.moveaxis(x, 0, -2) for x in (one, other)))
        if between is not None:
            between = between + _twice(one, other)
    shift = None
    if first.shift is not None or second.shift is not None:
        zero = jnp.zeros(())
        shifts = (zero if s is None else s for s in (first.shift, second.shift))
        shift = jnp.broadcast_to(sum(shifts), mean.shape)
    return Gaussian(
        mean, var, row_cov, between,
        origin=first.origin + second.origin if known else (),
        sites=first.sites | second.sites, cov_scale=cov_scale, shift=shift,
        moments_only=first.moments_only or second.moments_only,
        is_known=first.is_known and second.is_known,
        roots=_added(first.roots, second.roots),
    )  # fmt: skip


def _added(first: dict, second: dict) -> dict:
    """Roots of a sum, by group."""
    return {
        group: sum(roots[group] for roots in (first, second) if group in roots)
        for group in {**first, **second}
    }


def _twice(one, other):
    """`A B^T + B A^T` of the last two axes."""
    product = one @ jnp.swapaxes(other, -1, -2)
    return product + jnp.swapaxes(product, -1, -2)


def _both(first, second):
    return None if first is None or second is None else first + second


def _mixture(latent: Latent) -> Mixture:
    return Mixture(*latent.components(), sites=latent.sites)


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


def _refuse_moments_only(latents, verb: str) -> None:
    for latent in latents:
        if isinstance(latent, Gaussian) and latent.moments_only:
            raise ValueError(
                f"Latents at uncertain inputs cannot be {verb}: only the mean and "
                "variance of each are known. Use a rule with points, such as "
                "`gpx.cubature.Unscented()`, or put the sum into the kernel."
            )


def _not_held_together(first: Latent, second: Latent) -> None:
    groups = [one.roots for one in (first, second) if isinstance(one, Gaussian)]
    if len(groups) == 2 and set(groups[0]) & set(groups[1]):
        raise ValueError(
            f"The guide holds {sorted(first.sites)} and {sorted(second.sites)} "
            "together, so that their product has no closed moments. Use a guide that "
            "holds them apart, such as WhitenedGaussian."
        )


def _independent(first: Latent, second: Latent, verb: str) -> None:
    shared = first.sites & second.sites
    if shared:
        raise ValueError(
            f"Latents that are {verb} must come from different GP sites; both use "
            f"{sorted(shared)}. Evaluate the GP once and scale it (`2.0 * f(X)`), or "
            "write the combination into the kernel."
        )
