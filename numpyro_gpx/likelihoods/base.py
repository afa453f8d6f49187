r"""The interface of a likelihood :math:`p(y \mid f)`.

A new likelihood says its `distribution` and its `support`; what inference and
prediction need under :math:`f \sim \mathcal N(m, v)` then follows by quadrature: with
Gauss-Hermite nodes for a smooth link, with one node a piece, and no error, for a
piecewise-constant one. It is overridden where a closed form or a better rule exists.
"""

__all__ = [
    "Likelihood",
    "Moments",
    "check_positive_link",
    "check_probability_link",
    "label_moments",
]

import abc
import dataclasses
from typing import ClassVar, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from jaxtyping import Array, ArrayLike, Float, Shaped
from numpyro.distributions import constraints
from numpyro.util import not_jax_tracer

from numpyro_gpx.cubature import expectation, log_expectation_exp, nodes, peak
from numpyro_gpx.links import Identity, Link, PiecewiseConstant


class Moments(NamedTuple):
    """Mean and variance of the predictive distribution of `y`."""

    mean: Float[Array, "..."]
    var: Float[Array, "..."]


class Likelihood(eqx.Module):
    """The distribution of an observation given the latent function.

    With `latent_ndim = 0` a likelihood acts on each latent value by itself: `y`,
    `f_mean`, `f_var` and all results have one shape, whatever it is. With
    `latent_ndim = 1` it takes the `L` latents of a row at once, `f` is `(..., L)` and
    targets and results have the shape `target_shape` says.

    `num_nodes` is how many Gauss-Hermite nodes the default expectations use;
    likelihoods that let the user choose make it a static field. `link` likewise.
    """

    latent_ndim: ClassVar[int] = 0
    # Whether log p(y | f) is concave in f: predictive nodes may then move to its peak.
    log_concave: ClassVar[bool] = False
    # Not annotated: subclasses may make them fields, in any place.
    num_nodes = 32
    link = cast(Link, Identity())

    @property
    @abc.abstractmethod
    def support(self) -> constraints.Constraint:
        """Where one target lives, as a NumPyro constraint."""

    @abc.abstractmethod
    def distribution(self, f: Float[Array, "*shape"]) -> dist.Distribution:
        """NumPyro distribution of `y` given `f`, with the batch shape of `f`."""

    @property
    def normal_mixture(self) -> bool:
        """Whether predictions are mixtures of normals, and `predictive_cdf` exact."""
        return False

    @property
    def num_latent(self) -> int:
        """How many latent functions a target depends on."""
        return 1

    @property
    def num_classes(self) -> int | None:
        """Number of labels 0, 1, ... if targets are labels, else `None`."""
        return None

    @property
    def nominal(self) -> bool:
        """Whether labels have no order, so that a mean of them says nothing."""
        return False

    @property
    def discontinuous(self) -> bool:
        """Whether the density jumps in a known `f`, so that its gradient says nothing.

        Under Gaussian marginals with some variance, expectations are smooth all the
        same.
        """
        return self.link.discontinuous

    def target_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the targets for latents of this shape."""
        return latent_shape[:-1] if self.latent_ndim else latent_shape

    def log_prob(
        self, y: Shaped[ArrayLike, "..."], f: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        r"""Log density :math:`\log p(y \mid f)`."""
        return self.distribution(f).log_prob(y)

    def cdf(
        self, y: Shaped[ArrayLike, "..."], f: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """Probability of a target at most `y`, given `f`."""
        return self.distribution(f).cdf(y)

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
        return self._mean(self.log_prob, f_mean, f_var, y)

    def predictive_log_prob(
        self,
        y: Shaped[ArrayLike, "*shape"],
        f_mean: Float[Array, "*shape"],
        f_var: Float[Array, "*shape"],
    ) -> Float[Array, "*shape"]:
        r"""Log predictive density :math:`\log\mathbb E\,p(y \mid f)`, `f ~ N(m, v)`.

        Args and returns as in `expected_log_prob`.
        """
        if isinstance(self.link, PiecewiseConstant):
            points, log_weights = self.link.log_pieces(f_mean, f_var)
            terms = self.log_prob(jnp.asarray(y)[None], points)
            return logsumexp(terms + log_weights, axis=0)

        def log_fn(f):
            return self.log_prob(y, f)

        if not self.log_concave:
            return log_expectation_exp(log_fn, f_mean, f_var, self.num_nodes)
        where = peak(log_fn, f_mean, f_var)
        return log_expectation_exp(log_fn, f_mean, f_var, self.num_nodes, **where)

    def predictive_cdf(
        self,
        y: Shaped[ArrayLike, "*shape"],
        f_mean: Float[Array, "*shape"],
        f_var: Float[Array, "*shape"],
    ) -> Float[Array, "*shape"]:
        r"""Predictive probability of a target at most `y`.

        In `f` it is a step as wide as the noise, so that by default it takes more nodes
        than other expectations; where noise is still narrower it is off by up to the
        weight of one node.
        """
        return self._mean(self.cdf, f_mean, f_var, y, num_nodes=_CDF_NODES)

    def predictive_moments(
        self, f_mean: Float[Array, "*shape"], f_var: Float[Array, "*shape"]
    ) -> Moments:
        r"""Mean and variance of `y`, with `f` integrated out.

        By the law of total variance,
        :math:`\mathbb V[y] = \mathbb E\,\mathbb V[y \mid f]
        + \mathbb V\,\mathbb E[y \mid f]`.
        """

        def spread(mean, f):
            p = self.distribution(f)
            return p.variance + (p.mean - mean) ** 2

        mean = self._mean(lambda f: self.distribution(f).mean, f_mean, f_var)
        return Moments(mean, self._mean(spread, f_mean, f_var, mean))

    def predictive_probabilities(
        self, f_mean: Float[Array, "..."], f_var: Float[Array, "..."]
    ) -> Float[Array, "... C"]:
        """Predictive probability of each label, for likelihoods that have labels."""
        if self.num_classes is None:
            raise ValueError(f"Targets of {type(self).__name__} are not labels.")
        labels = jnp.arange(self.num_classes)
        shape = self.target_shape(f_mean.shape)
        log_p = jax.vmap(
            lambda c: self.predictive_log_prob(jnp.full(shape, c), f_mean, f_var),
            out_axes=-1,
        )(labels)
        return jnp.exp(log_p)

    def predictive(
        self, f_mean: Float[Array, "*shape"], f_var: Float[Array, "*shape"]
    ) -> dist.Distribution:
        """The predictive distribution as a NumPyro mixture over the nodes.

        Exact for a piecewise-constant link (Seitz, eq. 14): one component a piece. For
        one latent function, and parameters that do not change with the rows.
        """
        rowwise = [
            field.name
            for field in dataclasses.fields(self)
            if field.name in _ROW_PARAMETERS and jnp.ndim(getattr(self, field.name)) > 0
        ]
        if rowwise or self.latent_ndim:
            raise ValueError(
                "`predictive` needs one latent function and scalar parameters; got "
                f"{self.num_latent} latent functions and arrays for {rowwise}."
            )
        if isinstance(self.link, PiecewiseConstant):
            points, weights = self.link.pieces(f_mean, f_var)
        else:
            points, weights = nodes(f_mean, f_var, self.num_nodes)
        shape = (weights.shape[0], *f_mean.shape)
        points = jnp.moveaxis(jnp.broadcast_to(points, shape), 0, -1)
        weights = jnp.moveaxis(jnp.broadcast_to(weights, shape), 0, -1)
        mixing = dist.Categorical(probs=weights)
        return dist.MixtureSameFamily(mixing, self.distribution(points))

    def _mean(self, fn, f_mean, f_var, *data, num_nodes=None):
        """Expectation of the elementwise `fn(*data, f)` over `f`."""
        if isinstance(self.link, PiecewiseConstant):
            points = self.link.inside(f_mean)
            values = fn(*(jnp.asarray(x)[None] for x in data), points)
            return self.link.mean(values, f_mean, f_var)
        num_nodes = self.num_nodes if num_nodes is None else num_nodes
        return expectation(lambda f: fn(*data, f), f_mean, f_var, num_nodes)

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
                "values out with `mask=` or `missing=True`, or drop their rows."
            )
        # Entries that are not checked may be NaN, which integer constraints dislike.
        inside = np.asarray(self.support(np.where(keep, y, 0)))
        if inside.shape != y.shape:  # constraints on whole rows
            inside = inside.reshape(inside.shape + (1,) * (y.ndim - inside.ndim))
        bad = keep & ~inside
        if bad.any():
            raise ValueError(
                f"`{name}` must hold {self.expected()} for the likelihood "
                f"{type(self).__name__}; got {_first(y, bad)}. "
                f"{self.advice(y[keep])}"
            )

    def expected(self) -> str:
        """What `y` should hold, in the words of an error message."""
        return f"values in the support {self.support}"

    def advice(self, y: np.ndarray) -> str:
        """The way out for observations `y` outside the support."""
        return "Transform the observations, or choose another likelihood."


_CDF_NODES = 128
# Parameters that may have one entry a row.
_ROW_PARAMETERS = ("concentration", "df", "exposure", "scale", "total_count")


def check_positive_link(link: Link) -> None:
    """Raise for links that do not map to the positive numbers."""
    if isinstance(link, Identity) or link.is_probability:
        raise ValueError(
            f"`link` must map to positive numbers; got {type(link).__name__}. Use "
            "`link='exp'` or `link='softplus'`."
        )


def check_probability_link(link: Link) -> None:
    """Raise for links that do not map to probabilities."""
    if not link.is_probability:
        raise ValueError(
            f"`link` must map to a probability; got {type(link).__name__}. Use "
            "`link='logit'` or `link='probit'`."
        )


def label_moments(probabilities: Float[Array, "... C"]) -> Moments:
    """Mean and variance of a label, as a number."""
    labels = jnp.arange(probabilities.shape[-1], dtype=probabilities.dtype)
    mean = probabilities @ labels
    return Moments(mean, probabilities @ labels**2 - mean**2)


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
