"""Any function of two rows as a kernel."""

__all__ = ["Custom"]

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp

from numpyro_gpx.kernels.base import Kernel, as_callable


class Custom(Kernel):
    """A kernel given by any function `fn(x, x2)` of two rows `(D,)`.

    This is also the door for other libraries' kernels: pass `Custom(kernel.evaluate)`
    for a tinygp kernel (itself, it is a function of two matrices) and `Custom(kernel)`
    for a GPJax kernel. If `fn` is a pytree, its arrays are leaves of this kernel.

    Args:
        fn: The covariance of two rows, a scalar. It must be symmetric and positive
            definite, and differentiable where the rows coincide if gradients are
            needed there.
    """

    fn: Callable = eqx.field(converter=as_callable)

    def evaluate(self, x, x2):
        covariance = jnp.asarray(self.fn(x, x2))
        if covariance.shape != ():
            raise ValueError(
                f"`fn` must return a scalar for two rows of shape {x.shape}; got shape "
                f"{covariance.shape}. For a tinygp kernel pass `kernel.evaluate`."
            )
        return covariance
