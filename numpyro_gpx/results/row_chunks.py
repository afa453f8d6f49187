"""The model at new rows: raw draws handed on rightly, and rows cut into chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import Predictive

from numpyro_gpx import checks
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import Structure

__all__ = ["num_rows_of", "predictive", "row_chunks", "row_values"]


def predictive(model: Callable, draws: dict, *, params: dict | None = None) -> Callable:
    """Posterior predictive draws from raw draws, done right.

    NumPyro's `Predictive` passes on row-local sites with the length of the training
    data. This passes on global sites only; the others are drawn from their prior.

    Args:
        model: The model.
        draws: Draws by site, `(S, ...)`.
        params: Values of the model's `numpyro.param`s.

    Returns:
        A callable `(key, *args, **kwargs)`: a dictionary of draws `(S, N, ...)` of the
        sites of the model that `draws` does not hold.
    """

    def sample(key, *args, **kwargs):
        trace = Call(model, args, kwargs).abstract_trace()
        sites = {n: site for n, site in trace.items() if site["type"] == "sample"}
        row_plates = {
            frame.name
            for name, site in sites.items()
            if name not in draws
            for frame in site["cond_indep_stack"]
        }
        kept = {
            name: x
            for name, x in draws.items()
            if name in sites
            and not any(f.name in row_plates for f in sites[name]["cond_indep_stack"])
        }
        return Predictive(model, kept, params=params)(key, *args, **kwargs)

    return sample


def row_values(structure: Structure, given: dict | None, num_rows: int) -> dict:
    """Values of the rows' own sites, `(N, ...)` by name, checked.

    Args:
        structure: The model's sites.
        given: What the user says of them.
        num_rows: How many rows there are.
    """
    values = {name: jnp.asarray(x) for name, x in (given or {}).items()}
    names = structure.row_sites
    for name, x in values.items():
        if name not in names:
            raise ValueError(
                f"`given` must hold sites of the rows, {list(names)}; got {name!r}."
            )
        shape = (num_rows, *structure.latents[name].shape[1:])
        if x.shape != shape:
            raise ValueError(
                f"`given[{name!r}]` must have shape {shape}; got {x.shape}."
            )
        checks.finite(f"given[{name!r}]", x)
    return values


def num_rows_of(program: Program, call: Call, site: str) -> int:
    """Rows of an observed site at a new call: those of arguments that follow it."""
    unit = program.unit_of(site)
    arrays = zip(call.labels(), call.arrays(), strict=True)
    lengths = [len(x) for name, x in arrays if name in unit.arguments]
    return lengths[0] if lengths else call.num_rows


def row_chunks(
    program: Program, call: Call, site: str, chunk_rows: int | None, given: dict
) -> Iterator[tuple[Call, dict, int]]:
    """Cut a new call along the rows of a site; yield calls, `given`, numbers of rows.

    Inputs are padded to a multiple of `chunk_rows` (small ones to a power of two), so
    that calls with other numbers of rows reuse the compiled code.

    Args:
        program: What was fitted: it knows which arguments follow the rows.
        call: New arguments, inputs first.
        site: The observed site.
        chunk_rows: Rows of a chunk; `None` for all of them in one piece.
        given: Values of the rows' own sites.
    """
    unit = program.unit_of(site)
    known = set(program.call.labels())
    arrays = dict(zip(call.labels(), call.arrays(), strict=True))
    num_rows = num_rows_of(program, call, site)
    if chunk_rows is None:
        yield call, given, num_rows
        return

    def follows(label, x):
        """Whether an argument has one entry a row; one that is new, by its length."""
        mine = label in unit.arguments or label not in known
        return mine and np.shape(x)[:1] == (num_rows,)

    cut = iter([follows(label, x) for label, x in arrays.items()])
    cuts = jax.tree.map(lambda x: eqx.is_array(x) and next(cut), call)
    size = min(chunk_rows, 1 << (num_rows - 1).bit_length())
    for start in range(0, num_rows, size):
        index = np.minimum(np.arange(start, start + size), num_rows - 1)
        take = functools.partial(_take, index=index)
        chunk = jax.tree.map(take, call, cuts)
        if "num_rows" in call.kwargs:
            chunk = eqx.tree_at(
                lambda c: c.kwargs, chunk, {**chunk.kwargs, "num_rows": size}
            )
        values = {name: x[index] for name, x in given.items()}
        yield chunk, values, min(size, num_rows - start)


def _take(x, cut, index):
    return x[index] if cut else x
