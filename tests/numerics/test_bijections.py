"""Bijections: inverses, log-determinants by brute force, and independent formulas."""

import functools

import equinox as eqx
import flowjax.bijections
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.interpolate
from numpy.testing import assert_allclose

from numpyro_gpx.numerics import bijections as flows
from numpyro_gpx.numerics.bijections.splines import num_spline_parameters

# Layers with different numbers of outputs and points, not in order of their points.
SHAPES = {
    "one number": ((1, 1),),
    "a vector": ((3, 1),),
    "one layer": ((1, 4),),
    "layers": ((2, 3), (1, 5), (2, 1)),
}
BOUND = 3.0


def drawn(key, design, spread=0.7):
    """Parameters away from the identity, large enough to bend and to mix."""
    starts = design.starts()
    keys = jr.split(key, len(starts))
    return {
        name: spread * jr.normal(k, start.shape)
        for k, (name, start) in zip(keys, starts.items(), strict=True)
    }


def make(kind, shapes, key, spread=0.7):
    layout = flows.Layout(shapes)
    design = flows.Design(layout, 3, 5, 4, BOUND, kind == "channel blocks")
    parameters = drawn(key, design, spread)
    if kind in ("blocks", "channel blocks"):
        return design.build(parameters)
    if kind == "elementwise":
        return flows.ElementwiseSplines(jr.normal(key, (layout.size, 14)), BOUND)
    if kind == "affine":
        keys = jr.split(key)
        return flows.Affine(*(jr.normal(k, (layout.size,)) for k in keys))
    if kind == "beside":
        parts = tuple(
            flows.TriangularAffine(jr.normal(k, shape), triangles(k, shape))
            for k, shape in zip(jr.split(key, len(shapes)), shapes, strict=True)
        )
        return flows.Beside(parts, tuple(P * M for P, M in shapes))
    chain = design.build(parameters).blocks
    first = jax.tree.map(lambda x: x[1], chain)  # the second block is turned round
    return first.steps[("coupling", "points", "channels").index(kind)]


def triangles(key, shape):
    P, M = shape
    below = jnp.tril(jr.normal(key, (P, M, M)), -1)
    return below + 0.6 * jnp.eye(M)[None]


KINDS = (
    "affine", "beside", "elementwise", "coupling", "points", "channels", "blocks",
    "channel blocks",
)  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_inverse_and_log_determinant_agree_with_brute_force(kind, shapes, key):
    key_flow, key_x = jr.split(key)
    flow = make(kind, SHAPES[shapes], key_flow)
    size = flows.Layout(SHAPES[shapes]).size

    @eqx.filter_jit
    def check(flow, x):
        y, log_det = flow.forward(x)
        J = jax.jacfwd(lambda x: flow.forward(x)[0])(x)
        return y, log_det, J, *flow.inverse(y)

    moved = []
    # Some entries outside the splines' box.
    for x in 2.0 * jr.normal(key_x, (3, size)):
        y, log_det, J, back, log_det_back = check(flow, x)
        assert_allclose(back, x, rtol=0.0, atol=1e-9)
        sign, expected = np.linalg.slogdet(np.asarray(J))
        assert sign == 1.0
        assert_allclose(log_det, expected, rtol=0.0, atol=1e-8)
        assert_allclose(log_det_back, -expected, rtol=0.0, atol=1e-8)
        moved.append(np.max(np.abs(np.asarray(y - x))))
    if kind != "points" or shapes in ("one layer", "layers"):
        assert max(moved) > 0.01


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", ["blocks", "channel blocks"])
def test_single_precision_stays_single_and_inverts(kind, shapes, key):
    key_flow, key_x = jr.split(key)
    # Not as bent as above, where the inverse loses seven digits.
    flow = make(kind, SHAPES[shapes], key_flow, spread=0.3)
    flow = jax.tree.map(
        lambda a: a.astype(jnp.float32) if a.dtype == jnp.float64 else a, flow
    )
    x = jr.normal(key_x, (flows.Layout(SHAPES[shapes]).size,), jnp.float32)
    y, log_det = eqx.filter_jit(lambda f, x: f.forward(x))(flow, x)
    back, log_det_back = eqx.filter_jit(lambda f, y: f.inverse(y))(flow, y)
    assert {y.dtype, log_det.dtype, back.dtype} == {jnp.dtype("float32")}
    assert_allclose(back, x, atol=2e-4)
    assert_allclose(log_det_back, -log_det, atol=2e-3)


@pytest.mark.parametrize("channels_only", [False, True])
def test_blocks_start_at_the_identity(channels_only, key):
    layout = flows.Layout(SHAPES["layers"])
    design = flows.Design(layout, 4, 6, 8, BOUND, channels_only)
    parameters = {n: s.draw(key, jnp.float64) for n, s in design.starts().items()}
    x = 2.0 * jr.normal(key, (layout.size,))
    y, log_det = jax.jit(lambda p, x: design.build(p).forward(x))(parameters, x)
    assert_allclose(y, x, atol=1e-12)
    assert_allclose(log_det, 0.0, atol=1e-12)


def test_every_entry_depends_on_every_other_after_two_blocks(key):
    layout = flows.Layout(SHAPES["layers"])
    design = flows.Design(layout, 2, 5, 4, BOUND, False)
    flow = design.build(drawn(key, design))
    x = 0.3 * jr.normal(key, (layout.size,))
    J = np.asarray(eqx.filter_jit(jax.jacfwd(lambda x: flow.forward(x)[0]))(x))
    assert np.all(np.abs(J) > 0.0)


def test_points_stay_independent_in_the_channel_form(key):
    layout = flows.Layout(((2, 3), (1, 3)))
    design = flows.Design(layout, 3, 5, 4, BOUND, True)
    flow = design.build(drawn(key, design))
    J = eqx.filter_jit(jax.jacfwd(lambda x: flow.forward(x)[0]))(jnp.full(9, 0.1))
    J = np.asarray(J)
    point = np.tile(np.arange(3), 3)
    assert np.all(J[point[:, None] != point] == 0.0)
    assert np.all(J[point[:, None] == point] != 0.0)


def test_channels_that_are_present_see_the_leading_block_of_one_matrix(key):
    layout = flows.Layout(((1, 2), (2, 4), (1, 1)))
    lower, upper = jr.normal(key, (2, 4, 4))
    log_scale = jnp.asarray([0.3, -0.2, 0.5, 0.1])
    x = jnp.arange(1.0, 12.0)
    y, log_det = flows.ChannelMixing(layout, lower, upper, log_scale).forward(x)
    # By hand: channels in the order of the points they have (4, 4, 2, 1).
    L = np.tril(lower, -1) + np.eye(4)
    U = np.triu(upper, 1) + np.diag(np.exp(log_scale))
    W = L @ U
    first, second, third = x[:2], x[2:10].reshape(2, 4), x[10:]
    at = [
        np.array([second[0, 0], second[1, 0], first[0], third[0]]),
        np.array([second[0, 1], second[1, 1], first[1]]),
        np.array(second[:, 2]),
        np.array(second[:, 3]),
    ]
    out = [W[: len(v), : len(v)] @ v for v in at]
    expected = np.concatenate(
        [[out[0][2], out[1][2]], [o[0] for o in out], [o[1] for o in out], out[0][3:]]
    )
    assert_allclose(y, expected, rtol=1e-12)
    total = sum(np.linalg.slogdet(W[: len(v), : len(v)])[1] for v in at)
    assert_allclose(log_det, total, rtol=1e-12)


# Density ----------------------------------------------------------------------------


def test_density_integrates_to_one_and_is_that_of_the_draws(key):
    layout = flows.Layout(((2, 1),))
    design = flows.Design(layout, 4, 6, 8, BOUND, False)
    flow = design.build(drawn(key, design, 0.4))
    grid = jnp.linspace(-12.0, 12.0, 801)
    points = jnp.stack(jnp.meshgrid(grid, grid, indexing="ij"), axis=-1)
    log_q = eqx.filter_jit(jax.vmap(jax.vmap(lambda y: flows.log_density(flow, y))))
    density = jnp.exp(log_q(points))
    step = 24.0 / 800  # halving it moves the sum by 4e-4
    assert_allclose(jnp.sum(density) * step**2, 1.0, rtol=2e-3)
    # The share of draws in a half plane, at 5 standard errors.
    x = jr.normal(key, (20_000, 2))
    y = np.asarray(eqx.filter_jit(jax.vmap(lambda x: flow.forward(x)[0]))(x))
    expected = np.sum(np.asarray(density)[points[..., 0] > 0.4]) * step**2
    error = np.sqrt(expected * (1.0 - expected) / len(y))
    assert 0.05 < expected < 0.95
    assert abs(np.mean(y[:, 0] > 0.4) - expected) < 5.0 * error + 2e-3


def test_gradient_along_the_path_has_the_same_mean_and_no_noise_at_the_target(key):
    """At q = p, a Gaussian that the flow can be: the gradient is 0 for each draw."""
    loc, root = jnp.asarray([0.4, -0.7]), jnp.asarray([[0.8, 0.0], [0.5, 1.3]])

    def bound(parameters, x, path):
        scale_tril = jnp.tril(parameters[1])[None]
        flow = flows.TriangularAffine(parameters[0][None], scale_tril)
        y, log_det = flow.forward(x)
        change = flows.along_the_path(flow, x, y, log_det) if path else -log_det
        target = flows.TriangularAffine(loc[None], root[None])
        return flows.log_density(target, y) - change - jnp.sum(-0.5 * x**2)

    x = jr.normal(key, (4000, 2))

    def gradients(parameters, path):
        one = functools.partial(jax.grad(bound), path=path)
        found = jax.jit(jax.vmap(one, in_axes=(None, 0)))(parameters, x)
        flat = jnp.concatenate([g.reshape(len(x), -1) for g in found], axis=1)
        return np.asarray(flat)

    at_target = (loc, root)
    assert np.max(np.abs(gradients(at_target, True))) < 1e-10
    assert np.max(np.abs(gradients(at_target, False))) > 1.0
    elsewhere = (loc + 0.3, 1.4 * root)
    ours, plain = gradients(elsewhere, True), gradients(elsewhere, False)
    difference = ours - plain
    # 6 entries (one of them always 0) at 5 standard errors: false alarm 4e-6.
    error = difference.std(axis=0) / np.sqrt(len(x))
    assert np.all(np.abs(difference.mean(axis=0)) <= 5.0 * error)
    assert np.max(np.abs(plain.mean(axis=0))) > 0.1


# Splines -----------------------------------------------------------------------------


def test_spline_is_that_of_flowjax(key):
    """flowjax: an implementation that shares no line with ours."""
    num_bins = 6
    raw = jr.normal(key, (1, num_spline_parameters(num_bins)))
    x = jnp.linspace(-3.5, 3.5, 57)
    ours, log_slope = jax.jit(jax.vmap(lambda x: flows.spline(x[None], raw, BOUND)))(x)
    theirs = flowjax.bijections.RationalQuadraticSpline(
        knots=num_bins - 1, interval=BOUND, min_derivative=1e-3
    )
    # The same knots, in its own parameterisation: positions and derivatives.
    width, height = (
        6.0 * (1e-3 + (1.0 - 6e-3) * np.asarray(jax.nn.softmax(part)))
        for part in (raw[0, :6], raw[0, 6:12])
    )
    slopes = 1e-3 + np.log1p(np.exp(raw[0, 12:] + np.log(np.expm1(0.999))))
    theirs = eqx.tree_at(
        lambda b: (b.x_pos, b.y_pos, b.derivatives),
        theirs,
        tuple(
            jnp.asarray(v)
            for v in (
                -BOUND + np.concatenate([[0.0], np.cumsum(width)]),
                -BOUND + np.concatenate([[0.0], np.cumsum(height)]),
                np.concatenate([[1.0], slopes, [1.0]]),
            )
        ),
    )
    expected, log_det = jax.vmap(theirs.transform_and_log_det)(x)
    assert_allclose(ours[:, 0], expected, rtol=1e-9)
    assert_allclose(log_slope[:, 0], log_det, atol=1e-9)


def test_spline_rises_smoothly_and_is_the_identity_outside(key):
    raw = 2.0 * jr.normal(key, (1, 23))
    x = jnp.linspace(-4.0, 4.0, 4001)
    y, log_slope = jax.jit(jax.vmap(lambda x: flows.spline(x[None], raw, BOUND)))(x)
    y, slope = np.asarray(y[:, 0]), np.exp(np.asarray(log_slope[:, 0]))
    assert np.all(np.diff(y) > 0.0)
    outside = np.abs(x) > BOUND
    assert_allclose(y[outside], x[outside], rtol=0.0)
    # The slope integrates to the rise.
    area = scipy.interpolate.CubicSpline(x, slope).integrate(-4.0, 4.0)
    assert_allclose(area, 8.0, rtol=1e-4)


def test_derivatives_of_a_spline_are_finite_at_its_knots_and_bounds():
    raw = jnp.zeros((4, 11))
    x = jnp.asarray([-BOUND, BOUND, 0.0, 1.5])

    def total(x, raw):
        y, log_slope = flows.spline(x, raw, BOUND)
        return jnp.sum(y) + jnp.sum(log_slope)

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(x, raw):
        assert np.all(np.isfinite(gradient))
