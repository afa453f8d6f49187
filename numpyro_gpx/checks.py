"""What users can get wrong, found at the door.

Shapes are checked anywhere; values (NaN, labels) only on concrete arrays, since inside
`jit` there are none. `fit_*` brings the concrete arrays (`program/data_checks`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Array
from numpyro.util import is_prng_key, not_jax_tracer

__all__ = [
    "at_least",
    "exact_targets",
    "fills_plate",
    "finite",
    "guide",
    "inputs",
    "instance",
    "key",
    "latents",
    "loss",
    "matrix",
    "noise_scale",
    "not_negative",
    "number",
    "numbers",
    "one_of",
    "optimizer",
    "real",
    "rows_of",
    "rowwise",
    "sequence",
    "site_value",
    "targets",
]


def key(value) -> None:
    """Raise if `value` is not a random key."""
    if not is_prng_key(value):
        raise TypeError(
            "`key` must be a JAX random key, such as `jax.random.key(0)`; got "
            f"{_described(value)}."
        )


def guide(value, model):
    """The guide of `model`: `value` itself, or made from the model if it is a class.

    Raises where `value` is no guide, or was made for another model. Plain functions do
    not say what they were made for, and pass.
    """
    found = value(model) if isinstance(value, type) else value
    if not callable(found):
        raise TypeError(
            "`guide` must be a guide of the model, such as "
            f"`gpx.guides.WhitenedGaussian(model)`; got {_described(value)}. "
            "Engines take it first, `SVI(guide)`, and short forms behind the model, "
            "`fit_svi(model, guide, X, y, key=key)`."
        )
    # Equal, not the same: a method is another object each time it is named.
    if getattr(found, "model", model) != model:
        raise ValueError(
            "`guide` was made for another model; make it for this one: "
            f"`{type(found).__name__}(model)`."
        )
    return found


def optimizer(value) -> None:
    """Raise unless `value` is `None` or looks like an optimiser."""
    usual = value is None or all(hasattr(value, n) for n in ("init", "update"))
    if not usual:
        raise TypeError(
            "`optimizer` must be an optimiser such as `optax.adam(0.01)`; got "
            f"{_described(value)}."
        )


def loss(value) -> None:
    """Raise if `value` is a class of losses in place of one of them."""
    if not (value is None or isinstance(value, type | numpyro.infer.elbo.ELBO)):
        raise TypeError(
            "`loss` must be a loss such as `gpx.infer.ELBO()`; got "
            f"{_described(value)}."
        )
    if isinstance(value, type):
        raise TypeError(
            f"`loss` must be a loss; got the class {value.__name__}. Make one: "
            f"`{value.__name__}(...)`."
        )


def matrix(name: str, value, shape: str) -> None:
    """Raise unless `value` has two axes."""
    if np.ndim(value) != 2:
        raise ValueError(f"`{name}` must have shape {shape}; got {np.shape(value)}.")


def at_least(name: str, value, least: int) -> None:
    """Raise unless `value` is a whole number from `least` on."""
    if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number, at least {least}; got {value!r}."
        )


def number(name: str, value, above: float, below: float = np.inf) -> None:
    """Raise unless `value` is a real number between the two."""
    kinds = (int, float, np.integer, np.floating)
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    if not (fits and above < value < below):
        between = f" and below {below:g}" if np.isfinite(below) else ""
        raise ValueError(
            f"`{name}` must be a number above {above:g}{between}; got {value!r}."
        )


def one_of(name: str, value, allowed: tuple) -> None:
    """Raise unless `value` is among those."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {allowed}; got {value!r}.")


def sequence(name: str, value) -> None:
    """Raise if `value` is a single number."""
    if np.ndim(value) == 0:
        raise TypeError(f"`{name}` must be a sequence, `({value},)`; got {value!r}.")


def _described(value) -> str:
    if hasattr(value, "shape"):
        return f"an array of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def inputs(name: str, X) -> Array:
    """`X` as an array `(N, D)` of floats, or an error that says what came."""
    if jnp.ndim(X) != 2:
        raise ValueError(
            f"`{name}` must have shape (N, D); got {jnp.shape(X)}. For one-dimensional "
            f"inputs pass `{name}[:, None]`."
        )
    X = jnp.asarray(X)
    if not jnp.issubdtype(X.dtype, jnp.floating):
        raise ValueError(
            f"`{name}` must be floating point; got {X.dtype}. Pass "
            f"`{name}.astype(float)`."
        )
    if X.shape[0] == 0:
        raise ValueError(f"`{name}` must have at least one row; got shape {X.shape}.")
    finite(name, X)
    return X


def finite(name: str, value, *, hint: str = "Drop or impute these rows.") -> None:
    """Raise if a concrete array holds NaN or infinity."""
    if not not_jax_tracer(value):
        return
    value = np.asarray(value)
    if not np.issubdtype(value.dtype, np.floating):
        return
    bad = ~np.isfinite(value)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"`{name}` must be finite; got {value[first]} at index {first} and "
            f"{int(bad.sum())} such values in all. {hint}"
        )


def real(name: str, value):
    """`value`, unless it is complex."""
    if np.iscomplexobj(value):
        raise ValueError(f"`{name}` must be real; got {jnp.result_type(value)}.")
    return value


def numbers(name: str, value):
    """`value`, unless it holds anything but real numbers."""
    # Entry by entry: a list may hold tracers, of which only the dtype is known.
    leaves = jax.tree.leaves(value, is_leaf=lambda x: x is None)
    dtypes = [
        x.dtype if isinstance(x, jax.Array) else np.asarray(x).dtype for x in leaves
    ]
    kinds = (jnp.number, jnp.bool_)
    if not dtypes or not all(
        any(jnp.issubdtype(dtype, kind) for kind in kinds) for dtype in dtypes
    ):
        raise TypeError(
            f"`{name}` must be a number or an array of numbers; got "
            f"{_described(value)}."
        )
    for dtype in dtypes:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(f"`{name}` must be real; got {dtype}.")
    return value


def not_negative(argument: str, site: str, value) -> None:
    """Raise if a concrete argument of a site holds a number below 0."""
    if not_jax_tracer(value) and np.any(np.asarray(value) < 0.0):
        worst = np.min(np.asarray(value))
        raise ValueError(
            f"`{argument}` of site `{site}` must be at least 0; got {worst}."
        )


def noise_scale(site: str, scale, num_rows: int):
    """A noise scale, which must be a positive number or one for each row."""
    numbers("scale", scale)
    if isinstance(scale, list | tuple):
        scale = jnp.asarray(scale)
    if jnp.shape(scale) not in ((), (num_rows,)):
        raise ValueError(
            f"`scale` of site `{site}` must be a number, or have shape ({num_rows},); "
            f"got {jnp.shape(scale)}."
        )
    if not_jax_tracer(scale):
        finite("scale", scale, hint="")
        if not np.all(np.asarray(scale) > 0.0):
            raise ValueError(
                f"`scale` of site `{site}` must be positive; got "
                f"{np.min(np.asarray(scale))}."
            )
    return scale


def instance(name: str, value, kind: type, hint: str) -> None:
    """Raise if `value` is not a `kind`."""
    if not isinstance(value, kind):
        a = "an" if kind.__name__[0] in "AEIOU" else "a"
        got = f"the class {value.__name__}" if isinstance(value, type) else None
        raise TypeError(
            f"`{name}` must be {a} {kind.__name__}, {hint}; got "
            f"{got or type(value).__name__}."
        )


def latents(site: str, shape: tuple[int, ...], likelihood) -> None:
    """Raise if a likelihood gets another number of latent functions than it needs."""
    needed = likelihood.num_latent
    if likelihood.latent_ndim == 0 or (len(shape) == 2 and shape[1] == needed):
        return
    raise ValueError(
        f"{type(likelihood).__name__} at site `{site}` needs {needed} latent "
        f"functions, a latent of shape (N, {needed}); got {shape}. Make them with "
        f"`gpx.gp(..., num_outputs={needed})`, or join GPs with "
        "`gpx.stack(f(X), g(X))`."
    )


def site_value(name: str, value, shape: tuple[int, ...]) -> None:
    """Raise if a draw handed to a GP site has another shape than the site."""
    if jnp.shape(value) != shape:
        raise ValueError(
            f"The value of GP site `{name}` must have shape {shape}; got "
            f"{jnp.shape(value)}. These draws belong to another model, or to another "
            "number of inducing points or outputs; or `gpx.gp` was called inside a "
            "plate, and belongs outside."
        )


def targets(name: str, obs, fn, likelihood):
    """Targets of an `observe` site, checked against its latent and likelihood."""
    expected = fn.batch_shape + fn.event_shape
    if jnp.shape(obs) != expected:
        raise ValueError(
            f"`obs` of site `{name}` must have the shape {expected} of its latent "
            f"function; got {jnp.shape(obs)}. {_shape_hint(jnp.shape(obs), expected)}"
        )
    real(name, obs)
    if not_jax_tracer(obs):
        likelihood.check(obs, name=name, mask=fn.keep)
    return jnp.asarray(obs)


def rows_of(site: str, obs, rows, plate):
    """The plate's `rows` of `obs`, which has as many as the plate; `None` stays."""
    if plate is None:
        raise ValueError(
            f"`rows` of site `{site}` must be those of a plate around it, as in `with "
            "numpyro.plate(...) as i:`; there is none."
        )
    if rows is not plate._indices:
        raise ValueError(
            f"`rows` of site `{site}` must be the rows of plate `{plate.name}` as they "
            f"are, `with numpyro.plate({plate.name!r}, ...) as i:`; got others. Take "
            "the targets yourself: `obs=y[...]`."
        )
    if obs is None:
        return None
    if jnp.ndim(obs) == 0:
        raise ValueError(
            f"`obs` of site `{site}` must have {plate.size} rows, those of plate "
            f"`{plate.name}`; got a scalar."
        )
    if jnp.shape(obs)[0] != plate.size:
        raise ValueError(
            f"`obs` of site `{site}` has {jnp.shape(obs)[0]} rows; plate "
            f"`{plate.name}` has {plate.size}."
        )
    return jnp.asarray(obs)[rows]


def fills_plate(site: str, num_rows: int, handlers) -> None:
    """Raise if a latent has other rows than the plate of rows around its site."""
    for plate in handlers:
        if not isinstance(plate, numpyro.plate) or plate.dim != -1:
            continue
        inside = plate.subsample_size
        if num_rows in (1, inside):
            continue
        if inside == plate.size:
            raise ValueError(
                f"Site `{site}` has {num_rows} rows in plate `{plate.name}`, which has "
                f"{plate.size}."
            )
        raise ValueError(
            f"Site `{site}` has {num_rows} rows in a plate that subsamples {inside} of "
            f"{plate.size}: write `f(X[i])`, and `obs=y, rows=i`."
        )


def exact_targets(name: str, obs, fn):
    """Targets of an `exact` site: `(N,)`, finite."""
    if jnp.shape(obs) != fn.event_shape:
        raise ValueError(
            f"`obs` of site `{name}` must have shape {fn.event_shape}, one target for "
            f"each row of `X`; got {jnp.shape(obs)}. "
            f"{_shape_hint(jnp.shape(obs), fn.event_shape)}"
        )
    real(name, obs)
    finite(name, obs)
    return jnp.asarray(obs)


def rowwise(
    argument: str, site: str, value, shape: tuple[int, ...], *, spread: bool = True
):
    """An argument of a site, one entry a row or one for each entry, as `shape`.

    A value `(N,)` for a latent `(N, P)` follows the rows, also where N = P; not so with
    `spread=False`, where columns mean different things.
    """
    value = jnp.asarray(numbers(argument, value))
    allowed = (shape[:1], shape) if spread else (shape,)
    if value.shape not in allowed:
        expected = " or ".join(str(s) for s in dict.fromkeys(allowed))
        raise ValueError(
            f"`{argument}` of site `{site}` must have shape {expected}; got "
            f"{value.shape}."
        )
    finite(argument, value)
    return jnp.broadcast_to(value[:, None] if value.ndim < len(shape) else value, shape)


def _shape_hint(came, expected):
    if came == (*expected, 1):
        return "Pass `y[:, 0]`."
    if came[:1] != expected[:1]:
        return (
            "`X` and `y` must have the same number of rows; in a plate that "
            "subsamples pass `f(X[i])` and `obs=y, rows=i`."
        )
    return "The number of outputs is set by `num_outputs` in `gpx.gp`."
