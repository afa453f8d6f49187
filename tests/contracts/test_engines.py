"""What holds for every engine. A new one costs one line in `CASES`."""

import dataclasses
import itertools
from typing import ClassVar

import blackjax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.engines import Engine, Facts, Note, NotFinite, Outcome
from numpyro_gpx.engines.chains import starting_points
from numpyro_gpx.engines.taking import ENGINES
from numpyro_gpx.program.density import Target
from numpyro_gpx.results.posteriors import ChainPosterior
from numpyro_gpx.testing import check_engine

E, G = gpx.engines, gpx.guides
X = np.linspace(-1.0, 1.0, 12)[:, None]
Z = X[::3]
Y = np.sin(3.0 * X[:, 0])


def sparse(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    f = gpx.gp("f", gpx.kernels.RBF(1.3, 0.7), inducing=gpx.inducing.Points(Z))
    with numpyro.plate("data", len(X)) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(scale), obs=y, rows=i)


def plain(X, y=None):
    """No GP at all: the least to compile."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(X[:, 0], scale), obs=y)


class Metropolis(Engine):
    """What a user writes: a random walk, through the loop that all share."""

    name: ClassVar[str] = "metropolis"
    approximation: ClassVar[str] = "asymptotically exact"

    _: dataclasses.KW_ONLY
    num_samples: int = 8
    step_size: float = 0.1

    def run(self, program, key, *, start, watch):
        key_start, key_run = jr.split(key)
        target = Target(program.call, structure=program.structure)
        known = starting_points(key_start, start, program.structure, 1) or {}
        z = target.initial(key_start) | {name: x[0] for name, x in known.items()}
        density = jax.jit(target.log_density)
        if not np.isfinite(density(z)):
            raise NotFinite(f"The log density is {density(z)} at the start.")

        def step(z, key):
            key_move, key_take = jr.split(key)
            near = {n: x + self.step_size * jr.normal(key_move) for n, x in z.items()}
            accept = jnp.log(jr.uniform(key_take)) < density(near) - density(z)
            return near if accept else z

        def block(z, first, number):
            walk = [z]
            for i in range(first, first + number):
                walk.append(step(walk[-1], jr.fold_in(key_run, i)))
            return walk[-1], jax.tree.map(lambda *x: jnp.stack(x), *walk[1:])

        _, record = watch.loop("metropolis", block, z, self.num_samples)
        draws = jax.vmap(target.constrain)(record.values)
        return Outcome(ChainPosterior({name: x[None] for name, x in draws.items()}))


LENGTH = {"num_warmup": 2, "num_samples": 3, "num_chains": 2}
LEAPS = {
    "step_size": 0.1, "num_integration_steps": 2, "inverse_mass_matrix": jnp.ones(1),
}  # fmt: skip
SMALL = {"widths": (2,), "discriminator_widths": (2,), "noise_dim": 1}


class SmallImplicit(G.Implicit):
    """For any model, as an engine takes a class."""

    def __init__(self, model):
        super().__init__(model, theta="joint", **SMALL)


CASES = {
    "SVI": (lambda: E.SVI(G.WhitenedGaussian, num_steps=2), sparse),
    "LBFGS": (lambda: E.LBFGS(G.WhitenedGaussian, max_steps=3), sparse),
    "Implicit": (lambda: E.Implicit(SmallImplicit, num_rounds=2, num_draws=8), plain),
    "NUTS": (lambda: E.NUTS(max_tree_depth=2, **LENGTH), sparse),
    "HMC": (lambda: E.HMC(num_steps=2, **LENGTH), plain),
    "Sites": (lambda: E.Sites(max_updates=3), plain),
    "Guided": (lambda: E.Guided(num_samples=4, num_chains=2, num_proposals=200), plain),
    "SGHMC": (lambda: E.SGHMC(num_integration_steps=2, **LENGTH), plain),
    "MCMC": (lambda: E.MCMC(numpyro.infer.BarkerMH, **LENGTH), plain),
    "Blackjax": (lambda: E.Blackjax(blackjax.hmc, parameters=LEAPS, **LENGTH), plain),
    "toy": (Metropolis, plain),
}


@pytest.mark.parametrize("name", CASES)
def test_engines_keep_the_contract(name):
    make, model = CASES[name]
    check_engine(make(), model, X, Y)


def test_the_registry_is_complete():
    abstract = {"Engine"}
    public = {
        name
        for name in E.__all__
        if isinstance(getattr(E, name), type) and issubclass(getattr(E, name), Engine)
    }
    assert set(CASES) - {"toy"} == set(ENGINES) == public - abstract


class NotPlain(Metropolis):
    @property
    def facts(self):
        return Facts("metropolis", "unknown", {"step_size": np.ones(2)})


class NotAName(Metropolis):
    approximation: ClassVar[str] = "quite good"


class NoSentence(Metropolis):
    def objection(self, program):
        return "no"


class Keyless(Metropolis):
    def run(self, program, key, *, start, watch):
        return super().run(program, jr.key(3), start=start, watch=watch)


class Chancy(Metropolis):
    """Draws what no key determines."""

    calls: ClassVar = itertools.count()

    def run(self, program, key, *, start, watch):
        key = jr.fold_in(key, next(self.calls))
        return super().run(program, key, start=start, watch=watch)


class Changed(Metropolis):
    """Changes what it has found before it hands it on."""

    def run(self, program, key, *, start, watch):
        found = super().run(program, key, start=start, watch=watch)
        return found._replace(**self.change(found))


class Outside(Changed):
    def change(self, found):
        draws = {name: -x for name, x in found.posterior.draws.items()}
        return {"posterior": ChainPosterior(draws)}


class OneLess(Changed):
    def change(self, found):
        return {"posterior": ChainPosterior({})}


class OwnPosterior(Changed):
    def change(self, found):
        return {"posterior": found.posterior.draws}


class Mumbles(Changed):
    def change(self, found):
        return {"notes": (Note("step", "awful", "It is bad.", "Do not."),)}


class Patient(Metropolis):
    """Does not look at the clock."""

    def run(self, program, key, *, start, watch):
        class Deaf:
            def loop(self, phase, block, state, num_steps):
                state, values = block(state, 0, num_steps)
                return state, type("Record", (), {"values": values})

        return super().run(program, key, start=start, watch=Deaf())


class Counting(Changed):
    """Cannot do with fewer draws than it was asked for."""

    def change(self, found):
        draws = found.posterior.draws["scale"]
        return {"info": {"last": draws[0, self.num_samples - 1]}}


class Unstartable(Metropolis):
    def run(self, program, key, *, start, watch):
        if start.values or start.fit:
            raise ValueError("init")
        return super().run(program, key, start=start, watch=watch)


class Blind(Metropolis):
    """Takes NaN for a step that was refused."""

    def run(self, program, key, *, start, watch):
        number = self.num_samples
        try:
            return super().run(program, key, start=start, watch=watch)
        except (NotFinite, ValueError):
            return Outcome(ChainPosterior({"scale": np.ones((1, number))}))


@pytest.mark.parametrize(
    "kind, words",
    {
        NotPlain: "settings in its `facts` are not plain",
        NotAName: "`approximation` is 'quite good'",
        NoSentence: "a sentence with a full stop",
        Keyless: "another key gives the same draws",
        Chancy: "the same key gives other draws",
        Outside: "`scale` lie outside its support",
        OneLess: "no draws of site `scale`",
        OwnPosterior: "must be a `ChainPosterior`",
        Mumbles: "severity 'awful'",
        Patient: "never uses `watch`",
        Counting: "ended after its first step",
        Unstartable: "refuses to start from values",
        Blind: "the log density is finite nowhere",
    }.items(),
)
def test_the_contract_names_what_is_broken(kind, words):
    with pytest.raises(AssertionError, match=words):
        check_engine(kind(), plain, X, Y)


def test_what_is_no_engine_is_refused():
    with pytest.raises(TypeError, match="`engine` must be one"):
        check_engine(E.NUTS, plain, X, Y)


def test_a_model_that_the_engine_refuses_says_nothing_of_it():
    def noisy(y=None):
        numpyro.sample("y", dist.Poisson(numpyro.sample("a", dist.Gamma(2.0))), obs=y)

    class Choosy(Metropolis):
        def objection(self, program):
            return "It takes no model at all."

    with pytest.raises(ValueError, match="must be one that the engine takes. It takes"):
        check_engine(Choosy(), noisy, 3)
