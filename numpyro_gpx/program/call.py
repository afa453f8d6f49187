"""A model with its arguments, as one value."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import Messenger

from numpyro_gpx.numerics.jitter import explicit_jitter, jitter
from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.numpy_values import placed
from numpyro_gpx.program.options import check_known
from numpyro_gpx.sites.gp_calls import at_own_rows

__all__ = ["Call", "Trace", "drawable", "signature", "site_log_prob"]

Trace = dict[str, Any]


def _from_numpy(tree):
    """NumPy's arrays as JAX's: a tracer can index only these."""

    def convert(x):
        numeric = isinstance(x, np.ndarray) and x.dtype.kind in "biufc"
        return placed(x) if numeric else x

    return jax.tree.map(convert, tree)


class Call(eqx.Module):
    """A model with its arguments: arrays are leaves, the rest is static under `jit`.

    Attributes:
        model: The NumPyro function.
        args: Its positional arguments, inputs first.
        kwargs: Its keyword arguments.
        jitter: Relative jitter of what is traced; `None` for that of the context.
        own_rows: GP calls that were proven to be at the rows of `gpx.inducing.Data`.
        multiply_only: GP sites all of whose calls are.
    """

    model: Callable = eqx.field(static=True)
    args: tuple = eqx.field(default=(), converter=_from_numpy)
    kwargs: dict = eqx.field(default_factory=dict, converter=_from_numpy)
    jitter: float | None = eqx.field(static=True, default=None)
    own_rows: frozenset = eqx.field(static=True, default=frozenset())
    multiply_only: frozenset = eqx.field(static=True, default=frozenset())

    @classmethod
    def create(
        cls, model, args: tuple, kwargs: dict, *, function: str = "",
        elsewhere: dict[str, str] | None = None,
    ) -> Call:  # fmt: skip
        """The call that a user asked for: bound to the signature, arrays as arrays.

        Args:
            model: The NumPyro function.
            args: Its positional arguments.
            kwargs: Its keyword arguments; what `function` has no option for lands here.
            function: Who asks, for messages.
            elsewhere: Options that are given to something else, and how, for messages.
        """
        args = tuple(_as_array(f"number {i}", x) for i, x in enumerate(args))
        kwargs = {name: _as_array(f"`{name}`", x) for name, x in kwargs.items()}
        _check_binds(model, args, kwargs, function, elsewhere or {})
        args, kwargs = _inputs_first(model, args, kwargs)
        return cls(model, args, kwargs, explicit_jitter())

    def with_model(self, model) -> Call:
        """The same arguments for another model."""
        return dataclasses.replace(self, model=model)

    def at(self, args: tuple, kwargs: dict) -> Call:
        """The model at other arguments; whose own rows they are is not known there."""
        return Call(self.model, args, kwargs, self.jitter)

    def with_jitter(self, relative: float | None) -> Call:
        """The same call, traced with this jitter."""
        return dataclasses.replace(self, jitter=relative)

    def batched(self, batch_size: int | None) -> Call:
        """The call on minibatches of so many rows; `None` for all rows."""
        rest = {name: x for name, x in self.kwargs.items() if name != "batch_size"}
        if batch_size is None:
            return dataclasses.replace(self, kwargs=rest)
        rest["batch_size"] = int(batch_size)
        # A minibatch is not all rows.
        return self.at(self.args, rest)

    @property
    def batch_size(self) -> int | None:
        """Rows of a minibatch; `None` where all are used."""
        return self.kwargs.get("batch_size")

    @property
    def takes_inputs(self) -> bool:
        """Whether the model's first argument is the inputs, as it is by convention.

        A first argument that may be left out, as in `model(y=None)`, is the targets:
        such a model has latent inputs only.
        """
        first = next(iter(signature(self.model).parameters.values()), None)
        return first is not None and first.default is first.empty

    @property
    def num_rows(self) -> int:
        """Rows of the first argument, or as many as a model without inputs is told."""
        if self.args and np.ndim(self.args[0]):
            return np.shape(self.args[0])[0]
        return self.kwargs["num_rows"]

    def run(self, model: Callable | None = None):
        """Call the model, or something that takes its arguments, as it stands."""
        model = self.model if model is None else model
        with contextlib.ExitStack() as stack:
            if self.jitter is not None:
                stack.enter_context(jitter(self.jitter))
            if self.own_rows:
                calls, sites = self.own_rows, self.multiply_only
                stack.enter_context(at_own_rows(calls=calls, multiply_only=sites))
            return model(*self.args, **self.kwargs)

    def trace(self, values: dict, key, *, model: Callable | None = None) -> Trace:
        """Trace with sites, parameters and plates set to `values`.

        Inside another trace, block what must not be seen there.

        Args:
            values: By name.
            key: For sites without a value.
            model: Something else that takes the model's arguments, such as a guide.
        """
        model = self.model if model is None else model
        seeded = handlers.substitute(handlers.seed(model, key), data=values)
        tracer = handlers.trace(seeded)
        self.run(tracer)
        return tracer.trace

    def abstract_trace(self, model: Callable | None = None) -> Trace:
        """Trace for names and shapes only: values are abstract, nothing is computed."""
        trace: Trace = {}

        def look(call, key):
            with handlers.block():
                trace.update(call.trace({}, key, model=model))

        with one_at_a_time(), drawable():
            eqx.filter_eval_shape(look, self, jr.key(0))
        return trace

    def labels(self) -> list[str]:
        """What to call the array leaves in messages, in their order."""
        parameters = list(signature(self.model).parameters)
        names = []
        for path, leaf in jax.tree_util.tree_leaves_with_path((self.args, self.kwargs)):
            if not eqx.is_array(leaf):
                continue
            which, place, *rest = path
            if which.idx == 0:
                name = parameters[min(place.idx, len(parameters) - 1)]
            else:
                name = place.key
            names.append(name + jax.tree_util.keystr(tuple(rest)))
        return names

    def arrays(self) -> list:
        """The array leaves of the arguments."""
        leaves = jax.tree.leaves((self.args, self.kwargs))
        return [x for x in leaves if eqx.is_array(x)]


def site_log_prob(site: dict[str, Any]) -> Array:
    """Log density of a site at its value, entry by entry.

    Transforms without an inverse, as in `AutoBNAFNormal`, know it at their own draws.
    """
    made_by = site.get("intermediates")
    known = (made_by,) if made_by else ()
    return site["fn"].log_prob(site["value"], *known)


def signature(model: Callable) -> inspect.Signature:
    """What a model takes, also inside handlers such as `condition(model, ...)`."""
    while isinstance(model, Messenger) and model.fn is not None:
        model = model.fn
    return inspect.signature(model)


def _check_binds(model, args, kwargs, function: str, elsewhere) -> None:
    """Raise if the model cannot be called so, naming the option that was meant."""
    expected = signature(model)
    check_known(kwargs, expected, function, elsewhere)
    try:
        expected.bind(*args, **kwargs)
    except TypeError as error:
        where = f"`{function}` calls the model, which" if function else "The model"
        raise TypeError(
            f"{where} takes {expected}; {error}. Targets may be left out only if the "
            "model has a default for them, `y=None`."
        ) from None


def _inputs_first(model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The inputs as first positional argument, also if they were passed by name."""
    names = list(signature(model).parameters)
    if args or not names or names[0] not in kwargs:
        return args, kwargs
    rest = dict(kwargs)
    args = (rest.pop(names[0]),)
    if len(names) > 1 and eqx.is_array_like(rest.get(names[1])):
        args += (rest.pop(names[1]),)
    return args, rest


def _as_array(name: str, x):
    """Arrays, tables and lists of numbers as JAX arrays; other things as they are."""
    if isinstance(x, AutoGuide):
        raise TypeError(
            f"Argument {name} of the model is a guide. Only variational fits take "
            "one: `fit_svi(model, guide, X, y, key=key)`."
        )
    if isinstance(x, list) or type(x).__module__.split(".")[0] == "pandas":
        x = np.asarray(x)
    if isinstance(x, np.ndarray | jax.Array):
        if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
            raise ValueError(f"Argument {name} must be numeric; got dtype {x.dtype}.")
        return placed(x)
    return x


@contextlib.contextmanager
def drawable():
    """Name what stands behind NumPyro's empty `NotImplementedError`."""
    try:
        yield
    except NotImplementedError as error:
        if str(error):
            raise
        raise ValueError(
            "A site of the model has a distribution that cannot be drawn from, such as "
            "`ImproperUniform`; fits here start from draws. Give it a proper prior."
        ) from error
