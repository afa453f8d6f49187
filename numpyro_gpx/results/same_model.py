"""Whether a model is the one that a fit was made of, or a guide.

A fingerprint says so under the same version of JAX. Under another one the log density
at three draws does, which only another model changes.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import run
from numpyro_gpx.program.density import log_terms
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import structure_of
from numpyro_gpx.results.posteriors import GuidePosterior
from numpyro_gpx.results.site_draws import deterministic_sites, with_deterministic

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["VERSIONS", "check_draws", "check_same", "compared"]

# Packages whose versions are saved with a fit.
VERSIONS = ("jax", "jaxlib", "numpyro", "numpyro_gpx")
# Draws at which log densities are compared, and to how many digits: other
# versions of JAX sum in another order.
_COMPARED = 3
# Deterministic sites of more numbers are of the rows.
_MOST_NUMBERS = 1000
_CLOSE = {8: 1e-6, 4: 1e-3, 2: 0.1}  # by bytes of the shortest numbers


def compared(fit: Fit) -> dict[str, Any]:
    """Some draws, the model's log density there, and what else tells it from others."""
    draws = _drawn(fit.posterior)
    densities = _densities(fit.call.batched(fit.batch_size), fit.params, draws)
    return {
        "draws": draws,
        "densities": densities,
        "deterministic": _deterministic(fit.program, fit.params, draws),
        "arrays": fit.program.arrays_read,
    }


def check_same(program: Program, record, kept, path) -> None:
    """Raise if the model's density is another one than at the save."""
    tolerance = _tolerance(kept)
    if program.fingerprint == record["fingerprint"]:
        _check_deterministic(program, kept, tolerance)  # which no density reads
        return
    old = kept["compared"]
    then, draws = old["densities"], old["draws"]
    now = _densities(program.call.batched(kept["batch_size"]), kept["params"], draws)
    if _close(now, then, tolerance):
        _check_deterministic(program, kept, tolerance)
        _check_arrays(program, record, kept)
        return
    changed = {
        name: f"{old} -> {version(name)}"
        for name, old in record["versions"].items()
        if old != version(name)
    }
    shown = f"; versions have changed as well: {changed}" if changed else ""
    raise ValueError(
        "`model` is not the one that was fitted: its log density at three draws is "
        f"{_listed(now)}, that of the model in `{path}` was {_listed(then)}. Its "
        "kernel, likelihood, inducing inputs, priors or what else it reads must be "
        f"as at the fit{shown}."
    )


def _check_deterministic(program: Program, kept, tolerance: float) -> None:
    """Raise if deterministic sites have other values than at the save."""
    old = kept["compared"]
    now = _deterministic(program, kept["params"], old["draws"])
    changed = sorted(
        name
        for name in {*now, *old["deterministic"]}
        if name not in now
        or name not in old["deterministic"]
        or not _close(now[name], old["deterministic"][name], tolerance)
    )
    if changed:
        raise ValueError(
            f"`model` is not the one that was fitted: its deterministic sites {changed}"
            " have other values at three draws."
        )


def _check_arrays(program: Program, record, kept) -> None:
    """Raise if the model reads other arrays, as the rows of a fit on minibatches.

    Its density was compared at the first ones alone.
    """
    old = kept["compared"]
    # Another version may have computed them to other digits.
    same_versions = all(version(n) == v for n, v in record["versions"].items())
    if same_versions and tuple(old["arrays"]) != program.arrays_read:
        shapes = {
            x.rpartition(" ")[0] for x in {*old["arrays"]} ^ {*program.arrays_read}
        }
        raise ValueError(
            "`model` is not the one that was fitted: it reads other arrays, of shapes "
            f"{sorted(shapes)}. Load it with those that it read at the fit."
        )


def _deterministic(program: Program, params: dict, draws: dict) -> dict:
    """Values of deterministic sites at draws, `(S, ...)`; not those of many rows."""
    names = [
        name
        for name in deterministic_sites(program)
        if np.prod(jnp.shape(program.trace[name]["value"])) <= _MOST_NUMBERS
    ]
    if not names:
        return {}
    one_chain = {name: np.asarray(x)[None] for name, x in draws.items()}
    found = with_deterministic(program, params, one_chain)
    return {name: found[name][0] for name in names}


def check_draws(posterior: GuidePosterior, kept, path) -> None:
    """Raise if a guide that the user has handed over draws other values than then."""
    then, tolerance = kept["compared"]["draws"], _tolerance(kept)
    try:
        now = _drawn(posterior)
        same = all(_close(now[name], x, tolerance) for name, x in then.items())
        found = "it draws other values"
    except Exception as error:
        same, found = False, f"it raises {type(error).__name__}: {error}"
    if not same:
        raise ValueError(
            f"`guide` is not the one that was fitted: with the parameters in `{path}` "
            f"{found}."
        )


def _drawn(posterior) -> dict[str, np.ndarray]:
    key = jr.key(0, impl="threefry2x32")  # whatever the default is
    with one_at_a_time():
        found = posterior.sample(key, _COMPARED)
    return {name: np.asarray(x) for name, x in found.items()}


def _densities(call: Call, params: dict, draws: dict) -> np.ndarray:
    """Log joint density at draws, `(S,)`, without anything random.

    Of a fit on minibatches it is that of the first rows: all of them may be more than
    fit into memory.
    """
    structure = structure_of(call, discrete=True)
    chosen = {n: np.arange(p.subsample_size) for n, p in structure.plates.items()}
    values = dict(draws)
    for name, plates in structure.local.items():
        for plate, axis in plates.items():
            values[name] = values[name].take(chosen[plate], axis + 1)
    # The one generator of NumPy's whose numbers no later version changes.
    normal = np.random.RandomState(0).standard_normal
    for name, shape in structure.noise.items():
        values[name] = normal((_COMPARED, *shape))
    values, chosen = (jax.tree.map(jnp.asarray, x) for x in (values, chosen))
    with one_at_a_time():
        return np.asarray(run(_log_joints, call, {**params, **chosen}, values))


def _log_joints(call: Call, fixed: dict, draws: dict):
    """Log joint density at draws `(S, ...)`, `(S,)`."""

    def one(draw):
        prior, likelihood = log_terms(call.trace({**fixed, **draw}, jr.key(0)))
        return prior + likelihood

    if not draws:  # a model without latent sites
        return one({})[None]
    return jax.lax.map(one, draws)


def _tolerance(kept) -> float:
    """To how many digits numbers of a fit can be compared."""
    parts = [kept[name] for name in ("args", "kwargs", "params", "compared")]
    arrays = [np.asarray(x) for x in jax.tree.leaves(parts) if hasattr(x, "dtype")]
    floats = [x.dtype for x in arrays if jnp.issubdtype(x.dtype, np.floating)]
    return _CLOSE.get(min(dtype.itemsize for dtype in floats), 0.0)


def _close(x, other, tolerance: float) -> bool:
    """Whether numbers are equal but for how another version of JAX computes them."""
    return np.shape(x) == np.shape(other) and np.allclose(
        x, other, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def _listed(values) -> str:
    return ", ".join(f"{x:.6g}" for x in values)
