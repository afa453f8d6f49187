"""Covariances between inducing variables and the process.

Both depend on two types, so a new pair is a new function registered here or elsewhere
(`@Kuu.register(MyFeature, MyKernel)`), and no existing file changes.
"""

from __future__ import annotations

from multipledispatch import Dispatcher

from numpyro_gpx.inducing.points import Data, Points
from numpyro_gpx.kernels import Kernel

__all__ = ["Kuf", "Kuu"]

Kuu = Dispatcher("Kuu", doc="`Kuu(inducing, kernel)`: covariance of `u`, `(M, M)`.")
Kuf = Dispatcher("Kuf", doc="`Kuf(inducing, kernel, X)`: of `u` and `f(X)`, `(M, N)`.")


@Kuu.register((Points, Data), Kernel)
def _(inducing, kernel):
    return kernel(inducing.Z)


@Kuf.register((Points, Data), Kernel, object)
def _(inducing, kernel, X):
    return kernel(inducing.Z, X)
