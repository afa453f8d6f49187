"""Short forms: `fit_svi(model, guide, X, y, num_steps=...)` and its like.

Each takes the settings of its engine as options, makes the engine and hands the rest to
the driver. Names, defaults and descriptions of the options are those of the engine.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from numpyro_gpx import checks
from numpyro_gpx.engines.engine import Engine
from numpyro_gpx.engines.guided import Guided
from numpyro_gpx.engines.implicit import Implicit
from numpyro_gpx.engines.kernels import MCMC
from numpyro_gpx.engines.lbfgs import LBFGS
from numpyro_gpx.engines.nuts import NUTS
from numpyro_gpx.engines.run import fit, run_engine
from numpyro_gpx.engines.sghmc import SGHMC
from numpyro_gpx.engines.sites import Sites
from numpyro_gpx.engines.svi import SVI
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.options import takes_options
from numpyro_gpx.results.fit import Fit

__all__ = [
    "fit_guided", "fit_implicit", "fit_lbfgs", "fit_mcmc", "fit_nuts", "fit_sghmc",
    "fit_sites", "fit_svi",
]  # fmt: skip

# What all of them take behind the settings of their engine.
_COMMON = [
    parameter
    for parameter in inspect.signature(fit).parameters.values()
    if parameter.kind is Parameter.KEYWORD_ONLY and parameter.name != "key"
]


def _short_form(name: str, engine: type[Engine], *, guide: bool) -> Callable[..., Fit]:
    """The short form of this name, `(model, [guide,] *args, key, ...)`."""
    settings = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in dataclasses.fields(engine)
        if not (guide and field.name == "guide")
    ]
    every = Parameter.POSITIONAL_OR_KEYWORD
    first = [Parameter("model", every)] + [Parameter("guide", every)] * guide
    sig = _signature(first, settings)

    def short(*args, **kwargs) -> Fit:
        given = _bound(name, sig, args, kwargs)
        options = {p.name: given[p.name] for p in settings}
        if guide:  # swapped with the inputs, it would be the model that complains
            options["guide"] = checks.guide(given["guide"], given["model"])
        call = Call.create(
            given["model"], given["args"], given["kwargs"], function=name
        )
        common = {p.name: given[p.name] for p in _COMMON}
        return run_engine(
            call, engine(**options), given["key"], function=name, **common
        )

    arguments = "guide, " if guide else ""
    doc = (
        f"Short for `gpx.fit(model, gpx.engines.{engine.__name__}({arguments}...), "
        "*args, key=key, ...)`.\n\nThe options are the engine's:\n\n"
        f"{inspect.getdoc(engine)}"
    )
    return _named(short, name, sig, doc)


def _signature(first: list[Parameter], settings: list[Parameter]) -> inspect.Signature:
    return inspect.Signature(
        [
            *first,
            Parameter("args", Parameter.VAR_POSITIONAL),
            Parameter("key", Parameter.KEYWORD_ONLY),
            *settings,
            *_COMMON,
            Parameter("kwargs", Parameter.VAR_KEYWORD),
        ],
        return_annotation=Fit,
    )


def _bound(name: str, sig: inspect.Signature, given: tuple, named: dict) -> dict:
    try:
        found = sig.bind(*given, **named)
    except TypeError as error:
        hint = " Pass `key=jax.random.key(0)`." if "'key'" in str(error) else ""
        raise TypeError(f"`{name}`: {error}.{hint}") from None
    found.apply_defaults()
    return found.arguments


def _named(function, name: str, sig: inspect.Signature, doc: str) -> Callable[..., Fit]:
    function.__name__ = function.__qualname__ = name
    function.__signature__ = sig
    function.__doc__ = doc
    return takes_options(function)


fit_svi = _short_form("fit_svi", SVI, guide=True)
fit_lbfgs = _short_form("fit_lbfgs", LBFGS, guide=True)
fit_implicit = _short_form("fit_implicit", Implicit, guide=True)
fit_sites = _short_form("fit_sites", Sites, guide=False)
fit_guided = _short_form("fit_guided", Guided, guide=False)
fit_nuts = _short_form("fit_nuts", NUTS, guide=False)
fit_sghmc = _short_form("fit_sghmc", SGHMC, guide=False)


@takes_options
def fit_mcmc(
    kernel,
    *args,
    key,
    batch_size: int | None = None,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 2,
    thinning: int = 1,
    chain_method: str = "sequential",
    engine: str | None = None,
    params: Any = None,
    init: Fit | dict | None = None,
    progress: bool = True,
    time_limit: float | None = None,
    **kwargs,
) -> Fit:
    """Sample with any NumPyro kernel: HMC, `gpx.infer.Blackjax`, Gibbs, ...

    Short for `gpx.fit(kernel.model, gpx.engines.MCMC(kernel, ...), ...)`.

    Args:
        kernel: The kernel, built on the model.
        args: Arguments of the model: inputs, targets.
        key: Random key.
        batch_size: Rows of a minibatch, for kernels that take them.
        num_warmup: Warm-up steps of each chain.
        num_samples: Steps after these, of each chain.
        num_chains: Chains.
        thinning: Of so many draws after warm-up one is kept.
        chain_method: `"sequential"`, or `"vectorized"` for kernels that can.
        engine: Name of the engine in reports.
        params: Not here; give them to the kernel.
        init: Where to start: an earlier fit, or values by site.
        progress: Whether to show a progress bar.
        time_limit: Seconds after which the fit so far is returned.
        kwargs: Further arguments of the model.

    Returns:
        A fit; see `gpx.fit`.
    """
    if params is not None:
        raise ValueError(
            "`params` must be given to the kernel, which evaluates the model: "
            "`SGHMC(model, params=...)`, `Blackjax(model, ..., params=...)`, or "
            "`HMC(numpyro.handlers.substitute(model, data=params))`."
        )
    how = MCMC(
        kernel, batch_size=batch_size, num_warmup=num_warmup, num_samples=num_samples,
        num_chains=num_chains, thinning=thinning, chain_method=chain_method,
        label=engine,
    )  # fmt: skip
    call = Call.create(kernel.model, args, kwargs, function="fit_mcmc")
    return run_engine(call, how, key, init, progress, time_limit, function="fit_mcmc")
