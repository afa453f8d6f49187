"""Losses are values: equal settings make equal losses, which jit knows again."""

from numpyro_gpx.infer import ELBO, ImportanceWeighted


def test_losses_with_equal_settings_are_equal():
    assert ELBO() == ELBO()
    assert hash(ELBO()) == hash(ELBO())
    assert ELBO() != ELBO(draw_latents=True)
    assert ELBO(2) != ELBO(3)
    assert ImportanceWeighted(5) == ImportanceWeighted(5) != ImportanceWeighted(6)
    assert ImportanceWeighted(1) != ELBO()
    assert ELBO(2, draw_latents=True).bound() == ELBO(draw_latents=True)
