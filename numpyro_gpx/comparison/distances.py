"""Distances between latent inputs, a summary that symmetries leave alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["pairwise_distances"]


def pairwise_distances(site: str = "h", lengthscale: str | None = None) -> Callable:
    r"""Distances between the latent inputs of all pairs of rows, as a summary.

    Rotations and reflections leave them alone. With `lengthscale` they are in its
    units, :math:`\sqrt{\sum_q (h_{nq} - h_{mq})^2/\ell_q^2}`, and may be compared
    where the scale of the latent space is not known either.

    Args:
        site: The latent input, `(N, Q)`.
        lengthscale: Name of the site of the lengthscales, `()` or `(Q,)`.

    Returns:
        A function of draws by site, `(S, ...)`, with values `(S, N (N - 1) / 2)`: for
        `compare(..., summaries={"distance": ...})`, or for `fit.draws()`.
    """

    def distances(draws: dict) -> np.ndarray:
        H = np.asarray(draws[site])
        H = H[..., None] if H.ndim == 2 else H
        if lengthscale is not None:
            scales = np.asarray(draws[lengthscale]).reshape(len(H), 1, -1)
            H = H / scales
        first, second = np.triu_indices(H.shape[1], k=1)
        return np.sqrt(np.sum((H[:, first] - H[:, second]) ** 2, axis=-1))

    return distances
