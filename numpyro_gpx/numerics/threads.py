"""One BLAS thread while JAX computes.

JAX's LAPACK calls go to SciPy's OpenBLAS, whose threads fight XLA's for the cores: with
OpenBLAS's default a step of SVGP took 1.6 times as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from threadpoolctl import threadpool_limits

__all__ = ["single_blas_thread"]


@contextlib.contextmanager
def single_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread inside the `with` block."""
    with threadpool_limits(limits=1, user_api="blas"):
        yield
