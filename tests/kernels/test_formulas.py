"""Kernels against formulas written from the definitions, in NumPy and SciPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import integrate, special, stats

from numpyro_gpx import kernels as K

VARIANCE = 1.7
LENGTHSCALE = np.array([0.6, 2.3])
A = np.array([[0.4, -1.3], [1.1, 0.2], [-0.7, 0.9]])
B = np.array([[0.8, 0.3], [-1.5, -0.6]])


@eqx.filter_jit
def matrix(kernel, *inputs):  # compiled as a whole, which is faster than op by op
    return kernel(*inputs)


def distances(A, B):
    scaled = (A[:, None] - B[None]) / LENGTHSCALE
    return np.linalg.norm(scaled, axis=-1)


@pytest.mark.parametrize(
    ("kind", "nu"), [(K.Matern12, 0.5), (K.Matern32, 1.5), (K.Matern52, 2.5)]
)
def test_matern_is_the_bessel_form(kind, nu):
    z = np.sqrt(2 * nu) * distances(A, B)
    expected = VARIANCE * 2 ** (1 - nu) / special.gamma(nu) * z**nu * special.kv(nu, z)
    assert_allclose(matrix(kind(VARIANCE, LENGTHSCALE), A, B), expected, rtol=1e-12)


def test_rbf_is_a_gaussian_density_up_to_its_height():
    pdf = stats.multivariate_normal(cov=np.diag(LENGTHSCALE**2)).pdf
    expected = VARIANCE * pdf(A[:, None] - B[None]) / pdf(np.zeros(2))
    assert_allclose(matrix(K.RBF(VARIANCE, LENGTHSCALE), A, B), expected, rtol=1e-12)


def test_rational_quadratic_is_a_gamma_mixture_of_rbf():
    alpha = 2.6
    precision = stats.gamma(alpha, scale=1 / alpha)  # mean 1

    def mixed(r):
        def integrand(tau):
            return precision.pdf(tau) * np.exp(-0.5 * tau * r**2)

        return integrate.quad(integrand, 0, np.inf, epsabs=1e-12)[0]

    expected = VARIANCE * np.vectorize(mixed)(distances(A, B))
    kernel = K.RationalQuadratic(VARIANCE, LENGTHSCALE, alpha)
    assert_allclose(matrix(kernel, A, B), expected, rtol=1e-8)


def test_periodic_is_an_rbf_kernel_on_circles():
    period = np.array([1.4, 3.1])

    def circle(X):  # (N, D, 2)
        angle = 2 * np.pi * X / period
        return np.stack([np.cos(angle), np.sin(angle)], axis=-1) / LENGTHSCALE[:, None]

    squared = np.sum((circle(A)[:, None] - circle(B)[None]) ** 2, axis=(-1, -2))
    kernel = K.Periodic(VARIANCE, LENGTHSCALE, period)
    assert_allclose(matrix(kernel, A, B), VARIANCE * np.exp(-squared / 2), rtol=1e-12)
    assert_allclose(matrix(kernel, A + 3 * period, B), matrix(kernel, A, B), rtol=1e-10)


def test_cosine_is_the_product_of_two_quadrature_features():
    def features(X):
        phase = 2 * np.pi * (X / LENGTHSCALE).sum(axis=1)
        return np.stack([np.cos(phase), np.sin(phase)], axis=1)

    expected = VARIANCE * features(A) @ features(B).T
    assert_allclose(matrix(K.Cosine(VARIANCE, LENGTHSCALE), A, B), expected, rtol=1e-11)


def test_linear_is_the_covariance_of_its_features():
    expected = A @ np.diag(LENGTHSCALE) @ B.T
    assert_allclose(matrix(K.Linear(LENGTHSCALE), A, B), expected, rtol=1e-12)


def test_polynomial_is_the_product_of_its_monomials():
    # (a + b + c)^2 in monomials, for weights' variances a, b and offset c.
    (a, b), c = LENGTHSCALE, 0.7

    def features(X):
        x, y = X.T
        cross = [np.sqrt(2 * a * b) * x * y, np.sqrt(2 * a * c) * x]
        return np.stack([a * x**2, b * y**2, c + 0 * x, np.sqrt(2 * b * c) * y, *cross])

    kernel = K.Polynomial(2, LENGTHSCALE, c)
    assert_allclose(matrix(kernel, A, B), features(A).T @ features(B), rtol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_arc_cosine_is_the_integral_over_random_units(order):
    bias_variance = 0.8
    kernel = K.ArcCosine(order, VARIANCE, LENGTHSCALE, bias_variance)
    lift = np.sqrt(np.array([*LENGTHSCALE, bias_variance]))

    def integral(x, x2):
        # The linear function's two values, g and g2 given g, integrated in turn.
        u, v = lift * np.append(x, 1), lift * np.append(x2, 1)
        sd, slope = np.sqrt(u @ u), (u @ v) / (u @ u)
        rest = np.sqrt(v @ v - slope * (u @ v))

        def inner(m):  # E[max(0, g2)^n], g2 ~ N(m, rest^2), closed form
            cdf, pdf = special.ndtr(m / rest), rest * stats.norm.pdf(m / rest)
            return (cdf, m * cdf + pdf, (m**2 + rest**2) * cdf + m * pdf)[order]

        def integrand(g):
            return stats.norm.pdf(g, scale=sd) * g**order * inner(slope * g)

        return 2 * VARIANCE * integrate.quad(integrand, 0, 12 * sd, epsabs=1e-11)[0]

    expected = [[integral(x, x2) for x2 in B] for x in A]
    assert_allclose(matrix(kernel, A, B), expected, rtol=1e-8)
    assert_allclose(
        np.diag(matrix(kernel, A)),
        VARIANCE
        * (((lift[:2] * A) ** 2).sum(axis=1) + bias_variance) ** order
        * (1, 1, 3)[order],
        rtol=1e-12,
    )


def test_spectral_mixture_is_the_transform_of_its_density():
    weights, means, scales = [0.6, 1.4], [0.3, 0.9], [0.2, 0.15]
    kernel = K.SpectralMixture(weights, np.c_[means], np.c_[scales])
    frequency = np.linspace(-4, 4, 20_001)  # far beyond 0.9 + 12 * 0.2
    density = sum(
        w * (stats.norm.pdf(frequency, m, s) + stats.norm.pdf(frequency, -m, s)) / 2
        for w, m, s in zip(weights, means, scales, strict=True)
    )
    tau = np.array([0.35, 1.2, 2.8])
    waves = np.exp(2j * np.pi * tau[:, None] * frequency)
    expected = integrate.simpson(density * waves, x=frequency)
    assert np.abs(expected.imag).max() < 1e-10
    got = matrix(kernel, tau[:, None], np.zeros((1, 1)))[:, 0]
    assert_allclose(got, expected.real, rtol=1e-8)


def test_spectral_mixture_multiplies_over_columns():
    (w,), m, s = [1.4], np.array([0.3, 0.9]), np.array([0.2, 0.15])
    columns = [
        matrix(K.SpectralMixture([w], [[m[d]]], [[s[d]]]), A[:, [d]], B[:, [d]])
        for d in (0, 1)
    ]
    kernel = K.SpectralMixture([w], [m], [s])
    assert_allclose(matrix(kernel, A, B), columns[0] * columns[1] / w, rtol=1e-12)


SMOOTH = [
    K.RBF(VARIANCE, 0.6),
    K.Matern32(VARIANCE, 0.6),
    K.Matern52(VARIANCE, 0.6),
    K.RationalQuadratic(VARIANCE, 0.6, 2.6),
]


@pytest.mark.parametrize("kernel", SMOOTH, ids=lambda k: type(k).__name__)
def test_matrix_product_form_agrees_with_evaluate(kernel):
    # Five columns far from the origin: the form by matrix product.
    rng = np.random.default_rng(8)
    X = 100.0 + rng.normal(size=(6, 5)) * 0.3
    X[4] = X[1]
    X2 = X[:3] + np.array([0.0, 1e-6, 0.2])[:, None]

    @jax.jit
    def both(X, X2):
        def fast(X, X2):
            return kernel(X, X2)

        def plain(X, X2):
            return jax.vmap(lambda x: jax.vmap(lambda x2: kernel.evaluate(x, x2))(X2))(
                X
            )

        def with_gradients(form):
            K, pullback = jax.vjp(form, X, X2)
            return K, *pullback(2.0 * K)

        return with_gradients(fast), with_gradients(plain)

    (fast, *gradients), (plain, *expected) = both(X, X2)
    assert_allclose(fast, plain, rtol=1e-10)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert_allclose(gradient, wanted, rtol=1e-7, atol=1e-9)
    assert np.all(np.diag(matrix(kernel, X)) == VARIANCE)


# -k''(0), the variance of the derivative process, for variance and lengthscale 1.
CURVATURE = {K.RBF: 1, K.Matern32: 3, K.Matern52: 5 / 3, K.RationalQuadratic: 1}


# By differences, and by matrix product.
@pytest.mark.parametrize(("num_columns", "dtype"), [(1, np.float32), (4, np.float64)])
@pytest.mark.parametrize("kernel", SMOOTH, ids=lambda k: type(k).__name__)
def test_second_derivatives_are_right_where_inputs_coincide(kernel, num_columns, dtype):
    x = jnp.full(num_columns, 0.7, dtype)

    @jax.jit
    def curvatures(x):
        def by_matrix(x, x2):
            return kernel(x[None], x2[None])[0, 0]

        def mixed(k):
            return jax.jacfwd(jax.grad(k, 0), 1)(x, x)

        return mixed(kernel.evaluate), mixed(by_matrix)

    expected = VARIANCE * CURVATURE[type(kernel)] / 0.6**2 * np.eye(num_columns)
    for got in curvatures(x):
        assert got.dtype == dtype
        assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_arc_cosine_gradients_are_right_at_and_near_coincidence():
    # Order 1: dk/dx at x2 = x is half the gradient of the diagonal, by symmetry.
    kernel = K.ArcCosine(1, VARIANCE, LENGTHSCALE, 0.8)
    gradient = jax.jit(jax.grad(kernel.evaluate))
    x = jnp.array([0.4, -1.3])
    expected = VARIANCE * LENGTHSCALE * x
    assert_allclose(gradient(x, x), expected, rtol=1e-12)
    assert_allclose(gradient(x, x + 1e-6), expected, rtol=1e-5)


def test_arc_cosine_is_finite_at_an_origin_without_bias():
    kernel = K.ArcCosine(1, VARIANCE, LENGTHSCALE, 0.0)
    x, origin = jnp.array([0.4, -1.3]), jnp.zeros(2)
    value, gradient = jax.jit(jax.value_and_grad(kernel.evaluate))(origin, x)
    assert value == 0.0
    assert np.all(np.isfinite(gradient))
