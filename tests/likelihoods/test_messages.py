"""What a user reads who passes the wrong thing, and the special cases."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_gpx.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from numpyro_gpx.links import Exp, Logit, Probit, Softplus, get_link


def test_labels_of_minus_one_and_one_are_mapped():
    words = r"labels 0 and 1 .* got -1 at index 1 \(2 of 4 values\).*`\(y \+ 1\) / 2`"
    with pytest.raises(ValueError, match=words):
        Bernoulli().check(np.array([1, -1, 1, -1]))


def test_two_other_labels_are_compared():
    with pytest.raises(ValueError, match=r"map them with `y == 2`"):
        Bernoulli().check(np.array([1, 2, 2]))


def test_negative_and_fractional_counts_are_told_apart():
    with pytest.raises(ValueError, match=r"got -3.0 at index \(1, 0\).*not negative"):
        Poisson().check(np.array([[2.0], [-3.0]]))
    with pytest.raises(ValueError, match=r"got 0.5 at index 1.*whole numbers"):
        Poisson().check(np.array([2.0, 0.5]))


def test_masked_rows_are_not_checked():
    Poisson().check(np.array([2.0, -1.0]), mask=np.array([True, False]))
    with pytest.raises(ValueError, match=r"`mask` must be boolean .* shape \(3,\)"):
        Poisson().check(np.array([2.0, 1.0]), mask=np.ones(3, bool))


def test_text_is_not_numbers():
    with pytest.raises(ValueError, match="array of numbers; got dtype <U3"):
        Gaussian(0.3).check(np.array(["yes", "no"]))


def test_booleans_are_labels():
    y = np.array([True, False])
    Bernoulli().check(y)
    f = jnp.array([0.4, 0.7])
    expected = Bernoulli().log_prob(jnp.array([1, 0]), f)
    np.testing.assert_array_equal(Bernoulli().log_prob(y, f), expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("exp", Exp), ("logit", Logit), ("probit", Probit), ("softplus", Softplus)],
)
def test_links_have_names(name, kind):
    assert isinstance(get_link(name), kind)
    assert get_link(kind()) == kind()


def test_unknown_links_list_the_names():
    words = '`link` must be one of "exp", "identity", "logit", .*got \'cloglog\''
    with pytest.raises(ValueError, match=words):
        Bernoulli(link="cloglog")
    with pytest.raises(ValueError, match="map to a probability; got Exp"):
        Bernoulli(link="exp")


def test_student_t_without_variance_says_infinite():
    m, v = jnp.array(0.3), jnp.array(0.2)
    assert StudentT(df=1.7, scale=0.4).predictive_moments(m, v).var == jnp.inf
    assert np.isnan(StudentT(df=0.8, scale=0.4).predictive_moments(m, v).mean)
