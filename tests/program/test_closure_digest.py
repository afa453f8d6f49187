"""What the digest of a function sees of what the function reads."""

import collections
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import handlers

import numpyro_gpx as gpx
from numpyro_gpx.program.closure_digest import contents

X = np.linspace(-2.0, 2.0, 16)[:, None]


Z = X[::4]


SCALE = 2.0


def scaled(x):
    return SCALE * x


def test_contents_tell_closures_partials_and_globals_apart():
    def make(value):
        return lambda x: x + value

    assert contents(make(1.0)) == contents(make(1.0))
    assert contents(make(1.0)) != contents(make(2.0))
    assert contents(make(np.zeros(2))) != contents(make(np.ones(2)))
    assert contents(functools.partial(scaled, 1)) != contents(
        functools.partial(scaled, 2)
    )
    assert contents(gpx.models.svgp(gpx.inducing.Points(Z))) != contents(
        gpx.models.svgp(gpx.inducing.Points(Z + 1.0))
    )
    assert contents(iter([1])) is None  # what it cannot look into, it says


class Settings:
    noise = 0.3


class Bump(gpx.kernels.Kernel):
    """Reads a global where nobody looks."""

    def evaluate(self, x, x2):
        return jnp.exp(-jnp.sum(((x - x2) / SCALE) ** 2))


TABLE = {"a": {"b": 2.0}}


GIVEN = handlers.substitute(lambda: numpyro.param("s", 0.3), data={"s": 0.3})


def reads_a_class():
    return Settings.noise


def reads_an_instance():
    return Settings().noise


def reads_by_name():
    return globals()["SCALE"]


@functools.wraps(jnp.sum)
def wrapped():
    return SCALE


def reads_a_handler():
    return GIVEN()


def reads_a_table():
    return TABLE


def reads_a_kernel():
    return Bump()


@pytest.mark.parametrize(
    "reader, name, value",
    [
        (reads_by_name, "SCALE", 5.0),
        (wrapped, "SCALE", 5.0),
        (reads_a_table, "TABLE", {"a": {}, "b": 2.0}),
        (reads_a_kernel, "SCALE", 5.0),
        (
            reads_a_handler,
            "GIVEN",
            handlers.substitute(lambda: numpyro.param("s", 0.3), data={"s": 3.0}),
        ),
    ],
)
def test_what_is_read_in_roundabout_ways_is_seen_or_not_vouched_for(
    monkeypatch, reader, name, value
):
    before = contents(reader)
    monkeypatch.setitem(globals(), name, value)
    after = contents(reader)
    assert before is None or before != after


@pytest.mark.parametrize("reader", [reads_a_class, reads_an_instance])
def test_attributes_of_classes_are_read(monkeypatch, reader):
    before = contents(reader)
    assert before is not None
    monkeypatch.setattr(Settings, "noise", 3.0)
    assert contents(reader) != before


def test_arrays_of_objects_are_not_vouched_for():
    things = np.array([None, "a"], dtype=object)
    assert contents(lambda: things) is None


def helper(a, b):
    return a - b


def swapped(b, a):
    return a - b


def keyword(x, *, scale=1.0):
    return scale * x


def other_keyword(x, *, scale=2.0):
    return scale * x


class Base:
    noise = 0.3


class Derived(Base):
    pass


@pytest.fixture
def settings():
    """A module that somebody may change."""
    module = types.ModuleType("settings_of_a_test")
    module.scale = 1.0
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def imports_inside(x):
    import settings_of_a_test

    return settings_of_a_test.scale * x


def imports_a_name(x):
    from settings_of_a_test import scale

    return scale * x


def closed_over(module):
    def inner(x):
        return module.scale * x

    return inner


@pytest.mark.parametrize(
    "reader", [lambda _: imports_inside, lambda _: imports_a_name, closed_over]
)
def test_modules_that_are_read_in_roundabout_ways_are_seen(settings, reader):
    fn = reader(settings)
    before = contents(fn)
    settings.scale = 5.0
    after = contents(fn)
    assert before is None or before != after


def test_contents_see_what_objects_hold_and_what_code_takes():
    counts = collections.Counter(a=1)
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    before = contents(lambda: counts)
    assert before is not None
    counts["a"] = 5
    assert contents(lambda: counts) != before
    assert contents(lambda: masked) is None
    assert contents(jax.tree_util.Partial(scaled, 1)) != contents(
        jax.tree_util.Partial(scaled, 2)
    )
    assert contents(helper) != contents(swapped)
    assert contents(keyword) != contents(other_keyword)
    assert contents(functools.partial(scaled, x=1)) != contents(
        functools.partial(scaled, x=2)
    )
    assert contents(collections.deque([1.0])) is None  # written in C
    assert contents(OwnDeque([1.0])) is None


def test_contents_see_attributes_of_functions_and_of_bases(monkeypatch):
    def fn():
        return fn.scale

    fn.scale = 1.0
    before = contents(fn), contents(Derived)
    fn.scale = 2.0
    monkeypatch.setattr(Base, "noise", 3.0)
    assert contents(fn) != before[0]
    assert contents(Derived) != before[1]


class OwnDeque(collections.deque):
    """Has a `__dict__`, and its numbers elsewhere."""
