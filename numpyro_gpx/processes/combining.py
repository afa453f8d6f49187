"""Sums, known mixings and stacks of latents."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from numpyro_gpx.processes.latent import Gaussian, Latent, as_latent
from numpyro_gpx.processes.products import (
    Total,
    independent,
    not_held_together,
    refuse_moments_only,
)

__all__ = ["mixed", "stack", "summed"]


def summed(first: Latent, second: Latent) -> Latent:
    """The sum of independent latents."""
    independent(first, second, "added")
    if isinstance(first, Gaussian) and isinstance(second, Gaussian):
        return _gaussian_sum(first, second)
    not_held_together(first, second, "sum")
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
    if isinstance(latent, Gaussian) and latent.row_cov is not None:
        raise ValueError(
            "`A @ g(X)` keeps no covariance between rows; leave `full_cov` out."
        )
    if not isinstance(latent, Gaussian) and latent.groups:
        raise ValueError(
            f"The guide holds {sorted(latent.sites)} together with others, so that "
            "`A @ g(X)` of a product has no closed moments beside them. Use a guide "
            "that holds them apart, such as WhitenedGaussian."
        )
    A = jnp.broadcast_to(A, (latent.shape[0], *A.shape[-2:]))
    mean = jnp.einsum("npq,nq->np", A, latent.mean)
    if isinstance(latent, Gaussian) and latent.is_known:
        return dataclasses.replace(Gaussian.known(mean), sites=latent.sites)
    if isinstance(latent, Gaussian) and latent.between is None:
        between = jnp.einsum("npq,nrq,nq->npr", A, A, latent.var)
    else:
        between = jnp.einsum("npq,nqs,nrs->npr", A, latent.output_cov(), A)
    var = jnp.diagonal(between, axis1=1, axis2=2)
    gaussian = isinstance(latent, Gaussian) and not latent.moments_only
    return Gaussian(
        mean, var, between=between, sites=latent.sites, moments_only=not gaussian,
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

    if any(one.row_cov is not None for one in parts):
        raise ValueError(
            "`stack` keeps no covariance between rows; leave `full_cov` out."
        )
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
        taken=tuple(taken for one in parts for taken in one.taken),
    )


def _gaussian_sum(first: Gaussian, second: Gaussian) -> Gaussian:
    if first.moments_only:  # both may depend on the same input
        refuse_moments_only((second,), "added")
    row_cov, cov_scale = _row_sum(first, second)
    between = None
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
        roots=_added(first.roots, second.roots), taken=first.taken + second.taken,
    )  # fmt: skip


def _row_sum(first: Gaussian, second: Gaussian):
    """Covariance between the rows of a sum, and the scale of its jitter."""
    if first.row_cov is None and second.row_cov is None:
        return None, None
    if first.row_cov is not None and second.row_cov is not None:
        total = first.row_cov + second.row_cov
        return total, _both(first.cov_scale, second.cov_scale)
    alone, other = (first, second) if second.row_cov is None else (second, first)
    if not other.is_known:
        raise ValueError(
            f"Rows of {sorted(alone.sites)} were asked for jointly, and those of "
            f"{sorted(other.sites)} were not: give `full_cov=True` to both, or to none."
        )
    return alone.row_cov, alone.cov_scale


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
