"""What the contracts of guides and engines share: fits, draws, files."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from numpyro_gpx.engines.engine import Engine
from numpyro_gpx.engines.run import fit as run_fit
from numpyro_gpx.notes import FitWarning
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.guide_records import guide_record
from numpyro_gpx.results.load import load
from numpyro_gpx.results.posteriors import ChainPosterior, GuidePosterior, Posterior

__all__ = [
    "fitted",
    "not_random",
    "same",
    "saved_and_loaded",
    "sentence",
    "some_draws",
    "sound_draws",
    "without_warnings",
]

# Draws of a guide that are looked at; of a sampler it is all that there are.
_DRAWS = 20


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Without what fits warn of: a few steps never come to rest."""
    with warnings.catch_warnings():
        for kind in (FitWarning, RuntimeWarning):
            warnings.simplefilter("ignore", kind)
        yield


def fitted(name: str, call: Call, engine: Engine, key, init: Fit | None = None) -> Fit:
    """The fit of an engine; what it raises breaks the contract of `name`."""
    with without_warnings():
        try:
            return run_fit(
                call.model, engine, *call.args, key=key, init=init, progress=False,
                **call.kwargs,
            )  # fmt: skip
        except Exception as error:
            raise AssertionError(
                f"{name}: `gpx.fit` raised {type(error).__name__}: {error}"
            ) from error


def some_draws(posterior: Posterior) -> dict[str, np.ndarray]:
    """Draws `(chains, draws, ...)`: all of a sampler's, a few of a guide's."""
    everything = isinstance(posterior, ChainPosterior)
    return posterior.chains(None if everything else _DRAWS)


def sound_draws(draws: dict, program: Program, name: str, *, lead: int = 2) -> None:
    """Raise unless all latent sites were drawn, as the model would draw them.

    Args:
        draws: By site; their first `lead` axes count draws.
        program: The model.
        name: Whose draws they are.
        lead: Axes before that of the site.
    """
    for site, latent in program.structure.latents.items():
        assert site in draws, f"{name}: there are no draws of site `{site}`"
        x = np.asarray(draws[site])
        assert x.shape[lead:] == latent.shape, (
            f"{name}: draws of `{site}` have shape {x.shape[lead:]}, the site has "
            f"{latent.shape}"
        )
        assert x.dtype == latent.dtype, (
            f"{name}: draws of `{site}` are {x.dtype}, the site is {latent.dtype}"
        )
        assert np.all(np.isfinite(x)), f"{name}: draws of `{site}` are not finite"
        support = program.trace[site]["fn"].support
        assert np.all(support(x)), (
            f"{name}: draws of `{site}` lie outside its support, {support}"
        )


def saved_and_loaded(fit: Fit) -> Fit:
    """The fit once it was written to a file and read again.

    A guide that cannot be made again from a file is handed to `load`.
    """
    posterior, guide = fit.posterior, None
    if isinstance(posterior, GuidePosterior) and not guide_record(posterior.guide):
        guide = posterior.guide
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a guide kept as its draws
        path = Path(folder) / "fit.npz"
        fit.save(path)
        return load(path, fit.model, guide=guide)


def same(tree, other) -> bool:
    """Whether all numbers of two trees agree to the last bit."""
    leaves, others = map(jax.tree_util.tree_leaves_with_path, (tree, other))
    return len(leaves) == len(others) and all(
        place == there and np.array_equal(x, y)
        for (place, x), (there, y) in zip(leaves, others, strict=True)
    )


def not_random(draws: dict) -> bool:
    """Whether all draws `(chains, draws, ...)` are the same, as those of points are."""
    return all(np.ptp(x, axis=(0, 1)).max(initial=0.0) == 0.0 for x in draws.values())


def sentence(text: object) -> bool:
    """Whether somebody can read it: words that end in a full stop."""
    return isinstance(text, str) and " " in text.strip() and text.endswith(".")
