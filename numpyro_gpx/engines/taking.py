"""Which engines take a model, and why the others do not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import NamedTuple

import numpyro.infer

from numpyro_gpx import guides
from numpyro_gpx.engines.engine import Engine
from numpyro_gpx.engines.guided import Guided
from numpyro_gpx.engines.implicit import Implicit
from numpyro_gpx.engines.kernels import MCMC, Blackjax
from numpyro_gpx.engines.lbfgs import LBFGS
from numpyro_gpx.engines.nuts import HMC, NUTS
from numpyro_gpx.engines.sghmc import SGHMC
from numpyro_gpx.engines.sites import Sites
from numpyro_gpx.engines.svi import SVI
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.results.facts import VARIATIONAL

__all__ = ["ENGINES", "Taking", "taking"]


def _blackjax() -> Engine:
    import blackjax  # heavy: loaded on first use

    return Blackjax(blackjax.nuts)


# How to make the usual member of each kind, by its name in `gpx.engines`.
ENGINES: dict[str, Callable[[], Engine]] = {
    "SVI": lambda: SVI(guides.WhitenedGaussian),
    "LBFGS": lambda: LBFGS(guides.WhitenedGaussian),
    "Sites": Sites,
    "Guided": Guided,
    "Implicit": Implicit,
    "NUTS": NUTS,
    "HMC": HMC,
    "SGHMC": SGHMC,
    "MCMC": lambda: MCMC(numpyro.infer.BarkerMH),
    "Blackjax": _blackjax,
}


class Taking(NamedTuple):
    """Which engines take a model; printing it shows them.

    Attributes:
        engines: Names in `gpx.engines` of those that do.
        objections: Why the others do not, by name.
    """

    engines: tuple[str, ...]
    objections: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name}: takes this model" for name in self.engines]
        lines += [
            textwrap.fill(f"{name}: {why}", 96, subsequent_indent="  ")
            for name, why in self.objections.items()
        ]
        return "\n".join(lines)


def taking(model, *args, **kwargs) -> Taking:
    """Which engines take this model with this data, and why the others do not.

    Nothing is computed. Engines that need a guide are asked with
    `gpx.guides.WhitenedGaussian`.

    Args:
        model: A NumPyro function.
        args: Its arguments: inputs, targets.
        kwargs: Its further arguments.
    """
    program = Program.of(Call.create(model, args, kwargs, function="taking"))
    objections = {}
    for name, make in ENGINES.items():
        engine = make()
        reason = engine.objection(program)
        params = program.structure.params
        if reason is None and params and engine.facts.approximation != VARIATIONAL:
            reason = (
                f"It does not move the `numpyro.param`s {list(params)}: give their "
                "values, `params=svi_fit`."
            )
        if reason is not None:
            objections[name] = reason
    return Taking(tuple(n for n in ENGINES if n not in objections), objections)
