"""Engines as values: their settings, and settings that they do not have."""

import copy
import pickle

import pytest

import numpyro_gpx as gpx

ENGINES = gpx.engines


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ENGINES.NUTS(thining=2), r"of `NUTS`, .*Did you mean `thinning`\?"),
        (lambda: ENGINES.SVI(None, num_step=2), r"of `SVI`, .*mean `num_steps`\?"),
        (
            lambda: ENGINES.SVI(None, learning_rate=0.1),
            r"`learning_rate` is not a setting of `SVI`, which takes \['guide', .*"
            r"Did you mean `optimizer=optax.adam\(...\)`\?",
        ),
        (lambda: ENGINES.LBFGS(None, chain=3), r"of `LBFGS`, which takes .*\]\.$"),
        (lambda: ENGINES.SGHMC(draws=3), r"mean `num_samples`\?"),
    ],
)
def test_settings_that_an_engine_does_not_have_are_named(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_engines_are_copied_with_their_settings():
    engine = ENGINES.NUTS(num_samples=7)
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert other.num_samples == 7 and other.facts == engine.facts
