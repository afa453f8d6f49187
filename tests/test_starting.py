"""Starting values follow the data's units and survive its oddities."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numpyro_gpx as gpx
from numpyro_gpx.starting import lengthscale


@pytest.fixture
def X():
    return np.random.default_rng(3).normal(size=(60, 3)) * [0.2, 1.0, 30.0]


def test_lengthscale_is_the_median_distance_by_the_definition(X):
    distances = np.abs(X[:, None] - X[None])[np.triu_indices(60, k=1)]  # (pairs, 3)
    assert_allclose(lengthscale(X), np.sqrt(3) * np.median(distances, axis=0))
    assert_allclose(
        lengthscale(X, ard=False), np.median(np.sqrt(np.sum(distances**2, axis=-1)))
    )


@pytest.mark.parametrize("ard", [True, False])
def test_lengthscale_follows_units_and_ignores_origin_and_order(X, ard):
    start = lengthscale(X, ard=ard)
    assert_allclose(lengthscale(7.3 * X, ard=ard), 7.3 * start)
    assert_allclose(lengthscale(X + 100.0, ard=ard), start)
    assert_allclose(lengthscale(X[::-1], ard=ard), start)


def test_each_column_follows_its_own_unit(X):
    units = np.array([0.01, 5.0, 1e4])
    assert_allclose(lengthscale(units * X), units * lengthscale(X))


@pytest.mark.parametrize("num_columns", [1, 4, 25])
def test_a_typical_pair_is_about_one_apart_whatever_the_dimension(num_columns):
    X = np.random.default_rng(5).uniform(size=(200, num_columns))
    scaled = X / lengthscale(X)
    distance = np.linalg.norm(scaled[:100] - scaled[100:], axis=1)
    assert 0.7 < np.median(distance) < 1.5


def test_a_constant_column_gets_one_and_does_not_count(X):
    with_constant = np.insert(X, 1, 4.2, axis=1)
    assert_allclose(lengthscale(with_constant)[1], 1.0)
    assert_allclose(np.delete(lengthscale(with_constant), 1), lengthscale(X))
    assert_allclose(lengthscale(with_constant, ard=False), lengthscale(X, ard=False))


@pytest.mark.parametrize("ard", [True, False])
def test_repeating_every_row_changes_nothing(X, ard):
    repeated = np.repeat(X, 4, axis=0)
    assert_allclose(lengthscale(repeated, ard=ard), lengthscale(X, ard=ard))


def test_an_indicator_column_has_the_scale_of_its_step():
    X = np.zeros((50, 1))
    X[:3] = 2.5
    assert_allclose(lengthscale(X), [2.5])


def test_one_data_point_gives_ones():
    assert_array_equal(lengthscale(np.array([[3.0, -2.0]])), [1.0, 1.0])
    assert lengthscale(np.array([[3.0, -2.0]]), ard=False) == 1.0


def test_many_rows_are_subsampled_and_the_answer_repeats():
    X = np.random.default_rng(8).normal(size=(20_000, 2))
    start = lengthscale(X, max_rows=300)
    assert_array_equal(lengthscale(X, max_rows=300), start)
    # |x - x'| ~ |N(0, 2)|, median 0.6745 sqrt(2); 300 rows bring it to about 5 %.
    assert_allclose(start, np.sqrt(2) * 0.6745 * np.sqrt(2), rtol=0.15)


def test_float32_in_gives_float32_out(X):
    assert lengthscale(X.astype(np.float32)).dtype == np.float32
    assert lengthscale(X.astype(np.float32), ard=False).dtype == np.float32


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.zeros(5), r"shape \(N, D\); got \(5,\).*X\[:, None\]"),
        (np.zeros((0, 2)), "at least one row"),
        (np.zeros((5, 2), int), "floating point; got int64"),
        (np.array([[np.nan]]), "must be finite"),
    ],
)
def test_bad_inputs_are_named(X, message):
    with pytest.raises(ValueError, match=message):
        lengthscale(X)


def test_pairs_need_two_rows(X):
    with pytest.raises(ValueError, match="`max_rows` must be 2 or more; got 1"):
        lengthscale(X, max_rows=1)


def test_principal_components_are_those_of_the_singular_value_decomposition():
    Y = np.random.default_rng(0).normal(size=(12, 4)) @ np.diag([3.0, 2.0, 1.0, 0.5])
    U, S, Vt = np.linalg.svd(Y - Y.mean(0), full_matrices=False)
    signs = np.sign(Vt[np.arange(2), np.abs(Vt[:2]).argmax(1)])
    expected = np.sqrt(12.0) * U[:, :2] * signs
    np.testing.assert_allclose(gpx.latent_space.pca(Y, 2), expected, atol=1e-9)
    # More columns than rows take another route.
    wide = gpx.latent_space.pca(Y.T, 2)
    U, S, Vt = np.linalg.svd(Y.T - Y.T.mean(0), full_matrices=False)
    signs = np.sign(Vt[np.arange(2), np.abs(Vt[:2]).argmax(1)])
    np.testing.assert_allclose(wide, 2.0 * U[:, :2] * signs, atol=1e-9)
    holes = np.where(np.arange(48).reshape(12, 4) == 5, np.nan, Y)
    assert np.all(np.isfinite(gpx.latent_space.pca(holes, 2)))
