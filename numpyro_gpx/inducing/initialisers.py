"""Where to put the inducing points at first.

Three rules, from cheap to informed: `random_subset` draws rows of the data, `kmeans`
spreads centres by the density of the data, and `greedy_variance` adds, one by one, the
row that the kernel predicts worst from those chosen so far.

All of them run once, before a fit, on concrete data. They return `(M, D)` points of
the data's dtype, no two alike: a repeated inducing point makes `Kuu` singular.
"""

__all__ = ["greedy_variance", "kmeans", "random_subset"]

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from numpyro_gpx import checks
from numpyro_gpx.kernels import Kernel


def random_subset(
    key: PRNGKeyArray, X: Float[ArrayLike, "N D"], num_inducing: int
) -> Float[Array, "M D"]:
    """Distinct rows of the data, every set of `M` of them equally likely.

    Args:
        key: Random key.
        X: Inputs, `(N, D)`; repeated rows count once.
        num_inducing: Number of rows to draw, `M`.

    Returns:
        The rows, `(M, D)`.
    """
    data = _distinct_rows(X, num_inducing)
    chosen = jr.choice(key, len(data.rows), (num_inducing,), replace=False)
    return jnp.asarray(data.rows[np.asarray(chosen)])


def kmeans(
    key: PRNGKeyArray,
    X: Float[ArrayLike, "N D"],
    num_inducing: int,
    *,
    num_iterations: int = 20,
) -> Float[Array, "M D"]:
    """Centres of k-means clusters of the data.

    Starts from k-means++ (each further centre is a row drawn in proportion to its
    squared distance from the nearest centre so far), then alternates as Lloyd does:
    rows go to the nearest centre, centres to the mean of their rows. A centre that ends
    without rows is moved to the row farthest from every other.

    Distance is Euclidean in the units of `X`. If its columns differ much in scale, pass
    `X / lengthscale` and multiply the centres by `lengthscale`.

    Args:
        key: Random key, for the start.
        X: Inputs, `(N, D)`.
        num_inducing: Number of centres, `M`; at most the number of distinct rows.
        num_iterations: Most iterations of Lloyd's to take, fewer if the centres come
            to rest. The first few bring most of the gain; with 0 the centres are the
            k-means++ start, rows of `X`.

    Returns:
        The centres, `(M, D)`.

    References:
        Arthur and Vassilvitskii (2007), k-means++: the advantages of careful seeding.
    """
    if num_iterations < 0:
        raise ValueError(f"`num_iterations` must be 0 or more; got {num_iterations}.")
    data = _distinct_rows(X, num_inducing)
    # Distances are the same about any origin; near the data their matmul form
    # `|x|² - 2 x·c + |c|²` loses the fewest digits.
    origin = data.rows.mean(axis=0)  # (D,)
    shifted = data._replace(rows=data.rows - origin)
    start = _plus_plus(key, shifted, num_inducing)  # (M,)
    if num_iterations == 0:
        return jnp.asarray(data.rows[np.asarray(start)])
    centres = _lloyd(shifted, jnp.asarray(shifted.rows)[start], num_iterations)
    labels = np.asarray(_nearest(jnp.asarray(shifted.rows), centres))
    return jnp.asarray(_refill(data.rows, np.asarray(centres) + origin, labels))


def greedy_variance(
    X: Float[ArrayLike, "N D"], num_inducing: int, kernel: Kernel
) -> Float[Array, "M D"]:
    r"""Rows of the data with the largest conditional variance, chosen one by one.

    Having chosen `Z`, the next row maximises
    :math:`k(x, x) - k(x, Z)\,K_{uu}^{-1} k(Z, x)`: the pivots of a partial pivoted
    Cholesky factorisation of `Kff`. Takes `O(N M²)` time and `(M, N)` memory.

    It lowers the *largest* variance left. The sum, which separates the sparse bound
    from the evidence, follows once `M` points are enough for the kernel; with far too
    few (a short lengthscale) the choice goes to outlying rows, and `kmeans` or even a
    random subset leaves less.

    Args:
        X: Inputs, `(N, D)`; repeated rows count once.
        num_inducing: Number of rows to choose, `M`.
        kernel: The kernel, at the hyperparameters where the fit starts.

    Returns:
        The rows, `(M, D)`, in the order chosen: the first `m` of them are the answer
        for `num_inducing=m`.

    Raises:
        ValueError: If fewer than `M` rows explain the kernel to within rounding, so
            that the choice of the others would be arbitrary and `Kuu` singular.

    References:
        Burt, Rasmussen and van der Wilk (2020), Convergence of sparse variational
        inference in Gaussian processes regression.
    """
    rows = jnp.asarray(_distinct_rows(X, num_inducing).rows)
    chosen, useful = _pivoted_cholesky(rows, kernel, num_inducing)
    if useful < num_inducing:
        raise ValueError(
            f"`num_inducing` is {num_inducing}, but {useful} points already explain "
            f"all rows of `X` under this kernel to within rounding. Ask for at most "
            f"{useful}, start from a shorter lengthscale, or use `kmeans`."
        )
    return rows[chosen]


class _Rows(NamedTuple):
    """Distinct rows, in the order in which the data first show them."""

    rows: np.ndarray  # (N, D)
    counts: np.ndarray  # (N,), how often each occurs, in the rows' dtype


def _distinct_rows(X: Float[ArrayLike, "N D"], num_inducing: int) -> _Rows:
    # JAX's dtype first: rows distinct in float64 may be the same in float32.
    rows = np.asarray(checks.inputs("X", X))
    if num_inducing < 1:
        raise ValueError(f"`num_inducing` must be 1 or more; got {num_inducing}.")
    _, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
    if num_inducing > len(first):
        raise ValueError(
            f"`num_inducing` is {num_inducing}, but `X` has only {len(first)} distinct "
            f"rows (of {len(rows)}). Ask for at most {len(first)}."
        )
    order = np.argsort(first)
    return _Rows(rows[first[order]], counts[order].astype(rows.dtype))


@partial(jax.jit, static_argnums=2)
def _plus_plus(key: PRNGKeyArray, data: _Rows, num_centres: int) -> Int[Array, " M"]:
    """Indices of the k-means++ start, no two the same."""
    rows, counts = jnp.asarray(data.rows), jnp.asarray(data.counts)
    key_first, key_rest = jr.split(key)
    first = jr.categorical(key_first, jnp.log(counts))
    tiny = jnp.finfo(rows.dtype).tiny  # distances that underflow are still distances

    def add(carry, key_next):
        sq_dist, taken, last = carry
        sq_dist = jnp.minimum(sq_dist, jnp.sum((rows - rows[last][None]) ** 2, 1))
        taken = taken.at[last].set(True)
        logits = jnp.log(counts) + jnp.log(jnp.maximum(sq_dist, tiny))  # (N,)
        chosen = jr.categorical(key_next, jnp.where(taken, -jnp.inf, logits))
        return (sq_dist, taken, chosen), chosen

    nothing = (jnp.full_like(counts, jnp.inf), jnp.zeros(counts.shape, bool), first)
    _, rest = lax.scan(add, nothing, jr.split(key_rest, num_centres - 1))
    return jnp.concatenate([first[None], rest])


@jax.jit
def _lloyd(
    data: _Rows, centres: Float[Array, "M D"], num_iterations: int
) -> Float[Array, "M D"]:
    rows, counts = jnp.asarray(data.rows), jnp.asarray(data.counts)

    def unfinished(carry):
        iteration, _, moved = carry
        return moved & (iteration < num_iterations)

    def improve(carry):
        iteration, centres, _ = carry
        labels = _nearest(rows, centres)  # (N,)
        sums = jnp.zeros_like(centres).at[labels].add(counts[:, None] * rows)
        sizes = jnp.zeros_like(centres[:, 0]).at[labels].add(counts)  # (M,)
        means = sums / jnp.maximum(sizes, 1)[:, None]
        moved_to = jnp.where(sizes[:, None] > 0, means, centres)  # (M, D)
        return iteration + 1, moved_to, jnp.any(moved_to != centres)

    return lax.while_loop(unfinished, improve, (0, centres, True))[1]


@jax.jit
def _nearest(
    rows: Float[Array, "N D"], centres: Float[Array, "M D"]
) -> Int[Array, " N"]:
    """Index of the centre nearest to each row."""
    half_norm = 0.5 * jnp.sum(centres**2, axis=1)  # (M,)

    def nearest(row):
        # Half the squared distance, less what all centres share.
        return jnp.argmin(half_norm - centres @ row)

    # In blocks: all distances at once would be N x M.
    return lax.map(nearest, rows, batch_size=min(4096, len(rows)))


def _refill(rows: np.ndarray, centres: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Move centres that no row is nearest to, or that repeat another, to far rows."""
    _, first = np.unique(centres, axis=0, return_index=True)
    kept = np.intersect1d(first, labels)
    if len(kept) == len(centres):
        return centres
    centres = centres.copy()
    sq_dist = np.sum((rows - centres[labels]) ** 2, axis=1)  # (N,)
    for lost in np.setdiff1d(np.arange(len(centres)), kept):
        centres[lost] = rows[np.argmax(sq_dist)]
        sq_dist = np.minimum(sq_dist, np.sum((rows - centres[lost]) ** 2, axis=1))
    return centres


@eqx.filter_jit
def _pivoted_cholesky(
    rows: Float[Array, "N D"], kernel: Kernel, num_pivots: int
) -> tuple[Int[Array, " M"], Int[Array, ""]]:
    """Indices of the pivots, and how many of them had variance left to explain."""
    prior_var = kernel.diag(rows)  # (N,)
    # The error of `num_pivots` subtractions from numbers up to the largest variance.
    rounding = num_pivots * jnp.finfo(prior_var.dtype).eps * jnp.max(prior_var)

    def choose(m, carry):
        factor, cond_var, pivots, useful = carry
        i = jnp.argmax(cond_var)
        # `k(X, X2)` leaves out white noise, which `k.diag(X)` has.
        column = kernel(rows, rows[i][None])[:, 0].at[i].set(prior_var[i])  # (N,)
        column = column - factor[:, i] @ factor  # covariance given the pivots so far
        explains = cond_var[i] > rounding
        root = jnp.sqrt(jnp.maximum(cond_var[i], rounding))
        row = jnp.where(explains, column / root, 0.0)  # (N,)
        # A pivot is done with: rounding must not bring it back.
        cond_var = (cond_var - row**2).at[i].set(-jnp.inf)
        return factor.at[m].set(row), cond_var, pivots.at[m].set(i), useful + explains

    factor = jnp.zeros((num_pivots, len(rows)), prior_var.dtype)  # (M, N)
    start = (factor, prior_var, jnp.zeros(num_pivots, int), jnp.zeros((), int))
    _, _, pivots, useful = lax.fori_loop(0, num_pivots, choose, start)
    return pivots, useful
