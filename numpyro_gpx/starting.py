"""Starting values read off the data.

A gradient sees nothing when it starts with a lengthscale far from the spacing of the
data: all covariances are 0 or all are the variance. A start on the scale of the data
costs no tuning and follows the data's units.
"""

__all__ = ["lengthscale"]

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

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
        ard: One lengthscale a column, or one for all.
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


def _median_of_positive(distances: np.ndarray) -> float:
    positive = distances[distances > 0]
    return float(np.median(positive)) if positive.size else 1.0
