"""What a guide is known to get wrong: told for such a model, and for no other."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal

import numpyro_gpx as gpx
from numpyro_gpx.guides.parts.base import set_up
from numpyro_gpx.guides.parts.doubts import doubts_of
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.program import Program

X = np.linspace(-1.0, 1.0, 12)[:, None]
GROUP = np.arange(12) % 3
Y = np.sin(2.0 * X[:, 0]) + 0.3 * GROUP
POINTS = gpx.inducing.Points(X[::4])


def observe(f, y):
    with numpyro.plate("data", 12):
        gpx.observe("y", f, gpx.likelihoods.Gaussian(0.2), obs=y)


def gp(name="f", **hyper):
    return gpx.gp(name, gpx.kernels.RBF(**hyper), inducing=POINTS)


def plain(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    observe(gp(lengthscale=lengthscale)(X), y)


def effects(X, y=None, *, tau=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0)) if tau is None else tau
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0.0, tau))
    observe(gp()(X) + a[GROUP], y)


def own_rows(X, y=None):
    """The full GP at its rows, which is no effect of its hyperparameters."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    kernel = gpx.kernels.RBF(lengthscale=lengthscale)
    observe(gpx.gp("f", kernel, inducing=gpx.inducing.Data(ROWS))(X), y)


ROWS = X.copy()


def centred(X, y=None):
    """An intercept as the mean function."""
    c = numpyro.sample("c", dist.Normal(0.0, 2.0))
    mean = gpx.means.Constant(c)
    observe(gpx.gp("f", gpx.kernels.RBF(), mean=mean, inducing=POINTS)(X), y)


def mixture(X, y=None):
    """Effects whose prior has two widths."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 3):
        widths = dist.Normal(0.0, tau * jnp.array([0.2, 1.0]))
        shares = dist.Categorical(probs=jnp.array([0.5, 0.5]))
        a = numpyro.sample("a", dist.MixtureSameFamily(shares, widths))
    observe(gp()(X) + a[GROUP], y)


def moved(X, y=None):
    """The place of a prior, not its spread, depends on another site."""
    centre = numpyro.sample("centre", dist.Normal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(centre, 1.0))
    observe(gp(lengthscale=lengthscale)(X), y)


def noncentred(X, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 3):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    observe(gp()(X) + (tau * z)[GROUP], y)


def added(X, y=None):
    observe(gp("f")(X) + gp("g", lengthscale=0.2)(X), y)


def fixed_effects(X, y=None):
    effects(X, y, tau=0.4)


def kinds(guide, model, **options):
    program = Program.of(Call(model, (jnp.asarray(X), jnp.asarray(Y))))
    guide = guide(model, **options)
    set_up(guide, program)
    return sorted(note.kind for note in doubts_of(guide, program))


WHITENED = gpx.guides.WhitenedGaussian


@pytest.mark.parametrize("guide, model, options, expected", [
    (WHITENED, plain, {}, []),
    (WHITENED, plain, {"theta": "full"}, []),
    (AutoNormal, plain, {}, []),
    (AutoDelta, plain, {}, []),
    (WHITENED, effects, {}, ["collapse"]),
    (gpx.guides.ConditionalGaussian, effects, {}, ["effects"]),
    (AutoDelta, effects, {}, ["collapse"]),
    (WHITENED, effects, {"theta": "full"}, ["effects"]),
    (AutoNormal, effects, {}, ["effects"]),
    (AutoMultivariateNormal, effects, {}, []),
    (gpx.guides.Flow, effects, {}, []),
    (WHITENED, own_rows, {"theta": "full"}, []),
    (gpx.guides.ConditionalGaussian, own_rows, {}, []),
    (WHITENED, centred, {"theta": "full"}, ["effects"]),
    (gpx.guides.ConditionalGaussian, centred, {}, []),
    (WHITENED, mixture, {}, ["collapse"]),
    (WHITENED, fixed_effects, {}, []),
    (WHITENED, fixed_effects, {"theta": "full"}, ["effects"]),
    (WHITENED, moved, {}, []),
    (WHITENED, noncentred, {}, []),
    (WHITENED, noncentred, {"theta": "full"}, ["effects"]),
    (WHITENED, added, {}, ["parts"]),
    (gpx.guides.Flow, added, {}, []),
    (AutoNormal, added, {}, ["parts"]),
])  # fmt: skip
def test_a_guide_is_doubted_where_it_is_known_to_be_wrong(
    guide, model, options, expected
):
    assert kinds(guide, model, **options) == expected


def test_the_note_names_the_sites_and_the_way_out():
    program = Program.of(Call(effects, (jnp.asarray(X), jnp.asarray(Y))))
    guide = WHITENED(effects)
    (note,) = doubts_of(guide, program)
    assert note.evidence == {"sites": ["a"], "scales": ["tau"]}
    assert note.severity == "wrong" and "gpx.fit_nuts" in note.advice


@pytest.mark.slow
def test_the_doubts_are_right():
    """A scale may collapse under points, and effects are too narrow beside NUTS.

    From where it starts the scale finds a local maximum; below, the bound rises without
    end.
    """
    quick = dict(key=jr.key(0), progress=False)
    point = gpx.fit_svi(effects, WHITENED, X, Y, num_steps=4000, **quick)
    small = {"tau": 0.01, "a": np.zeros(3)}
    collapsed = gpx.fit_svi(
        effects, WHITENED, X, Y, num_steps=1000, init=small, **quick
    )
    full = gpx.fit_svi(
        fixed_effects, WHITENED(fixed_effects, theta="full"), X, Y, num_steps=8000,
        **quick,
    )  # fmt: skip
    nuts = gpx.fit_nuts(fixed_effects, X, Y, **quick)
    assert point.draws(1)["tau"][0] > 0.1 > 0.002 > collapsed.draws(1)["tau"][0]
    assert collapsed.elbo().value > point.elbo().value + 3.0
    assert np.all(full.draws()["a"].std(0) < 0.7 * nuts.draws()["a"].std(0))


def test_plain_svi_is_doubted_alike():
    guide = WHITENED(effects)
    svi = numpyro.infer.SVI(effects, guide, numpyro.optim.Adam(0.01), gpx.infer.ELBO())
    params = svi.run(jr.key(0), 2, jnp.asarray(X), jnp.asarray(Y), progress_bar=False)
    fit = gpx.Fit.from_svi(svi, params, X, Y)
    assert [note.kind for note in fit.check()] == ["collapse", "not_converged"]
    assert "collapse to 0" in repr(fit)


def test_points_moved_by_monte_carlo_em_are_doubted_alike():
    fit = gpx.fit_sghmc(
        effects, X, Y, key=jr.key(0), em=gpx.infer.MonteCarloEM(num_rounds=20),
        num_warmup=2, num_samples=10, progress=False,
    )  # fmt: skip
    assert "collapse" in [note.kind for note in fit.check()]
    assert jax.tree.leaves(fit.params) == []
