"""The default schedule of `SVI`: its rates, places, restarts and programs."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import autoguide

import numpyro_gpx as gpx
from numpyro_gpx.cache import num_compiled
from numpyro_gpx.engines.schedule import Schedule
from numpyro_gpx.engines.stopping import Stopper
from numpyro_gpx.engines.watch import Watch

E = gpx.engines
FAR = 1e4


def far(scale=1.0):
    """A target so far away that Adam's steps are of the learning rate each."""
    x = numpyro.sample("x", dist.Normal(0.0, 1e4))
    numpyro.factor("target", -0.5 * ((x - FAR) / scale) ** 2)


class Slow(autoguide.AutoDelta):
    learning_rate = 0.02


def fit(num_steps, guide=Slow, model=far, init=None, **options):
    engine = E.SVI(guide, num_steps=num_steps, **options)
    with pytest.warns(gpx.FitWarning):
        return gpx.fit(model, engine, key=jr.key(0), init=init, progress=False)


def place(fit):
    return float(fit.params["x_auto_loc"])


def cosine(peak, shares):
    """From the peak to a hundredth of it."""
    return peak * (0.505 + 0.495 * np.cos(np.pi * np.asarray(shares)))


@pytest.fixture
def interrupted_after(monkeypatch):
    """Makes fits end after so many steps, as if Ctrl-C had been pressed then."""

    def after(number):
        loop = Watch.loop

        def cut(watch, phase, block, state, num_steps, **options):
            found = loop(watch, phase, block, state, number, **options)
            watch.cut = "interrupted"
            return found

        monkeypatch.setattr(Watch, "loop", cut)

    yield after


def test_rates_fall_along_a_cosine_to_a_hundredth():
    found = Schedule(0.3, 0.0, 7).rates(7)
    assert_allclose(found, cosine(0.3, np.arange(7) / 7), rtol=1e-12)
    assert_allclose(Schedule(0.3, 0.0, 7).rate(7), 0.003)


def test_steps_are_of_the_rates_of_the_guide():
    """Far from its target Adam moves by the learning rate, whatever the slope."""
    found = fit(30)
    start = place(fit(1)) - 0.02
    assert_allclose(place(found) - start, cosine(0.02, np.arange(30) / 30).sum(), 1e-3)
    assert found.info["learning_rate"] == 0.02
    assert found.info["schedule_place"] == 1.0


def test_another_number_of_steps_or_another_rate_is_the_same_program():
    class Fast(Slow):
        learning_rate = 0.07

    fit(4)
    before = num_compiled()
    fit(9)
    fit(6, Fast)
    assert num_compiled() == before


def test_an_interrupted_fit_goes_on_from_its_rate(interrupted_after, monkeypatch):
    """With the steps that were missing its rates are those of the whole fit."""
    with monkeypatch.context():
        interrupted_after(12)
        first = fit(30)
        monkeypatch.undo()
    assert first.info["interrupted"] and first.info["num_steps"] == 12
    assert_allclose(first.info["schedule_place"], 0.4)
    second = fit(18, init=first)
    rates = cosine(0.02, np.arange(12, 30) / 30)
    assert_allclose(place(second) - place(first), rates.sum(), 1e-3)
    assert second.info["schedule_place"] == 1.0
    # With fewer steps the rest of the curve is gone through faster.
    third = fit(9, init=first)
    rates = cosine(0.02, np.arange(12, 30, 2) / 30)
    assert_allclose(place(third) - place(first), rates.sum(), 1e-3)


def test_a_finished_fit_or_another_model_starts_the_curve_anew(
    interrupted_after, monkeypatch
):
    def nearer():
        far(2.0)

    whole = fit(5)
    again = fit(1, init=whole)
    assert_allclose(place(again) - place(whole), 0.02, 1e-3)
    with monkeypatch.context():
        interrupted_after(12)
        cut = fit(30)
        monkeypatch.undo()
    other = fit(3, model=nearer, init=cut)
    assert_allclose(
        place(other) - place(cut), cosine(0.02, np.arange(3) / 3).sum(), 1e-3
    )


def cliff():
    """A target beyond the place where its density ends, from which 0.5 is far."""
    x = numpyro.sample("x", dist.Normal(0.0, 1e4))
    numpyro.factor("target", jnp.sqrt(1.0 - x) * 0.0 + FAR * x)


class Hasty(autoguide.AutoDelta):
    learning_rate = 0.1


def test_nan_under_way_starts_again_at_a_lower_rate_and_says_so():
    zero = {"x": 0.0}
    found = fit(40, Hasty, cliff, init=zero)
    assert found.info["learning_rate"] == 0.03
    assert len(found.info["losses"]) == 40
    assert_allclose(place(found), cosine(0.03, np.arange(40) / 40).sum(), 1e-3)
    (note,) = [n for n in found.notes if n.kind == "learning_rate"]
    assert "became nan at step" in note.message and "from 0.03 instead of" in str(note)
    # Steps of 0.1 end beyond 1 after 10 of them, or soon after: the rate falls.
    assert 10 <= note.evidence["step"] <= 13


def test_where_a_lower_rate_does_not_help_the_jitter_comes_next():
    """80 steps from 0.03 lead to 1.2."""
    with (
        pytest.warns(RuntimeWarning, match="Starting again with a relative jitter"),
        pytest.raises(ValueError, match="did not help either"),
    ):
        gpx.fit_svi(
            cliff, Hasty, key=jr.key(0), num_steps=80, init={"x": 0.0}, progress=False
        )


def test_a_named_optimiser_has_no_schedule():
    found = fit(3, optimizer=optax.adam(0.5))
    assert_allclose(place(found) - place(fit(1)) + 0.02, 1.5, 1e-3)
    assert not {"learning_rate", "schedule_place"} & set(found.info)


class Flat:
    """What the stopper sees of a training whose loss lies still."""

    values = np.ones(100)

    def __init__(self, num_steps):
        self.num_steps = num_steps


@pytest.mark.parametrize(
    "schedule, stop", [(None, 600), (Schedule(0.1, 0, 4000), 3800)]
)
def test_the_loss_is_looked_at_in_the_last_fifth(schedule, stop):
    """Six blocks of 100, after step 3200 of 4000 if there is a schedule."""
    stopper = Stopper(0.1, schedule, 4000, 0)
    first = next(n for n in range(100, 4001, 100) if stopper(Flat(n)))
    assert first == stop
    assert stopper.notes(np.ones(first)) == []


def test_too_few_looks_are_no_evidence():
    """In the last fifth of 2000 steps there are 4; a loss at rest is not doubted."""
    schedule = Schedule(0.1, 0.0, 2000)
    stopper = Stopper(0.1, schedule, 2000, 0)
    assert not any(stopper(Flat(n)) for n in range(100, 2001, 100))
    assert stopper.looks == 4
    assert stopper.notes(np.ones(2000)) == []
    falling = stopper.notes(np.linspace(50.0, 0.0, 2000))
    assert [note.kind for note in falling] == ["not_converged"]
