"""GP calls as effects: what handlers around a model may see and decide.

`f(X)` sends a NumPyro message of type `"gpx_call"` without a name, so that traces do
not record it. Unhandled, it is the conditional given the site's value. A handler here
may look at it, or put something else in its place: marginals, a drawn function, the
function at its own rows.

(NumPyro's `block` stops nameless messages too: inside a user's `handlers.block` the
model is its own.)
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack

from numpyro_gpx.processes.conditional import conditional
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.processes.own_rows import own_rows
from numpyro_gpx.uncertain import InputBelief

__all__ = [
    "CallId",
    "CallRecord",
    "at_own_rows",
    "current_axis",
    "drawn_functions",
    "given_marginals",
    "multiplies_only",
    "joint_rows",
    "recorded_calls",
    "send_call",
    "shared_replicates",
    "silenced_functions",
]


class CallId(NamedTuple):
    """Which call of which GP: the site's name, and how many came before."""

    site: str
    number: int


class CallRecord(NamedTuple):
    """A GP call that was seen.

    Attributes:
        gp: The GP.
        X: Where it was called: inputs `(N, D)`, or a belief about them.
    """

    gp: Any
    X: Any


def send_call(gp, X, *, full_cov: bool, evaluate) -> Gaussian:
    """Send the message of a GP call; `evaluate()` is what it is if nobody answers."""
    if not _PYRO_STACK:
        return evaluate()
    message: dict[str, Any] = {
        "type": "gpx_call",
        "fn": evaluate,
        "args": (),
        "kwargs": {},
        "value": None,
        "gp": gp,
        "X": X,
        "full_cov": full_cov,
    }
    return apply_stack(message)["value"]


def _asked(kind: str, **content):
    """What a handler answers to a nameless question; `None` if nobody does."""
    if not _PYRO_STACK:
        return None
    message: dict[str, Any] = {
        "type": kind, "fn": lambda: None, "args": (), "kwargs": {}, "value": None,
    }  # fmt: skip
    return apply_stack({**message, **content})["value"]


class _Calls(Messenger):
    """Counts the calls of each GP, so that each has a `CallId`."""

    def __enter__(self):
        self.seen: Counter[str] = Counter()
        super().__enter__()
        return self

    def process_message(self, msg) -> None:
        if msg["type"] != "gpx_call":
            return self.answer(msg)
        name = msg["gp"].name
        call = CallId(name, self.seen[name])
        self.seen[name] += 1
        if msg["value"] is None:
            self.handle(call, msg)

    def answer(self, msg) -> None:
        """Answer another message."""

    def handle(self, call: CallId, msg) -> None:
        """Look at a call, or set its value."""


class recorded_calls(_Calls):
    """Collects the GP calls of what runs inside: `calls`, by `CallId`."""

    def __init__(self, fn=None):
        self.calls: dict[CallId, CallRecord] = {}
        super().__init__(fn)

    def handle(self, call, msg):
        self.calls[call] = CallRecord(msg["gp"], msg["X"])


class given_marginals(_Calls):
    """Puts known marginals in the place of GP calls.

    Args:
        fn: A model.
        marginals: Mean and variance `(N, *P)` by `CallId`.
    """

    def __init__(self, fn=None, *, marginals: dict[CallId, tuple[Array, Array]]):
        self.marginals = marginals
        super().__init__(fn)

    def handle(self, call, msg):
        if call in self.marginals:
            mean, var = self.marginals[call]
            msg["value"] = msg["gp"].signed(Gaussian(mean, var), msg["X"])


def _needs_known_inputs(gp, X) -> None:
    if isinstance(X, InputBelief):
        raise ValueError(
            f"`{gp.name}` at uncertain inputs has no joint distribution of its rows; "
            "call it at known inputs."
        )


class drawn_functions(_Calls):
    """Draws one function for each GP: its rows jointly, and then known.

    Whatever the model computes from them is one coherent function.
    """

    def __init__(self, fn=None, *, key):
        self.key = key
        super().__init__(fn)

    def handle(self, call, msg):
        gp, X = msg["gp"], msg["X"]
        _needs_known_inputs(gp, X)
        # A checksum, not `hash`: Python salts the hash of strings.
        key = jr.fold_in(self.key, zlib.crc32(gp.name.encode()))
        joint = conditional(gp.prior, X, gp.whitened, full_cov=True)
        msg["value"] = Gaussian.known(joint.sample(key))


class joint_rows(_Calls):
    """Computes the covariance between the rows of each GP call."""

    def handle(self, call, msg):
        gp, X = msg["gp"], msg["X"]
        _needs_known_inputs(gp, X)
        latent = conditional(gp.prior, X, gp.whitened, full_cov=True)
        msg["value"] = gp.signed(latent, X)


class silenced_functions(_Calls):
    """Puts 0 in the place of every GP, so that what else enters a site shows.

    Also where somebody else has answered: a GP at its own rows is one, too.
    """

    def process_message(self, msg) -> None:
        if msg["type"] == "gpx_call":
            known = msg["fn"]() if msg["value"] is None else msg["value"]
            msg["value"] = Gaussian.known(jnp.zeros_like(known.mean))


class at_own_rows(_Calls):
    """Takes calls at the inducing rows of `gpx.inducing.Data` for what they are.

    Args:
        fn: A model.
        calls: Calls that were proven to be at the GP's own rows.
        multiply_only: GP sites all of whose calls are, so that nothing is solved.
    """

    def __init__(self, fn=None, *, calls: frozenset, multiply_only: frozenset):
        self.calls, self.multiply_only = calls, multiply_only
        super().__init__(fn)

    def handle(self, call, msg):
        gp = msg["gp"]
        if call in self.calls and not msg["full_cov"]:
            latent = own_rows(gp.prior, msg["X"], gp.whitened)
            msg["value"] = gp.signed(latent, msg["X"])

    def answer(self, msg):
        if msg["type"] == "gpx_multiplies_only":
            msg["value"] = msg["site"] in self.multiply_only


class shared_replicates(Messenger):
    """Lets layers inside be drawn jointly across a mapped axis.

    Args:
        fn: A model.
        axis: Name of the axis over replicates.
    """

    def __init__(self, fn=None, *, axis: str):
        self.axis = axis
        super().__init__(fn)

    def process_message(self, msg) -> None:
        if msg["type"] == "gpx_axis":
            msg["value"] = self.axis


def current_axis() -> str | None:
    """Name of the mapped axis over replicates, or `None` outside."""
    return _asked("gpx_axis")


def multiplies_only(site: str) -> bool:
    """Whether nothing will be solved with the root of this GP's covariance."""
    return bool(_asked("gpx_multiplies_only", site=site))
