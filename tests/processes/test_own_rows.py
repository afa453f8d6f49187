"""The full GP at its own rows, `f = m + R v`, against dense NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_gpx.beliefs import GaussianBelief
from numpyro_gpx.inducing import Data
from numpyro_gpx.joint_beliefs import Group
from numpyro_gpx.kernels import RBF, Matern32
from numpyro_gpx.means import Constant
from numpyro_gpx.processes.own_rows import own_rows
from numpyro_gpx.processes.prior import SparsePrior

RNG = np.random.default_rng(4)
M, P = 5, 2
X = RNG.uniform(-2.0, 2.0, (M, 1))
KERNELS = RBF(1.3, 0.9), Matern32(0.7, 1.4)


def root(kernel):
    K = np.asarray(kernel(jnp.asarray(X)))
    return np.linalg.cholesky(K + 1e-8 * np.mean(np.diag(K)) * np.eye(M))


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_moments_are_those_of_the_root(number, multiplies):
    """One kernel for both outputs, and one for each."""
    kernels = KERNELS[:number]
    mean = Constant(jnp.asarray(0.4))
    prior = SparsePrior.create(kernels, Data(X), mean, multiplies=multiplies)
    roots = [root(kernels[p % number]) for p in range(P)]
    m, S = RNG.normal(size=(P, M)), np.tril(RNG.normal(size=(P, M, M)))
    found = own_rows(
        prior, jnp.asarray(X), GaussianBelief(jnp.asarray(m), jnp.asarray(S))
    )
    for p, R in enumerate(roots):
        assert_allclose(found.mean[:, p], 0.4 + R @ m[p], rtol=1e-9)
        cov = R @ S[p] @ S[p].T @ R.T
        assert_allclose(found.var[:, p], np.diag(cov), rtol=1e-9)
    known = own_rows(prior, jnp.asarray(X), jnp.asarray(m))
    assert known.is_known
    assert_allclose(known.mean, found.mean, rtol=1e-12)


def test_outputs_that_are_held_together_covary():
    prior = SparsePrior.create(KERNELS, Data(X), Constant(jnp.asarray(0.0)))
    S = RNG.normal(size=(P * M, P * M))
    group = Group.joint({"f": jnp.zeros((P, M))}, jnp.asarray(S))
    found = own_rows(prior, jnp.asarray(X), group.beliefs["f"])
    zeros = np.zeros((M, M))
    R = np.block([[root(KERNELS[0]), zeros], [zeros, root(KERNELS[1])]])
    cov = R @ S @ S.T @ R.T
    for n in range(M):
        rows = [n, M + n]
        assert_allclose(found.output_cov()[n], cov[np.ix_(rows, rows)], rtol=1e-7)
