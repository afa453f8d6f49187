"""Options that nobody knows, and what was meant by them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping

__all__ = ["check_known", "meant_by", "takes_options"]

# Options of functions by their name, for messages; each registers its own.
_OPTIONS: dict[str, tuple[str, ...]] = {}
# What other libraries call them.
_OTHER_WORDS = {
    "burn_in": "num_warmup",
    "chains": "num_chains",
    "draws": "num_samples",
    "epochs": "num_steps",
    "learning_rate": "optimizer",
    "lr": "optimizer",
    "n_chains": "num_chains",
    "n_samples": "num_samples",
    "n_steps": "num_steps",
    "num_epochs": "num_steps",
    "num_iterations": "num_steps",
    "progress_bar": "progress",
    "rng_key": "key",
    "seed": "key",
    "subsample_size": "batch_size",
    "thin": "thinning",
    "tune": "num_warmup",
    "warmup": "num_warmup",
}
# How those are written whose values are not the ones that came.
_WRITTEN = {"optimizer": "optimizer=optax.adam(...)", "key": "key=jax.random.key(...)"}
# Likeness of a name to an option from which a model that takes anything may not have
# it: 1 is the same.
_ALIKE = 0.8


def takes_options(function: Callable) -> Callable:
    """Let messages about unknown options name those of this function."""
    parameters = inspect.signature(function).parameters.values()
    _OPTIONS[function.__name__] = tuple(
        p.name for p in parameters if p.kind is p.KEYWORD_ONLY
    )
    return function


def meant_by(name: str, options: Iterable[str], elsewhere: Mapping = _WRITTEN) -> str:
    """A sentence that asks whether the nearest option was meant, or nothing."""
    near = _nearest(name, options)
    return "" if near is None else f" Did you mean `{_written(near, elsewhere)}`?"


def _nearest(name: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    options = list(options)
    meant = _OTHER_WORDS.get(name)
    if meant in options:
        return meant
    near = difflib.get_close_matches(name, options, 1, cutoff)
    return near[0] if near else None


def check_known(
    names: Iterable[str], taken: inspect.Signature, function: str,
    elsewhere: Mapping[str, str],
) -> None:  # fmt: skip
    """Raise if a model was handed an option that nobody knows.

    A model that takes anything, `**kwargs`, would swallow a misspelt option in silence:
    what is like an option of some fit must be named in its signature.

    Args:
        names: Keyword arguments that the function has no option for.
        taken: What the model takes.
        function: Who was called; empty if nobody has options.
        elsewhere: Options that are given to something else, such as the engine, and how
            they are written there.
    """
    kinds = taken.parameters
    anything = [n for n, p in kinds.items() if p.kind is p.VAR_KEYWORD]
    own = [
        n for n, p in kinds.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    for name in names:
        if name in own:
            continue
        if not anything:
            raise TypeError(_unknown(name, own, function, elsewhere))
        if function and name != "batch_size":  # which models without plates may read
            _check_swallowed(name, anything[0], function, elsewhere)


def _unknown(name: str, own: list[str], function: str, elsewhere) -> str:
    options = _OPTIONS.get(function, ())
    meant = meant_by(name, [*options, *elsewhere, *own], elsewhere)
    neither = f"neither an option of `{function}` nor" if function else "not"
    return f"`{name}` is {neither} an argument of the model, which takes {own}.{meant}"


def _check_swallowed(name: str, anything: str, function: str, elsewhere) -> None:
    """Raise if a name is like an option, of this function or of another."""
    near = _nearest(name, [*_OPTIONS.get(function, ()), *elsewhere], _ALIKE)
    where = ""
    if near is None:
        others = {x: of for of in reversed(_OPTIONS) for x in _OPTIONS[of]}
        near = _nearest(name, others, _ALIKE)
        where = f", an option of `{others[near]}`" if near else ""
    if near is not None:
        raise TypeError(
            f"`{name}` is not an option of `{function}`, and the model would take it "
            f"among its `**{anything}`. Did you mean `{_written(near, elsewhere)}`"
            f"{where}? If the model is to have it, name it in its signature."
        )


def _written(option: str, elsewhere) -> str:
    return elsewhere.get(option, _WRITTEN.get(option, option))
