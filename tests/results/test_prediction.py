"""Predictive distributions: mixtures over posterior components."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose

import numpyro_gpx as gpx
from numpyro_gpx.processes.latent import Gaussian
from numpyro_gpx.results.prediction import Prediction
from numpyro_gpx.sites.predictive import FromDistribution, FromLikelihood

L = gpx.likelihoods
MEAN, VAR = np.array([[0.3, -1.2], [0.7, 0.4], [-0.2, 1.5]]), np.full((3, 2), 0.3)


def predicted(likelihood, mean=MEAN, var=VAR):
    """One component, targets of a likelihood at known marginals, three rows."""

    def one(mean, var):
        return FromLikelihood(Gaussian(mean, var), likelihood)

    chunk = jax.vmap(one)(jnp.asarray(mean)[None], jnp.asarray(var)[None])
    return Prediction([chunk], [3], jr.key(0))


NORMAL = predicted(L.Gaussian(0.3), MEAN[:, 0], VAR[:, 0])


def test_covariances_of_outputs_are_mixed_over_components_and_rescaled():
    """Two draws of a mixed latent: within components, and between their means."""
    rng = np.random.default_rng(2)
    A = rng.normal(size=(3, 2))
    mean, var = rng.normal(size=(2, 4, 2)), rng.uniform(0.2, 1.0, (2, 4, 2))

    def one(mean, var):
        latent = A @ Gaussian(mean, var, sites=frozenset("g"))
        return FromLikelihood(latent, gpx.likelihoods.Gaussian(0.3))

    chunk = jax.vmap(one)(jnp.asarray(mean), jnp.asarray(var))
    scale = np.array([2.0, 0.5, 1.5])
    found = Prediction([chunk], [4], jr.key(0)).rescaled(np.ones(3), scale)
    means = mean @ A.T
    for n in range(4):
        within = [A @ np.diag(var[s, n]) @ A.T + 0.09 * np.eye(3) for s in range(2)]
        apart = means[:, n] - means[:, n].mean(axis=0)
        cov = np.mean(within, axis=0) + apart.T @ apart / 2
        assert_allclose(found.cov[n], np.outer(scale, scale) * cov, rtol=1e-9)
    assert_allclose(found.var, np.einsum("npp->np", found.cov), rtol=1e-9)


@pytest.mark.parametrize("q", [np.nan, None, True, "half", 0.5j, [], [0.5, None], 1.5])
def test_levels_of_quantiles_are_numbers_between_0_and_1(q):
    with pytest.raises(ValueError, match="`q` must lie between 0 and 1.*got"):
        NORMAL.quantile(q)


@pytest.mark.parametrize(
    "shift, scale, error, words",
    [
        (np.nan, 1.0, ValueError, "`shift` must be finite; got nan"),
        (0.0, np.inf, ValueError, "`scale` must be finite; got inf"),
        (0.0, np.nan, ValueError, "`scale` must be finite; got nan"),
        (0.0, 0.0, ValueError, "`scale` must be positive; got 0.0"),
        (1j, 1.0, ValueError, "`shift` must be real; got complex128"),
        (0.0, 1j * np.ones(()), ValueError, "`scale` must be real; got complex128"),
        (
            "1",
            1.0,
            TypeError,
            "`shift` must be a number or an array of numbers; got st",
        ),
        (
            0.0,
            None,
            TypeError,
            "`scale` must be a number or an array of numbers; got No",
        ),
        (
            np.ones(2),
            1.0,
            ValueError,
            r"`shift` must be a number, or have shape \(3,\)",
        ),
        (0.0, np.ones(3), ValueError, r"`scale` must be a number; got shape \(3,\)"),
    ],
)
def test_units_are_finite_numbers(shift, scale, error, words):
    with pytest.raises(error, match=words):
        NORMAL.rescaled(shift, scale)


def test_each_output_has_units_of_its_own_and_each_row_a_shift():
    found = predicted(L.Gaussian(0.3)).rescaled([1.0, 2.0], [3.0, 0.5])
    assert_allclose(found.mean, [1.0, 2.0] + np.array([3.0, 0.5]) * MEAN)
    assert_allclose(
        NORMAL.rescaled([1.0, 2.0, 4.0], 2).mean, [1, 2, 4] + 2 * MEAN[:, 0]
    )


def test_a_standard_deviation_is_known_where_its_square_is_out_of_range():
    sd = np.sqrt(0.39)
    assert_allclose(NORMAL.rescaled(0.0, 1e-200).sd, sd * 1e-200)


def test_log_densities_take_real_targets_of_the_right_shape():
    law = scipy.stats.norm(MEAN[:, 0], np.sqrt(0.39))
    assert_allclose(NORMAL.log_prob([1, 0, 2]), law.logpdf([1, 0, 2]))
    with pytest.raises(ValueError, match="`y` must be real; got complex128"):
        NORMAL.log_prob(1j * np.ones(3))
    with pytest.raises(
        ValueError, match=r"the shape \(3,\) of the predictions; got \(2,"
    ):
        NORMAL.log_prob(np.ones(2))


@pytest.mark.parametrize("likelihood", [L.Categorical(2), L.RobustMax(2)])
@pytest.mark.parametrize("what", ["mean", "var", "sd", "cov"])
def test_labels_without_an_order_have_no_mean(likelihood, what):
    labels = predicted(likelihood)
    with pytest.raises(ValueError, match="labels without an order.*`probabilities`"):
        getattr(labels, what)
    for use in (lambda: labels.quantile(0.5), lambda: labels.rescaled(0.0, 2.0)):
        with pytest.raises(
            ValueError, match="labels without an order.*`probabilities`"
        ):
            use()
    p = labels.probabilities
    assert labels.shape == (3,) and len(labels) == 3
    assert_allclose(labels.log_prob([0, 1, 1]), np.log(p[range(3), [0, 1, 1]]))
    assert_allclose(labels.draws.mean(axis=0), p[:, 1], atol=0.08)  # 5 standard errors


def test_ordered_and_binary_labels_have_a_mean():
    mean, var = MEAN[:, 0], VAR[:, 0]
    ordinal = predicted(L.Ordinal(jnp.array([-0.5, 0.8])), mean, var)
    assert_allclose(ordinal.mean, ordinal.probabilities @ np.arange(3))
    binary = predicted(L.Bernoulli("probit"), mean, var)
    assert_allclose(binary.mean, scipy.stats.norm.cdf(mean / np.sqrt(1.3)), rtol=1e-8)


def squashed(f):
    sigmoid = dist.transforms.SigmoidTransform()
    return dist.TransformedDistribution(dist.Normal(f, 0.3), sigmoid)


def test_distributions_without_a_mean_are_named():
    """Quantiles, draws and densities need none."""
    squeezed = predicted(L.From(squashed), MEAN[:, 0], VAR[:, 0])
    plain = jax.vmap(lambda f: FromDistribution(squashed(f)))(MEAN[None, :, 0])
    for one in (squeezed, Prediction([plain], [3], jr.key(0))):
        words = (
            "TransformedDistribution of the targets has no `mean` and no `variance` in "
            "NumPyro; use `quantile` and `draws`"
        )
        for what in ("mean", "var", "sd"):
            with pytest.raises(ValueError, match=words):
                getattr(one, what)
        assert one.shape == (3,) and one.draws.shape == (1000, 3)
        assert np.all(one.quantile(0.9) > one.quantile(0.1))
    y = np.array([0.4, 0.6, 0.7])
    law = scipy.stats.norm(MEAN[:, 0], np.sqrt(0.39))
    expected = law.logpdf(np.log(y / (1 - y))) - np.log(y * (1 - y))
    assert_allclose(squeezed.log_prob(y), expected, rtol=1e-6)
