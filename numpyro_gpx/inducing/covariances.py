"""Covariances between inducing variables and the process.

All depend on two types, so a new pair is a new function registered here or elsewhere
(`@Kuf.register(MyFeature, MyKernel, object)`), and no existing file changes. A feature
registers `Kuf`, and `Kuu` or, if it has a cheaper one than Cholesky's, a `root`.
"""

from __future__ import annotations

from jaxtyping import Array
from multipledispatch import Dispatcher

from numpyro_gpx.inducing.base import Inducing
from numpyro_gpx.inducing.points import Data, Points
from numpyro_gpx.kernels import ActiveDims, Kernel, Scaled
from numpyro_gpx.numerics.factor import Factor, factorise

__all__ = ["Kuf", "Kuu", "psi", "root", "unwrapped"]

Kuu = Dispatcher("Kuu", doc="`Kuu(inducing, kernel)`: covariance of `u`, `(M, M)`.")
Kuf = Dispatcher("Kuf", doc="`Kuf(inducing, kernel, X)`: of `u` and `f(X)`, `(M, N)`.")
root = Dispatcher("root", doc="`root(inducing, kernel)`: a `Factor` of `Kuu`.")
psi = Dispatcher(
    "psi",
    doc="`psi(inducing, kernel, inputs, weights)`: closed-form expectations over "
    "Gaussian inputs, a `Psi`; with `weights=None`, `psi2` of each row.",
)


@Kuu.register((Points, Data), Kernel)
def _(inducing, kernel):
    return kernel(inducing.coordinates())


@Kuf.register((Points, Data), Kernel, object)
def _(inducing, kernel, X):
    return kernel(inducing.coordinates(), X)


@Kuu.register(Inducing, Kernel)
def _(inducing, kernel):
    raise _not_there("Kuu(inducing, kernel)", inducing, kernel)


@Kuf.register(Inducing, Kernel, object)
def _(inducing, kernel, X):
    raise _not_there("Kuf(inducing, kernel, X)", inducing, kernel)


@root.register(Inducing, Kernel)
def _(inducing, kernel) -> Factor:
    return factorise(Kuu(inducing, kernel))


@psi.register(Inducing, Kernel, object, object)
def _(inducing, kernel, inputs, weights):
    raise ValueError(
        "At uncertain inputs the inducing variables must be `gpx.inducing.Points`; "
        f"got {type(inducing).__name__}. Use a rule with points, such as "
        "`gpx.cubature.Unscented()`."
    )


def unwrapped(kernel: Kernel):
    """What is inside `Scaled` and `ActiveDims`, for features that know plain kernels.

    Returns:
        The kernel inside, the factor of its covariances, and a function that picks
        its columns of `X`.
    """
    scale: float | Array = 1.0
    select = _all_columns
    while isinstance(kernel, Scaled | ActiveDims):
        if isinstance(kernel, Scaled):
            scale = scale * kernel.variance
        else:
            select = _then(select, kernel.select)
        kernel = kernel.kernel
    return kernel, scale, select


def _all_columns(X):
    return X


def _then(first, second):
    return lambda X: second(first(X))


def _not_there(what, inducing, kernel):
    return TypeError(
        f"`{what}` is not there for {type(inducing).__name__} and "
        f"{type(kernel).__name__}. Register it: "
        f"`@gpx.inducing.{what.split('(')[0]}.register({type(inducing).__name__}, "
        f"{type(kernel).__name__}, ...)`; or use `gpx.inducing.Points`."
    )
