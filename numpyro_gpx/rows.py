"""The model at new rows: raw draws handed on rightly, and rows cut into chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from numpyro_gpx.infer.structure import abstract_trace

__all__ = ["predictive", "row_chunks"]


def predictive(model: Callable, draws: dict, *, params: dict | None = None) -> Callable:
    """Posterior predictive draws from raw draws, done right.

    NumPyro's `Predictive` passes on row-local sites with the length of the training
    data. This passes on global sites only; the others are drawn from their prior.

    Args:
        model: The model.
        draws: Draws by site, `(S, ...)`.
        params: Values of the model's `numpyro.param`s.

    Returns:
        A callable `(key, *args, **kwargs)`: a dictionary of draws `(S, N, ...)` of the
        sites of the model that `draws` does not hold.
    """
    from numpyro.infer import Predictive

    def sample(key, *args, **kwargs):
        trace = abstract_trace(model, args, kwargs)
        sites = {n: site for n, site in trace.items() if site["type"] == "sample"}
        row_plates = {
            frame.name
            for name, site in sites.items()
            if name not in draws
            for frame in site["cond_indep_stack"]
        }
        kept = {
            name: x
            for name, x in draws.items()
            if name in sites
            and not any(f.name in row_plates for f in sites[name]["cond_indep_stack"])
        }
        return Predictive(model, kept, params=params)(key, *args, **kwargs)

    return sample


def row_chunks(args: tuple, kwargs: dict, chunk_rows: int | None) -> Iterator:
    """Cut arguments along rows; yield `((args, kwargs), number of rows)`.

    Inputs are padded to a multiple of `chunk_rows` (small ones to a power of two), so
    that calls with other numbers of rows reuse the compiled code.
    """
    if not args:
        raise ValueError("Pass the model's arguments, as in `fit.predict(X_test)`.")
    num_rows = np.shape(args[0])[0]

    def rows(x, index):
        return x[index] if np.ndim(x) > 0 and np.shape(x)[0] == num_rows else x

    if chunk_rows is None:
        yield (args, kwargs), num_rows
        return
    size = min(chunk_rows, 1 << (num_rows - 1).bit_length())
    for start in range(0, num_rows, size):
        index = np.minimum(np.arange(start, start + size), num_rows - 1)
        cut = jax.tree.map(functools.partial(rows, index=index), (args, kwargs))
        yield cut, min(size, num_rows - start)
