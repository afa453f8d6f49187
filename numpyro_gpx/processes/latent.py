"""What is known about functions at the rows of `X`, before a likelihood sees them.

`f(X)` is Gaussian in each row. Operators act row by row: sums and differences of
independent latents, products (`f(X) * g(X)`, `W(X) @ f(X)`), known mixing `A @ g(X)`,
columns `f(X)[:, 0]`, and one column a row `f(X).take(group)`. Mean and variance are
exact whatever was done; a mixture of Gaussians is formed only where somebody asks.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from numpyro_gpx.numerics.factor import cholesky
from numpyro_gpx.processes.columns import columns_of, leading, taken, taken_roots

__all__ = ["Components", "Gaussian", "Latent", "Taken", "Term", "as_latent"]


class Components(NamedTuple):
    """A mixture of S Gaussians in each row; outputs are independent given `s`.

    Attributes:
        log_weights: `(S,)`.
        means: `(S, N, *P)`.
        variances: `(S, N, *P)`.
    """

    log_weights: Float[Array, " S"]
    means: Float[Array, "S N *P"]
    variances: Float[Array, "S N *P"]


class Term(NamedTuple):
    """A GP call that a latent was made of.

    Attributes:
        gp: The GP.
        X: Where it was called.
    """

    gp: Any
    X: Any


class Taken(eqx.Module):
    """A column for each row, `(N,)`, of so many."""

    group: Array
    number: int = eqx.field(static=True)


class Latent(eqx.Module):
    """What is known of one or more functions at N rows: `(N,)`, `(N, P)`, `(N, P, Q)`.

    `mean` and `var` are exact, always. `sites` names the GP sites involved;
    independence is read off them.
    """

    # NumPy leaves `array + latent` to `__radd__`, instead of adding entry by entry.
    __array_ufunc__ = None

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            "`f(X)` is what is known of a function, not an array: hand it to "
            '`gpx.observe("y", f(X), likelihood, obs=y)`, or take its `mean`.'
        )

    if TYPE_CHECKING:
        # Fields of some, properties of others: when run, no base can say both.
        @property
        def mean(self) -> Array:
            """Mean of each entry, `(N, *P)`."""

        @property
        def var(self) -> Array:
            """Variance of each entry, `(N, *P)`."""

        @property
        def sites(self) -> frozenset:
            """Names of the GP sites involved."""

        @property
        def taken(self) -> tuple[Taken, ...]:
            """Columns that were taken row by row, to be looked at by their values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(N, *P)`."""
        return self.mean.shape

    @property
    @abc.abstractmethod
    def outputs_depend(self) -> bool:
        """Whether the outputs of a row depend on each other."""

    @property
    @abc.abstractmethod
    def groups(self) -> frozenset[str]:
        """Names of the `Group`s that share a part of its spread with others."""

    @abc.abstractmethod
    def output_cov(self) -> Float[Array, "N P P"]:
        """Covariance between the outputs of each row, exact."""

    @abc.abstractmethod
    def components(self) -> Components:
        """As a mixture of Gaussians; refused if only moments are known."""

    def entry_components(self) -> Components:
        """As a mixture of Gaussians of each entry, whatever others it depends on."""
        return self.components()

    @abc.abstractmethod
    def sample(self, key, sample_shape=()) -> Array:
        """Draw `f`, of shape `sample_shape + shape`."""

    @abc.abstractmethod
    def bare(self) -> Latent:
        """Without its origin; all else kept."""

    @abc.abstractmethod
    def __getitem__(self, index) -> Latent:
        """Some of the columns: `f(X)[:, 0]`, `f(X)[:, 1:]`; all rows are kept."""

    @abc.abstractmethod
    def take(self, group) -> Latent:
        """In row `n` the column `group[n]`, `(N,)`: a function for each group."""

    @abc.abstractmethod
    def _plus(self, other) -> Latent:
        """Plus a known function."""

    @abc.abstractmethod
    def _times(self, other) -> Latent:
        """Times a known function."""

    def __rmatmul__(self, A) -> Latent:
        """`A @ g(X)` with a known matrix `(P, Q)`, or one for each row `(N, P, Q)`."""
        from numpyro_gpx.processes.combining import mixed

        return mixed(A, self)

    def __matmul__(self, other) -> Latent:
        """`W(X) @ f(X)` of independent latents `(N, P, Q)` and `(N, Q)`."""
        from numpyro_gpx.processes.products import Product

        return Product.matrix(self, other)

    def __add__(self, other) -> Latent:
        """The sum with an independent latent, or with a known function."""
        if not isinstance(other, Latent):
            return self._plus(other)
        from numpyro_gpx.processes.combining import summed

        return summed(self, other)

    def __mul__(self, other) -> Latent:
        """The product with an independent latent, or with a known function."""
        if not isinstance(other, Latent):
            return self._times(other)
        from numpyro_gpx.processes.products import Product

        return Product.entrywise(self, other)

    def __radd__(self, other):
        return self + other

    def __rmul__(self, other):
        return self * other

    def __sub__(self, other):
        return self + (-1.0) * other

    def __rsub__(self, other):
        return other + (-1.0) * self

    def __neg__(self):
        return (-1.0) * self


class Gaussian(Latent):
    """Gaussian rows.

    Attributes:
        mean: Mean of `f` at each row, `(N, *P)`.
        var: Variance of `f` at each row.
        row_cov: Covariance between the rows, `(*P, N, N)`, if asked for.
        between: Covariance between the outputs of a row, `(N, P, P)`; `None` where
            they are independent.
        origin: The GP calls that were added up, apart from a known shift; empty if
            unknown.
        sites: Names of the GP sites involved.
        cov_scale: Prior variance that `row_cov` was subtracted from, for its jitter.
        shift: The known shift added to the origin; `None` for 0.
        moments_only: Whether the rows are not Gaussian, as at uncertain inputs, and
            mean and variance are all that is known of them.
        is_known: Whether the variance is 0.
        roots: The part of the spread that is shared with other latents, `(N, *P, R)` by
            `Group`: added before it is squared. `var`, `row_cov` and `between` have it.
        taken: Columns that were taken in each row, `(N,)`, each with the number there
            is: to be looked at where they have values.
    """

    mean: Float[Array, " N *P"]
    var: Float[Array, " N *P"]
    row_cov: Array | None = None
    between: Array | None = None
    origin: tuple[Term, ...] = ()
    sites: frozenset = eqx.field(static=True, default=frozenset())
    cov_scale: Float[Array, ""] | None = None
    shift: Array | None = None
    moments_only: bool = eqx.field(static=True, default=False)
    is_known: bool = eqx.field(static=True, default=False)
    roots: dict[str, Array] = eqx.field(default_factory=dict)
    taken: tuple[Taken, ...] = ()

    @classmethod
    def known(cls, value) -> Gaussian:
        """A function whose values are known."""
        mean = jnp.asarray(value)
        if not jnp.issubdtype(mean.dtype, jnp.floating):
            mean = mean.astype(jnp.result_type(float))
        return cls(mean, jnp.zeros_like(mean), is_known=True)

    @property
    def outputs_depend(self):
        return self.between is not None

    @property
    def groups(self):
        return frozenset(self.roots)

    def output_cov(self):
        if self.between is not None:
            return self.between
        if self.mean.ndim != 2:
            raise ValueError(
                "`output_cov` needs a latent (N, P) of several outputs; got "
                f"{self.shape}."
            )
        return jax.vmap(jnp.diag)(self.var)

    def components(self):
        if self.between is not None:
            raise ValueError(
                "The outputs of a mixed latent, such as `A @ g(X)`, depend on each "
                "other; only likelihoods that need mean and covariance, or one output "
                "at a time, can use it."
            )
        return Components(
            jnp.zeros(1, self.mean.dtype), self.mean[None], self.var[None]
        )

    def sample(self, key, sample_shape=()) -> Array:
        """Draw `f`: jointly over the rows if `row_cov` is known, else row by row."""
        noise = jr.normal(key, sample_shape + self.mean.shape, self.mean.dtype)
        return leading(self.mean, noise.ndim) + self.correlate(noise)

    def correlate(self, noise) -> Array:
        """Give standard normal `noise` `(..., N, *P)` the covariance of the rows."""
        if self.between is not None and self.row_cov is not None:
            raise ValueError(
                "Rows and outputs that depend on each other cannot be drawn together; "
                "leave `full_cov` out."
            )
        if self.between is not None:
            scale = jnp.mean(self.var)
            root = cholesky(self.between, scale)
            return jnp.einsum("npq,...nq->...np", root, noise)
        if self.row_cov is None:
            return leading(jnp.sqrt(self.var), noise.ndim) * noise
        L = cholesky(self.row_cov, self.cov_scale)
        if self.row_cov.ndim == 2:
            return jnp.einsum("nm,...m->...n", L, noise)
        return jnp.einsum("pnm,...mp->...np", L, noise)

    def bare(self):
        return dataclasses.replace(self, origin=(), shift=None)

    def __getitem__(self, index):
        columns = columns_of(index, self.shape)
        between = row_cov = None
        if self.between is not None and np.ndim(columns[0]) > 1:
            raise IndexError(
                "Columns of `A @ g(X)` depend on each other and cannot be arranged as "
                f"{np.shape(columns[0])}."
            )
        if self.between is not None and np.ndim(columns[0]) == 1:
            between = self.between[:, columns[0]][:, :, columns[0]]
        if self.row_cov is not None:
            row_cov = self.row_cov[columns]
        place = (slice(None), *columns)
        return Gaussian(
            self.mean[place], self.var[place], row_cov, between, sites=self.sites,
            cov_scale=self.cov_scale, moments_only=self.moments_only,
            is_known=self.is_known,
            roots={group: x[place] for group, x in self.roots.items()},
        )  # fmt: skip

    def take(self, group):
        return Gaussian(
            taken(self.mean, group), taken(self.var, group),
            self._taken_rows(group), cov_scale=self.cov_scale, sites=self.sites,
            moments_only=self.moments_only, is_known=self.is_known,
            roots={name: taken_roots(x, group) for name, x in self.roots.items()},
            taken=(*self.taken, Taken(jnp.asarray(group), self.shape[1])),
        )  # fmt: skip

    def _taken_rows(self, group):
        """Covariance between rows that take different columns, `(N, N)`."""
        if self.row_cov is None:
            return None
        group = jnp.asarray(group)
        each = self.row_cov[group, jnp.arange(group.shape[0])]  # (N, N)
        # Different columns have in common what is held jointly, and nothing else.
        shared = jnp.zeros_like(each)
        for root in self.roots.values():
            rows = taken_roots(root, group)  # (N, R)
            shared = shared + rows @ rows.T
        return jnp.where(group[:, None] == group[None], each, shared)

    def _plus(self, other):
        mean, var = jnp.broadcast_arrays(self.mean + other, self.var)
        shift = other if self.shift is None else self.shift + other
        shift = jnp.broadcast_to(shift, mean.shape)
        return dataclasses.replace(self, mean=mean, var=var, shift=shift)

    def _times(self, other):
        factor = jnp.asarray(other, self.mean.dtype)
        row_cov = cov_scale = between = None
        if self.row_cov is not None:
            rows = jnp.moveaxis(jnp.broadcast_to(factor, self.shape), 0, -1)  # (*P, N)
            row_cov = rows[..., :, None] * self.row_cov * rows[..., None, :]
            if self.cov_scale is not None:
                cov_scale = jnp.mean(rows**2) * self.cov_scale
        if self.between is not None:
            column = jnp.broadcast_to(factor, self.shape)
            between = column[:, :, None] * self.between * column[:, None, :]
        return Gaussian(
            factor * self.mean, factor**2 * self.var, row_cov, between,
            sites=self.sites, cov_scale=cov_scale, moments_only=self.moments_only,
            is_known=self.is_known,
            roots={group: factor[..., None] * x for group, x in self.roots.items()},
            taken=self.taken,
        )  # fmt: skip


def as_latent(value) -> Latent:
    """`value` itself, or a known function (an array) as a latent without variance."""
    return value if isinstance(value, Latent) else Gaussian.known(value)
