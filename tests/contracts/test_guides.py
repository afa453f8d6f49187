"""What holds for every guide. A new one costs one line in `CASES`."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro.distributions import constraints
from numpyro.infer import autoguide
from numpyro.infer.autoguide import AutoGuide

import numpyro_gpx as gpx
from numpyro_gpx.contracts.guide_draws import (
    Draws,
    beliefs_are_those_of_draws,
    density_is_that_of_draws,
)
from numpyro_gpx.sites.marks import as_infer
from numpyro_gpx.testing import check_guide

G = gpx.guides
X = np.linspace(-1.0, 1.0, 12)[:, None]
Y = np.sin(3.0 * X[:, 0]) + 0.1
Z = X[::3]


def sparse(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(scale), obs=y, rows=i)


def latent(y=None, *, num_rows=None):
    """Inputs that nobody has measured."""
    f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", num_rows if y is None else len(y)) as i:
        h = numpyro.sample("h", dist.Normal(jnp.zeros(1), 1.0).to_event(1))
        gpx.observe("y", f(h), gpx.likelihoods.Gaussian(0.3), obs=y, rows=i)


def plain(X, y=None):
    """No GP at all: the least to compile."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(slope[0] + X[:, 0] * slope[1], scale), obs=y)


class MeanField(G.SiteGuide):
    """What a user writes: independent normals on the real line."""

    @property
    def config(self):
        return {"prefix": self.prefix}

    def __call__(self, *args, **kwargs):
        self._heard(*args, **kwargs)
        return {name: self.draw(name) for name in self.structure.latents}

    def draw(self, name):
        site, stem = self.structure.latents[name], f"{name}_{self.prefix}"
        loc = numpyro.param(f"{stem}_loc", jnp.zeros(site.unconstrained_shape))
        scale = numpyro.param(
            f"{stem}_scale", jnp.full_like(loc, 0.3), constraint=constraints.positive
        )
        return self.register_normal(name, loc, scale)

    def register_normal(self, name, loc, scale):
        base = dist.Normal(loc, scale).to_event(loc.ndim)
        transform = self.structure.latents[name].transform
        return numpyro.sample(name, dist.TransformedDistribution(base, transform))


FLOW = {"num_blocks": 1, "num_bins": 2, "hidden": 2, "base_hidden": 2}
SMALL = {"widths": (2,), "discriminator_widths": (2,), "noise_dim": 1}
CASES = {
    "ConditionalGaussian": lambda: (G.ConditionalGaussian, sparse, X, Y),
    "Flow": lambda: (G.Flow(sparse, **FLOW), sparse, X, Y),
    "Implicit": lambda: (G.Implicit(plain, theta="joint", **SMALL), plain, X, Y),
    "OptimalGaussian": lambda: (
        G.OptimalGaussian(sparse, theta="mean_field"), sparse, X, Y
    ),
    "UnscentedLatent": lambda: (
        G.UnscentedLatent(G.WhitenedGaussian(latent)), latent, Y
    ),
    "WhitenedGaussian": lambda: (
        G.WhitenedGaussian(sparse, covariance="diagonal"), sparse, X, Y
    ),
    "AutoDelta": lambda: (autoguide.AutoDelta, plain, X, Y),
    "AutoLowRankMultivariateNormal": lambda: (
        autoguide.AutoLowRankMultivariateNormal, plain, X, Y
    ),
    "AutoMultivariateNormal": lambda: (autoguide.AutoMultivariateNormal, plain, X, Y),
    "AutoNormal": lambda: (autoguide.AutoNormal, sparse, X, Y),
    "toy": lambda: (MeanField, sparse, X, Y),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_guides_keep_the_contract(name):
    check_guide(*CASES[name]())


def test_the_registry_is_complete():
    public = {
        name
        for name, kind in vars(G).items()
        if name in G.__all__
        and issubclass(kind, AutoGuide)
        and not inspect.isabstract(kind)
    }
    numpyros = {name for name in CASES if name.startswith("Auto")}
    assert set(CASES) - numpyros - {"toy"} == public


class Forgets(MeanField):
    def __call__(self, *args, **kwargs):
        self._heard(*args, **kwargs)
        return {"scale": self.draw("scale")}


class Adds(MeanField):
    def __call__(self, *args, **kwargs):
        numpyro.sample("noise", dist.Normal(0.0, 1.0))
        return super().__call__(*args, **kwargs)


class WrongShape(MeanField):
    def register_normal(self, name, loc, scale):
        loc, scale = jnp.broadcast_arrays(loc[None], scale[None])
        return super().register_normal(name, loc, scale)


class Single(MeanField):
    def register_normal(self, name, loc, scale):
        value = loc.astype(jnp.float32)
        return numpyro.sample(name, dist.Delta(value, event_dim=loc.ndim))


class Outside(MeanField):
    """Draws on the real line what is positive: one in 150 is not."""

    def register_normal(self, name, loc, scale):
        fn = dist.Normal(loc + 1.0, 0.4 + 0.0 * scale).to_event(loc.ndim)
        return numpyro.sample(name, fn)


class Stuck(MeanField):
    def register_normal(self, name, loc, scale):
        return super().register_normal(name, *jax.lax.stop_gradient((loc, scale)))


class StartsNowhere(MeanField):
    def register_normal(self, name, loc, scale):
        shift = numpyro.param("shift", jnp.asarray(jnp.nan))
        return super().register_normal(name, loc + shift, scale)


class Remembers(MeanField):
    """Keeps a target of the data that it was first set up with."""

    kept = None

    def adopt(self, program):
        super().adopt(program)
        self.kept = program.call.args[1][:1] if self.kept is None else self.kept

    def register_normal(self, name, loc, scale):
        return super().register_normal(name, loc + jnp.sum(self.kept), scale)


class Restless(MeanField):
    """Another number, and so another program, each time that it is traced."""

    steps = itertools.count()

    def register_normal(self, name, loc, scale):
        return super().register_normal(name, loc, scale * (1.0 + next(self.steps)))


class NoChange(MeanField):
    """Leaves out the density of the change of variables."""

    def register_normal(self, name, loc, scale):
        normal = dist.Normal(loc, scale).to_event(loc.ndim)
        z = numpyro.sample(f"_{name}", normal, infer={"is_auxiliary": True})
        x = self.structure.latents[name].transform(z)
        return numpyro.sample(name, dist.Delta(x, event_dim=x.ndim))


class Fickle(MeanField):
    """A density that depends on more than what is drawn."""

    def register_normal(self, name, loc, scale):
        key = numpyro.prng_key()
        if key is not None:
            scale = scale * jnp.exp(0.3 * jr.normal(key))
        return super().register_normal(name, loc, scale)


class Unsaveable(MeanField):
    @property
    def config(self):
        return {"prefix": self.prefix, "model": self.model}


class Changes(MeanField):
    def __init__(self, model, *, width=0.3, prefix="auto"):
        super().__init__(model, prefix=prefix)
        self.width = width

    @property
    def config(self):
        return {"prefix": self.prefix, "width": 2.0 * self.width}


class Anybodys(MeanField):
    """Does not know whose guide it is."""

    class Any:
        def __init__(self, model):
            self.model, self.__signature__ = model, inspect.signature(model)

        def __call__(self, *args, **kwargs):
            return self.model(*args, **kwargs)

        def __eq__(self, other):
            return True

        __hash__ = object.__hash__

    def __init__(self, model):
        super().__init__(self.Any(model))


@pytest.mark.parametrize(
    "kind, words",
    {
        Forgets: r"does not draw the model's sites \['slope'\]",
        Adds: r"draws \['noise'\], which the model does not have",
        WrongShape: r"have shape \(1,\), the site has \(\)",
        Single: "are float32, the site is float64",
        Outside: "lie outside its support",
        Stuck: "moves none of its parameters",
        StartsNowhere: "`gpx.fit` raised",
        Restless: "are compiled anew",
        Remembers: "data that the guide has met first",
        NoChange: "log density is not that of its draws",
        Fickle: "changes if its own draws are put back",
        Unsaveable: "`config` cannot be saved",
        Changes: "`rebuild` makes a guide of",
        Anybodys: "taken for the guide of another model",
    }.items(),
)
def test_the_contract_names_what_is_broken(kind, words):
    with pytest.raises(AssertionError, match=words):
        check_guide(kind, plain, X, Y)


class Elsewhere(G.WhitenedGaussian):
    """Draws beside what it believes."""

    def _sample_held(self, held):
        ((name, belief),) = held.group.beliefs.items()
        eye = jnp.eye(belief.mean.shape[-1])
        drawn = belief.affine(0.3 + 0.0 * belief.mean, eye)
        fn = drawn.distribution()
        return {name: numpyro.sample(name, fn, infer=as_infer(held))}


def test_the_contract_names_a_belief_that_is_not_that_of_the_draws():
    with pytest.raises(AssertionError, match="belief about `f` is not .* mean"):
        check_guide(Elsewhere, sparse, X, Y)


def gaussian_draws(seed, *, said=1.0, believed=1.0):
    """Draws of a standard normal of 4 numbers, and what is said of them."""
    z = np.random.default_rng(seed).normal(size=(2000, 4))
    log_q = scipy.stats.norm(scale=said).logpdf(z).sum(axis=1)
    change = np.zeros(2000)
    residuals = {"f": (z / believed)[:, None]}
    return Draws({"f": z}, {"f": z}, {"f": change}, log_q, log_q, residuals)


def test_moments_of_right_draws_pass():
    """At the rate stated one in three suites of 300 would have a failure at most."""
    for seed in range(300):
        found = gaussian_draws(seed)
        beliefs_are_those_of_draws(found, "right")
        density_is_that_of_draws(found, "right")


@pytest.mark.parametrize("scale", [0.85, 1.2])
def test_what_is_wrong_by_a_fifth_is_seen(scale):
    for seed in range(30):
        with pytest.raises(AssertionError, match="log density is not that"):
            density_is_that_of_draws(gaussian_draws(seed, said=scale), "wrong")
        with pytest.raises(AssertionError, match="belief about `f` .* covariance"):
            beliefs_are_those_of_draws(gaussian_draws(seed, believed=scale), "wrong")


def test_large_models_are_refused():
    def large(y=None):
        numpyro.sample("y", dist.Normal(numpyro.sample("a", WIDE), 1.0), obs=y)

    with pytest.raises(ValueError, match="it has 51"):
        check_guide(autoguide.AutoNormal, large, np.zeros(51))


WIDE = dist.Normal(jnp.zeros(51), 1.0).to_event(1)
