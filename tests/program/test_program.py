"""One look at a call: who follows which plate, and what would go wrong in silence."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.density import Target
from numpyro_gpx.program.program import Program

rng = np.random.default_rng(4)
X = rng.uniform(-2.0, 2.0, (20, 1))
Y = np.sin(X[:, 0])
Z = np.linspace(-2.0, 2.0, 5)[:, None]
POINTS = gpx.inducing.Points(Z)
KERNEL = gpx.kernels.RBF()
NORMAL = gpx.likelihoods.Gaussian(0.3)
QUICK = dict(key=jr.key(0), num_steps=2, progress=False)


def look(model, *args, batch_size=None, **kwargs):
    return Program.of(Call.create(model, args, kwargs), batch_size)


def exposed(X, exposure, targets=None, *, batch_size=None):
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
        y = None if targets is None else targets[i]
        gpx.observe("y", f(X[i]), NORMAL, obs=y, offset=exposure[i])


@pytest.mark.parametrize("length", [3, 19, 21, 40])
@pytest.mark.parametrize("by_name", [True, False])
def test_arguments_of_another_length_are_named_wherever_they_stand(length, by_name):
    wrong = np.ones(length)
    words = f"`exposure` has {length} rows and is indexed by plate `data`, which has 20"
    args = dict(exposure=wrong, targets=Y) if by_name else None
    with pytest.raises(ValueError, match=words):
        look(exposed, X, **args) if by_name else look(exposed, X, wrong, Y)
    words = f"`targets` has {length} rows and is indexed by plate `data`, which has 20"
    with pytest.raises(ValueError, match=words):
        look(exposed, X, np.ones(20), wrong)


def test_predictions_look_too():
    fit = gpx.fit_svi(exposed, gpx.guides.WhitenedGaussian, X, np.ones(20), Y, **QUICK)
    with pytest.raises(ValueError, match="`exposure` has 20 rows and is indexed"):
        fit.predict(X[:7], np.ones(20))
    assert fit.predict(X[:7], np.ones(7)).mean.shape == (7,)


def test_tables_that_rows_index_are_left_alone():
    groups = rng.integers(0, 3, 20)

    def grouped(X, groups, table, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("data", X.shape[0]) as i:
            shift = a[groups[i]] + table[groups[i]] + table[(i + 1) % 3]
            gpx.observe("y", f(X[i]) + shift, NORMAL, obs=y, rows=i)

    found = look(grouped, X, groups, np.arange(3.0), Y)
    assert found.units["data"].arguments == {"X", "groups", "y"}


@pytest.mark.parametrize("size", [200, 10, 21, 1])
def test_a_plate_of_another_size_is_named(size):
    def model(X, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", size) as i:
            gpx.observe("y", f(X[i]), NORMAL, obs=None if y is None else y[i])

    words = f"Plate `data` has size {size}, but `X` has 20 rows"
    with pytest.raises(ValueError, match=words):
        look(model, X, Y)


def test_rows_that_were_not_taken_are_named():
    def model(X, y=None, *, batch_size=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size):
            gpx.observe("y", f(X), NORMAL, obs=y)

    words = "Site `y` has 20 rows in a plate that subsamples 1 of 20: write `f"
    with pytest.raises(ValueError, match=words):
        look(model, X, Y, batch_size=1)


@pytest.mark.parametrize("kind", ["Data", "Points"])
def test_inducing_inputs_that_follow_the_arguments_are_refused(kind):
    def model(X, y=None):
        here = gpx.inducing.Data(X) if kind == "Data" else gpx.inducing.Points(X[::4])
        f = gpx.gp("f", KERNEL, inducing=here)
        with numpyro.plate("data", X.shape[0]) as i:
            gpx.observe("y", f(X[i]), NORMAL, obs=y, rows=i)

    words = rf"inducing inputs of `f` depend on the model's argument `X`.*{kind}\(X_tr"
    with pytest.raises(ValueError, match=words):
        look(model, X, Y)


def test_learnt_inducing_inputs_pass():
    model = gpx.models.svgp(gpx.inducing.Points(Z, learn=True))
    assert look(model, X, Y).structure.params == ("f/Z",)


def two_sets(X1, X2, y1=None, y2=None, *, batch_size=None):
    """Two input sets with plates of their own, of different or of equal sizes."""
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    g = gpx.gp("g", gpx.kernels.Matern32(), inducing=gpx.inducing.Points(Z[:3]))
    with numpyro.plate("first", X1.shape[0], subsample_size=batch_size) as i:
        y = None if y1 is None else y1[i]
        gpx.observe("y1", f(X1[i]), NORMAL, obs=y)
    with numpyro.plate("second", X2.shape[0]):
        gpx.observe("y2", f(X2) + g(X2), gpx.likelihoods.Poisson(), obs=y2)


@pytest.mark.parametrize("number", [13, 20])
def test_each_plate_has_its_own_arguments(number):
    X2, counts = rng.uniform(size=(number, 1)), np.arange(float(number)) % 3
    found = look(two_sets, X, X2, Y, counts)
    assert found.targets == {"y1": "y1", "y2": "y2"}
    assert found.units["first"].size == 20 and found.units["second"].size == number
    assert found.units["first"].arguments == {"X1", "y1"}
    assert found.units["second"].arguments == {"X2", "y2"}


def test_predictions_cut_the_rows_of_their_own_plate():
    X2, counts = rng.uniform(size=(13, 1)), np.arange(13.0) % 3
    fit = gpx.fit_svi(two_sets, gpx.guides.WhitenedGaussian, X, X2, Y, counts, **QUICK)
    at = fit.predict(X[:3], X2[:9], site="y2")
    cut = fit.predict(X[:3], X2[:9], site="y2", chunk_rows=4)
    assert at.mean.shape == (9,)
    assert_allclose(cut.mean, at.mean, rtol=1e-12)
    assert fit.predict(X[:3], X2[:9], site="y1").mean.shape == (3,)


def test_options_that_nobody_knows_are_named_with_the_nearest():
    fit = gpx.fit_svi
    guide = gpx.guides.WhitenedGaussian
    with pytest.raises(TypeError, match=r"`num_step` is neither.*`num_steps`\?"):
        fit(exposed, guide, X, np.ones(20), Y, key=jr.key(0), num_step=5)
    with pytest.raises(TypeError, match=r"`exposur` is neither.*`exposure`\?"):
        fit(exposed, guide, X, exposur=np.ones(20), key=jr.key(0))
    with pytest.raises(TypeError, match="`thining` is neither an option of `fit_nut"):
        gpx.fit_nuts(exposed, X, np.ones(20), Y, key=jr.key(0), thining=2)
    with pytest.raises(TypeError, match="missing a required argument: 'exposure'"):
        fit(exposed, guide, X, key=jr.key(0))


def test_a_handler_around_the_model_does_not_hide_its_arguments():
    model = handlers.condition(two_sets, data={"g": jnp.zeros(3)})
    assert Call(model).takes_inputs
    with pytest.raises(TypeError, match="`X3` is not an argument of the model"):
        Call.create(model, (X, X), {"X3": X})


def test_whole_numbers_of_numpy_are_whole_numbers():
    fit = gpx.fit_svi(
        exposed, gpx.guides.WhitenedGaussian, X, np.ones(20), Y,
        batch_size=np.int64(5), **QUICK,
    )  # fmt: skip
    assert fit.batch_size == 5 and np.isfinite(fit.elbo(3).value)


def masked(X, y, keep, *, inside):
    """The same rows left out by `mask=`, or by NumPyro's handler."""
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    with numpyro.plate("data", X.shape[0]):
        if inside:
            gpx.observe("y", f(X), NORMAL, obs=y, mask=keep)
        else:
            with handlers.mask(mask=keep):
                gpx.observe("y", f(X), NORMAL, obs=y)


def test_a_mask_around_a_site_is_a_mask():
    keep = rng.uniform(size=20) < 0.7
    outliers = np.where(keep, Y, 50.0)
    fits = [
        gpx.fit_svi(
            masked, gpx.guides.WhitenedGaussian, X, outliers, keep, inside=inside,
            **QUICK,
        )
        for inside in (True, False)
    ]  # fmt: skip
    one, other = (gpx.loo(fit) for fit in fits)
    assert one["n_data_points"] == other["n_data_points"] == keep.sum()
    assert_allclose(one["elpd_loo"], other["elpd_loo"], rtol=1e-9)
    densities = [f.to_arviz().log_predictive_density["y"].values for f in fits]
    assert_allclose(*densities, rtol=1e-9)


OWN = rng.uniform(-2.0, 2.0, (9, 1))


def full_gp(X, y=None):
    f = gpx.gp(
        "f",
        gpx.kernels.Matern52(variance=1.7, lengthscale=0.8),
        inducing=gpx.inducing.Data(OWN),
        mean=gpx.means.Linear(jnp.array([0.4]), 0.2),
    )
    with numpyro.plate("data", X.shape[0]) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Bernoulli(), obs=y, rows=i)


def matern52(a, b):
    r = np.sqrt(5.0) * np.abs(a - b.T) / 0.8
    return 1.7 * (1.0 + r + r**2 / 3.0) * np.exp(-r)


def test_the_full_gp_at_its_own_rows_is_the_root_times_v():
    """f = m + R v, no variance, no quadrature: log density written out in NumPy."""
    labels = (OWN[:, 0] > 0.0).astype(float)
    program = look(full_gp, OWN, labels)
    assert program.call.multiply_only == {"f"}
    v = rng.normal(size=9)
    L = np.linalg.cholesky(matern52(OWN, OWN) + 1.7e-8 * np.eye(9))
    f = 0.4 * OWN[:, 0] + 0.2 + L @ v
    expected = -np.logaddexp(0.0, np.where(labels == 1.0, -f, f)).sum()
    expected += -0.5 * v @ v - 4.5 * np.log(2.0 * np.pi)
    found = Target(program.call).log_density({"f": jnp.asarray(v)})
    assert_allclose(found, expected, rtol=1e-12)
    # Without being told, the jitter of the root is a variance at each row.
    plain = Target(Call(full_gp, (OWN, labels))).log_density({"f": jnp.asarray(v)})
    assert_allclose(plain, expected, atol=1e-4)
    assert abs(float(plain) - expected) > 1e-10


def test_other_rows_are_not_the_own_ones():
    labels = np.ones(9)
    assert not look(full_gp, OWN + 1e-3, labels).call.own_rows
    assert not look(full_gp, OWN[:5], labels[:5]).call.own_rows
    shuffled = OWN[::-1]
    assert not look(full_gp, shuffled, labels).call.own_rows
    assert not look(gpx.models.svgp(POINTS), Z, np.ones(5)).call.own_rows


def test_a_draw_and_a_belief_agree_on_the_own_rows():
    labels = (OWN[:, 0] > 0.0).astype(float)
    fit = gpx.fit_lbfgs(
        full_gp, gpx.guides.WhitenedGaussian, OWN, labels, key=jr.key(0), progress=False
    )
    # What was fitted with the root alone predicts as the conditional does.
    loc, scale = (np.asarray(fit.params[f"f_auto_{n}"]) for n in ("loc", "scale_tril"))
    L = np.linalg.cholesky(matern52(OWN, OWN) + 1.7e-8 * np.eye(9))
    latent = fit.predict(OWN, of="f")
    assert_allclose(latent.mean, 0.4 * OWN[:, 0] + 0.2 + L @ loc, atol=1e-5)
    assert_allclose(latent.var, np.sum((L @ scale) ** 2, axis=1), atol=1e-5)


WIDE = np.ones((20, 2))


def by_columns(X, E, y=None):
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    with numpyro.plate("data", X.shape[0]) as i:
        gpx.observe("y", f(X[i, :1]), NORMAL, obs=y, rows=i, offset=E[i, 0])


def by_axes(X, E, y=None):
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    with numpyro.plate("data", X.shape[0]) as i:
        offset = jnp.take(E, i, axis=1)[0]
        gpx.observe("y", f(X[i]), NORMAL, obs=y, rows=i, offset=offset)


def in_a_branch(X, E, y=None):
    f = gpx.gp("f", KERNEL, inducing=POINTS)
    with numpyro.plate("data", X.shape[0]) as i:
        offset = jax.lax.cond(X[0, 0] > 9.0, lambda: 0.0 * E[i], lambda: E[i])
        gpx.observe("y", f(X[i]), NORMAL, obs=y, rows=i, offset=offset)


@pytest.mark.parametrize(
    "model, E, words",
    [
        (by_columns, WIDE[:5], "`E` has 5 rows and is indexed by plate `data`"),
        (by_columns, np.ones((40, 2)), "`E` has 40 rows and is indexed by plate"),
        (by_axes, WIDE[:5].T, "`E` has 5 entries along axis 1 and is indexed by plate"),
        (in_a_branch, np.ones(5), "5 rows (and )?is indexed by plate `data`"),
    ],
)
def test_rows_are_followed_through_columns_axes_and_branches(model, E, words):
    with pytest.raises(ValueError, match=words):
        look(model, X, E, Y)


def test_right_lengths_pass_through_columns_axes_and_branches():
    for model, E in (
        (by_columns, WIDE), (by_axes, WIDE.T), (in_a_branch, np.ones(20))
    ):  # fmt: skip
        assert look(model, X, E, Y).units["data"].size == 20


def test_learnt_points_may_start_at_the_arguments():
    def model(X, y=None):
        points = gpx.inducing.Points(X[:5], learn=True)
        f = gpx.gp("f", KERNEL, inducing=points)
        with numpyro.plate("data", X.shape[0]) as i:
            gpx.observe("y", f(X[i]), NORMAL, obs=y, rows=i)

    assert look(model, X, Y).structure.params == ("f/Z",)


def test_a_parameter_that_starts_at_1_is_not_taken_for_1():
    """Inputs warped by a parameter are the own rows at its start alone."""

    def warped(X, y=None):
        relevance = numpyro.param("relevance", jnp.ones(1))
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Data(OWN))
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(relevance * X), NORMAL, obs=y)

    program = look(warped, OWN, OWN[:, 0])
    assert not program.call.own_rows and program.target == "sparse"
    v = jnp.asarray(rng.normal(size=9))
    found = [
        float(
            Target(program.call, params={"relevance": jnp.asarray([r])}).log_density(
                {"f": v}
            )
        )
        for r in (1.0, 0.3)
    ]
    assert abs(found[0] - found[1]) > 0.1


def test_a_parameter_that_starts_at_0_is_not_taken_for_0():
    def shifted(X, y=None):
        shift = numpyro.param("shift", jnp.zeros(1))
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Data(OWN))
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X + shift), NORMAL, obs=y)

    program = look(shifted, OWN, OWN[:, 0])
    assert not program.call.own_rows and program.target == "sparse"


def test_a_minibatch_of_the_full_gp_is_not_all_of_its_rows():
    """All minibatches average to the density of all rows."""

    def model(X, y=None, *, batch_size=None):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Data(OWN))
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            gpx.observe("y", f(X[i]), NORMAL, obs=y, rows=i)

    program = look(model, OWN, OWN[:, 0], batch_size=3)
    assert program.call.own_rows and not program.batched.own_rows
    z = {"f": jnp.asarray(rng.normal(size=9))}
    whole = Target(program.call).log_density(z)
    parts = [
        Target(program.batched).log_density(z, batch={"data": jnp.arange(k, k + 3)})
        for k in (0, 3, 6)
    ]
    # The jitter of the root is a variance where rows are not known to be the own ones.
    assert_allclose(np.mean(parts), whole, rtol=1e-5)


def test_the_full_gp_is_exact_only_at_its_own_rows():
    labels = np.ones(9)
    assert look(full_gp, OWN, labels).target == "exact"
    assert look(full_gp, OWN[::-1], labels).target == "exact"
    assert look(full_gp, OWN[:5], labels[:5]).target == "exact"
    assert look(full_gp, OWN + 1e-3, labels).target == "sparse"


def test_tables_as_long_as_the_data_are_not_cut_into_chunks():
    group = (np.arange(20) * 7) % 20

    def model(X, group, table, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", X.shape[0]) as i:
            shift = table[group[i]]
            gpx.observe("y", f(X[i]), NORMAL, obs=y, rows=i, offset=shift)

    table = np.linspace(-3.0, 3.0, 20)
    found = look(model, X, group, table, Y)
    assert found.units["data"].arguments == {"X", "group", "y"}
    fit = gpx.fit_svi(model, gpx.guides.WhitenedGaussian, X, group, table, Y, **QUICK)
    cut = fit.predict(X, group, table, chunk_rows=8).mean
    assert_allclose(cut, fit.predict(X, group, table, chunk_rows=None).mean, rtol=1e-12)


def grouped(X, group, y=None):
    f = gpx.gp("f", KERNEL, inducing=POINTS, num_outputs=3)
    with numpyro.plate("data", X.shape[0]) as i:
        gpx.observe("y", f(X[i]).take(group[i]) + 1.0, NORMAL, obs=y, rows=i)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_groups_that_are_not_there_are_named(wrong):
    group = np.arange(20) % 3
    words = f"`take` at site `y` needs columns 0 to 2; got {wrong}, in 1 of 20 rows"
    with pytest.raises(ValueError, match=words):
        look(grouped, X, np.where(np.arange(20) == 4, wrong, group), Y)
    fit = gpx.fit_svi(grouped, gpx.guides.WhitenedGaussian, X, group, Y, **QUICK)
    fit.predict(X[:3], group[:3])
    with pytest.raises(ValueError, match=f"got {wrong}, in 1 of 4 rows"):
        fit.predict(X[:4], np.array([0, 1, wrong, 2]))


def test_rows_of_another_plate_are_refused():
    def model(X, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("first", 20) as i:
            numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("second", 20) as j:
            gpx.observe("y", f(X[j]), NORMAL, obs=y, rows=i)

    with pytest.raises(ValueError, match="must be the rows of plate `second` as they"):
        look(model, X, Y)


def test_targets_are_not_taken_for_other_arguments():
    fit = gpx.fit_svi(masked, gpx.guides.WhitenedGaussian, X, Y, np.ones(20, bool),
                      inside=True, **QUICK)  # fmt: skip
    with pytest.raises(ValueError, match="without targets; got `y`, which holds them"):
        fit.predict(X[:3], np.ones(3), np.ones(3, bool), inside=True)


def test_two_input_sets_have_parts_and_scores_of_their_own():
    X2, counts = rng.uniform(size=(13, 1)), np.arange(13.0) % 3
    fit = gpx.fit_svi(two_sets, gpx.guides.WhitenedGaussian, X, X2, Y, counts, **QUICK)
    parts = fit.parts(X[:3], X2[:7], site="y2")
    at = fit.predict(X[:3], X2[:7], site="y2", of="g")
    assert_allclose(parts["g"].mean, at.mean, rtol=1e-10)
    scored = gpx.compare({"svi": fit}, (X[:3], X2[:7]), counts[:7], site="y2")
    assert scored.num_rows == 7


def mixing(X, y=None, *, keep=None):
    g = gpx.gp("g", KERNEL, inducing=POINTS, num_outputs=2)
    with numpyro.plate("data", X.shape[0]):
        A = np.array([[1.0, 0.3], [0.9, 0.2], [-0.5, 1.0]])
        gpx.observe("y", A @ g(X), NORMAL, obs=y, mask=keep)


def test_a_row_of_dependent_outputs_is_scored_jointly_masked_or_not():
    targets = np.stack([Y, Y, -Y], axis=1)
    everything = np.ones((20, 3), bool)
    guide = gpx.guides.WhitenedGaussian
    fits = [
        gpx.fit_svi(mixing, guide, X, targets, keep=keep, **QUICK)
        for keep in (None, everything)
    ]
    plain, masked = (fit.to_arviz().log_predictive_density["y"].values for fit in fits)
    assert_allclose(plain, masked, rtol=1e-9)
    # Functions, draws and densities of the latent know the dependence.
    fit = fits[0]
    functions = fit.functions(jr.key(0), 50)(X[:4])
    assert np.all(np.isfinite(functions))
    latent = fit.predict(X[:4], of="latent")
    assert np.corrcoef(latent.draws[:, 0].T)[0, 1] > 0.9


def test_groups_are_looked_at_again_at_each_prediction_and_inside_products():
    """A second call of the same shapes has groups of its own."""

    def model(X, group, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS, num_outputs=3)
        h = gpx.gp("h", KERNEL, inducing=POINTS)
        with numpyro.plate("data", X.shape[0]) as i:
            latent = f(X[i]).take(group[i]) * h(X[i])
            gpx.observe("y", latent, NORMAL, obs=y, rows=i)

    group = np.arange(20) % 3
    fit = gpx.fit_svi(model, gpx.guides.WhitenedGaussian, X, group, Y, **QUICK)
    fit.predict(X, group)
    with pytest.raises(ValueError, match="got 3, in 6 of 20 rows"):
        fit.predict(X, group + 1)


@pytest.mark.parametrize(
    "one_by_one",
    [
        lambda table, i: jax.lax.map(lambda k: table[k], i),
        lambda table, i: jax.lax.scan(lambda c, k: (c, table[k]), 0, i)[1],
    ],
)
def test_rows_are_followed_into_loops_over_them(one_by_one):
    def model(X, exposure, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", X.shape[0]) as i:
            latent = f(X[i]) + one_by_one(exposure, i)
            gpx.observe("y", latent, NORMAL, obs=y, rows=i)

    look(model, X, np.ones(20), Y)
    with pytest.raises(ValueError, match="`exposure` has 3 rows and is indexed"):
        look(model, X, np.ones(3), Y)


def test_a_plate_of_some_rows_says_how_to_take_them():
    """As in a model of the next row given the last."""

    def model(X, y=None, *, cut=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", 19) as i:
            y = None if y is None else y[i + 1]
            gpx.observe("y", f(X[:cut][i]), NORMAL, obs=y)

    words = "`data` has size 19, but `X` has 20 rows.*cut it first: `X\\[:19\\]`"
    with pytest.raises(ValueError, match=words):
        look(model, X, Y)
    look(model, X, Y, cut=-1)


def test_a_plate_that_subsamples_and_indexes_nothing_is_named():
    """The same rows would count for all others."""

    def model(X, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", 1000, subsample_size=20):
            gpx.observe("y", f(X), NORMAL, obs=y)

    words = "Plate `data` around site `y` subsamples 20 of 1000 rows, and nothing is"
    with pytest.raises(ValueError, match=words):
        look(model, X, Y)


def test_offsets_that_are_not_finite_are_named():
    exposure = np.where(np.arange(20) == 3, 0.0, 1.0)

    def model(X, exposure, y=None):
        f = gpx.gp("f", KERNEL, inducing=POINTS)
        with numpyro.plate("data", X.shape[0]) as i:
            known = jnp.log(exposure)[i]
            gpx.observe("y", f(X[i]), NORMAL, obs=y, rows=i, offset=known)

    words = r"`offset` of site `y` must be finite; got -inf at index \(3,\)"
    with pytest.raises(ValueError, match=words):
        look(model, X, exposure, Y)
    look(model, X, exposure + 1.0, Y)


def test_lbfgs_refuses_minibatches():
    with pytest.raises(ValueError, match="`fit_lbfgs` needs all rows.*`fit_svi`"):
        gpx.fit_lbfgs(
            exposed, gpx.guides.WhitenedGaussian, X, np.ones(20), Y,
            key=jr.key(0), batch_size=5,
        )  # fmt: skip


def test_a_matrix_of_functions_is_columns_in_its_shape():
    def model(X, y=None, *, num_outputs=6):
        W = gpx.gp("W", KERNEL, inducing=POINTS, num_outputs=num_outputs)
        f = gpx.gp("f", KERNEL, inducing=POINTS, num_outputs=2)
        table = np.arange(6).reshape(3, 2)
        with numpyro.plate("data", X.shape[0]) as i:
            latent = W(X[i])[:, table] @ f(X[i])
            gpx.observe("y", latent, NORMAL, obs=y, rows=i)

    table = np.stack([Y, -Y, 0.5 * Y], axis=1)
    fit = gpx.fit_svi(model, gpx.guides.WhitenedGaussian, X, table, **QUICK)
    text = str(gpx.compare({"first": fit, "again": fit}, X, table))
    assert "coverage" in text and "nan" not in text
    with pytest.raises(TypeError, match=r"whole number; got \(3, 2\).*columns in its"):
        look(model, X, table, num_outputs=(3, 2))
