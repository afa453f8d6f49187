"""Saved fits: the same to the last bit, refused with another model."""

import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_array_equal
from numpyro.infer import HMC, MCMC

import numpyro_gpx as gpx
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.compile_cache import clear, num_compiled
from numpyro_gpx.program.program import Program
from numpyro_gpx.results import same_model
from numpyro_gpx.results.archive import read_archive, write_archive
from numpyro_gpx.results.posteriors import ChainPosterior

_rng = np.random.default_rng(5)
X = _rng.normal(size=(12, 1))
Y = np.sin(X[:, 0])
Y2 = np.hstack([Y[:, None], X])
X_NEW = np.linspace(-1.0, 1.0, 5)[:, None]
Z = np.linspace(-2.0, 2.0, 4)[:, None]
OPTIONS = {"key": jr.key(0), "progress": False}


def make(
    kernel=gpx.kernels.RBF, points=Z, noise=0.3, prior=None, likelihood=None, scale=1.3
):
    """A model; each argument is something that may be another one at the loading."""
    prior = dist.LogNormal(0.0, 1.0) if prior is None else prior
    likelihood = gpx.likelihoods.Gaussian(noise) if likelihood is None else likelihood

    def model(inputs, y=None, *, batch_size=None, table=None):
        lengthscale = numpyro.sample("lengthscale", prior)
        numpyro.deterministic("twice", 2.0 * lengthscale)
        inducing = gpx.inducing.Points(jnp.asarray(points))
        f = gpx.gp("f", kernel(scale, lengthscale), inducing=inducing)
        with numpyro.plate("data", inputs.shape[0], subsample_size=batch_size) as i:
            gpx.observe("y", f(inputs[i]), likelihood, obs=y, rows=i)

    return model


def with_everything(inputs, y=None, *, batch_size=None, table=None):
    """A parameter, and arguments that hold others."""
    table = {"a": [np.float32(0.4)], "b": (0.0, 0.1)} if table is None else table
    offset = numpyro.param("offset", 0.2) + table["b"][1]
    f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(jnp.asarray(Z)))
    noise = gpx.likelihoods.Gaussian(table["a"][0])
    with numpyro.plate("data", inputs.shape[0], subsample_size=batch_size) as i:
        gpx.observe("y", f(inputs[i] + offset), noise, obs=y, rows=i)


def decoder(y=None, *, num_rows=None, batch_size=None):
    num_rows = num_rows if y is None else y.shape[0]
    f = gpx.gp("f", gpx.kernels.RBF(), num_outputs=2, inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", num_rows, subsample_size=batch_size) as i:
        h = numpyro.sample("h", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        gpx.observe("y", f(h), gpx.likelihoods.Gaussian(0.3), obs=y, rows=i)


deep = gpx.models.deep_gp(
    gpx.inducing.Points(Z),
    widths=(1,),
    kernel=gpx.kernels.RBF(1.3, 0.9),
    likelihood=gpx.likelihoods.Gaussian(0.3),
)


def _svi(model, *args, guide=gpx.guides.WhitenedGaussian, **options):
    return gpx.fit_svi(model, guide, *args, num_steps=3, **{**OPTIONS, **options})


def _everything():
    table = {"a": [np.float32(0.4)], "b": (None, jnp.full(1, 0.1, "bfloat16"))}
    with gpx.jitter(1e-5):
        return _svi(
            with_everything, X, Y, batch_size=5, table=table, key=jr.key(3, impl="rbg")
        )


def _float32():
    noise = gpx.likelihoods.Gaussian(np.float32(0.3))
    model = make(points=Z.astype("f4"), likelihood=noise)
    return _svi(model, X.astype("f4"), Y.astype("f4"))


def _gplvm():
    def guide(model):
        return gpx.guides.UnscentedLatent(gpx.guides.WhitenedGaussian(model))

    loss = gpx.infer.ImportanceWeighted(3)
    return _svi(decoder, Y2, guide=guide(decoder), loss=loss, batch_size=5)


def line(inputs, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", inputs.shape[0]):
        numpyro.sample("y", dist.Normal(slope * inputs[:, 0], 0.3), obs=y)


def _from_mcmc():
    mcmc = MCMC(HMC(line), num_warmup=5, num_samples=7, progress_bar=False)
    mcmc.run(jr.key(0), jnp.asarray(X), jnp.asarray(Y), extra_fields=("energy",))
    return gpx.Fit.from_mcmc(mcmc, X, Y)


def _chains(fit, **options):
    return fit(make(), X, Y, num_warmup=5, num_samples=6, **OPTIONS, **options)


FITS = {
    "everything": _everything,
    "float32": _float32,
    "lbfgs": lambda: gpx.fit_lbfgs(
        make(), gpx.guides.OptimalGaussian, X, Y, max_steps=3, **OPTIONS
    ),
    "gplvm": _gplvm,
    "deep": lambda: _svi(deep, X, Y),
    "nuts": lambda: _chains(gpx.fit_nuts, num_chains=2),
    "sghmc": lambda: _chains(gpx.fit_sghmc, batch_size=5),
    "from_mcmc": _from_mcmc,
}
_MADE = {}


def fit_of(name):
    """The fit of this name, made once."""
    if name not in _MADE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gpx.FitWarning)
            _MADE[name] = FITS[name]()
    return _MADE[name]


def predicted(fit):
    if fit.model is decoder:
        return fit.predict(num_rows=3)
    return fit.predict(X_NEW)


def assert_same_values(one, other):
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(leaves, others, strict=True):
        assert getattr(x, "dtype", type(x)) == getattr(y, "dtype", type(y))
        assert_array_equal(x, y)


KEPT = (
    "params", "sample_stats", "info", "seconds", "seconds_compiling", "batch_size",
    "jitter", "engine", "target", "approximation", "is_mcmc",
)  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_fits_come_back_to_the_last_bit(name, tmp_path):
    fit = fit_of(name)
    fit.save(tmp_path / "fit")
    again = gpx.load(tmp_path / "fit", fit.model)
    assert_same_values(dict(again.chains(8)), dict(fit.chains(8)))
    assert_array_equal(predicted(again).mean, predicted(fit).mean)
    assert_array_equal(predicted(again).var, predicted(fit).var)
    assert_array_equal(again.elbo(3), fit.elbo(3))
    for kept in KEPT:
        assert_same_values(getattr(again, kept), getattr(fit, kept))
    assert again.program.batched.batch_size == fit.program.batched.batch_size
    assert repr(again) == repr(fit) and again.notes == fit.notes
    assert again.facts == fit.facts and again.loss == fit.loss
    assert_same_values(again.call.args, fit.call.args)
    assert_same_values(again.call.kwargs, fit.call.kwargs)
    # Once more, from the loaded one.
    again.save(tmp_path / "again")
    (record, arrays), (same, found) = map(
        read_archive, (tmp_path / "fit", tmp_path / "again")
    )
    assert record == same and arrays.keys() == found.keys()
    gpx.load(tmp_path / "again", fit.model)


def test_the_fits_above_have_what_they_are_there_for():
    """Else they would say nothing about it."""
    fit = fit_of("everything")
    assert fit.jitter == 1e-5 and fit.params["offset"] and fit.notes[0].evidence
    table = fit.call.kwargs["table"]
    assert table["a"][0].dtype == np.float32 and table["b"][1].dtype == "bfloat16"
    assert str(jr.key_impl(fit.posterior.key)) == "rbg" and fit.batch_size == 5
    assert fit_of("float32").call.args[0].dtype == np.float32
    assert fit_of("deep").structure.noise and fit_of("gplvm").structure.row_sites


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file of a fit of `make()`."""
    path = tmp_path_factory.mktemp("saved") / "fit.npz"
    fit_of("lbfgs").save(path)
    return path


CHANGED = {
    "kernel": {"kernel": gpx.kernels.Matern32},
    "kernel's constant": {"scale": 1.4},
    "points": {"points": Z + 0.01},
    "noise": {"noise": 0.31},
    "likelihood": {"likelihood": gpx.likelihoods.StudentT(5.0, 0.3)},
    "prior": {"prior": dist.LogNormal(0.0, 1.1)},
}


@pytest.mark.parametrize("what", CHANGED)
def test_another_model_is_refused(what, saved):
    with pytest.raises(ValueError, match=r"not the one .* log density at three draws"):
        gpx.load(saved, make(**CHANGED[what]))


def test_models_of_other_sites_or_arguments_are_refused(saved):
    with pytest.raises(ValueError, match=r"shapes {.*\[4\]}; it has {.*\[3\]}"):
        gpx.load(saved, make(points=Z[1:]))
    with pytest.raises(ValueError, match=r"not the one .* in `.*fit.npz` it raises"):
        gpx.load(saved, lambda y, *, num_rows: None)


def shifted(shift, factor=2.0):
    shift = jnp.asarray(shift)

    def model(inputs, y=None, *, batch_size=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        numpyro.deterministic("twice", factor * lengthscale)
        inducing = gpx.inducing.Points(jnp.asarray(Z))
        f = gpx.gp("f", gpx.kernels.RBF(1.0, lengthscale), inducing=inducing)
        with numpyro.plate("data", inputs.shape[0], subsample_size=batch_size) as i:
            latent = f(inputs[i]) + shift[i]
            gpx.observe("y", latent, gpx.likelihoods.Gaussian(0.3), obs=y, rows=i)

    return model


@pytest.mark.parametrize("other, words", [
    (shifted(np.arange(12.0) * (np.arange(12) > 5)), r"other arrays, of shapes.*12"),
    (shifted(np.zeros(12), factor=3.0), r"deterministic sites \['twice'\]"),
], ids=["rows beyond the first batch", "deterministic"])  # fmt: skip
def test_what_the_densities_of_a_minibatch_do_not_show_is_refused(
    other, words, tmp_path
):
    model = shifted(np.zeros(12))
    with pytest.warns(gpx.FitWarning):
        fit = _svi(model, X, Y, batch_size=5)
    fit.save(tmp_path / "fit")
    gpx.load(tmp_path / "fit", shifted(np.zeros(12)))
    with pytest.raises(ValueError, match=words):
        gpx.load(tmp_path / "fit", other)


def test_the_same_model_defined_anew_is_loaded(saved):
    again, fit = gpx.load(saved, make()), fit_of("lbfgs")
    assert_array_equal(again.predict(X_NEW).mean, fit.predict(X_NEW).mean)


def edited(path, target, change):
    """A file that `save` could have written, had the fit been another one."""
    record, arrays = read_archive(path)
    change(record, arrays)
    write_archive(target, record, arrays)
    return target


def _as_of_another_jax(record, arrays):
    record["fingerprint"] = "of another lowering"
    record["versions"]["jax"] = "0.0.1"


@pytest.mark.parametrize("name", ["gplvm", "deep"])
def test_another_jax_is_no_other_model(name, tmp_path):
    """Nothing random is compared: other versions draw other numbers."""
    fit = fit_of(name)
    fit.save(tmp_path / "old")
    path = edited(tmp_path / "old", tmp_path / "fit", _as_of_another_jax)
    clear()  # programs hold keys
    with jax.default_prng_impl("rbg"):
        gpx.load(path, fit.model)
    clear()


def test_another_model_is_told_from_another_jax(saved, tmp_path):
    path = edited(saved, tmp_path / "fit", _as_of_another_jax)
    with pytest.raises(ValueError, match=r"not the one .*changed as well: .*0.0.1 ->"):
        gpx.load(path, make(noise=0.30001))


@pytest.mark.parametrize("name", ["lbfgs", "float32"])
@pytest.mark.parametrize("error", [1e-8, 1e-5, 1e-2])
def test_densities_agree_to_the_digits_that_there_are(name, error, tmp_path):
    fit = fit_of(name)

    def change(record, arrays):
        _as_of_another_jax(record, arrays)
        arrays["compared/densities"] = arrays["compared/densities"] * (1.0 + error)

    fit.save(tmp_path / "old")
    path = edited(tmp_path / "old", tmp_path / "fit", change)
    if error < (1e-4 if name == "float32" else 1e-7):
        gpx.load(path, fit.model)
    else:
        with pytest.raises(ValueError, match="is not the one that was fitted"):
            gpx.load(path, fit.model)


def test_densities_of_fits_on_minibatches_need_no_more_rows(tmp_path, monkeypatch):
    """All rows may be more than fit into memory."""
    sizes = []

    def noted(fn, call, *args):
        sizes.append(call.batch_size)
        return run(fn, call, *args)

    run = same_model.run
    monkeypatch.setattr(same_model, "run", noted)
    fit_of("everything").save(tmp_path / "fit")
    assert sizes == [5]


def _a_nan(record, arrays):
    name = next(name for name in arrays if name.startswith("params/"))
    arrays[name] = np.full_like(arrays[name], np.nan)


def _jitter(value):
    return lambda record, arrays: record.update(jitter=value)


@pytest.mark.parametrize(
    "change, message",
    [
        (_a_nan, r"of `params\['.*'\]` are not finite"),
        (_jitter(100.0), "relative jitter is 100.0, and must lie between 0 and 0.01"),
        (_jitter(-1e-6), "relative jitter is -1e-06"),
        (_jitter(float("nan")), "relative jitter is nan"),
    ],
)
def test_numbers_that_no_fit_comes_to_are_refused(change, message, saved, tmp_path):
    path = edited(saved, tmp_path / "fit", change)
    with pytest.raises(ValueError, match=f"fit` is damaged: .*{message}.* Fit again"):
        gpx.load(path, make())


def test_fits_with_such_numbers_are_not_saved(saved, tmp_path):
    fit = gpx.load(saved, make())
    fit.params = {name: x * np.nan for name, x in fit.params.items()}
    with pytest.raises(ValueError, match="The fit is damaged: .* not finite"):
        fit.save(tmp_path / "fit")
    assert not list(tmp_path.iterdir())


def test_files_of_the_other_precision_are_refused(saved, tmp_path):
    path = edited(saved, tmp_path / "fit", lambda record, _: record.update(x64=False))
    with pytest.raises(ValueError, match="saved with `jax_enable_x64` False"):
        gpx.load(path, make())


def test_a_model_that_has_changed_since_the_fit_is_not_saved(tmp_path):
    """The file would vouch for the model as it is now."""
    noise = {"scale": 0.3}

    def model(inputs, y=None):
        f = gpx.gp("f", gpx.kernels.RBF(), inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", inputs.shape[0]):
            gpx.observe("y", f(inputs), gpx.likelihoods.Gaussian(noise["scale"]), obs=y)

    posterior = ChainPosterior({"f": _rng.normal(size=(1, 5, 4))})
    program = Program.unchecked(Call(model, (X, Y)))
    fit = gpx.Fit(program, posterior, facts=gpx.engines.NUTS().facts)
    fit.save(tmp_path / "fit")
    before = (tmp_path / "fit").read_bytes()
    noise["scale"] = 0.4
    with pytest.raises(ValueError, match="reads values that have changed since the"):
        fit.save(tmp_path / "fit")
    with pytest.raises(ValueError, match="is not the one that was fitted"):
        gpx.load(tmp_path / "fit", model)
    noise["scale"] = 0.3
    # An argument that cannot be saved leaves the old file, too.
    fit.info = {"x": [object()]}
    with pytest.raises(ValueError, match="`info/x/0` of the fit cannot be saved"):
        fit.save(tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before


class MyLoss(gpx.infer.ELBO):
    """A user's."""

    @property
    def config(self):
        return {"function": len}


def test_a_loss_of_the_users_is_left_out_with_a_warning(saved, tmp_path):
    fit = gpx.load(saved, make())
    fit.loss = MyLoss()
    with pytest.warns(UserWarning, match="The loss MyLoss cannot be made again"):
        fit.save(tmp_path / "fit")
    assert type(gpx.load(tmp_path / "fit", make()).loss) is gpx.infer.ELBO


def test_models_without_latent_sites(tmp_path):
    def model(inputs, y=None):
        gpx.exact("y", gpx.kernels.RBF(), inputs, 0.3, obs=y)

    program = Program.unchecked(Call(model, (X, Y)))
    posterior = ChainPosterior({}, fixed=("scale",))
    fit = gpx.Fit(program, posterior, facts=gpx.engines.NUTS().facts)
    fit.save(tmp_path / "fit")
    again = gpx.load(tmp_path / "fit", model)
    assert_array_equal(again.predict(X_NEW).mean, fit.predict(X_NEW).mean)
    assert again.posterior.fixed == ("scale",)


def test_saving_and_loading_once_more_compile_nothing(saved, tmp_path):
    fit = fit_of("lbfgs")
    fit.save(tmp_path / "fit")
    gpx.load(tmp_path / "fit", fit.model)
    before = num_compiled()
    fit.save(tmp_path / "fit")
    gpx.load(tmp_path / "fit", fit.model)
    gpx.load(edited(saved, tmp_path / "new", _as_of_another_jax), fit.model)
    assert num_compiled() == before
