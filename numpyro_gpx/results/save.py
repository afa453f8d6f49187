"""Saving fits as NumPy archives, without pickle.

An archive holds arrays (parameters, training arguments, draws) and one JSON text. A
guide of this library is rebuilt from its name, its configuration and its parameters;
any other guide is saved as 1000 of its draws.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from numpyro_gpx import guides
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.elbo import ELBO
from numpyro_gpx.program.importance import ImportanceWeighted
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.posteriors import ChainPosterior, GuidePosterior

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["read", "save"]

_FORMAT = 1
_PLAIN = (type(None), bool, int, float, str)
_LOSSES = {kind.__name__: kind for kind in (ELBO, ImportanceWeighted)}


def save(fit: Fit, path) -> None:
    """Write `fit` to `path`."""
    arrays: dict[str, np.ndarray] = {}
    record: dict[str, Any] = {
        "format": _FORMAT,
        "engine": fit.engine,
        "sites": _shapes(fit.structure),
        "seconds": fit.seconds,
        "jitter": fit.jitter,
        "batch_size": fit.batch_size,
        "args": [_store(arrays, f"args/{i}", x) for i, x in enumerate(fit.call.args)],
        "kwargs": {
            n: _store(arrays, f"kwargs/{n}", x) for n, x in fit.call.kwargs.items()
        },
        "loss": {"name": type(fit.loss).__name__, "config": fit.loss.config},
        "params": _store_all(arrays, "params", fit.params),
        "sample_stats": _store_all(arrays, "sample_stats", fit.sample_stats),
        "info": {n: _store(arrays, f"info/{n}", x) for n, x in fit.info.items()},
    }
    posterior = fit.posterior
    has_guide = isinstance(posterior, GuidePosterior)
    if isinstance(posterior, GuidePosterior) and _can_be_rebuilt(posterior.guide):
        guide = posterior.guide
        record["guide"] = {"name": type(guide).__name__, "config": guide.config}
        arrays["guide_key"] = np.asarray(jr.key_data(posterior.key))
    else:
        draws = fit.chains(1000 if has_guide else None)
        record["draws"] = _store_all(arrays, "draws", draws)
        record["independent"] = posterior.independent
    # A file object, since `savez` appends ".npz" to names that lack it.
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            record=json.dumps(record),
            **arrays,  # type: ignore[arg-type]  # NumPy's stub: may be `allow_pickle`
        )


def read(path, model) -> dict[str, Any]:
    """What a fit is made of, by the names of its constructor; see `gpx.load`."""
    with np.load(Path(path), allow_pickle=False) as archive:
        if "record" not in archive.files:
            raise ValueError(f"`{path}` was not written by `Fit.save`.")
        record = json.loads(str(archive["record"]))
        arrays = {name: archive[name] for name in archive.files if name != "record"}
    if record["format"] != _FORMAT:
        raise ValueError(
            f"`{path}` has format {record['format']}; this version reads {_FORMAT}."
        )
    args = tuple(_restore(arrays, x) for x in record["args"])
    kwargs = {name: _restore(arrays, x) for name, x in record["kwargs"].items()}
    params = {name: jnp.asarray(arrays[x]) for name, x in record["params"].items()}
    call = Call(model, args, kwargs, record["jitter"])
    program = Program.unchecked(call)
    sites = _shapes(program.structure)
    if sites != record["sites"]:
        raise ValueError(
            "`model` must be the one that was fitted, with sites of the shapes "
            f"{record['sites']}; it has {sites}."
        )
    return {
        "program": program,
        "posterior": _posterior(record, arrays, call, params),
        "engine": record["engine"],
        "params": params,
        "seconds": record["seconds"],
        "batch_size": record["batch_size"],
        "info": {n: _restore(arrays, x) for n, x in record["info"].items()},
        "sample_stats": {n: arrays[x] for n, x in record["sample_stats"].items()},
        "loss": _LOSSES[record["loss"]["name"]](**record["loss"]["config"]),
    }


def _shapes(structure) -> dict[str, list[int]]:
    """Shapes of the latent sites, as JSON has them."""
    return {name: list(site.shape) for name, site in structure.latents.items()}


def _can_be_rebuilt(guide) -> bool:
    known = type(guide).__name__ in guides.__all__
    ours = known and isinstance(guide, guides.SiteGuide)
    return ours and guide.can_be_rebuilt


def _posterior(record, arrays, call, params):
    if "guide" in record:
        kind = getattr(guides, record["guide"]["name"])
        guide = kind.rebuild(call.model, record["guide"]["config"])
        call.run(guide.setup)
        key = jr.wrap_key_data(jnp.asarray(arrays["guide_key"]))
        return GuidePosterior(guide, params, call, key=key)
    draws = {name: arrays[x] for name, x in record["draws"].items()}
    return ChainPosterior(draws, independent=record["independent"])


def _store_all(arrays, prefix, values):
    for name, x in values.items():
        if not isinstance(x, np.ndarray | jnp.ndarray):
            raise ValueError(
                f"`{prefix}/{name}` of the fit cannot be saved: it must be an array; "
                f"got {type(x).__name__}."
            )
        arrays[f"{prefix}/{name}"] = np.asarray(x)
    return {name: f"{prefix}/{name}" for name in values}


def _store(arrays, name, x):
    """A JSON entry for `x`, its array put aside."""
    if isinstance(x, _PLAIN):
        return {"plain": x}
    if isinstance(x, np.ndarray | jnp.ndarray):
        arrays[name] = np.asarray(x)
        return {"array": name}
    raise ValueError(
        f"`{name}` of the fit cannot be saved: only arrays, numbers, texts and None "
        f"can; got {type(x).__name__}. Close over it in the model instead."
    )


def _restore(arrays, entry):
    return entry["plain"] if "plain" in entry else jnp.asarray(arrays[entry["array"]])
