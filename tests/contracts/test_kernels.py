"""What holds for every kernel. A new kernel costs one line in `KERNELS`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array

import numpyro_gpx as gpx
from numpyro_gpx import kernels as K
from numpyro_gpx.testing import check_kernel

LENGTHSCALE = np.array([0.7, 1.9])


def dot_plus(x, x2):
    """A covariance that is a plain function of two rows."""
    return 0.6 * jnp.dot(x, x2) + 0.8


class Toy(K.Kernel):
    """What a user writes: a Gaussian bump of a width."""

    width: Array = eqx.field(converter=jnp.asarray)

    def evaluate(self, x, x2):
        return jnp.exp(-jnp.sum(((x - x2) / self.width) ** 2))


KERNELS = {
    "Toy": lambda: Toy(0.7),
    "RBF": lambda: K.RBF(1.3, 0.7),
    "RBF-ard": lambda: K.RBF(1.3, LENGTHSCALE),
    "Matern12": lambda: K.Matern12(1.3, LENGTHSCALE),
    "Matern32": lambda: K.Matern32(1.3, LENGTHSCALE),
    "Matern52": lambda: K.Matern52(1.3, LENGTHSCALE),
    "RationalQuadratic": lambda: K.RationalQuadratic(1.3, LENGTHSCALE, 2.4),
    "Periodic": lambda: K.Periodic(1.3, LENGTHSCALE, 1.7),
    "Cosine": lambda: K.Cosine(1.3, LENGTHSCALE),
    "Linear": lambda: K.Linear(LENGTHSCALE),
    "Polynomial": lambda: K.Polynomial(3, 0.6, 0.8),
    "ArcCosine-0": lambda: K.ArcCosine(0, 1.3, LENGTHSCALE, 0.4),
    "ArcCosine-1": lambda: K.ArcCosine(1, 1.3, LENGTHSCALE, 0.4),
    "ArcCosine-2": lambda: K.ArcCosine(2, 1.3, LENGTHSCALE, 0.4),
    "Constant": lambda: K.Constant(1.3),
    "White": lambda: K.White(1.3),
    "SpectralMixture": lambda: K.SpectralMixture(
        [0.6, 1.4], [[0.3, 0.2], [0.8, 0.5]], [[0.2, 0.4], [0.1, 0.3]]
    ),
    "Sum": lambda: K.RBF(1.3, 0.7) + K.White(0.4) + 0.3,
    "Product": lambda: K.RBF(1.3, 0.7) * K.Linear(0.6),
    "Scaled": lambda: 2.2 * K.Matern32(1.3, LENGTHSCALE),
    "ActiveDims": lambda: K.RBF(1.3, 0.7).on(1),
    "Warped": lambda: K.Warped(
        K.RBF(1.3, 0.7), eqx.nn.MLP(2, 3, 4, 1, activation=jnp.tanh, key=jr.key(3))
    ),
    "Warped-function": lambda: K.Warped(K.RBF(1.3, 0.7), jnp.tanh),
    "Custom": lambda: K.Custom(dot_plus),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_keep_the_contract(kernel):
    with jax.numpy_rank_promotion("raise"):
        check_kernel(KERNELS[kernel]())


def test_a_toy_kernel_runs_everywhere(key):
    """Subclass, `evaluate`, nothing else: it adds, fits and predicts."""
    kernel = Toy(0.7) + K.White(0.4)
    X = np.linspace(-1.0, 1.0, 12)[:, None]
    model = gpx.models.svgp(gpx.inducing.Points(X[::3]), kernel=kernel)
    guide = gpx.guides.WhitenedGaussian
    fit = gpx.fit_svi(model, guide, X, X[:, 0], key=key, num_steps=3, progress=False)
    assert np.all(np.isfinite(fit.predict(X[:4] + 0.1).var))


class Skewed(Toy):
    def evaluate(self, x, x2):
        return super().evaluate(x, x2) + 0.1 * (x[0] - x2[0])


class WrongDiagonal(Toy):
    def diag(self, X):
        return 1.01 * super().diag(X)


class Indefinite(Toy):
    def evaluate(self, x, x2):
        return 1.0 - super().evaluate(x, x2)


class WrongMatrix(Toy):
    def matrix(self, X, X2):
        return super().matrix(X, X2) + (0.0 if X2 is None else 0.1)


class NoSlope(Toy):
    def evaluate(self, x, x2):
        return jnp.exp(-jnp.sqrt(jnp.sum((x - x2) ** 2)) / self.width)


class AlwaysDouble(Toy):
    def evaluate(self, x, x2):
        return super().evaluate(x, x2).astype(jnp.float64)


@pytest.mark.parametrize(
    "kind, words",
    {
        Skewed: "is not symmetric",
        WrongDiagonal: "diag",
        Indefinite: "not positive semidefinite",
        WrongMatrix: "not `evaluate` of the pairs",
        NoSlope: "gradients of NoSlope where inputs coincide",
        AlwaysDouble: "float32 in",
    }.items(),
)
def test_the_contract_names_what_is_broken(kind, words):
    with pytest.raises(AssertionError, match=words):
        check_kernel(kind(0.7))


@pytest.mark.parametrize(
    "kernel",
    [
        K.RBF(),
        K.RBF(2, 3),
        K.Matern12(),
        K.Matern32(),
        K.Matern52(),
        K.RationalQuadratic(),
        K.Periodic(),
        K.Cosine(),
        K.Linear(),
        K.Polynomial(2),
        K.ArcCosine(0),
        K.ArcCosine(1),
        K.Constant(),
        K.White(),
        2 * K.RBF() + 3,
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_python_numbers_leave_the_dtype_to_the_inputs(kernel):
    for dtype in (jnp.float32, jnp.float64):
        inputs = jax.ShapeDtypeStruct((5, 2), dtype)
        results = jax.eval_shape(lambda X: (kernel(X), kernel.diag(X)), inputs)
        assert [result.dtype for result in results] == [dtype, dtype]
