"""One thread at a time, and one BLAS thread while JAX computes.

NumPyro's stack of handlers belongs to the process: models that are traced in two
threads at once see each other's handlers. And JAX's LAPACK calls go to SciPy's
OpenBLAS, whose threads fight XLA's for the cores: with OpenBLAS's default a step of
SVGP took 1.6 times as long.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

from threadpoolctl import threadpool_limits

__all__ = ["one_at_a_time"]

_LOCK = threading.RLock()
_DEPTH = [0]  # of `with` blocks inside each other; changed by the lock's owner alone
# Seconds after which a thread that waits says so.
_PATIENCE = 1.0


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let no other thread in, and limit BLAS to one thread."""
    if not _LOCK.acquire(timeout=_PATIENCE):
        warnings.warn(
            "Another thread is fitting or predicting. Threads share NumPyro's "
            "handlers, so this one waits for its turn; to fit side by side, use "
            "several processes.",
            RuntimeWarning,
            stacklevel=4,
        )
        _LOCK.acquire()
    _DEPTH[0] += 1
    try:
        outermost = _DEPTH[0] == 1
        with (
            threadpool_limits(limits=1, user_api="blas")
            if outermost
            else contextlib.nullcontext()
        ):
            yield
    finally:
        _DEPTH[0] -= 1
        _LOCK.release()
