"""Annotations and ranks are enforced where conftest.py says: a move does not end it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.numerics.bijections.density import log_density
from numpyro_gpx.numerics.factor import factorise
from numpyro_gpx.processes.collapse import collapsed_bound

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(gpx.__file__).parent
VECTOR = jnp.zeros(3)
KERNEL = gpx.kernels.RBF(1.3, 0.7)

# One call for each enforced folder with an argument of the wrong rank.
WRONG = {
    "kernels": lambda: KERNEL.evaluate(jnp.zeros((2, 2)), VECTOR),
    "likelihoods": lambda: gpx.likelihoods.Laplace(0.3).log_prob("y", VECTOR),
    "numerics": lambda: factorise(VECTOR),
    "processes": lambda: collapsed_bound(
        KERNEL, gpx.inducing.Points(np.eye(2)), VECTOR, VECTOR, noise_var=0.3
    ),
}


def test_every_enforced_folder_has_a_case_here(array_code):
    assert set(WRONG) == set(array_code)


@pytest.mark.parametrize("folder", WRONG)
def test_annotations_hold_at_run_time(folder):
    with pytest.raises(jaxtyping.TypeCheckError):
        WRONG[folder]()


def test_folders_inside_are_enforced_too():
    with pytest.raises(jaxtyping.TypeCheckError):
        log_density(gpx, VECTOR)


def test_enforced_folders_exist_on_both_sides(array_code):
    for name in array_code:
        assert (PACKAGE / name).is_dir(), name
        assert list((TESTS / name).glob("test_*.py")), name


def test_ranks_are_spelled_out_in_these_folders_and_not_elsewhere(forbids_promotion):
    def forbidden(path):
        return forbids_promotion(TESTS / path)

    assert forbidden("kernels/test_formulas.py")
    assert forbidden("processes/test_latent.py")
    assert not forbidden("results/test_fit.py")
    assert jax.config.values["jax_numpy_rank_promotion"] == "allow"


def test_long_files_are_there(long_files):
    names = {path.name for path in TESTS.rglob("test_*.py")}
    assert set(long_files) <= names
