r"""Free simulation of time series: predictions fed back as uncertain inputs.

A Gaussian process NARX model, :math:`y_t = f(y_{t-1}, \dots, y_{t-L}, c_t) + \epsilon`,
is ordinary regression on lagged rows (`lagged`). Several steps ahead some of the lags
are predictions themselves. With the belief :math:`x \sim \mathcal N(m, C)` about the
lags, and the mean :math:`\mu(x)` and variance :math:`\sigma^2(x)` of the next *target*,

.. math::
    \mathbb E[y] = \textstyle\sum_s w_s\, \mu(x_s), \qquad
    \mathbb V[y] = \sum_s w_s [\sigma^2(x_s) + (\mu(x_s) - \mathbb E[y])^2], \qquad
    \operatorname{cov}(x, y) = \sum_s w_s (x_s - m)(\mu(x_s) - \mathbb E[y])

over the nodes of a rule, and these moments move into the belief about the next lags.

References:
    Girard, Rasmussen, Quiñonero-Candela & Murray-Smith (2003); Kocijan et al. (2005);
    dissertation 3.4.2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from scipy.special import ndtri

from numpyro_gpx import checks
from numpyro_gpx.cubature import Analytic, MonteCarlo, Rule, Unscented
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.mixtures import shape_of
from numpyro_gpx.results.predict import sites_at
from numpyro_gpx.uncertain import InputBelief

__all__ = ["Simulation", "lagged", "simulate", "simulate_paths"]

# Components evaluated at once, as in predictions.
_BATCH = 16


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Gaussian predictions of T consecutive steps, each on its own.

    Attributes:
        mean: Predictive means of the targets, `(T,)`.
        var: Predictive variances, observation noise included, `(T,)`.
    """

    mean: np.ndarray
    var: np.ndarray

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def sd(self) -> np.ndarray:
        """Predictive standard deviations, `(T,)`."""
        return np.sqrt(self.var)

    def log_prob(self, y) -> np.ndarray:
        """Log density of each step, `(T,)`."""
        y = np.asarray(y, float)
        if y.shape != self.mean.shape:
            raise ValueError(
                f"`y` must have the shape {self.mean.shape} of the simulation; got "
                f"{y.shape}."
            )
        checks.finite("y", y)
        z = (y - self.mean) / self.sd
        return -0.5 * z**2 - np.log(self.sd) - 0.5 * np.log(2.0 * np.pi)

    def quantile(self, q) -> np.ndarray:
        """Quantiles, `(T,)` or `(Q, T)`."""
        levels = np.asarray(q, float)
        if np.any((levels <= 0.0) | (levels >= 1.0)):
            raise ValueError(f"`q` must lie between 0 and 1; got {q}.")
        return self.mean + ndtri(levels)[..., None] * self.sd

    def rescaled(self, shift, scale) -> Simulation:
        """The simulation of `shift + scale * y`, with a positive scale."""
        if not scale > 0.0:
            raise ValueError(f"`scale` must be positive; got {scale}.")
        return Simulation(shift + scale * self.mean, scale**2 * self.var)


def lagged(y, num_lags: int, exogenous=None) -> tuple[np.ndarray, np.ndarray]:
    r"""Rows of a time series for regression, :math:`(y_{t-1}, \dots, y_{t-L}, c_t)`.

    Standardise the series before, not the columns of the rows after: what is fed back
    into the columns is the target.

    Args:
        y: The series `(T,)`, oldest value first.
        num_lags: Number of lags L.
        exogenous: Known columns `(T, E)`, a row for each value of `y`; the row of the
            target's own time is used.

    Returns:
        Inputs `(T - L, L + E)`, the most recent lag first and the exogenous columns
        last, and targets `(T - L,)`.
    """
    y = np.asarray(y, float)
    checks.at_least("num_lags", num_lags, 1)
    if y.ndim != 1 or len(y) <= num_lags:
        raise ValueError(
            f"`y` must have shape (T,) with more than num_lags={num_lags} values; got "
            f"{y.shape}."
        )
    checks.finite("y", y, hint="Impute them: lags must be consecutive.")
    windows = np.lib.stride_tricks.sliding_window_view(y[:-1], num_lags)
    X = windows[:, ::-1]  # (T - L, L)
    if exogenous is not None:
        known = _exogenous(exogenous, len(y), "a row for each value of `y`")
        X = np.concatenate([X, known[num_lags:]], axis=1)
    return np.ascontiguousarray(X), y[num_lags:]


def simulate(
    fit: Fit,
    history,
    num_steps: int,
    *,
    rule: Rule | None = None,
    exogenous=None,
    joint: bool = True,
    site: str | None = None,
    num_components: int | None = None,
    key=None,
) -> Simulation:
    """Predict many steps ahead; what was predicted is the input of what follows.

    The noise is part of what is fed back, since lags are targets. The posterior of the
    function, and of its hyperparameters, enters each step anew: that the same function
    acts at all steps is neglected, here as in the references.

    Args:
        fit: A fit of a model `(X, y=None)` on the rows of `lagged`, by any engine.
        history: The last L observed values, the most recent one *last*.
        num_steps: Number of steps T.
        rule: How to integrate over the lags; `gpx.cubature.Unscented()` if left out.
            `GaussHermite(1)` has its only node at the mean and is the plain GP-NARX,
            which feeds back means as if they had been observed. `Analytic()` needs a
            kernel with psi statistics and `joint=False`. Where negative weights
            (`SphericalRadial(5)`) leave a negative variance, it counts as 0.
        exogenous: Known columns of the steps to come, `(T, E)`, if the model has any.
        joint: Whether to keep the covariances between lags; `False` takes lags for
            independent, as the dissertation does.
        site: Observed site; may be left out if there is one.
        num_components: Posterior draws to average over; see `Fit.predict`.
        key: For rules and models that draw; `jax.random.key(0)` if left out.

    Returns:
        Mean and variance of the target of each step.
    """
    rule = Unscented() if rule is None else rule
    checks.instance("rule", rule, Rule, "such as gpx.cubature.Unscented()")
    if isinstance(rule, MonteCarlo) and rule.num_draws < 2:
        raise ValueError(
            "`rule=MonteCarlo(1)` has no spread; use two draws at least, or "
            "`GaussHermite(1)` to feed back means."
        )
    if joint and isinstance(rule, Analytic):
        raise ValueError(
            "`joint=True` needs the covariance between inputs and target, which "
            "`rule=Analytic()` does not give. Pass `joint=False`, or another rule."
        )
    key = jr.key(0) if key is None else key
    checks.key(key)
    lags, known = _start(fit, history, num_steps, exogenous)
    keys = jr.split(key, num_steps)
    with one_at_a_time():
        mean, var = run(
            _propagate, fit.site_view(site), fit.global_components(num_components),
            rule, joint, lags, known, keys,
        )  # fmt: skip
    return Simulation(np.asarray(mean), np.asarray(var))


def simulate_paths(
    fit: Fit,
    history,
    num_steps: int,
    *,
    key,
    num_paths: int = 1000,
    exogenous=None,
    site: str | None = None,
    num_components: int | None = None,
) -> np.ndarray:
    """Draw paths: each step from the predictive distribution at the path's own past.

    What `simulate` approximates by Gaussians. The function is drawn anew at each step,
    marginally, and so are the hyperparameters: values of a path at different steps do
    not share one function.

    Args:
        fit: A fit of a model `(X, y=None)` on the rows of `lagged`.
        history: The last L observed values, the most recent one last.
        num_steps: Number of steps T.
        key: Random key.
        num_paths: Number of paths.
        exogenous: Known columns of the steps to come, `(T, E)`.
        site: Observed site; may be left out if there is one.
        num_components: Posterior draws to choose from.

    Returns:
        Targets, `(num_paths, T)`.
    """
    checks.key(key)
    checks.at_least("num_paths", num_paths, 1)
    lags, known = _start(fit, history, num_steps, exogenous)
    keys = jr.split(key, num_steps)
    with one_at_a_time():
        paths = run(
            _draw_paths, fit.site_view(site), fit.global_components(num_components),
            jnp.tile(lags, (num_paths, 1)), known, keys,
        )  # fmt: skip
    return np.asarray(paths).T


def _propagate(view, components, rule, joint: bool, lags, exogenous, keys):
    """Means and variances `(T,)`, from lags `(L,)` that are known."""

    def step(belief, inputs):
        (m, C), (known, key) = belief, inputs
        key_nodes, key_model = jr.split(key)
        scale = _symmetric_root(C) if joint else jnp.sqrt(jnp.diag(C))
        x = InputBelief(m[None], scale[None])
        if isinstance(rule, Analytic):
            X = InputBelief(
                _join(x.mean, known), _join(x.scale, jnp.zeros_like(known))
            )  # (1, D)
            mean, var = _moments(view, components, X, key_model)
            mean, var, cross = mean[0], var[0], jnp.zeros_like(m)
        else:
            points, w = rule.nodes(x, key_nodes)  # (S, 1, L), (S,)
            points = points[:, 0]
            means, variances = _moments(
                view, components, _join(points, known), key_model
            )  # (S,)
            mean = w @ means
            apart = means - mean
            var = jnp.maximum(w @ (variances + apart**2), 0.0)
            cross = (w * apart) @ (points - m)  # (L,)
        cross = cross[:-1] if joint else jnp.zeros_like(m[:-1])
        m = jnp.concatenate([mean[None], m[:-1]])
        C = jnp.block([[var[None, None], cross[None]], [cross[:, None], C[:-1, :-1]]])
        return (m, C), (mean, var)

    start = lags, jnp.zeros((lags.size, lags.size), lags.dtype)
    return jax.lax.scan(step, start, (exogenous, keys))[1]


def _draw_paths(view, components, lags, exogenous, keys):
    """Targets `(T, P)` of P paths that start from lags `(P, L)`."""

    def step(lags, inputs):
        known, key = inputs
        key_model, key_target, key_component = jr.split(key, 3)
        fn = _targets(view, components, _join(lags, known), key_model)
        number = jax.tree.leaves(fn)[0].shape[0]
        draws = jax.lax.map(
            lambda pair: pair[0].sample(pair[1]),
            (fn, jr.split(key_target, number)),
            batch_size=_BATCH,
        )  # (components, P)
        chosen = jr.randint(key_component, lags.shape[:1], 0, number)
        y = draws[chosen, jnp.arange(lags.shape[0])]
        return _join(y[:, None], lags[:, :-1]), y

    return jax.lax.scan(step, lags, (exogenous, keys))[1]


def _targets(view, components, X, key):
    """Distributions of the targets at the rows of `X`, a leading axis of components."""
    call = view.train.at((X,), {})
    fn = sites_at(view, components, call, key, of=None)
    shape = shape_of(fn)
    if shape != X.shape[:1]:
        raise ValueError(
            f"Site `{view.site}` must have one target a row to be fed back; its "
            f"predictions have shape {shape} for {X.shape[0]} rows."
        )
    return fn


def _moments(view, components, X, key):
    """Mean and variance of the target at each row, averaged over components."""
    fn = _targets(view, components, X, key)
    means, variances = jax.lax.map(
        lambda one: (one.mean, one.variance), fn, batch_size=_BATCH
    )  # (components, N)
    mean = jnp.mean(means, axis=0)
    return mean, jnp.mean(variances + (means - mean) ** 2, axis=0)


def _join(rows, columns):
    """`rows` `(N, L)` with more columns, `(N, E)` or the same `(E,)` in each row."""
    shape = (rows.shape[0], columns.shape[-1])
    return jnp.concatenate([rows, jnp.broadcast_to(columns, shape)], axis=1)


def _symmetric_root(C):
    """The symmetric square root; what is not positive in `C` counts as 0.

    Lags that were observed make `C` singular, and a Cholesky factor NaN. For a diagonal
    `C` the root is that of `joint=False`.
    """
    values, vectors = jnp.linalg.eigh(C)
    return (vectors * jnp.sqrt(jnp.maximum(values, 0.0))) @ vectors.T


def _start(fit, history, num_steps, exogenous):
    """Lags `(L,)`, most recent first, and known columns `(T, E)`."""
    fit.program.check_unchanged()
    checks.at_least("num_steps", num_steps, 1)
    history = np.asarray(history, float)
    if history.ndim != 1:
        raise ValueError(
            "`history` must have shape (L,), the most recent value last; got "
            f"{history.shape}."
        )
    checks.finite("history", history, hint="Impute them: lags must be consecutive.")
    known = np.zeros((num_steps, 0))
    if exogenous is not None:
        known = _exogenous(exogenous, num_steps, f"num_steps={num_steps} rows")
    args = fit.call.args
    shape: tuple[int, ...] = np.shape(args[0]) if args else ()
    if len(shape) != 2:
        raise ValueError(
            "`fit` must be of a model (X, y=None) on the rows of "
            f"`gpx.timeseries.lagged`; its first training argument has shape {shape}."
        )
    num_lags = shape[1] - known.shape[1]
    if num_lags < 1:
        raise ValueError(
            f"`exogenous` must leave a column for a lag: the model was trained on "
            f"{shape[1]} columns; got {known.shape[1]} exogenous ones."
        )
    if len(history) != num_lags:
        hint = "Earlier values are needed."
        if len(history) > num_lags:
            hint = f"Pass `history[-{num_lags}:]`."
        raise ValueError(
            f"`history` must have {num_lags} values: the model was trained on "
            f"{shape[1]} columns, of which `exogenous` gives {known.shape[1]}; got "
            f"{len(history)} values. {hint}"
        )
    dtype = jnp.result_type(args[0])
    return jnp.asarray(history[::-1], dtype), jnp.asarray(known, dtype)


def _exogenous(value, num_rows, rows):
    value = np.asarray(value, float)
    if value.ndim != 2 or value.shape[0] != num_rows:
        raise ValueError(
            f"`exogenous` must have shape ({num_rows}, E), {rows}; got {value.shape}."
        )
    checks.finite("exogenous", value, hint="Impute them.")
    return value
