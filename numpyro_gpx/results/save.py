"""Fits as files: what of a fit is kept, and whether a model is the one it was made of.

A guide is made again from its name, its settings and its parameters; one that cannot
be is kept as 1000 of its draws. The model is a function, and is not kept: its
fingerprint is, and its log density at three draws. Where another version of JAX has
changed the fingerprint, the densities say whether the model is the same.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.guides.parts.base import set_up
from numpyro_gpx.notes import Note
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.elbo import ELBO
from numpyro_gpx.program.importance import ImportanceWeighted
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.archive import Arrays, read_archive, write_archive
from numpyro_gpx.results.facts import Facts
from numpyro_gpx.results.guide_records import guide_record, rebuilt
from numpyro_gpx.results.posteriors import ChainPosterior, GuidePosterior
from numpyro_gpx.results.same_model import (
    VERSIONS,
    check_draws,
    check_same,
    compared,
)

if TYPE_CHECKING:
    from numpyro_gpx.results.fit import Fit

__all__ = ["read", "save"]

_LOSSES = {kind.__name__: kind for kind in (ELBO, ImportanceWeighted)}
# Draws of a guide that cannot be made again.
_KEPT_DRAWS = 1000
# No jitter in use is larger.
_LARGEST_JITTER = 0.01
# What is kept as it stands.
_FIELDS = (
    "params", "sample_stats", "info", "seconds", "seconds_compiling", "batch_size",
)  # fmt: skip


def save(fit: Fit, path, *, stacklevel: int = 2) -> None:
    """Write `fit` to `path`."""
    if fit.is_prior:
        raise ValueError(
            "`save` is for fits; draws of the prior are drawn again with "
            "`gpx.Fit.from_prior(model, ..., key=key)`."
        )
    # What the model reads now is what the file will say of it.
    fit.program.check_unchanged()
    posterior = fit.posterior
    kept: dict[str, Any] = {name: getattr(fit, name) for name in _FIELDS}
    kept |= {
        "args": fit.call.args,
        "kwargs": fit.call.kwargs,
        "facts": tuple(fit.facts),
        "notes": tuple(map(tuple, fit.notes)),
        "loss": _loss_record(fit.loss),
        "compared": compared(fit),
        "guide": None,
    }
    lost = []
    if kept["loss"] is None:
        lost.append(_lost_loss(fit.loss))
    if isinstance(posterior, GuidePosterior):
        kept["key"] = posterior.key
        kept["guide"] = guide_record(posterior.guide)
        if kept["guide"] is None:
            lost.append(_lost_guide(posterior.guide))
    if kept["guide"] is None:
        draws = posterior.chains(_KEPT_DRAWS if posterior.independent else None)
        kept["draws"] = dict(draws)
        kept["fixed"] = tuple(getattr(posterior, "fixed", ()))
    _check_finite("The fit", fit.jitter, kept)
    arrays = Arrays()
    record = {
        "versions": {name: version(name) for name in VERSIONS},
        "x64": bool(jax.config.values["jax_enable_x64"]),
        "fingerprint": fit.program.fingerprint,
        "checked": fit.program.checked,
        "jitter": fit.jitter,
        "sites": _shapes(fit.structure),
        "independent": posterior.independent,
        "kept": {name: arrays.store(name, x) for name, x in kept.items()},
    }
    write_archive(path, record, arrays.known)
    if lost:
        warnings.warn(" ".join(lost), stacklevel=stacklevel + 1)


def _lost_guide(guide) -> str:
    name = getattr(guide, "__name__", type(guide).__name__)
    return (
        f"The guide `{name}` cannot be made again from a file, and is saved as "
        f"{_KEPT_DRAWS} of its draws: predictions will differ within Monte Carlo "
        "error, and `elbo()` will be NaN. To lose nothing, load with the guide: "
        "`gpx.load(path, model, guide=guide)`."
    )


def _lost_loss(loss) -> str:
    return (
        f"The loss {type(loss).__name__} cannot be made again from a file: after "
        "loading, `elbo()` and `objective()` will be those of `gpx.infer.ELBO()`."
    )


def _loss_record(loss) -> dict[str, Any] | None:
    name = type(loss).__name__
    if _LOSSES.get(name) is not type(loss):
        return None
    return {"name": name, "config": loss.config}


def read(path, model, guide=None) -> dict[str, Any]:
    """What a fit is made of, by the names of its constructor; see `gpx.load`."""
    record, known = read_archive(path)
    _check_precision(record, path)
    arrays = Arrays(known)
    kept = {name: arrays.restore(entry) for name, entry in record["kept"].items()}
    _check_finite(f"`{path}`", record["jitter"], kept)
    for name in ("args", "kwargs", "params"):
        kept[name] = _on_device(kept[name])
    call = Call(model, kept["args"], kept["kwargs"], record["jitter"])
    program = _program(call, kept["batch_size"], record, path)
    check_same(program, record, kept, path)
    loss = kept["loss"]
    return {
        **{name: kept[name] for name in _FIELDS},
        "program": program,
        "posterior": _posterior(record, kept, program, guide, path),
        "facts": Facts(*kept["facts"]),
        "notes": tuple(Note(*note) for note in kept["notes"]),
        "loss": None if loss is None else _LOSSES[loss["name"]](**loss["config"]),
    }


def _posterior(record, kept, program: Program, guide, path):
    if guide is not None and (kept["guide"] is not None or "key" not in kept):
        has = "draws alone" if kept["guide"] is None else "its guide"
        raise ValueError(
            "`guide` is for fits of guides that cannot be made again from a file; "
            f"`{path}` holds {has}. Leave it out."
        )
    if guide is not None:
        guide = checks.guide(guide, program.model)
        set_up(guide, program)
    elif kept["guide"] is not None:
        draws = _on_device(kept["compared"]["draws"])
        guide = rebuilt(kept["guide"], program, {n: x[0] for n, x in draws.items()})
    if guide is None:
        draws, fixed = kept["draws"], kept["fixed"]
        return ChainPosterior(draws, independent=record["independent"], fixed=fixed)
    key = _on_device(kept["key"])  # of the old kind it is an array
    posterior = GuidePosterior(guide, kept["params"], program.call, key=key)
    if kept["guide"] is None:
        check_draws(posterior, kept, path)
    return posterior


def _program(call: Call, batch_size, record, path) -> Program:
    """The model with the arguments of the file; its sites must be those of the file."""
    try:
        if record["checked"]:
            program = Program.of(call, batch_size)
        else:
            program = Program.unchecked(call.batched(batch_size), discrete=True)
    except Exception as error:
        raise ValueError(
            f"`model` is not the one that was fitted: with the arguments in `{path}` "
            f"it raises {type(error).__name__}: {error}"
        ) from error
    sites = _shapes(program.structure)
    if sites != record["sites"]:
        raise ValueError(
            "`model` must be the one that was fitted, with sites of the shapes "
            f"{record['sites']}; it has {sites}."
        )
    return program


def _shapes(structure) -> dict[str, list[int]]:
    """Shapes of the latent sites, as JSON has them."""
    return {name: list(site.shape) for name, site in structure.latents.items()}


def _check_finite(whose: str, jitter, kept) -> None:
    """Raise if a fit has numbers that no fit comes to."""
    if jitter is not None and not 0.0 <= jitter <= _LARGEST_JITTER:
        raise ValueError(
            f"{whose} is damaged: its relative jitter is {jitter}, and must lie "
            f"between 0 and {_LARGEST_JITTER}. Fit again."
        )
    for part in ("params", "draws"):
        for path, x in jax.tree_util.tree_leaves_with_path(kept.get(part, {})):
            bad = np.count_nonzero(~np.isfinite(np.asarray(x)))
            if bad:
                raise ValueError(
                    f"{whose} is damaged: {bad} numbers of "
                    f"`{part}{jax.tree_util.keystr(path)}` are not finite. Fit again."
                )


def _check_precision(record, path) -> None:
    """Raise if numbers have other digits by default than at the save."""
    then, now = record["x64"], bool(jax.config.values["jax_enable_x64"])
    if then != now:
        raise ValueError(
            f"`{path}` was saved with `jax_enable_x64` {then}, and it is {now} now: "
            "predictions would be other ones. Call `jax.config.update("
            f"'jax_enable_x64', {then})` first."
        )


def _on_device(tree):
    """NumPy's arrays as JAX's."""
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree
    )
