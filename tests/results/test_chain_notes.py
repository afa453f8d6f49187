"""Notes on chains: what may stay where it is, and what has not moved."""

import numpy as np
import pytest

from numpyro_gpx.results.chain_notes import mixing_notes

RNG = np.random.default_rng(8)
# Four entries of labels, (chains, draws, entries): one label, a rare other one, labels
# that come and go, and another label in each chain.
LABELS = RNG.integers(0, 3, (2, 400, 4))
LABELS[:, :, 0] = 1
LABELS[:, :, 1] = 1
LABELS[0, [30, 200], 1] = 0
LABELS[:, :, 3] = [[0], [2]]


@pytest.mark.parametrize("entry, kinds", [(0, []), (1, []), (2, []), (3, ["frozen"])])
def test_labels_may_stay_at_a_likely_one(entry, kinds):
    chains = {"k": LABELS[:, :, entry], "a": RNG.normal(size=(2, 400))}
    assert [note.kind for note in mixing_notes(chains, discrete=("k",))] == kinds


@pytest.mark.parametrize("entry", [0, 1, 3])
def test_numbers_that_stay_have_not_moved(entry):
    (note,) = mixing_notes({"k": 1.0 * LABELS[:, :, entry]})
    assert note.kind == "frozen" and "`k`" in note.message
