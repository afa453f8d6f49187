"""The data door of the fits: concrete arrays, checked before anything is trained."""

from __future__ import annotations

from numpyro_gpx import checks
from numpyro_gpx.program.call import Call, Trace
from numpyro_gpx.program.dataflow import Indexed
from numpyro_gpx.program.structure import structure_of
from numpyro_gpx.sites.marks import GPMark, find
from numpyro_gpx.sites.observation import observation

__all__ = [
    "check_indexed",
    "check_inducing",
    "check_observed",
    "check_subsampled",
    "no_slope",
]


def check_indexed(call: Call, indexed: list[Indexed], sizes: dict[str, int]) -> None:
    """Raise if something with another number of rows is indexed by a plate.

    JAX would not: an index past the end is the last row, surplus rows go unseen.
    """
    labels = call.labels()
    for plate, argument, length, axis in indexed:
        size = sizes[plate]
        if length == size:
            continue
        cut = ""
        if axis == 0 and length > size:
            name = "array" if argument is None else labels[argument]
            cut = f" If only some are meant, cut it first: `{name}[:{size}]`."
        if argument is None:
            raise ValueError(
                f"An array with {length} rows is indexed by plate `{plate}`, which "
                f"has {size}.{cut}"
            )
        if argument == 0 and axis == 0 and call.takes_inputs and call.args:
            raise ValueError(
                f"Plate `{plate}` has size {size}, but `{labels[0]}` has {length} "
                f"rows.{cut}"
            )
        what = "rows" if axis == 0 else f"entries along axis {axis}"
        raise ValueError(
            f"`{labels[argument]}` has {length} {what} and is indexed by plate "
            f"`{plate}`, which has {size}.{cut}"
        )


def check_subsampled(trace: Trace, indexed: list[Indexed]) -> None:
    """Raise if a plate around data subsamples, and nothing is indexed by its rows.

    The same rows would count for all others at each step.
    """
    used = {one.plate for one in indexed}
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        for frame in site["cond_indep_stack"]:
            size = trace[frame.name]["args"][0]
            if frame.size < size and frame.name not in used:
                raise ValueError(
                    f"Plate `{frame.name}` around site `{name}` subsamples "
                    f"{frame.size} of {size} rows, and nothing is indexed by them: "
                    "write `with numpyro.plate(...) as i:`, `f(X[i])` and `obs=y, "
                    "rows=i`."
                )


def check_observed(call: Call, values: dict[str, tuple]) -> None:
    """Check every observed site: its targets, masks and weights.

    Args:
        call: The model with its arguments.
        values: Concrete targets of the observed sites, with their checkers.
    """
    if call.args and call.takes_inputs and hasattr(call.args[0], "dtype"):
        checks.finite("X", call.args[0])  # unlike targets, inputs have no mask
    if not values:
        raise ValueError(
            "The model observes nothing. Pass the targets, as in "
            "`fit_svi(model, guide, X, y, ...)`, and hand them to `gpx.observe(obs=y)`."
        )
    for name, (value, checker) in values.items():
        checker.check(value, name)


def check_inducing(call: Call, trace: Trace, read: dict[str, list[int]]) -> None:
    """Raise if inducing variables follow the arguments: at new rows they would move.

    Args:
        call: The model with its arguments.
        trace: Its sites.
        read: GP site to the arguments that its inducing variables depend on.
    """
    labels = call.labels()
    for name, arguments in read.items():
        # Learnt ones only start there: they are parameters.
        if not arguments or f"{name}/Z" in trace:
            continue
        mark = find(trace[name], GPMark)
        kind = type(mark.prior.inducing).__name__ if mark else "Data"
        raise ValueError(
            f"The inducing inputs of `{name}` depend on the model's argument "
            f"`{labels[arguments[0]]}`, so that at new rows they would move. Close "
            f"over the training inputs: `{kind}(X_train)`."
        )


def no_slope(trace: Trace, engine: str) -> str | None:
    """Why an engine that follows gradients would not move; `None` if it would.

    A likelihood that jumps in `f` is constant between its jumps. Where `f` is known
    given the inducing variables, as on the full GP, so is the whole density.
    """
    latents = structure_of(trace).latents
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        found = observation(site)
        likelihood = found.likelihood
        if likelihood is None or not likelihood.discontinuous:
            continue
        gps = [gp for gp in found.latent().sites if gp in latents]
        if all(latents[gp].target == "exact" for gp in gps):
            return (
                f"{type(likelihood).__name__} at site `{name}` jumps, so that on "
                f"the full GP its gradient is zero and {engine} would not move. Use "
                "elliptical slice sampling, `gpx.engines.Blackjax("
                "blackjax.elliptical_slice)`; or `gpx.inducing.Points`; or a "
                "smooth link."
            )
    return None
