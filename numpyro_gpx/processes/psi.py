r"""Closed-form expectations of kernels under Gaussian inputs, the psi statistics.

With independent columns :math:`x_{nd} \sim \mathcal N(m_{nd}, s_{nd}^2)` every kernel
here is a sum of terms that are polynomials times a Gaussian bump,

.. math:: k(x, z) = \sum_t p_t(x \circ z)\,
    \exp\Big(-\tfrac12 \sum_d a_{td} (x_d - z_d)^2\Big),

and so are sums and products of such kernels. The product of two bumps is a bump, which
tilts the Gaussian to another one with independent columns; what is left are moments of
that. RBF is a bump, `Linear` and `Constant` are polynomials.

References:
    Titsias & Lawrence (2010), Bayesian Gaussian process latent variable model, for the
    statistics and RBF. Girard, Rasmussen, Quiñonero-Candela & Murray-Smith (2003) for
    GPs with uncertain inputs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from numpyro_gpx.checked_fields import as_inputs
from numpyro_gpx.inducing import Data, Points, psi
from numpyro_gpx.kernels import (
    RBF,
    ActiveDims,
    Constant,
    Kernel,
    Linear,
    Product,
    Scaled,
    Sum,
    White,
)
from numpyro_gpx.uncertain import InputBelief

__all__ = ["Psi", "psi2_rows", "psi_statistics"]


class Psi(NamedTuple):
    r"""Expectations of a kernel under Gaussian rows :math:`x_n`.

    Attributes:
        psi0: :math:`\mathbb E\,k(x_n, x_n)`, `(N,)`.
        psi1: :math:`\mathbb E\,k(x_n, z_m)`, `(N, M)`.
        psi2: :math:`\sum_n w_n\,\mathbb E\,k(x_n, z_m)\,k(x_n, z_j)`, `(M, M)`.
    """

    psi0: Float[Array, " N"]
    psi1: Float[Array, "N M"]
    psi2: Float[Array, "M M"]


def psi_statistics(
    kernel: Kernel,
    belief: InputBelief,
    Z: Array,
    weights: Float[Array, " N"] | None = None,
) -> Psi:
    r"""The psi statistics of a kernel, with `psi2` summed over the rows.

    Args:
        kernel: RBF, `Linear`, `Constant`, `White`, and what `Sum`, `Product`, `Scaled`
            and `.on(...)` make of them. `White` counts in `psi0` alone, as an inducing
            input is never the same point as a row.
        belief: Gaussian rows with independent columns, `(N, D)`. A standard deviation
            of 0 is a known entry.
        Z: Inducing inputs, `(M, D)`.
        weights: Weights :math:`w_n` of the rows in `psi2`, `(N,)`; 1 by default.

    References:
        Titsias & Lawrence (2010) for RBF and linear kernels.
    """
    Z, terms = _prepared(kernel, belief, Z)
    if weights is None:
        weights = jnp.ones_like(belief.mean[:, 0])
    if weights.shape != belief.shape[:1]:
        raise ValueError(
            f"`weights` must have shape {belief.shape[:1]}, one for each row of "
            f"`belief`; got {weights.shape}."
        )
    terms_xz = _without_white(terms)
    one = _Term({(0,) * Z.shape[1]: 1.0}, jnp.zeros_like(Z[0]))
    psi1 = jnp.zeros((len(belief), len(Z)), Z.dtype)
    for term in terms_xz:
        moment = _tilted_moments(term, one, belief, Z, Z, lambda rows: rows)
        psi1 = psi1 + _expected(moment, _in_x(term, Z), _in_x(one, Z))
    psi2 = _psi2(terms_xz, belief, Z, lambda rows: _matmul(weights[None, :], rows))
    return Psi(_psi0(terms, belief), psi1, psi2[0])


def psi2_rows(kernel: Kernel, belief: InputBelief, Z: Array) -> Float[Array, "N M M"]:
    r""":math:`\mathbb E\,k(x_n, z_m)\,k(x_n, z_j)` for each row, `(N, M, M)`.

    Args:
        kernel: As for `psi_statistics`.
        belief: Gaussian rows with independent columns, `(N, D)`.
        Z: Inducing inputs, `(M, D)`.
    """
    Z, terms = _prepared(kernel, belief, Z)
    return _psi2(_without_white(terms), belief, Z, lambda rows: rows)


def _prepared(kernel, belief, Z):
    """`Z` as an array and the terms of the kernel, or what is wrong with them."""
    if not belief.is_diagonal:
        raise ValueError(
            "`belief` must have independent columns, with standard deviations (N, D), "
            f"for closed forms; got factors of shape {belief.scale.shape}. Use another "
            "rule, such as `rule=gpx.cubature.Unscented()`."
        )
    Z = as_inputs("Z", Z)
    if Z.shape[1] != belief.shape[1]:
        raise ValueError(
            "`Z` must have as many columns as `belief`; got shapes "
            f"{Z.shape} and {belief.shape}."
        )
    # The kernel itself knows which columns and lengthscales do not fit, and says so.
    jax.eval_shape(lambda X: kernel.diag(X), Z)
    columns = tuple(range(Z.shape[1]))
    return Z, _terms(kernel, columns, jnp.zeros_like(Z[0]))


# ---- expectations of terms


def _psi0(terms, belief):
    """`E k(x, x)`, `(N,)`: where x = z the bumps are 1, and moments remain."""
    psi0 = jnp.zeros_like(belief.mean[:, 0])
    for term in terms:
        for powers, coefficient in term.polynomial.items():
            moments = (
                _moment(2 * power, belief.mean[:, d], belief.var[:, d])
                for d, power in enumerate(powers)
            )
            psi0 = psi0 + coefficient * math.prod(moments)
    return psi0


def _psi2(terms, belief, Z, total: Callable):
    """`E k(x, z_m) k(x, z_j)`, `(R, M, M)`; `total` maps `(N, P)` to `(R, P)`."""
    M = len(Z)
    upper = np.triu_indices(M)
    position = np.zeros((M, M), int)  # of each pair (m, j) in the upper triangle
    position[upper] = position[upper[::-1]] = np.arange(len(upper[0]))
    every = np.indices((M, M)).reshape(2, -1)

    psi2 = total(jnp.zeros((len(belief), 1), Z.dtype))[:, :, None]  # (R, 1, 1)
    for f, g in itertools.combinations_with_replacement(terms, 2):
        if not g.columns:
            value = _times_polynomial(f, g, belief, Z, total)
        else:
            i, j = upper if f is g else every
            moment = _tilted_moments(f, g, belief, Z[i], Z[j], total)
            value = _expected(moment, _in_x(f, Z[i]), _in_x(g, Z[j]))  # (R, P)
            value = value[:, position] if f is g else value.reshape(-1, M, M)
        psi2 = psi2 + value
        if f is not g:
            psi2 = psi2 + value.mT  # f g and g f
    return jnp.broadcast_to(psi2, (psi2.shape[0], M, M))


def _times_polynomial(f, g, belief, Z, total: Callable):
    r""":math:`\mathbb E f(x_n, z_m)\,g(x_n, z_j)`, `(R, M, M)`, if `g` has no bump.

    Each monomial of `g` is then a power of `x` times one of `z_j`, so that the
    expectations are over M inputs, not over pairs of them.
    """
    moment = _tilted_moments(f, g, belief, Z, Z, total)
    f_in_x, value = _in_x(f, Z), jnp.zeros((1, len(Z), len(Z)), Z.dtype)
    for powers, z_part in _in_x(g, Z).items():
        x_part = _expected(moment, f_in_x, {powers: 1.0})  # (R, M)
        value = value + x_part[:, :, None] * z_part[:, None, :]
    return value


def _in_x(term, Z):
    """The polynomial of a term in `x` alone: coefficients `(1, P)`, or `(1, 1)`."""
    columns = list(Z.T[:, None, :])
    coefficients = {}
    for powers, coefficient in term.polynomial.items():
        z_part = (z**p for z, p in zip(columns, powers, strict=True) if p > 0)
        coefficients[powers] = math.prod(z_part, start=jnp.full((1, 1), coefficient))
    return coefficients


def _expected(moment, f_in_x, g_in_x):
    r""":math:`\mathbb E f g`, `(R, P)`, from the moments with both bumps."""
    result = 0.0
    for (p, f), (p2, g) in itertools.product(f_in_x.items(), g_in_x.items()):
        result = result + f * g * moment(_plus(p, p2))
    return result


def _tilted_moments(f, g, belief, Z, Z2, total: Callable):
    r"""Moments of `x` with the bumps of two terms, at pairs of their centres.

    That is :math:`\mathbb E\,\prod_d x_d^{p_d}\,e^{-\frac{a_d}2 (x_d - z_d)^2
    - \frac{b_d}2 (x_d - z'_d)^2}` for powers :math:`p`.

    In each column, with :math:`A = a + b`, :math:`\bar z = (a z + b z') / A` and
    :math:`q = 1 + A s^2`,

    .. math:: \mathbb E\,e^{-\frac a2 (x - z)^2 - \frac b2 (x - z')^2}
        = q^{-\frac12} \exp\Big(-\frac{ab}{2A} (z - z')^2
          - \frac{A}{2q} (m - \bar z)^2\Big),

    and the Gaussian that the bumps tilt has the mean
    :math:`m + (A s^2 / q)(\bar z - m)` and the variance :math:`s^2 / q`. Nothing is
    divided by `s`, which may be 0.

    Args:
        f, g: Terms, whose polynomials do not matter here.
        Z, Z2: Inputs :math:`(z_p, z'_p)`, the centres of the bumps, `(P, D)`.
        total: What becomes of the rows, `(N, P)` to `(R, P)`.

    Returns:
        A function from the powers to the moments `(R, P)`; `(R, 1)` without bumps.
    """
    bumps = sorted(f.columns | g.columns)
    columns = np.array(bumps, int)
    a, b = f.precision[columns], g.precision[columns]
    A = a + b  # not 0 in these columns
    # Squares of small numbers lose fewer digits when they cancel. Nothing depends on
    # the centre, so neither does a gradient.
    centre = jax.lax.stop_gradient(jnp.mean(Z, axis=0))
    m = (belief.mean - centre[None, :])[:, columns]  # (N, C)
    z, z2 = ((inputs - centre[None, :])[:, columns] for inputs in (Z, Z2))  # (P, C)
    var = belief.var[:, columns]
    z_bar = (z * a[None, :] + z2 * b[None, :]) / A[None, :]
    q = 1.0 + A[None, :] * var
    R = A[None, :] / q

    if bumps:
        of_row = jnp.sum(jnp.log(q), axis=1)
        of_pair = jnp.sum((z - z2) ** 2 * (a * b / A)[None, :], axis=1)
        both = _weighted_squares(R, m, z_bar)
        mass = jnp.exp(-0.5 * (of_row[:, None] + of_pair[None, :] + both))  # (N, P)
    else:
        mass = jnp.ones_like(belief.mean[:, :1])

    @functools.cache
    def column_moment(d, power):
        mean, column_var = belief.mean[:, d, None], belief.var[:, d, None]
        if d in bumps:
            c = bumps.index(d)
            pull = (R * var)[:, c, None] * (z_bar[None, :, c] - m[:, c, None])
            mean, column_var = mean + pull, column_var / q[:, c, None]
        return _moment(power, mean, column_var)

    @functools.cache
    def moment(powers):
        of_columns = (
            column_moment(d, power) for d, power in enumerate(powers) if power
        )
        return total(math.prod(of_columns, start=mass))

    return moment


def _weighted_squares(R, m, z):
    r""":math:`\sum_c R_{nc} (m_{nc} - z_{pc})^2`, `(N, P)`, from `(N, C)` and `(P, C)`.

    No array has N, P and C entries. In float64 by products; in float32 these would
    cancel nearly all digits of a short distance, as in `kernels.distances`.
    """
    if m.dtype == jnp.float64:
        of_row = jnp.sum(R * m**2, axis=1)
        return of_row[:, None] + _matmul(R, (z**2).T) - 2.0 * _matmul(R * m, z.T)
    columns = range(m.shape[1])
    return sum(R[:, c, None] * (m[:, c, None] - z[None, :, c]) ** 2 for c in columns)


# Some devices drop digits in a product unless told not to.
_matmul = functools.partial(jnp.matmul, precision="highest")


def _moment(power: int, mean, var):
    r""":math:`\mathbb E x^k` under a Gaussian, by Stein's identity
    :math:`\mathbb E x^{k+1} = \mu\,\mathbb E x^k + k \sigma^2\,\mathbb E x^{k-1}`."""
    before, moment = 0.0, 1.0
    for k in range(power):
        before, moment = moment, mean * moment + k * var * before
    return moment


# ---- kernels as sums of terms


class _Term(NamedTuple):
    r"""A polynomial of :math:`x_d z_d` times a bump of the precisions :math:`a_d`.

    Attributes:
        polynomial: Coefficients of the monomials :math:`\prod_d (x_d z_d)^{p_d}`, by
            their powers :math:`(p_1, \dots, p_D)`.
        precision: :math:`a`, `(D,)`.
        columns: Where `precision` is not 0; a part of the structure.
        white: Whether the term is 0 unless `x` and `z` are the same row.
    """

    polynomial: dict[tuple[int, ...], Array | float]
    precision: Float[Array, " D"]
    columns: frozenset[int] = frozenset()
    white: bool = False

    def __mul__(self, other):
        polynomial: dict = {}
        for powers, coefficient in self.polynomial.items():
            for powers2, coefficient2 in other.polynomial.items():
                both = coefficient * coefficient2
                _accumulate(polynomial, _plus(powers, powers2), both)
        return _Term(
            polynomial,
            self.precision + other.precision,
            self.columns | other.columns,
            self.white or other.white,
        )


def _plus(powers, powers2):
    return tuple(p + p2 for p, p2 in zip(powers, powers2, strict=True))


def _accumulate(polynomial, powers, coefficient):
    polynomial[powers] = polynomial.get(powers, 0.0) + coefficient


def _without_white(terms):
    """Terms of `k(X, Z)`: the bumps, then what has none as one polynomial."""
    bumps = [term for term in terms if term.columns and not term.white]
    polynomial: dict = {}
    for term in terms:
        if not term.columns and not term.white:
            for powers, coefficient in term.polynomial.items():
                _accumulate(polynomial, powers, coefficient)
    flat = [_Term(polynomial, jnp.zeros_like(terms[0].precision))] if polynomial else []
    return bumps + flat


@functools.singledispatch
def _terms(kernel: Kernel, columns: tuple[int, ...], flat) -> list[_Term]:
    """The kernel as a sum of terms.

    Args:
        columns: The columns of `Z` that the kernel sees.
        flat: The precisions of no bump, zeros `(D,)`.
    """
    raise ValueError(
        f"There are no closed-form psi statistics for the kernel "
        f"{type(kernel).__name__}. Use another rule, such as "
        "`rule=gpx.cubature.Unscented()` or `rule=gpx.cubature.GaussHermite(10)`."
    )


@_terms.register(RBF)
def _rbf(kernel, columns, flat):
    dtype = jnp.result_type(flat, kernel.lengthscale)
    # Added, since `.on(0, 0)` sees a column twice.
    a = flat.astype(dtype).at[np.array(columns)].add(kernel.lengthscale**-2)
    return [_Term({(0,) * len(flat): kernel.variance}, a, frozenset(columns))]


@_terms.register(Linear)
def _linear(kernel, columns, flat):
    variance = jnp.broadcast_to(kernel.variance, len(columns))
    polynomial: dict = {}
    for i, column in enumerate(columns):
        powers = tuple(int(d == column) for d in range(len(flat)))
        _accumulate(polynomial, powers, variance[i])
    return [_Term(polynomial, flat)]


@_terms.register(Constant)
@_terms.register(White)
def _constant(kernel, columns, flat):
    white = isinstance(kernel, White)
    return [_Term({(0,) * len(flat): kernel.variance}, flat, white=white)]


@_terms.register(Scaled)
def _scaled(kernel, columns, flat):
    factor = Constant(kernel.variance)
    return _terms(Product((factor, kernel.kernel)), columns, flat)


@_terms.register(ActiveDims)
def _active_dims(kernel, columns, flat):
    return _terms(kernel.kernel, tuple(columns[d] for d in kernel.dims), flat)


@_terms.register(Sum)
def _sum(kernel, columns, flat):
    return [term for part in kernel.kernels for term in _terms(part, columns, flat)]


@_terms.register(Product)
def _product(kernel, columns, flat):
    factors = [_terms(part, columns, flat) for part in kernel.kernels]
    return [
        math.prod(chosen[1:], start=chosen[0]) for chosen in itertools.product(*factors)
    ]


@psi.register((Points, Data), Kernel, object, object)
def _(inducing, kernel, inputs, weights):
    Z = inducing.coordinates()
    if weights is not None:
        return psi_statistics(kernel, inputs, Z, weights)
    found = psi_statistics(kernel, inputs, Z)
    return found._replace(psi2=psi2_rows(kernel, inputs, Z))
