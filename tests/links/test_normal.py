"""Probabilities of intervals under a normal, far into the tails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.test_util import check_grads
from numpy.testing import assert_allclose

from numpyro_gpx.links import interval_probabilities, log_interval


def exact_log_interval(a, b):
    """From the side of zero where both ends are in the lower tail, in float64."""
    if a + b > 0:
        a, b = -b, -a
    log_a, log_b = scipy.special.log_ndtr(a), scipy.special.log_ndtr(b)
    return log_b + np.log1p(-np.exp(log_a - log_b))


ENDS = [(-30.0, -29.5), (-6.0, -1.0), (-0.3, 0.4), (1.2, 1.3), (7.0, 9.0), (20.0, 21.0)]


@pytest.mark.parametrize("dtype, rtol", [(jnp.float32, 1e-5), (jnp.float64, 1e-11)])
def test_log_probabilities_of_intervals_are_accurate_in_both_tails(dtype, rtol):
    a, b = (jnp.asarray(x, dtype) for x in zip(*ENDS, strict=True))
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    exact = [exact_log_interval(*pair) for pair in pairs]
    result = jax.jit(log_interval)(a, b)
    assert result.dtype == dtype
    assert_allclose(result, exact, rtol=rtol)


def test_infinite_ends_are_tails_with_finite_gradients():
    inf = jnp.inf
    a = jnp.asarray([-inf, 1.7, -inf])
    b = jnp.asarray([0.6, inf, inf])
    value, gradient = jax.jit(
        jax.vmap(jax.value_and_grad(log_interval, argnums=(0, 1)))
    )(a, b)
    exact = [scipy.special.log_ndtr(0.6), scipy.special.log_ndtr(-1.7), 0.0]
    assert_allclose(value, exact, rtol=1e-13)
    assert all(np.all(np.isfinite(g)) for g in gradient)


def test_derivatives_of_log_intervals_agree_with_differences():
    a, b = (jnp.asarray(x) for x in zip(*ENDS[1:5], strict=True))
    check_grads(jax.jit(log_interval), (a, b), order=2, modes=("rev",), rtol=1e-4)


@pytest.mark.parametrize("dtype, rtol", [(jnp.float32, 2e-5), (jnp.float64, 1e-12)])
def test_probabilities_between_edges_are_accurate_in_both_tails(dtype, rtol):
    edges = np.array([-9.0, -7.5, -2.0, 0.0, 0.1, 3.0, 8.0, 8.5, 12.0])
    P = jax.jit(interval_probabilities)(jnp.asarray(edges, dtype))
    ends = np.concatenate([[-np.inf], edges, [np.inf]])
    exact = []
    for a, b in zip(ends[:-1], ends[1:], strict=True):
        if a >= 0.0:  # differences of small numbers
            exact.append(scipy.special.ndtr(-a) - scipy.special.ndtr(-b))
        else:
            exact.append(scipy.special.ndtr(b) - scipy.special.ndtr(a))
    assert P.dtype == dtype
    assert_allclose(P, exact, rtol=rtol)
    assert_allclose(np.sum(np.asarray(P, float)), 1.0, rtol=10 * rtol)


def test_derivatives_of_interval_probabilities_hold_at_zero_too():
    t = jnp.asarray([[-1.3, 0.2], [0.0, 0.4], [0.7, 2.0]])
    check_grads(jax.jit(interval_probabilities), (t,), order=2, modes=("fwd", "rev"))
