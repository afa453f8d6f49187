"""What every likelihood must satisfy."""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from numpyro_gpx.contracts.shared import (
    as_float32,
    finite,
    is_float32,
    needs_float64,
    round_trip,
)
from numpyro_gpx.likelihoods import Likelihood

__all__ = ["check_likelihood"]

_MEANS = (-2.9, -0.4, 0.2, 1.7)
_VARIANCES = (0.013, 0.3, 1.7)


def check_likelihood(
    likelihood: Likelihood,
    y: Sequence[float],
    *,
    means: Sequence[float] = _MEANS,
    variances: Sequence[float] = _VARIANCES,
    atol: float = 1e-4,
) -> None:
    r"""Raise unless a likelihood's expectations are those of its own density.

    :math:`\mathbb E[\log p(y \mid f)]`, :math:`\log\mathbb E[p(y \mid f)]`, their
    gradients and the predictive moments are compared with integrals of `log_prob` and
    `distribution` on a fine grid; shapes, `vmap`, pytrees and float32 as for kernels.
    It does not know what `log_prob` ought to be: compare that with SciPy yourself.

    Args:
        likelihood: A likelihood of one latent function.
        y: Targets to try.
        means: Means of the latent function to try.
        variances: Its variances.
        atol: Allowed error of expectations; their gradients may have ten times that.
    """
    needs_float64("check_likelihood")
    name = type(likelihood).__name__
    if likelihood.latent_ndim:
        raise ValueError(
            f"`check_likelihood` integrates over one latent function; {name} has "
            f"{likelihood.num_latent}."
        )
    grid = np.meshgrid(np.asarray(y, float), means, variances, indexing="ij")
    ys, m, v = (jnp.asarray(x.ravel()) for x in grid)
    f, w = _gaussian_grid(np.asarray(m), np.asarray(v))
    log_p = np.asarray(jax.vmap(likelihood.log_prob, (None, 1), 1)(ys, jnp.asarray(f)))
    expected = np.sum(w * log_p, axis=1)
    density = np.sum(w * np.exp(log_p), axis=1)
    seen = density > 1e-25  # below, the mass may lie outside the grid
    both = eqx.filter_jit(_expectations_and_gradients)
    ell, predictive, ell_slopes, slopes, moments = map(
        np.asarray, both(likelihood, ys, m, v)
    )
    assert_allclose(
        ell, expected, rtol=1e-6, atol=atol, err_msg=f"{name}.expected_log_prob"
    )
    assert_allclose(
        predictive[seen], np.log(density[seen]), atol=atol,
        err_msg=f"{name}.predictive_log_prob",
    )  # fmt: skip
    x = (f - np.asarray(m)[:, None]) / np.asarray(v)[:, None]
    slope = np.sum(w * log_p * x, axis=1)
    assert_allclose(
        ell_slopes, slope, rtol=1e-4, atol=10 * atol,
        err_msg=f"the slope of {name}.expected_log_prob in the mean",
    )  # fmt: skip
    slope = np.sum(w * np.exp(log_p) * x, axis=1)[seen] / density[seen]
    assert_allclose(
        slopes[seen], slope, rtol=1e-3, atol=10 * atol,
        err_msg=f"the slope of {name}.predictive_log_prob in the mean",
    )  # fmt: skip
    for found, value, part in zip(
        moments, _integrated_moments(likelihood, f, w), ("mean", "variance"),
        strict=True,
    ):  # fmt: skip
        assert_allclose(
            found, value, rtol=1e-3, atol=10 * atol,
            err_msg=f"the {part} of {name}.predictive_moments",
        )  # fmt: skip
    _same_in_other_shapes(likelihood, ys, m, v)
    round_trip(likelihood)
    found = both(as_float32(likelihood), *(z.astype(jnp.float32) for z in (ys, m, v)))
    is_float32(found, name)
    finite(found, f"{name} in float32")


def _expectations_and_gradients(likelihood, y, m, v):
    def slope(fn):
        return jax.grad(lambda m: jnp.sum(fn(y, m, v)))(m)

    return (
        likelihood.expected_log_prob(y, m, v),
        likelihood.predictive_log_prob(y, m, v),
        slope(likelihood.expected_log_prob),
        slope(likelihood.predictive_log_prob),
        jnp.stack(likelihood.predictive_moments(m, v)),
    )


def _gaussian_grid(m, v):
    """Gauss-Legendre points and weights of `N(m, v)` on 10 sds, each `(K, F)`."""
    x, w = np.polynomial.legendre.leggauss(8)
    edges = np.linspace(-10.0, 10.0, 401)
    half = 0.5 * np.diff(edges)[:, None]
    z = (0.5 * (edges[1:] + edges[:-1])[:, None] + half * x).ravel()
    w = (half * w).ravel() * np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    f = m[:, None] + np.sqrt(v)[:, None] * z
    return f, np.broadcast_to(w, f.shape)


def _integrated_moments(likelihood, f, w):
    """Mean and variance of the targets, from those given `f`; labels are numbers."""
    f = jnp.asarray(f)
    if likelihood.num_classes is None:
        law = likelihood.distribution(f)
        mean, square = law.mean, law.variance + law.mean**2
    else:
        labels = jnp.arange(likelihood.num_classes, dtype=f.dtype)
        shares = jnp.exp(jax.vmap(lambda c: likelihood.log_prob(c, f))(labels))
        mean, square = (jnp.tensordot(x, shares, 1) for x in (labels, labels**2))
    mean, square = np.sum(w * mean, axis=1), np.sum(w * square, axis=1)
    return mean, square - mean**2


def _same_in_other_shapes(likelihood, y, m, v):
    name = type(likelihood).__name__
    plain = likelihood.expected_log_prob(y, m, v)
    mapped = jax.vmap(likelihood.expected_log_prob)(y, m, v)
    assert_allclose(mapped, plain, rtol=1e-9, err_msg=f"{name} under `vmap`")
    column = likelihood.expected_log_prob(y[:, None], m[:, None], v[:, None])
    assert_allclose(
        column[:, 0], plain, rtol=1e-9, err_msg=f"{name} of an (N, 1) latent"
    )
