"""Notes on chains: each speaks where it must and is silent where it must be.

Independent draws are what good chains are at their best; on these the notes are silent
but for chance, at the rates that the tests state.
"""

import numpy as np
import pytest

from numpyro_gpx.results.chain_notes import hamiltonian_notes, mixing_notes


def kinds(chains):
    return [note.kind for note in mixing_notes(chains)]


def autoregression(rng, correlation, *shape):
    x = rng.normal(size=shape)
    for t in range(1, shape[1]):
        x[:, t] = correlation * x[:, t - 1] + np.sqrt(1 - correlation**2) * x[:, t]
    return x


def test_independent_draws_are_not_doubted():
    """None of 200 sets of 10 numbers: chains of 500 have R-hat 1 +- 0.003."""
    rng = np.random.default_rng(0)
    assert not any(kinds({"a": rng.normal(size=(2, 500, 10))}) for _ in range(200))


def test_chains_that_mix_well_are_not_doubted_either():
    """Correlation 0.6 leaves 500 of 2000 draws.

    NumPyro's estimate of it scatters: of 600 numbers one was taken for fewer than 100.
    At that rate more than 4 have probability 0.004.
    """
    rng = np.random.default_rng(1)
    found = [kinds({"a": autoregression(rng, 0.6, 2, 1000, 3)}) for _ in range(200)]
    assert sum(map(bool, found)) <= 4
    assert not any("r_hat" in one for one in found)


def test_chains_apart_are_named_with_their_worst_number():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 500, 3))
    x[1, :, 2] += 2.0
    notes = mixing_notes({"a": x, "b": rng.normal(size=(2, 500))})
    (note,) = [n for n in notes if n.kind == "r_hat"]
    assert "`a[2]`" in note.message and note.evidence["entries"] == 1
    assert note.severity == "doubt" and note.evidence["r_hat"] > 1.5


def test_a_chain_that_drifts_is_named_though_it_is_alone():
    x = np.linspace(0.0, 5.0, 400) + np.random.default_rng(3).normal(size=(1, 400))
    assert "r_hat" in kinds({"a": x})


@pytest.mark.parametrize("scale, shift", [(1e-200, 0.0), (1e200, 0.0), (1.0, 1e6)])
def test_units_do_not_matter(scale, shift):
    x = np.random.default_rng(4).normal(size=(2, 400))
    assert kinds({"a": shift + scale * x}) == []
    x[1] += 2.0
    assert "r_hat" in kinds({"a": shift + scale * x})


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numbers_that_overflowed_are_named_and_hide_no_others(dtype):
    x = np.random.default_rng(9).normal(size=(2, 400)).astype(dtype)
    apart = x + np.array([[0.0], [5.0]], dtype)
    huge = x.copy()
    huge[0, 7] = np.inf
    notes = mixing_notes({"a": huge, "b": x, "c": apart})
    assert [note.kind for note in notes] == ["not_finite", "r_hat", "ess"]
    assert "1 draws of `a`" in notes[0].message and notes[0].severity == "wrong"
    assert "`c`" in notes[1].message and notes[1].evidence["entries"] == 1
    assert kinds({"a": np.full((2, 400), np.nan)}) == ["not_finite"]


def test_numbers_near_the_largest_are_none_that_overflowed():
    """Their squares, and their sum, leave float64."""
    x = 1e308 * (1.0 + 0.1 * np.tanh(np.random.default_rng(9).normal(size=(2, 400))))
    assert kinds({"a": x}) == []


def test_chains_of_other_spread_have_not_met():
    x = np.random.default_rng(10).normal(size=(2, 500))
    x[1] *= 10.0
    assert "r_hat" in kinds({"a": x - x.mean(axis=1, keepdims=True)})


def test_few_effective_draws_are_counted():
    """Correlation 0.98 leaves 20 of 2000."""
    x = autoregression(np.random.default_rng(5), 0.98, 2, 1000)
    (note,) = [n for n in mixing_notes({"a": x}) if n.kind == "ess"]
    assert 5 < note.evidence["ess"] < 60 and "fewer than 100" in note.message


def test_a_chain_that_stands_is_named_and_fixed_sites_are_not():
    x = np.random.default_rng(6).normal(size=(2, 50, 2))
    x[1, :, 0] = 0.3
    (note,) = mixing_notes({"a": x})
    assert note.kind == "frozen" and "`a[0]`" in note.message
    x[1] = 0.3
    (note,) = mixing_notes({"a": x, "b": x, "c": x})
    assert "`a[0]`, `a[1]`, `b[0]` and 3 more" in note.message
    assert mixing_notes({"a": x}, fixed=("a",)) == []


def test_three_draws_say_nothing_and_no_sites_need_nothing():
    assert kinds({"a": np.random.default_rng(7).normal(size=(4, 3))}) == ["ess"]
    assert kinds({}) == []


def stats(*, diverging=0, cut=0.0, draws=1000):
    steps = np.full((2, draws // 2), 7)
    steps.reshape(-1)[: int(cut * draws)] = 1023
    flags = (np.arange(draws) < diverging).reshape(2, -1)
    return {"diverging": flags, "n_steps": steps}


def test_divergences_are_counted():
    (note,) = hamiltonian_notes(stats(diverging=1))
    assert note.kind == "divergences" and "1 of 1000 draws" in note.message
    assert hamiltonian_notes(stats()) == ()


@pytest.mark.parametrize("depth", [10, (6, 10)])
def test_trees_that_are_cut_off_are_counted_against_the_depth_of_draws(depth):
    (note,) = hamiltonian_notes(stats(cut=0.3), depth)
    assert note.kind == "tree_depth" and "30 %" in note.message
    assert hamiltonian_notes(stats(cut=0.04), depth) == ()
    assert hamiltonian_notes(stats(cut=0.3), 11) == ()
    # Of a pair the second is for draws, whatever the warm-up had.
    assert hamiltonian_notes(stats(cut=0.3), (10, 11)) == ()
    assert hamiltonian_notes(stats(cut=0.3)) == ()  # a sampler without trees
