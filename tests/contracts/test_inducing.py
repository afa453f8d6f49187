"""What holds for every inducing variable. A new one costs one line in `CASES`."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.stats
from jaxtyping import Array
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.inducing import Inducing, Kuf, root
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.numerics.factor import Factor
from numpyro_gpx.testing import check_inducing


class Waves(Kernel):
    """A periodic function of the first column with a known spectrum."""

    spectrum: Array = eqx.field(converter=jnp.asarray)  # (H,)

    def evaluate(self, x, x2):
        number = jnp.arange(self.spectrum.shape[0], dtype=self.spectrum.dtype)
        return jnp.sum(self.spectrum * jnp.cos(number * (x[0] - x2[0])))


class Coefficients(Inducing):
    """Its Fourier coefficients: nowhere in particular, and independent."""

    num_waves: int = eqx.field(static=True)

    @property
    def size(self):
        return 2 * self.num_waves


class Diagonal(Factor):
    """The root of a diagonal covariance: no matrix is formed."""

    scale: Array

    def solve(self, K, *, accurate=False):
        return K / self.scale[:, None]

    def solve_t(self, K):
        return K / self.scale[:, None]

    def multiply(self, v):
        return self.scale[:, None] * v

    def multiply_t(self, v):
        return self.scale[:, None] * v

    def log_det(self):
        return jnp.sum(jnp.log(self.scale))

    def lower(self):
        return jnp.diag(self.scale)

    def condition(self):
        return (jnp.max(self.scale) / jnp.min(self.scale)) ** 2


@Kuf.register(Coefficients, Waves, object)
def _(inducing, kernel, X):
    number = jnp.arange(inducing.num_waves, dtype=X.dtype)[:, None]
    waves = jnp.concatenate([jnp.cos(number * X[:, 0]), jnp.sin(number * X[:, 0])])
    return jnp.tile(kernel.spectrum, 2)[:, None] * waves


@root.register(Coefficients, Waves)
def _(inducing, kernel):
    return Diagonal(jnp.sqrt(jnp.tile(kernel.spectrum, 2)))


SPECTRUM = np.array([0.7, 1.3, 0.4])
WAVES = Waves(SPECTRUM)
Z = np.array([[0.2, -0.7], [1.1, 0.4], [-0.9, 0.3]])
CASES = {
    "points": (gpx.inducing.Points(Z), gpx.kernels.RBF(1.3, 0.7)),
    "points, sum kernel": (
        gpx.inducing.Points(Z), gpx.kernels.Matern32(1.3) + gpx.kernels.Linear(0.6)
    ),
    "data": (gpx.inducing.Data(Z), 2.0 * gpx.kernels.Matern52(1.3, 0.7).on(1)),
    "toy": (Coefficients(3), WAVES),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_inducing_variables_keep_the_contract(name):
    check_inducing(*CASES[name])


X = np.linspace(-2.0, 2.0, 15)[:, None]
Y = np.sin(X[:, 0]) + 0.3 * np.random.default_rng(2).normal(size=15)


def toy_model():
    likelihood = gpx.likelihoods.Gaussian(0.3)
    return gpx.models.svgp(Coefficients(3), kernel=WAVES, likelihood=likelihood)


def test_a_toy_without_places_and_with_a_structured_root_is_exact():
    """The coefficients are all there is: the bound is the evidence, in NumPy."""
    model = toy_model()
    fit = gpx.fit_lbfgs(
        model, gpx.guides.OptimalGaussian, X, Y, key=jr.key(0), progress=False
    )
    apart = X - X.T
    K = sum(s * np.cos(i * apart) for i, s in enumerate(SPECTRUM))
    noisy = K + 0.3**2 * np.eye(15)
    evidence = scipy.stats.multivariate_normal(cov=noisy).logpdf(Y)
    assert_allclose(fit.elbo().value, evidence, rtol=1e-9)
    mean = K @ np.linalg.solve(noisy, Y)
    var = np.diag(K - K @ np.linalg.solve(noisy, K))
    latent = fit.predict(X, of="f")
    assert_allclose(latent.mean, mean, atol=1e-8)
    assert_allclose(latent.var, var, atol=1e-8)


@pytest.mark.parametrize("guide", ["ConditionalGaussian", "Flow"])
def test_guides_take_a_toy_without_places(guide):
    fit = gpx.fit_svi(
        toy_model(), getattr(gpx.guides, guide), X, Y, key=jr.key(0), num_steps=2,
        progress=False,
    )  # fmt: skip
    assert np.all(np.isfinite(fit.predict(X[:3]).mean))


def test_samplers_take_a_toy_without_places():
    options = dict(key=jr.key(0), num_warmup=3, num_samples=4, num_chains=1)
    for sample in (gpx.fit_nuts, gpx.fit_sghmc):
        fit = sample(toy_model(), X, Y, progress=False, **options)
        assert np.all(np.isfinite(fit.predict(X[:3]).mean))


class WrongRoot(Coefficients):
    pass


class WrongCross(Coefficients):
    pass


@root.register(WrongRoot, Waves)
def _(inducing, kernel):
    return Diagonal(0.7 * jnp.sqrt(jnp.tile(kernel.spectrum, 2)))


@Kuf.register(WrongCross, Waves, object)
def _(inducing, kernel, X):
    return 1.1 * Kuf(Coefficients(inducing.num_waves), kernel, X)


class WrongSolve(Diagonal):
    def solve_t(self, K):
        return K


class WrongProduct(Coefficients):
    pass


@root.register(WrongProduct, Waves)
def _(inducing, kernel):
    return WrongSolve(jnp.sqrt(jnp.tile(kernel.spectrum, 2)))


@pytest.mark.parametrize(
    "kind, words",
    {
        WrongRoot: "do not belong to one process",
        WrongCross: "do not belong to one process",
        WrongProduct: "`solve_t` is not that of the root",
    }.items(),
)
def test_the_contract_names_what_is_broken(kind, words):
    with pytest.raises(AssertionError, match=words):
        check_inducing(kind(3), WAVES)


def test_what_is_not_registered_is_named():
    with pytest.raises(TypeError, match="not there for Coefficients and RBF"):
        Kuf(Coefficients(3), gpx.kernels.RBF(), X)
