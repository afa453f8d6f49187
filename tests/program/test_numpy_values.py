"""NumPy does what XLA would: the same keys, the same numbers, or it leaves it alone."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import num_compiled, once
from numpyro_gpx.program.numpy_values import numpy_values, placed
from numpyro_gpx.program.program import Program

X = np.linspace(-2.0, 2.0, 12)[:, None]
Y = np.sin(2.0 * X[:, 0])
M = np.array([[2.3, 0.4, -0.7], [0.4, 1.9, 0.2], [-0.7, 0.2, 1.1]])


def ours(fn, *args, draws=False):
    """By NumPy; `None` if that was declined."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    found = numpy_values(closed, jax.tree.leaves(args), draws=draws)
    return (
        None if found is None else jax.tree.unflatten(jax.tree.structure(shapes), found)
    )


def keys_of(key):
    """Every way to make keys of one."""
    first, *others = jr.split(key, 3)
    return (
        first, jnp.stack(others),
        jr.fold_in(key, 7), jr.split(key, (2, 3)), jr.split(jr.fold_in(first, 2**31)),
        jr.split(jr.key(5), 2)[1], jax.vmap(lambda k: jr.fold_in(k, 3))(jr.split(key)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 12345678901])
def test_keys_are_those_of_jax(seed):
    key = jr.fold_in(jr.key(seed), 3)
    for mine, theirs in zip(ours(keys_of, key), jax.jit(keys_of)(key), strict=True):
        assert mine.dtype == theirs.dtype
        assert_array_equal(jr.key_data(mine), jr.key_data(theirs))


def test_random_bits_are_those_of_jax_and_only_where_draws_are_allowed():
    def drawn(key):
        return [
            jr.bits(key, (3, 5), jnp.uint32), jr.bits(key, (4,), jnp.uint64),
            jr.bits(key, (2, 1), jnp.uint8), jr.uniform(key, (7,)), jr.normal(key),
        ]  # fmt: skip

    key = jr.key(11)
    assert ours(drawn, key) is None
    *exact, normal = zip(ours(drawn, key, draws=True), jax.jit(drawn)(key), strict=True)
    for mine, theirs in exact:
        assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert_allclose(*normal, rtol=1e-12)


def smooth(x):
    """What constraints and quantiles are made of."""
    return {
        "median": dist.Gamma(2.3, 0.7).mean * dist.Normal(0.3, 1.7).icdf(0.37),
        "icdf": dist.LogNormal(x, 1.3).icdf(jnp.asarray(0.81)),
        "softplus": jax.nn.softplus(x), "sigmoid": jax.nn.sigmoid(x),
        "logsumexp": jax.nn.logsumexp(x), "tanh": jnp.tanh(x) ** 3 / (1.0 + x**2),
        "cumsum": jnp.cumsum(jnp.exp(x)), "where": jnp.where(x > 0.0, x, -2.0 * x),
    }  # fmt: skip


def shaped(A):
    """What moves numbers about."""
    rows = jnp.asarray([2, 0, 2])
    return {
        "rows": A[rows], "columns": A[:, rows], "entries": A[rows, rows[::-1]],
        "last": A[-1], "flip": A[::-1, 1:], "tril": jnp.tril(A, -1) + jnp.eye(3),
        "diagonal": jnp.diagonal(A), "trace": jnp.trace(A),
        "stack": jnp.stack([A.T, A[:, ::-1]]).reshape(2, -1)[:, ::2],
        "sums": (A.sum(0), A.max(1), (A > 0.3).all(0), A.prod()),
        "whole": (A * 3.7).astype(int), "count": jnp.arange(4) * 0.7,
        "piece": jax.lax.dynamic_slice(A, (2, 0), (2, 2)),
        "clip": jnp.clip(A, -0.3, 1.5), "single": A.astype(jnp.float32) * 1.1,
    }  # fmt: skip


def looped(x):
    def step(carry, row):
        carry = 0.7 * carry + row
        return carry, jnp.sin(carry)

    total, backwards = jax.lax.scan(step, x[0], x, reverse=True)
    chosen = jax.lax.cond(total > 0.0, jnp.exp, jnp.square, total)
    return total, backwards, chosen, jax.lax.map(jnp.cos, x)


CASES = {
    "smooth": (smooth, np.array([-1.7, 0.3, 2.1])), "shaped": (shaped, M),
    "looped": (looped, np.array([0.4, -1.3, 0.9, 2.2])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_xla(name):
    fn, x = CASES[name]
    x = jnp.asarray(x)
    found, expected = ours(fn, x), jax.jit(fn)(x)
    assert found is not None
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        rtol = 1e-6 if mine.dtype == jnp.float32 else 1e-13
        assert_allclose(mine, theirs, rtol=rtol, atol=rtol)


DECLINED = {
    "factors": (jnp.linalg.cholesky, M), "products": (lambda A: A @ A, M),
    "whole numbers": (lambda x: jax.lax.div(x, 2), np.array([-3, 3])),
    "beyond": (lambda x: jnp.asarray([1.0, 2.0])[x], np.array([0, 5])),
    "long loops": (lambda x: jax.lax.fori_loop(0, 999, lambda i, x: x + i, x), 1.5),
    "callbacks": (
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), float), x), 1.5
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_what_numpy_does_otherwise_is_left_to_xla(name):
    fn, x = DECLINED[name]
    assert ours(fn, jnp.asarray(x)) is None


def test_old_keys_are_left_to_xla():
    """Another generator would not give the same keys."""
    assert ours(jr.split, jr.key(0, impl="rbg")) is None
    was = jax.config.jax_threefry_partitionable
    jax.config.update("jax_threefry_partitionable", False)
    try:
        assert ours(jr.split, jr.key(0)) is None
    finally:
        jax.config.update("jax_threefry_partitionable", was)


def test_results_have_memory_of_their_own():
    """XLA may write over what it is given: results are donated to the first block."""
    table, x = placed(np.arange(3.0)), placed(np.arange(64.0))

    def twice(x):
        zero = jnp.zeros_like(x)
        return zero, zero, jnp.broadcast_to(x[0], x.shape), x, table

    found = once(twice)(x)
    pointers = {a.unsafe_buffer_pointer() for a in (*found, x, table)}
    assert len(pointers) == 7


def test_placed_arrays_are_those_of_jax_and_copies(compiled_by_xla):
    x = np.arange(65536.0)
    mine = placed(x)
    x[:] = 7.0
    assert_array_equal(mine, np.arange(65536.0))
    assert not compiled_by_xla
    for y in (3, 0.5, np.float32(2.0), np.arange(3), np.array([True])):
        theirs = jnp.asarray(y)
        assert placed(y).dtype == theirs.dtype
        assert placed(y).weak_type == theirs.weak_type


def test_what_runs_once_and_is_large_is_compiled():
    before = num_compiled()
    L = once(jnp.linalg.cholesky)(jnp.asarray(M))
    assert num_compiled() == before + 1
    assert_allclose(L @ L.T, M)


def model(X, y=None, *, batch_size=None):
    """Targets, mask and weights as models compute them; the noise is drawn."""
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    kernel = gpx.kernels.RBF(lengthscale=numpyro.sample("ls", dist.LogNormal(0.0, 1.0)))
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(X_OWN))
    with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
        y = None if y is None else (jnp.asarray(y) - 0.3) / 1.7
        likelihood = gpx.likelihoods.Gaussian(noise)
        gpx.observe("y", f(X[i]), likelihood, obs=y, rows=i, missing=True)


X_OWN = X[::3]


@pytest.fixture
def compiled_by_xla():
    """Names of all programs that XLA compiles, ours or not."""
    found = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_data_check_compiles_nothing(compiled_by_xla):
    jax.clear_caches()
    jr.key(0)  # JAX's own
    compiled_by_xla.clear()
    y = np.where(np.arange(12) == 4, np.nan, Y)
    program = Program.of(Call.create(model, (X, y), {}), batch_size=5)
    assert not compiled_by_xla
    assert_allclose(program.observed["y"], (y - 0.3) / 1.7, rtol=1e-14)
    with pytest.raises(ValueError, match="`X` must be finite; got inf at index"):
        Program.of(Call.create(model, (np.full((12, 1), np.inf), Y), {}))


def first_fit(engine):
    options = dict(key=jr.key(0), progress=False)
    if engine == "svi":
        guide = gpx.guides.ConditionalGaussian
        return gpx.fit_svi(model, guide, X, Y, num_steps=2, batch_size=5, **options)
    guide = gpx.guides.OptimalGaussian
    return gpx.fit_lbfgs(plain, guide, X, Y, max_steps=2, **options)


def plain(X, y=None):
    kernel = gpx.kernels.RBF(lengthscale=numpyro.sample("ls", dist.LogNormal(0.0, 1.0)))
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(X_OWN))
    with numpyro.plate("data", len(X)):
        gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.3), obs=y)


@pytest.mark.parametrize("engine", ["svi", "lbfgs"])
def test_a_first_fit_compiles_its_steps_and_nothing_else(engine, compiled_by_xla):
    """XLA's own count; it was 19 for `fit_svi`."""
    gpx.cache.clear()
    jax.clear_caches()
    jr.key(0)  # JAX's own
    compiled_by_xla.clear()
    first_fit(engine)
    assert compiled_by_xla == ["jit(program)"]
