"""One thread at a time, one BLAS thread while JAX computes, no batches that hang.

NumPyro's stack of handlers belongs to the process: models that are traced in two
threads at once see each other's handlers. And JAX's LAPACK calls go to SciPy's
OpenBLAS, whose threads fight XLA's for the cores: with OpenBLAS's default a step of
SVGP took 1.6 times as long. On jaxlib 0.10 batches of matrices may wait for ever for
the threads that they run on (tests/test_hang.py).
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version

import jax
from threadpoolctl import threadpool_limits

__all__ = ["batches_hang", "one_at_a_time", "over_chains"]

_OLD = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)

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


def batches_hang() -> bool:
    """Whether this jaxlib may hang where batches of matrices are factorised."""
    return _OLD and jax.default_backend() == "cpu"


def over_chains(fn: Callable) -> Callable:
    """`fn` of each entry along the leading axis of its argument.

    As `jax.vmap`; one after the other where batches hang, which on a CPU costs little.
    """
    if batches_hang():
        return lambda x: jax.lax.map(fn, x)
    return jax.vmap(fn)
