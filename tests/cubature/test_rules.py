"""Rules for uncertain inputs: what they integrate exactly, and what they refuse."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from numpyro_gpx.cubature import (
    Analytic,
    GaussHermite,
    MonteCarlo,
    SphericalRadial,
    Unscented,
)
from numpyro_gpx.uncertain import InputBelief, join

RULES = {
    "unscented": Unscented(),
    "unscented with a centre": Unscented(0.4),
    "gauss-hermite 2": GaussHermite(2),
    "gauss-hermite 3": GaussHermite(3),
    "spherical-radial 3": SphericalRadial(3),
    "spherical-radial 5": SphericalRadial(5),
}


def full_belief(num_dims, num_rows=3):
    rng = np.random.default_rng(num_dims)
    factors = np.tril(rng.normal(size=(num_rows, num_dims, num_dims)))
    mean = rng.normal(size=(num_rows, num_dims))
    return InputBelief(jnp.asarray(mean), jnp.asarray(factors))


@pytest.mark.parametrize("num_dims", [1, 2, 5])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_quadratics_are_exact(rule, num_dims):
    belief = full_belief(num_dims)
    points, weights = rule.nodes(belief)
    assert points.shape == (rule.num_points(num_dims), 3, num_dims)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-12)
    mean = jnp.einsum("s,sni->ni", weights, points)
    np.testing.assert_allclose(mean, belief.mean, atol=1e-12)
    centred = points - belief.mean
    covariance = jnp.einsum("s,sni,snj->nij", weights, centred, centred)
    expected = belief.scale @ jnp.swapaxes(belief.scale, -1, -2)
    np.testing.assert_allclose(covariance, expected, atol=1e-12)


def monomial(rule, powers):
    belief = InputBelief(jnp.zeros((1, len(powers))), jnp.ones((1, len(powers))))
    points, weights = rule.nodes(belief)
    return float(weights @ jnp.prod(points[:, 0] ** np.array(powers), axis=-1))


@pytest.mark.parametrize("num_dims", [2, 3, 6])
def test_degree_five_has_the_fourth_moments_right(num_dims):
    rest = [0] * (num_dims - 2)
    rule = SphericalRadial(5)
    np.testing.assert_allclose(monomial(rule, [4, 0, *rest]), 3.0, rtol=1e-12)
    np.testing.assert_allclose(monomial(rule, [2, 2, *rest]), 1.0, rtol=1e-12)
    assert abs(monomial(rule, [3, 1, *rest])) < 1e-12
    # Degree 3 does not, so that the test above says something.
    assert abs(monomial(SphericalRadial(3), [2, 2, *rest])) < 1e-12


def test_gauss_hermite_is_exact_to_its_degree_and_no_further():
    np.testing.assert_allclose(monomial(GaussHermite(3), [4, 4]), 9.0, rtol=1e-12)
    assert abs(monomial(GaussHermite(3), [6, 0]) - 15.0) > 1.0


def test_a_centre_can_mend_the_fourth_moment():
    np.testing.assert_allclose(monomial(Unscented(1.0 - 2.0 / 3.0), [4, 0]), 3.0)


def test_the_unscented_points_are_those_of_the_dissertation():
    belief = full_belief(4)
    points, weights = Unscented().nodes(belief)
    columns = jnp.sqrt(4.0) * jnp.moveaxis(belief.scale, 2, 0)  # (Q, N, Q)
    np.testing.assert_allclose(points[:4], belief.mean + columns, atol=1e-12)
    np.testing.assert_allclose(points[4:], belief.mean - columns, atol=1e-12)
    np.testing.assert_allclose(weights, 1.0 / 8.0)


def test_monte_carlo_draws_from_the_belief_row_by_row(key):
    belief = full_belief(2)
    points, weights = MonteCarlo(40_000).nodes(belief, key)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-9)
    # Standard errors of means are at most sd / 200; false alarms below 1e-6 at 5.5.
    sd = np.sqrt(belief.var)
    assert np.all(np.abs(points.mean(0) - belief.mean) < 5.5 * sd / 200.0)
    covariance = np.cov(np.asarray(points[:, 0]).T)
    expected = belief.scale[0] @ belief.scale[0].T
    np.testing.assert_allclose(covariance, expected, atol=0.05 * expected.max())
    between_rows = np.corrcoef(np.asarray(points[:, :2, 0]).T)[0, 1]
    assert abs(between_rows) < 5.5 / 200.0


def test_join_of_known_and_uncertain_columns():
    X = jnp.arange(6.0).reshape(3, 2)
    diagonal = InputBelief(jnp.ones((3, 1)), jnp.full((3, 1), 0.5))
    joined = join(X, diagonal)
    np.testing.assert_array_equal(joined.mean, np.c_[X, np.ones(3)])
    np.testing.assert_array_equal(
        joined.scale, np.c_[np.zeros((3, 2)), 0.5 * np.ones(3)]
    )
    full = join(X, full_belief(2))
    assert full.scale.shape == (3, 4, 4)
    np.testing.assert_array_equal(full.scale[:, 2:, 2:], full_belief(2).scale)
    assert not np.any(full.scale[:, :2])
    np.testing.assert_array_equal(join(X, X), np.c_[X, X])


def test_words():
    with pytest.raises(ValueError, match="`centre` must be at least 0 and below 1"):
        Unscented(1.0)
    with pytest.raises(ValueError, match="`degree` must be 3 or 5; got 4"):
        SphericalRadial(4)
    with pytest.raises(ValueError, match=r"needs 10\*\*9 points"):
        GaussHermite(10).nodes(InputBelief(jnp.zeros((1, 9)), jnp.ones((1, 9))))
    with pytest.raises(TypeError, match="`key` must be a JAX random key"):
        MonteCarlo(3).nodes(full_belief(2))
    with pytest.raises(NotImplementedError, match="no points"):
        Analytic().nodes(full_belief(2))
    with pytest.raises(ValueError, match="same number of rows; got"):
        join(jnp.zeros((3, 1)), full_belief(2, num_rows=4))
    with pytest.raises(TypeError, match=r"gpx.inputs.join\(X, H\)"):
        jnp.concatenate([jnp.zeros((3, 1)), full_belief(2)])
    assert MonteCarlo(3).nodes(full_belief(2), jr.key(0)).points.shape == (3, 3, 2)
