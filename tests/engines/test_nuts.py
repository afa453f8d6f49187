"""Options of NUTS and HMC reach NumPyro's kernels; chains side by side are the same."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import init_to_value

import numpyro_gpx as gpx
from numpyro_gpx.program.density import Target

E = gpx.engines
X = np.linspace(-1.0, 1.0, 12)[:, None]
Y = np.sin(3.0 * X[:, 0])
LENGTH = {"num_warmup": 20, "num_samples": 12, "num_chains": 2}


def model(X, y=None):
    """Hyperparameters alone: little to compile."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(slope * X[:, 0], scale), obs=y)


def fit(engine=E.NUTS, **options):
    init = options.pop("init", None)
    how = engine(**{**LENGTH, **options})
    return gpx.fit(model, how, X, Y, key=jr.key(3), init=init, progress=False)


@pytest.fixture(scope="module")
def plain():
    return fit()


def test_vectorized_chains_are_the_sequential_ones(plain):
    side_by_side = fit(chain_method="vectorized")
    for name, x in plain.chains().items():
        assert_allclose(side_by_side.chains()[name], x, rtol=1e-6)
    stats = side_by_side.sample_stats
    np.testing.assert_array_equal(stats["n_steps"], plain.sample_stats["n_steps"])


def test_thinning_keeps_every_so_many_draws_of_the_same_chain(plain):
    thinned = fit(thinning=3)
    assert thinned.chains()["scale"].shape == (2, 4)
    assert_allclose(thinned.chains()["scale"], plain.chains()["scale"][:, 2::3])
    depths = plain.sample_stats["n_steps"][:, 2::3]
    np.testing.assert_array_equal(thinned.sample_stats["n_steps"], depths)


def test_divergences_that_thinning_leaves_out_count_too(plain):
    thinned = fit(thinning=3)
    assert thinned.info["num_gradients"] == plain.info["num_gradients"]
    assert thinned.info["num_gradients"] > thinned.sample_stats["n_steps"].sum()


def test_the_log_density_of_a_draw_is_recorded_as_one(plain):
    draws = {name: jnp.asarray(x[0, 3]) for name, x in plain.chains().items()}
    target = Target(plain.call, structure=plain.structure)
    expected = target.log_density(plain.structure.unconstrain(draws))
    assert_allclose(plain.sample_stats["lp"][0, 3], expected, rtol=1e-6)


@pytest.mark.parametrize("make, words", [
    (lambda: E.NUTS(max_tree_depth=0), "`max_tree_depth`.* at least 1; got 0"),
    (lambda: E.NUTS(max_tree_depth="x"), "`max_tree_depth`.*got 'x'"),
    (lambda: E.NUTS(target_accept_prob="a"), "above 0 and below 1; got 'a'"),
    (lambda: E.NUTS(noise_sets=0), "`noise_sets`.*got 0"),
    (lambda: E.HMC(num_steps=0), "`num_steps`.*got 0"),
    (lambda: E.HMC(trajectory_length=-1.0), "`trajectory_length`.*got -1.0"),
    (lambda: E.HMC(trajectory_length=None), "`trajectory_length` or `num_steps`"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_trees_are_no_deeper_than_was_said(plain):
    assert fit(max_tree_depth=1).sample_stats["n_steps"].max() == 1
    assert plain.sample_stats["n_steps"].max() > 1


def test_a_higher_target_makes_smaller_steps():
    low, high = (fit(target_accept_prob=p, num_warmup=80) for p in (0.6, 0.99))
    assert np.all(high.info["step_size"] < low.info["step_size"].min())


def test_a_dense_mass_is_another_chain(plain):
    assert not np.allclose(
        fit(dense_mass=True).draws()["scale"], plain.draws()["scale"]
    )


@pytest.mark.parametrize("options", [
    {"init": {"scale": 0.5, "slope": 1.7}},
    {"init_strategy": init_to_value(values={"scale": 0.5, "slope": 1.7})},
], ids=["values", "strategy"])  # fmt: skip
@pytest.mark.parametrize("engine", [E.NUTS, E.HMC])
def test_chains_start_where_they_were_told(engine, options):
    still = {"step_size": 1e-7, "adapt_step_size": False, "num_warmup": 0}
    still |= {"adapt_mass_matrix": False, **options}
    if engine is E.HMC:
        still |= {"num_steps": 1}
    else:
        still |= {"max_tree_depth": 1}
    found = fit(engine, **still)
    assert_allclose(found.draws()["scale"], 0.5, rtol=1e-4)
    assert_allclose(found.draws()["slope"], 1.7, rtol=1e-4)


@pytest.mark.parametrize("init, words", [
    ({"scael": 0.5}, r"latent sites of the model, \['scale', 'slope'\]; got 'scael'"),
    ({"scale": -1.0}, r"`init\['scale'\]` must lie inside the support"),
    ({"scale": [1.0, 2.0]}, r"`init\['scale'\]` must have shape \(\); got \(2,\)"),
    (0.5, "`init` must be a fit"),
])  # fmt: skip
def test_starts_that_are_none_are_named(init, words):
    with pytest.raises((ValueError, TypeError), match=words):
        fit(init=init)


def test_a_fit_remembers_its_settings(plain):
    assert plain.facts.settings["target_accept_prob"] == 0.8
    assert plain.facts.settings["chain_method"] == "sequential"


def test_parallel_chains_are_refused_in_words():
    with pytest.raises(ValueError, match="use 'vectorized' or 'sequential'"):
        E.NUTS(chain_method="parallel")
