"""Posteriors that `samplers.py` draws from, each as our model and written by hand.

By hand means plain NumPyro, whitened, with the same sites, priors and jitter: what a
user would have written without this library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from datasets import load

import numpyro_gpx as gpx

__all__ = ["Problem", "problems"]

# As the library's, relative to the variance.
_JITTER = 1e-8


class Problem(NamedTuple):
    """A posterior.

    Attributes:
        ours: Our model, a function of `args`.
        by_hand: The same by hand, a function of nothing.
        args: Inputs and targets.
        thetas: Names of its hyperparameters.
        function: Values of `f` at the rows, from a draw by site.
        noisy: Whether layers draw noise, so that only our own engines can be compared.
    """

    ours: Callable
    by_hand: Callable
    args: tuple
    thetas: tuple[str, ...]
    function: Callable
    noisy: bool = False


def rbf(variance, lengthscale, A, B=None):
    B = A if B is None else B
    squares = jnp.sum(((A[:, None] - B[None]) / lengthscale) ** 2, axis=-1)
    return variance * jnp.exp(-0.5 * squares)


def root(variance, lengthscale, X):
    K = rbf(variance, lengthscale, X)
    return jnp.linalg.cholesky(K + _JITTER * variance * jnp.eye(len(X)))


def positive(*names):
    """Sites with standard log-normal priors."""
    return {name: numpyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in names}


def normals(name, size):
    return numpyro.sample(name, dist.Normal(0.0, 1.0).expand([size]).to_event(1))


def kernel_of(theta, prefix=""):
    return gpx.kernels.RBF(theta[f"{prefix}variance"], theta[f"{prefix}lengthscale"])


def full_gp(X, y, likelihood, theirs, extra=()) -> Problem:
    """A GP at its own rows; `likelihood` and `theirs` take the `extra` sites."""
    names = ("variance", "lengthscale", *extra)

    def ours(X_, y=None):
        theta = positive(*names)
        f = gpx.gp("f", kernel_of(theta), inducing=gpx.inducing.Data(X))
        with numpyro.plate("data", len(X_)):
            gpx.observe("y", f(X_), likelihood(*(theta[n] for n in extra)), obs=y)

    def function(draw):
        return root(draw["variance"], draw["lengthscale"], X) @ draw["f"]

    def by_hand():
        theta = positive(*names)
        f = function({**theta, "f": normals("f", len(X))})
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", theirs(f, *(theta[n] for n in extra)), obs=y)

    return Problem(ours, by_hand, (X, y), names, function)


def sparse_classifier(X, y, Z) -> Problem:
    """Logit link; expectations under the conditional by 20 Gauss-Hermite nodes."""
    names = ("variance", "lengthscale")
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)

    def ours(X, y=None):
        f = gpx.gp("f", kernel_of(positive(*names)), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", len(X)):
            gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(), obs=y)

    def projected(theta, rows):
        L = root(theta["variance"], theta["lengthscale"], Z)
        K = rbf(theta["variance"], theta["lengthscale"], Z, rows)
        return jax.scipy.linalg.solve_triangular(L, K, lower=True)

    def by_hand():
        theta = positive(*names)
        A = projected(theta, X)
        v = normals("f", len(Z))
        var = jnp.maximum(theta["variance"] - jnp.sum(A**2, axis=0), 1e-30)
        f = (A.T @ v)[:, None] + jnp.sqrt(var)[:, None] * nodes
        terms = dist.Bernoulli(logits=f).log_prob(y[:, None])
        numpyro.factor("y", jnp.sum(terms @ (weights / weights.sum())))

    def function(draw):
        return projected(draw, X[:200]).T @ draw["f"]

    return Problem(ours, by_hand, (X, y), names, function)


def exact_regression(X, y) -> Problem:
    """Six hyperparameters, `f` integrated out."""
    D = X.shape[1]

    def theta():
        scales = dist.LogNormal(jnp.zeros(D), 1.0).to_event(1)
        return {
            **positive("variance", "noise"),
            "lengthscale": numpyro.sample("lengthscale", scales),
        }

    def ours(X, y=None):
        found = theta()
        gpx.exact("y", kernel_of(found), X, found["noise"], obs=y)

    def by_hand():
        found = theta()
        K = rbf(found["variance"], found["lengthscale"], X)
        K = K + (found["noise"] ** 2 + _JITTER * found["variance"]) * jnp.eye(len(X))
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(X)), K), obs=y)

    def function(draw):  # its posterior mean
        K = rbf(draw["variance"], draw["lengthscale"], X)
        noise = draw["noise"] ** 2 * jnp.eye(len(X))
        return K @ jnp.linalg.solve(K + noise, y)

    names = ("variance", "lengthscale", "noise")
    return Problem(ours, by_hand, (X, y), names, function)


def heteroscedastic(X, y) -> Problem:
    """Two GPs, the second the log of the noise's standard deviation."""
    names = tuple(f"{p}_{n}" for p in "fg" for n in ("variance", "lengthscale"))

    def ours(X_, y=None):
        theta = positive(*names)
        f, g = (
            gpx.gp(p, kernel_of(theta, f"{p}_"), inducing=gpx.inducing.Data(X))
            for p in "fg"
        )
        likelihood = gpx.likelihoods.HeteroscedasticGaussian()
        with numpyro.plate("data", len(X_)):
            gpx.observe("y", gpx.stack(f(X_), g(X_)), likelihood, obs=y)

    def both(draw):
        roots = (root(draw[f"{p}_variance"], draw[f"{p}_lengthscale"], X) for p in "fg")
        return [R @ draw[p] for R, p in zip(roots, "fg", strict=True)]

    def by_hand():
        theta = positive(*names)
        f, g = both({**theta, **{p: normals(p, len(X)) for p in "fg"}})
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    def function(draw):
        return jnp.concatenate(both(draw))

    return Problem(ours, by_hand, (X, y), names, function)


def group_effects(X, group, y) -> Problem:
    """Counts: a GP and effects of groups, whose scale is unknown."""
    number = int(group.max()) + 1
    names = ("variance", "lengthscale", "tau")

    def effects(theta):
        with numpyro.plate("groups", number):
            return numpyro.sample("a", dist.Normal(0.0, 1.0)) * theta["tau"]

    def ours(X_, group, y=None):
        theta = positive(*names)
        a = effects(theta)
        f = gpx.gp("f", kernel_of(theta), inducing=gpx.inducing.Data(X))
        with numpyro.plate("data", len(X_)):
            gpx.observe("y", f(X_) + a[group], gpx.likelihoods.Poisson(), obs=y)

    def total(draw):
        f = root(draw["variance"], draw["lengthscale"], X) @ draw["f"]
        return f + (draw["tau"] * draw["a"])[group]

    def by_hand():
        theta = positive(*names)
        a = effects(theta) / theta["tau"]
        f = total({**theta, "a": a, "f": normals("f", len(X))})
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    return Problem(ours, by_hand, (X, group, y), names, total)


def deep_gp(X, y, Z) -> Problem:
    """Two layers of M inducing points each; target A, by 16 noise sets."""
    names = ("f1_variance", "f1_lengthscale", "f2_variance", "f2_lengthscale", "noise")

    def ours(X, y=None):
        theta = positive(*names)
        f1 = gpx.gp(
            "f1", kernel_of(theta, "f1_"), inducing=gpx.inducing.Points(Z),
            mean=gpx.means.Identity(), num_outputs=1,
        )  # fmt: skip
        f2 = gpx.gp("f2", kernel_of(theta, "f2_"), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", len(X)):
            h = gpx.propagate("h", f1(X))
            gpx.observe("y", f2(h), gpx.likelihoods.Gaussian(theta["noise"]), obs=y)

    def function(draw):  # of the outer layer at its inducing points
        return root(draw["f2_variance"], draw["f2_lengthscale"], Z) @ draw["f2"]

    def by_hand():
        raise NotImplementedError("Plain NumPyro has no density of target A.")

    return Problem(ours, by_hand, (X, y), names, function, noisy=True)


def problems(folder) -> dict[str, Callable[[], Problem]]:
    """By name; made when asked for."""
    rng = np.random.default_rng
    found: dict[str, Callable[[], Problem]] = {}

    def coal():
        years, counts = load(folder, "coal")
        return full_gp(
            (years - 1907.0) / 30.0, counts, gpx.likelihoods.Poisson,
            lambda f: dist.Poisson(jnp.exp(f)),
        )  # fmt: skip

    def labels(draw, number):
        X = draw.uniform(-2.0, 2.0, (number, 2))
        f = np.sin(2.0 * X[:, 0]) + X[:, 1]
        return X, (f + draw.logistic(size=number) > 0.0).astype(float)

    def classifier():
        return full_gp(
            *labels(rng(1), 200), gpx.likelihoods.Bernoulli,
            lambda f: dist.Bernoulli(logits=f),
        )  # fmt: skip

    def sparse():
        X, y = labels(rng(2), 2000)
        Z = np.asarray(gpx.inducing.kmeans(jr.key(0), X, 30))
        return sparse_classifier(X, y, Z)

    def outliers():
        draw = rng(3)
        X = np.sort(draw.uniform(-3.0, 3.0, 100))[:, None]
        noise = np.where(draw.uniform(size=100) < 0.1, 2.0, 0.2)
        y = np.sin(2.0 * X[:, 0]) + noise * draw.normal(size=100)
        return full_gp(
            X, y, lambda scale: gpx.likelihoods.StudentT(df=4.0, scale=scale),
            lambda f, scale: dist.StudentT(4.0, f, scale), ("scale",),
        )  # fmt: skip

    def exact():
        draw = rng(4)
        X = draw.uniform(-1.0, 1.0, (200, 4))
        y = np.sin(3.0 * X[:, 0]) + X[:, 1] ** 2 + 0.2 * draw.normal(size=200)
        return exact_regression(X, y)

    def motorcycle():
        X, y = load(folder, "mcycle")
        return heteroscedastic((X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std())

    def groups():
        draw = rng(5)
        X = np.sort(draw.uniform(-2.0, 2.0, 120))[:, None]
        group = draw.integers(0, 8, 120)
        f = np.sin(2.0 * X[:, 0]) + 0.5 * draw.normal(size=8)[group]
        return group_effects(X, group, draw.poisson(np.exp(1.0 + f)).astype(float))

    def deep():
        draw = rng(6)
        X = np.sort(draw.uniform(-1.5, 1.5, 60))[:, None]
        y = np.sign(X[:, 0]) + 0.2 * draw.normal(size=60)
        return deep_gp(X, y, np.linspace(-1.5, 1.5, 8)[:, None])

    found["coal counts, 112 years, full GP"] = coal
    found["classifier, N=200, full GP"] = classifier
    found["classifier, N=2000, M=30"] = sparse
    found["Student-t, outliers, N=100, full GP"] = outliers
    found["exact regression, N=200, 6 hyperparameters"] = exact
    found["motorcycle, changing noise, two full GPs"] = motorcycle
    found["counts, group effects, N=120, full GP"] = groups
    found["two-layer deep GP, N=60, M=8"] = deep
    return found
