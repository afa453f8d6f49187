r"""The interface of a likelihood :math:`p(y \mid f)`.

A new likelihood says its `distribution` and its `support`; what inference and
prediction need under :math:`f \sim \mathcal N(m, v)` then follows by Gauss-Hermite
quadrature, and is overridden where a closed form or a better rule exists.
"""

__all__ = ["Likelihood", "Moments"]

import abc
from typing import ClassVar, NamedTuple

import equinox as eqx
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float, Shaped
from numpyro.distributions import constraints
from numpyro.util import not_jax_tracer

from numpyro_gpx.cubature import expectation, log_expectation_exp


class Moments(NamedTuple):
    """Mean and variance of the predictive distribution of `y`."""

    mean: Float[Array, "..."]
    var: Float[Array, "..."]


class Likelihood(eqx.Module):
    """The distribution of an observation given the latent function.

    With `latent_ndim = 0` a likelihood acts on each latent value by itself: `y`,
    `f_mean`, `f_var` and all results have one shape, whatever it is. With
    `latent_ndim = 1` it takes the `P` latents of a row at once, `f` is `(..., P)`,
    results are `(...)`, and the three expectations must be overridden.

    `num_nodes` is how many Gauss-Hermite nodes the default expectations use;
    likelihoods that let the user choose make it a static field.
    """

    latent_ndim: ClassVar[int] = 0
    num_nodes = 32  # not annotated: subclasses may make it a field, in any place

    @property
    @abc.abstractmethod
    def support(self) -> constraints.Constraint:
        """Where `y` lives, as a NumPyro constraint."""

    @abc.abstractmethod
    def distribution(self, f: Float[Array, "*shape"]) -> dist.Distribution:
        """NumPyro distribution of `y` given `f`, with the batch shape of `f`."""

    def log_prob(
        self, y: Shaped[ArrayLike, "*shape"], f: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        r"""Log density :math:`\log p(y \mid f)`."""
        return self.distribution(f).log_prob(y)

    def expected_log_prob(
        self,
        y: Shaped[ArrayLike, "*shape"],
        f_mean: Float[Array, "*shape"],
        f_var: Float[Array, "*shape"],
    ) -> Float[Array, "*shape"]:
        r"""Expected log density :math:`\mathbb E \log p(y \mid f)`, `f ~ N(m, v)`.

        Args:
            y: Observations.
            f_mean: Means of the latent.
            f_var: Variances of the latent, at least 0.

        Returns:
            One value for each observation.
        """
        return expectation(lambda f: self.log_prob(y, f), f_mean, f_var, self.num_nodes)

    def predictive_log_prob(
        self,
        y: Shaped[ArrayLike, "*shape"],
        f_mean: Float[Array, "*shape"],
        f_var: Float[Array, "*shape"],
    ) -> Float[Array, "*shape"]:
        r"""Log predictive density :math:`\log\mathbb E\,p(y \mid f)`, `f ~ N(m, v)`.

        Args and returns as in `expected_log_prob`.
        """
        return log_expectation_exp(
            lambda f: self.log_prob(y, f), f_mean, f_var, self.num_nodes
        )

    def predictive_moments(
        self, f_mean: Float[Array, "*shape"], f_var: Float[Array, "*shape"]
    ) -> Moments:
        r"""Mean and variance of `y`, with `f` integrated out.

        By the law of total variance,
        :math:`\mathbb V[y] = \mathbb E\,\mathbb V[y \mid f]
        + \mathbb V\,\mathbb E[y \mid f]`.
        """

        def spread(f):
            p = self.distribution(f)
            return p.variance + (p.mean - mean) ** 2

        mean = expectation(
            lambda f: self.distribution(f).mean, f_mean, f_var, self.num_nodes
        )
        return Moments(mean, expectation(spread, f_mean, f_var, self.num_nodes))

    def check(self, y, name: str = "obs", mask=None) -> None:
        """Raise if `y` holds values that this likelihood cannot produce.

        Looks at concrete arrays only; inside `jit` it does nothing.

        Args:
            y: Observations, `(N, ...)`.
            name: What the user calls them, for the message.
            mask: Booleans, `(N,)` or the shape of `y`: the entries to check.
        """
        if not (not_jax_tracer(y) and not_jax_tracer(mask)):
            return
        y = np.asarray(y)
        if not (np.issubdtype(y.dtype, np.number) or y.dtype == bool):
            raise ValueError(
                f"`{name}` must be an array of numbers; got dtype {y.dtype}. Encode "
                "categories as numbers first."
            )
        keep = _entries(mask, y.shape, name)
        bad = keep & ~np.isfinite(y)
        if bad.any():
            raise ValueError(
                f"`{name}` must be finite; got {_first(y, bad)}. Leave missing "
                "values out with `mask=`, or drop their rows."
            )
        # Entries that are not checked may be NaN, which integer constraints dislike.
        inside = np.asarray(self.support(np.where(keep, y, 0)))
        if inside.shape != y.shape:  # constraints on whole rows
            inside = inside.reshape(inside.shape + (1,) * (y.ndim - inside.ndim))
        bad = keep & ~inside
        if bad.any():
            raise ValueError(
                f"`{name}` must hold {self.expected()} for a "
                f"{type(self).__name__} likelihood; got {_first(y, bad)}. "
                f"{self.advice(y[keep])}"
            )

    def expected(self) -> str:
        """What `y` should hold, in the words of an error message."""
        return f"values in the support {self.support}"

    def advice(self, y: np.ndarray) -> str:
        """The way out for observations `y` outside the support."""
        return "Transform the observations, or choose another likelihood."


def _entries(mask, shape, name):
    """The mask as booleans of the given shape."""
    if mask is None:
        return np.ones(shape, bool)
    mask = np.asarray(mask)
    if mask.dtype != bool or mask.shape != shape[: mask.ndim]:
        raise ValueError(
            f"`mask` must be boolean with the shape {shape} of `{name}`, or one entry "
            f"a row; got {mask.dtype} of shape {mask.shape}."
        )
    return np.broadcast_to(
        mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape
    )


def _first(y, bad):
    """Describe the first offending value, its index, and how many there are."""
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    where = index[0] if len(index) == 1 else index
    return f"{y[index]} at index {where} ({int(bad.sum())} of {y.size} values)"
