"""Starting values read off the data.

A gradient sees nothing when it starts with a lengthscale far from the spacing of the
data: all covariances are 0 or all are the variance. A start on the scale of the data
costs no tuning and follows the data's units.
"""

__all__ = ["lengthscale", "pca"]

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from numpyro_gpx import checks


def lengthscale(
    X: Float[ArrayLike, "N D"], *, ard: bool = True, max_rows: int = 1000
) -> Float[np.ndarray, "..."]:
    r"""Lengthscales at which a typical pair of inputs is about 1 apart.

    With `ard`, for each column

    .. math:: \ell_d = \sqrt{D}\,\operatorname{median}_{i<j} |x_{id} - x_{jd}|,

    the median taken over the pairs that differ. Each of the `D` columns then adds
    about `1/D` to the scaled squared distance of a typical pair; without the root that
    distance, and with it all correlations, would depend on the number of columns.
    Without `ard`, the median Euclidean distance of the rows that differ.

    Pairs that agree are left out so that repeated rows and indicator columns do not
    pull the median to 0. A constant column says nothing about its lengthscale: it gets
    1 and does not count in `D`.

    Args:
        X: Inputs, `(N, D)`.
        ard: One lengthscale per column, or one for all.
        max_rows: Use this many rows at most, since pairs cost `max_rows²`. They are
            drawn with a fixed seed: the answer depends on the data alone.

    Returns:
        Lengthscales, `(D,)`, or `()` without `ard`, in the dtype of `X`.

    Example:
        >>> import numpy as np
        >>> lengthscale(np.array([[0.0, 5.0], [2.0, 5.0], [4.0, 5.0]])).tolist()
        [2.0, 1.0]
    """
    rows = np.asarray(checks.inputs("X", X))
    if max_rows < 2:
        raise ValueError(f"`max_rows` must be 2 or more; got {max_rows}.")
    if len(rows) > max_rows:
        chosen = np.random.default_rng(0).choice(len(rows), max_rows, replace=False)
        rows = rows[chosen]
    first, second = np.triu_indices(len(rows), k=1)

    if not ard:
        sq_dist = sum((x[first] - x[second]) ** 2 for x in rows.T)  # (pairs,)
        return np.asarray(_median_of_positive(np.sqrt(sq_dist)), rows.dtype)

    # One column at a time: all at once would be pairs x D.
    scales = np.array(
        [_median_of_positive(np.abs(x[first] - x[second])) for x in rows.T]
    )
    varies = np.ptp(rows, axis=0) > 0  # (D,)
    return np.where(varies, np.sqrt(np.sum(varies)) * scales, 1.0).astype(rows.dtype)


def pca(Y: Float[ArrayLike, "N P"], num_dims: int) -> Float[Array, "N Q"]:
    """The leading principal components of the rows, each with variance 1.

    Where latent inputs start. The sign of a component is such that its largest loading
    is positive.

    Args:
        Y: Observations `(N, P)`; NaN is filled with the mean of its column.
        num_dims: Number of components Q, at most `min(N, P)`.

    Returns:
        Scores `(N, Q)`, with mean 0 and standard deviation 1.
    """
    Y = jnp.asarray(Y)
    if Y.ndim != 2 or not 1 <= num_dims <= min(Y.shape):
        raise ValueError(
            f"`num_dims` must lie between 1 and the smaller side of `Y` (N, P); got "
            f"{num_dims} for shape {Y.shape}."
        )
    if not jnp.issubdtype(Y.dtype, jnp.floating):
        Y = Y.astype(jnp.result_type(float))
    centred = Y - jnp.nanmean(Y, axis=0)
    centred = jnp.where(jnp.isnan(centred), 0.0, centred)
    tall = Y.shape[0] >= Y.shape[1]
    gram = centred.T @ centred if tall else centred @ centred.T
    _, vectors = jnp.linalg.eigh(gram)
    leading = vectors[:, ::-1][:, :num_dims]
    scores = centred @ leading if tall else leading
    loadings = leading if tall else centred.T @ leading  # (P, Q)
    largest = jnp.argmax(jnp.abs(loadings), axis=0)
    signs = jnp.sign(loadings[largest, jnp.arange(num_dims)])
    scores = scores * jnp.where(signs == 0.0, 1.0, signs)
    spread = jnp.std(scores, axis=0)
    # Components without variance carry nothing but rounding errors.
    tiny = jnp.finfo(Y.dtype).eps * jnp.max(spread)
    return jnp.where(spread > tiny, scores / jnp.maximum(spread, tiny), 0.0)


def _median_of_positive(distances: np.ndarray) -> float:
    positive = distances[distances > 0]
    return float(np.median(positive)) if positive.size else 1.0
