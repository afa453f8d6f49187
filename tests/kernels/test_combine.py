"""Sums, products, scalars and active dimensions, and what a user can get wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_gpx import kernels as K

X = np.array([[0.3, -1.1, 0.8], [1.4, 0.2, -0.5], [-0.6, 0.9, 1.7]])
X2 = X[:2] + 0.4
RBF, LINEAR, WHITE = K.RBF(1.3, 0.7), K.Linear(0.6), K.White(0.4)


def test_operators_act_on_matrices():
    rbf, linear = np.asarray(RBF(X, X2)), np.asarray(LINEAR(X, X2))
    assert_allclose((RBF + LINEAR)(X, X2), rbf + linear)
    assert_allclose((RBF * LINEAR)(X, X2), rbf * linear)
    assert_allclose((2.5 * RBF + 0.3)(X, X2), 2.5 * rbf + 0.3)
    assert_allclose((0.3 + RBF * 2.5)(X, X2), 2.5 * rbf + 0.3)
    assert_allclose((np.float64(2.5) * RBF)(X, X2), 2.5 * rbf)
    assert_allclose((jnp.array(2.5) * RBF)(X, X2), 2.5 * rbf)


def test_builtin_sum_adds_kernels_and_nothing_else():
    total = sum([RBF, LINEAR, WHITE])
    assert total.parts == (RBF, LINEAR, WHITE)


def test_parts_flatten_sums_only():
    nested = K.Sum([K.Sum([RBF, LINEAR]), 2.0 * WHITE])
    assert [type(part) for part in nested.parts] == [K.RBF, K.Linear, K.Scaled]
    product = RBF * LINEAR
    assert product.parts == (product,)
    assert_allclose(sum(part(X) for part in nested.parts), nested(X))


def test_white_noise_survives_every_wrapper():
    noise = 0.4 * np.eye(3)
    assert_allclose(WHITE(X), noise)
    assert_allclose(WHITE(X, X), np.zeros((3, 3)))
    assert_allclose((RBF + WHITE)(X), RBF(X) + noise)
    assert_allclose((RBF + WHITE)(X, X), RBF(X))
    assert_allclose((WHITE * RBF)(X), 1.3 * noise)
    assert_allclose((2.5 * WHITE).on(0)(X), 2.5 * noise)
    assert_allclose(K.Warped(WHITE, jnp.tanh)(X), noise)
    assert_allclose((RBF + 2.5 * WHITE).diag(X), np.full(3, 1.3 + 2.5 * 0.4))


def test_active_dims_select_columns():
    ard = K.RBF(1.3, np.array([0.7, 1.9]))
    assert_allclose(ard.on(2, 0)(X, X2), ard(X[:, [2, 0]], X2[:, [2, 0]]))
    assert_allclose(LINEAR.on(1).diag(X), 0.6 * X[:, 1] ** 2)


def test_inputs_must_be_a_matrix():
    message = r"`X` must have shape \(N, D\); got \(200,\).* pass `X\[:, None\]`"
    for kernel in (RBF, WHITE, RBF + WHITE, RBF.on(0), K.Warped(RBF, jnp.tanh)):
        with pytest.raises(ValueError, match=message):
            kernel(jnp.ones(200))
        with pytest.raises(ValueError, match=message):
            kernel.diag(jnp.ones(200))
    with pytest.raises(ValueError, match=r"`X2` must have shape \(N, D\); got \(3,\)"):
        RBF(X, jnp.ones(3))
    with pytest.raises(ValueError, match=r"same number of columns.*\(3, 3\).*\(3, 2\)"):
        RBF(X, X[:, :2])


@pytest.mark.parametrize(
    ("kernel", "argument"),
    [
        (K.RBF(1.3, np.ones(2)), "lengthscale"),
        (K.Matern12(1.3, np.ones(1)), "lengthscale"),
        (K.Periodic(1.3, 0.7, np.ones(2)), "period"),
        (K.Linear(np.ones(2)), "variance"),
        (K.ArcCosine(1, 1.3, np.ones(2)), "weight_variances"),
        (K.SpectralMixture(np.ones(4), np.ones((4, 2)), np.ones((4, 2))), "scales"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_one_entry_a_column_must_fit_the_columns(kernel, argument):
    with pytest.raises(ValueError, match=rf"`{argument}` has shape .* 3 columns"):
        kernel(X)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: K.RBF(np.ones(3)), r"`variance` must be a scalar; got shape \(3,\)"),
        (lambda: K.RBF(1.3, np.ones((3, 1))), "`lengthscale` must be a scalar or a v"),
        (lambda: K.RationalQuadratic(alpha=np.ones(2)), "`alpha` must be a scalar"),
        (lambda: K.Polynomial(0), "`degree` must be a positive int; got 0"),
        (lambda: K.ArcCosine(3), "`order` must be 0, 1 or 2; got 3"),
        (lambda: np.ones(2) * RBF.on(0), "`variance` must be a scalar"),
        (lambda: RBF.on(), "`dims` must name one column or more"),
        (lambda: RBF.on(0, 3)(X), r"between 0 and 2 .*got \(0, 3\)"),
        (lambda: K.Sum([]), "at least one kernel"),
        (
            lambda: K.SpectralMixture([0.5], [[0.2]], [[0.1, 0.3]]),
            r"`means` and `scales` must have the same shape.*\(1, 1\) and \(1, 2\)",
        ),
        (
            lambda: K.SpectralMixture([0.5, 0.6], [[0.2]], [[0.1]]),
            "`weights` must hold one entry for each row of `means`",
        ),
        (lambda: K.Warped(RBF, jnp.sum)(X), r"`fn` must map a row .* got shape \(\)"),
    ],
)
def test_wrong_arguments_are_named(construct, message):
    with pytest.raises(ValueError, match=message):
        construct()


def test_what_is_no_kernel_is_named():
    with pytest.raises(TypeError, match="kernels only; got function"):
        K.Sum([RBF, lambda x, x2: 0.0])
    with pytest.raises(TypeError, match="`fn` must be callable; got float"):
        K.Custom(0.5)


def test_kernels_are_built_under_vmap():
    lengthscales = jnp.array([0.4, 0.9])
    batch = jax.vmap(lambda scale: K.RBF(1.3, scale) + WHITE)(lengthscales)
    matrices = jax.vmap(lambda kernel: kernel(X))(batch)
    for got, lengthscale in zip(matrices, lengthscales, strict=True):
        assert_allclose(got, (K.RBF(1.3, lengthscale) + WHITE)(X))
