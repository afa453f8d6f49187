"""Kernels on inputs that a function has moved: deep kernels."""

__all__ = ["Warped"]

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import as_inputs
from numpyro_gpx.kernels.base import Kernel, as_callable


class Warped(Kernel):
    r"""A kernel on features, :math:`k(\phi(x), \phi(x'))`.

    The features are computed once a row. A network's weights are leaves of the kernel.
    Inside a model they are trained by `numpyro.contrib.module.eqx_module`, or get
    priors by `random_eqx_module`:

        net = random_eqx_module("net", eqx.nn.MLP(...), prior=dist.Normal())
        kernel = Warped(RBF(), net)

    Args:
        kernel: The kernel on features, `(K,)`.
        fn: The map :math:`\phi` of one row `(D,)` to its features `(K,)`.

    References:
        Wilson, Hu, Salakhutdinov & Xing (2016).
    """

    kernel: Kernel
    fn: Callable = eqx.field(converter=as_callable)

    def features(self, x: Float[Array, " D"]) -> Float[Array, " K"]:
        """The features of one row."""
        features = self.fn(x)
        if features.ndim != 1:
            raise ValueError(
                "`fn` must map a row (D,) to features (K,); got shape "
                f"{features.shape} for a row {x.shape}."
            )
        return features

    def evaluate(self, x, x2):
        return self.kernel.evaluate(self.features(x), self.features(x2))

    def matrix(self, X, X2=None):
        F = jax.vmap(self.features)(X)  # (N, K)
        F2 = None if X2 is None else jax.vmap(self.features)(X2)  # (N2, K)
        return self.kernel(F, F2)

    def diag(self, X):
        return self.kernel.diag(jax.vmap(self.features)(as_inputs("X", X)))
