"""Initial inducing points: distinct, reproducible, and good by each rule's measure."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.cluster.vq
from numpy.testing import assert_allclose, assert_array_equal

from numpyro_gpx.inducing import greedy_variance, kmeans, random_subset
from numpyro_gpx.kernels import RBF, Linear, Matern32, White

KERNEL = Matern32(variance=1.7, lengthscale=jnp.array([0.4, 0.9]))

# Under one signature, `(key, X, num_inducing)`, for what they have in common.
INITIALISERS = {
    "random_subset": random_subset,
    "kmeans": kmeans,
    "kmeans++": lambda key, X, M: kmeans(key, X, M, num_iterations=0),
    "greedy_variance": lambda key, X, M: greedy_variance(X, M, KERNEL),
}


@pytest.fixture
def X():
    return np.random.default_rng(1).normal(size=(80, 2))


@pytest.fixture(params=INITIALISERS.values(), ids=INITIALISERS.keys())
def initialise(request):
    return request.param


def inertia(X, Z):
    """Sum over rows of the squared distance to the nearest point."""
    return np.sum(np.min(np.sum((X[:, None] - Z[None]) ** 2, axis=-1), axis=1))


def as_set(rows):
    return {tuple(row) for row in np.asarray(rows)}


# What all of them promise


@pytest.mark.parametrize("num_inducing", [1, 8, 80])
def test_points_are_distinct_and_of_the_right_shape(initialise, key, X, num_inducing):
    Z = initialise(key, X, num_inducing)
    assert Z.shape == (num_inducing, 2)
    assert len(as_set(Z)) == num_inducing
    assert np.all(np.isfinite(Z))


def test_repeated_rows_give_distinct_points(initialise, key, X):
    repeated = np.repeat(X[:6], 9, axis=0)
    Z = np.asarray(initialise(key, repeated, 6))
    # The only six distinct rows there are, in some order.
    assert_allclose(Z[np.argsort(Z[:, 0])], X[:6][np.argsort(X[:6, 0])], rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_points_have_the_dtype_of_the_data(initialise, key, X, dtype):
    assert initialise(key, X.astype(dtype), 8).dtype == dtype


def test_the_same_key_gives_the_same_points(initialise, key, X):
    assert_array_equal(initialise(key, X, 8), initialise(key, X, 8))


def test_too_many_points_are_refused_with_both_numbers(initialise, key, X):
    repeated = np.repeat(X[:6], 9, axis=0)
    with pytest.raises(ValueError, match="is 7, but `X` has only 6 distinct rows"):
        initialise(key, repeated, 7)


@pytest.mark.parametrize(
    ("change", "num_inducing", "message"),
    [
        (lambda X: X[:, 0], 3, r"shape \(N, D\); got \(80,\)"),
        (lambda X: np.where(X > 2.0, np.nan, X), 3, "must be finite"),
        (lambda X: X, 0, "`num_inducing` must be 1 or more; got 0"),
    ],
)
def test_bad_arguments_are_named(initialise, key, X, change, num_inducing, message):
    with pytest.raises(ValueError, match=message):
        initialise(key, change(X), num_inducing)


# random_subset


def test_random_subset_draws_rows_and_follows_its_key(key, X):
    Z = random_subset(key, X, 20)
    assert as_set(Z) < as_set(X)
    other = random_subset(jr.fold_in(key, 1), X, 20)
    assert as_set(Z) != as_set(other)


def test_random_subset_draws_repeated_rows_as_often_as_others(key):
    X = np.array([[0.0]] * 50 + [[1.0], [2.0], [3.0]])
    keys = jr.split(key, 40)
    drawn = np.array([random_subset(k, X, 1)[0, 0] for k in keys])
    # 10 +- 2.7 expected, 38 if repeats counted; beyond 5 sd once in a million runs.
    assert np.sum(drawn == 0.0) < 24


# kmeans


def test_kmeans_agrees_with_scipy_from_the_same_start(key, X):
    start = kmeans(key, X, 8, num_iterations=0)
    for num_iterations in (1, 4, 15):
        expected, labels = scipy.cluster.vq.kmeans2(
            X, np.asarray(start), iter=num_iterations, minit="matrix", missing="raise"
        )
        found = kmeans(key, X, 8, num_iterations=num_iterations)
        assert_allclose(found, expected, rtol=1e-12)


def test_kmeans_counts_repeated_rows_as_often_as_they_occur(key):
    X = np.array([[0.0], [1.0], [1.0], [1.0], [50.0]])
    assert_allclose(np.sort(kmeans(key, X, 2)[:, 0]), [0.75, 50.0])


def test_kmeans_starts_at_rows_and_lowers_the_inertia(key, X):
    start = kmeans(key, X, 8, num_iterations=0)
    assert as_set(start) < as_set(X)
    found = [kmeans(key, X, 8, num_iterations=n) for n in (1, 3, 20)]
    inertias = [inertia(X, Z) for Z in (start, *found)]
    assert sorted(inertias, reverse=True) == inertias


def test_kmeans_covers_the_data_better_than_a_random_subset(key, X):
    keys = jr.split(key, 10)
    subset = [inertia(X, random_subset(k, X, 8)) for k in keys]
    centres = [inertia(X, kmeans(k, X, 8)) for k in keys]
    assert max(centres) < min(subset)


def test_the_careful_start_finds_far_clusters(key):
    # Uniform rows would hit all 8 clusters with probability 8!/8^8 = 0.002.
    corners = 1e3 * np.array(
        [[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)]
    )
    X = np.repeat(corners, 30, axis=0) + np.random.default_rng(2).normal(size=(240, 3))
    Z = kmeans(key, X, 8, num_iterations=0)
    assert as_set(np.round(Z, -3) + 0.0) == as_set(corners)


def test_kmeans_does_not_care_where_the_origin_is(key, X):
    far = kmeans(key, X + 1e6, 8)
    assert_allclose(far - 1e6, kmeans(key, X, 8), atol=1e-8)


def test_kmeans_in_blocks_equals_kmeans_at_once(key):
    # 10 000 rows are three blocks, the last one short.
    X = np.random.default_rng(4).uniform(size=(10_000, 3))
    start = kmeans(key, X, 20, num_iterations=0)
    expected, _ = scipy.cluster.vq.kmeans2(X, np.asarray(start), iter=2, minit="matrix")
    assert_allclose(kmeans(key, X, 20, num_iterations=2), expected, rtol=1e-12)


def test_kmeans_refuses_a_negative_number_of_iterations(key, X):
    with pytest.raises(ValueError, match="`num_iterations` must be 0 or more; got -1"):
        kmeans(key, X, 3, num_iterations=-1)


def test_kmeans_moves_a_centre_that_lost_its_rows_to_the_farthest_row(key):
    X = np.array([[0.0], [1.0], [3.2], [3.4], [3.4], [3.4], [3.4], [5.6]])
    # From the start {0, 1, 5.6} the middle centre takes 1 and 3.2, moves to 2.1, and
    # loses 1 to the left and 3.2 to the right.
    lucky = next(
        k
        for k in jr.split(key, 2000)
        if as_set(kmeans(k, X, 3, num_iterations=0)) == {(0.0,), (1.0,), (5.6,)}
    )
    Z = kmeans(lucky, X, 3)
    assert_allclose(np.sort(Z[:, 0]), [0.5, (3.2 + 4 * 3.4 + 5.6) / 6, 5.6])


# greedy_variance


def greedy_by_brute_force(X, num_inducing, kernel):
    """The definition: at each step the full conditional variance, by a dense solve."""
    K = np.asarray(kernel(jnp.asarray(X)))
    chosen = [int(np.argmax(np.diag(K)))]
    while len(chosen) < num_inducing:
        Kuf = K[chosen]
        explained = np.sum(
            Kuf * np.linalg.solve(K[np.ix_(chosen, chosen)], Kuf), axis=0
        )
        cond_var = np.diag(K) - explained
        cond_var[chosen] = -np.inf
        chosen.append(int(np.argmax(cond_var)))
    return X[chosen]


@pytest.mark.parametrize("num_inducing", [1, 5, 25])
def test_greedy_variance_agrees_with_its_definition(X, num_inducing):
    expected = greedy_by_brute_force(X, num_inducing, KERNEL)
    assert_array_equal(greedy_variance(X, num_inducing, KERNEL), expected)


def test_greedy_variance_is_nested(X):
    assert_array_equal(
        greedy_variance(X, 12, KERNEL)[:5], greedy_variance(X, 5, KERNEL)
    )


def test_greedy_variance_does_not_care_about_the_order_of_rows(X):
    kernel = KERNEL + Linear(variance=0.3)  # no ties between rows
    shuffled = np.random.default_rng(6).permutation(X)
    expected = greedy_variance(X, 10, kernel)
    assert_array_equal(greedy_variance(shuffled, 10, kernel), expected)


# Over 12 other data sets like `X` and lengthscales 0.3 to 2, the largest variance left
# was always below that of all 10 subsets. The sum is not what greedy lowers: it was
# below the median subset's in 0, 1, 11, 12, 12, 12 of 12 sets at lengthscales 0.3, 0.5,
# 0.8, 1.2, 1.5, 2.
def test_greedy_variance_leaves_less_than_random_subsets(key, X):
    kernel = RBF(variance=1.7, lengthscale=1.5)
    K = np.asarray(kernel(X))

    def left(Z):
        chosen = np.flatnonzero(np.all(X[:, None] == np.asarray(Z)[None], -1).any(1))
        Kuu, Kuf = K[np.ix_(chosen, chosen)], K[chosen]
        return np.diag(K) - np.sum(Kuf * np.linalg.solve(Kuu, Kuf), axis=0)  # (N,)

    greedy = left(greedy_variance(X, 15, kernel))
    subsets = np.stack([left(random_subset(k, X, 15)) for k in jr.split(key, 10)])
    assert np.max(greedy) < np.min(np.max(subsets, axis=1))
    assert np.sum(greedy) < np.median(np.sum(subsets, axis=1))


def test_greedy_variance_with_white_noise_agrees_with_its_definition(X):
    kernel = KERNEL + White(variance=0.2)
    expected = greedy_by_brute_force(X, 15, kernel)
    assert_array_equal(greedy_variance(X, 15, kernel), expected)


def test_greedy_variance_says_when_fewer_points_explain_everything(X):
    with pytest.raises(ValueError, match="is 3, but 2 points already explain"):
        greedy_variance(X, 3, Linear(variance=1.3))  # of rank 2
    smooth = RBF(variance=1.3, lengthscale=20.0)
    with pytest.raises(ValueError, match="shorter lengthscale, or use `kmeans`"):
        greedy_variance(X.astype(np.float32), 40, smooth)
