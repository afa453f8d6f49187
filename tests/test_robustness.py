"""Odd data gives answers, bad data gives words; neither gives NaN in silence."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpyro.infer.autoguide import AutoNormal

import numpyro_gpx as gpx
from numpyro_gpx.processes.collapse import collapsed_bound
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program

NOISE = 0.5


def make_model(inducing, kernel=None, likelihood=None, num_outputs=None):
    def model(X, y=None, *, batch_size=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        k = (
            gpx.kernels.RBF(variance=1.0, lengthscale=scale)
            if kernel is None
            else kernel
        )
        f = gpx.gp("f", k, inducing=inducing, num_outputs=num_outputs)
        noise = gpx.likelihoods.Gaussian(NOISE) if likelihood is None else likelihood
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            gpx.observe("y", f(X[i]), noise, obs=y, rows=i)

    return model


_rng = np.random.default_rng(0)
_X = _rng.normal(size=(12, 2))
ODD = {
    "one row": (_X[:1], _X[:1, 0], _X[:1]),
    "repeated rows": (np.repeat(_X[:4], 3, axis=0), _X[:, 0], _X[:4]),
    "constant targets": (_X, np.full(12, 7.0), _X[:5]),
    "more inducing points than rows": (_X[:4], _X[:4, 0], _rng.normal(size=(9, 2))),
    "a constant column": (_X * [1.0, 0.0], _X[:, 0], _X[:5] * [1.0, 0.0]),
    "huge inputs": (1e6 * _X, _X[:, 0], 1e6 * _X[:5]),
    "tiny inputs": (1e-6 * _X, _X[:, 0], 1e-6 * _X[:3]),
    "several outputs": (_X, _X, _X[:5]),
}


@pytest.mark.parametrize("name", list(ODD))
@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)]
)
def test_odd_data_is_fitted_and_predicted(name, dtype):
    X, y, Z = (np.asarray(a, dtype) for a in ODD[name])
    with jax.enable_x64(dtype is np.float64):
        outputs = None if y.ndim == 1 else y.shape[1]
        model = make_model(gpx.inducing.Points(Z), num_outputs=outputs)
        fit = gpx.fit_svi(
            model, gpx.guides.ConditionalGaussian(model), X, y, key=jr.key(0),
            num_steps=15, progress=False,
        )  # fmt: skip
        assert np.all(np.isfinite(fit.info["losses"]))
        prediction = fit.predict(X, num_components=4)
        for values in (prediction.mean, prediction.var, prediction.log_prob(y)):
            assert values.dtype == dtype
            assert np.all(np.isfinite(values))
        assert np.all(prediction.var > 0.0)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 6),
    num_inducing=st.integers(1, 8),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_the_bound_is_never_above_the_evidence(num_rows, num_inducing, spread, seed):
    """Any rows, inducing points and spread; the jitter is the only slack."""
    rng = np.random.default_rng(seed)
    X = spread * rng.normal(size=(num_rows, 1))
    Z = spread * rng.normal(size=(num_inducing, 1))
    y = rng.normal(size=num_rows)
    kernel = gpx.kernels.RBF(variance=1.4, lengthscale=0.9)
    bound = collapsed_bound(
        kernel, gpx.inducing.Points(Z), jnp.asarray(X), jnp.asarray(y),
        noise_var=jnp.asarray(0.3),
    )  # fmt: skip
    cov = 1.4 * np.exp(-0.5 * (X - X.T) ** 2 / 0.9**2) + 0.3 * np.eye(num_rows)
    evidence = scipy.stats.multivariate_normal(cov=cov).logpdf(y)
    assert np.isfinite(bound)
    assert bound <= evidence + 1e-8 * num_rows


MODEL = make_model(gpx.inducing.Points(_X[:5]))
Y = _X[:, 0]


def fit(model, X, y, **options):
    guide = gpx.guides.WhitenedGaussian(model)
    options = {"key": jr.key(0), "num_steps": 3, "progress": False, **options}
    return gpx.fit_svi(model, guide, X, y, **options)


BERNOULLI = make_model(
    gpx.inducing.Points(_X[:5]), likelihood=gpx.likelihoods.Bernoulli()
)
POISSON = make_model(gpx.inducing.Points(_X[:5]), likelihood=gpx.likelihoods.Poisson())
WITH_NAN = np.where(np.arange(12) == 3, np.nan, Y)

BAD = {
    "rank of X": (MODEL, _X[:, 0], Y, r"`X` must have shape \(N, D\); got \(12,\)"),
    "integers": (MODEL, _X.astype(int), Y, "`X` must be floating point; got int64"),
    "NaN in X": (
        MODEL, np.where(_X == _X[2, 1], np.nan, _X), Y, r"`X` must be finite.*\(2, 1\)"
    ),
    "rows": (MODEL, _X, Y[:7], "number of rows; got 12 and 7|7 rows; plate `data`"),
    "column": (MODEL, _X, Y[:, None], r"got \(12, 1\). Pass `y\[:, 0\]`"),
    "NaN in y": (MODEL, _X, WITH_NAN, "`y` must be finite; got nan at index 3"),
    "labels": (BERNOULLI, _X, np.sign(Y), r"labels 0 and 1 .*`\(y \+ 1\) / 2`"),
    "counts": (POISSON, _X, Y, "counts 0, 1, 2.*"),
    "text": (MODEL, _X, np.array(["a"] * 12), "must be numeric; got dtype <U1"),
    "nothing": (MODEL, _X, None, "observes nothing|has no targets"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_bad_data_is_refused_in_words_by_every_fit(name):
    model, X, y, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        fit(model, X, y)
    for sampler in (gpx.fit_nuts, gpx.fit_sghmc):
        with pytest.raises(ValueError, match=words):
            sampler(model, X, y, key=jr.key(0), progress=False)


def test_minibatches_need_a_model_that_takes_them():
    def without(X, y=None):
        MODEL(X, y)

    with pytest.raises(ValueError, match="the model does not take it"):
        fit(without, _X, Y, batch_size=4)


def test_minibatches_need_a_plate_that_subsamples():
    def ignores(X, y=None, *, batch_size=None):
        MODEL(X, y)

    with pytest.raises(ValueError, match="no plate of the model subsamples"):
        fit(ignores, _X, Y, batch_size=4)


@pytest.mark.parametrize(
    "batch_size, words",
    [
        (0, "must be at least 1; got 0"),
        (-3, "must be at least 1; got -3"),
        (13, "must not exceed the 12 rows of the data; got 13"),
    ],
)
def test_a_batch_must_be_some_of_the_rows(batch_size, words):
    with pytest.raises(ValueError, match=words):
        fit(MODEL, _X, Y, batch_size=batch_size)
    with pytest.raises(ValueError, match=words):
        gpx.fit_sghmc(MODEL, _X, Y, key=jr.key(0), batch_size=batch_size)


def test_a_batch_is_a_whole_number():
    with pytest.raises(TypeError, match="a whole number of rows; got 2.5"):
        fit(MODEL, _X, Y, batch_size=2.5)


def test_a_batch_of_all_rows_is_the_whole_data():
    assert np.isfinite(fit(MODEL, _X, Y, batch_size=12).predict(_X).mean).all()


def test_a_number_is_no_key_and_data_are_no_guide():
    with pytest.raises(TypeError, match=r"`key` must be a JAX random key.*got int 0"):
        gpx.fit_nuts(MODEL, _X, Y, key=0)
    with pytest.raises(TypeError, match=r"`key` must be a JAX random key.*got int 7"):
        gpx.fit_lbfgs(MODEL, gpx.guides.WhitenedGaussian(MODEL), _X, Y, key=7)
    words = r"`guide` must be a guide.*array of shape \(12, 2\).*`fit_svi\(model, guide"
    with pytest.raises(TypeError, match=words):
        gpx.fit_svi(MODEL, _X, Y, key=jr.key(0))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: gpx.likelihoods.Gaussian(-1.0), "`scale` must be positive; got -1.0"),
        (lambda: gpx.likelihoods.StudentT(0.0, 1.0), "`df` must be positive; got 0.0"),
        (lambda: gpx.kernels.RBF(1.0, [0.5, -2.0]), "`lengthscale` must be .*-2.0"),
        (lambda: gpx.kernels.Matern32(np.nan), "`variance` must be positive; got nan"),
        (lambda: gpx.kernels.Linear(-0.5), "`variance` must be at least 0; got -0.5"),
    ],
)
def test_numbers_out_of_range_are_refused_also_inside_jit(make, words):
    with pytest.raises(ValueError, match=words):
        make()

    @jax.jit
    def compiled(x):
        make()
        return x

    with pytest.raises(ValueError, match=words):
        compiled(1.0)


def test_a_guide_for_other_sites_is_refused():
    other = gpx.guides.WhitenedGaussian(gpx.models.svgp(gpx.inducing.Points(_X[:5])))
    with pytest.raises(ValueError, match=r"only in the model: \['scale'\].*'variance'"):
        gpx.fit_svi(
            MODEL, lambda *args: other(*args), _X, Y, key=jr.key(0), progress=False
        )


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (gpx.fit_svi, gpx.guides.WhitenedGaussian),
        (gpx.fit_svi, AutoNormal),
        (gpx.fit_lbfgs, gpx.guides.WhitenedGaussian),
        (gpx.fit_implicit, gpx.guides.Implicit),
    ],
)
def test_a_guide_made_for_another_model_is_refused(run, kind):
    other = kind(gpx.models.svgp(gpx.inducing.Points(_X[:5])))
    words = f"another model; make it for this one: `{kind.__name__}\\(model\\)`"
    with pytest.raises(ValueError, match=words):
        run(MODEL, other, _X, Y, key=jr.key(0), progress=False)


def test_a_class_is_made_a_guide_of_the_model():
    options = dict(key=jr.key(0), progress=False)
    kind = gpx.guides.WhitenedGaussian
    for run, length in ((gpx.fit_svi, "num_steps"), (gpx.fit_lbfgs, "max_steps")):
        named, made = (
            run(MODEL, guide, _X, Y, **options, **{length: 3})
            for guide in (kind, kind(MODEL))
        )
        assert_array_equal(named.info["losses"], made.info["losses"])
    with pytest.raises(TypeError, match="`guide` must be an Implicit.*got Whitened"):
        gpx.fit_implicit(MODEL, kind, _X, Y, **options)


def indefinite(x, x2):
    """No covariance function: minus the squared distance."""
    return -jnp.sum((x - x2) ** 2)


def test_a_kernel_that_cannot_be_factorised_is_named_after_one_more_try():
    model = make_model(
        gpx.inducing.Points(_X[:5]), kernel=gpx.kernels.Custom(indefinite)
    )
    words = r"relative jitter of 1e-06 did not help.*GP site `f` \(kernel Custom, 5 "
    for run in (
        lambda: fit(model, _X, Y),
        lambda: gpx.fit_nuts(model, _X, Y, key=jr.key(0), progress=False),
        lambda: gpx.fit_sghmc(
            model, _X, Y, key=jr.key(0), em=gpx.infer.MonteCarloEM(num_rounds=3),
            progress=False,
        ),
        lambda: gpx.fit_lbfgs(
            model, gpx.guides.WhitenedGaussian(model), _X, Y, key=jr.key(0),
            progress=False,
        ),
    ):  # fmt: skip
        with pytest.warns(
            RuntimeWarning, match="Starting again with a relative jitter"
        ):
            with pytest.raises(ValueError, match=words):
                run()


def test_targets_that_are_not_the_second_argument_are_counted_too():
    def model(X, group, y=None):
        scale = numpyro.sample(
            "scale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1)
        )
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Normal(0.0, scale[group[i]]), obs=y[i])

    group = np.zeros(12, int)
    for run in (
        lambda: gpx.fit_nuts(model, _X, group, Y[:7], key=jr.key(0)),
        lambda: gpx.fit_nuts(model, _X, group, y=Y[:7], key=jr.key(0)),
    ):
        words = "`y` has 7 rows and is indexed by plate `data`"
        with pytest.raises(ValueError, match=words):
            run()


def test_nan_in_targets_of_plain_sites_is_named_unless_masked():
    def model(y=None, mask=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        fn = dist.Normal(0.0, scale)
        with numpyro.plate("data", 3):
            numpyro.sample("y", fn if mask is None else fn.mask(mask), obs=y)

    y = np.array([0.2, np.nan, 0.3])
    with pytest.raises(ValueError, match="site `y` must not be NaN; got 1 of 3"):
        Program.of(Call(model, (y, None)))
    Program.of(Call(model, (y, ~np.isnan(y))))


def test_a_gradient_that_is_not_finite_stops_a_fit_where_it_starts():
    def model(X, y=None):
        # The loss is finite at 0, and its slope is NaN.
        shift = jnp.sqrt(numpyro.param("shift", jnp.zeros(())) ** 2)
        kernel = gpx.kernels.RBF(1.0 + shift, 1.0)
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(_X[:5]))
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), gpx.likelihoods.Gaussian(0.3), obs=y)

    guide = gpx.guides.OptimalGaussian(model)
    with pytest.warns(RuntimeWarning, match="1 entries are not finite"):
        with pytest.raises(ValueError, match="did not help"):
            gpx.fit_lbfgs(model, guide, _X, Y, key=jr.key(0), progress=False)


def test_the_users_jitter_is_used_and_remembered():
    with gpx.jitter(1e-3):
        large = fit(MODEL, _X, Y)
    small = fit(MODEL, _X, Y)
    assert large.jitter == 1e-3
    assert small.jitter is None
    assert not np.allclose(large.info["losses"], small.info["losses"], rtol=1e-7)
    with pytest.raises(ValueError, match="jitter must be at least 0"):
        with gpx.jitter(-1.0):
            pass
