"""The samplers that `samplers.py` compares, each all in: what it makes, what it costs.

Those of other libraries see the log density of the model by hand. `Drawn.chains` holds
draws of all sites on their supports, `(chains, draws, ...)`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoBNAFNormal, AutoMultivariateNormal
from numpyro.infer.reparam import NeuTraReparam
from numpyro.infer.util import initialize_model

import numpyro_gpx as gpx

__all__ = ["Drawn", "SAMPLERS"]


class Drawn(NamedTuple):
    """What a sampler has made.

    Attributes:
        chains: Draws by site.
        gradients: Of the draws, warm-up not counted; 0 where there are none.
        worth: Independent draws that they are worth, if the sampler knows it itself.
        note: A diagnostic of its own.
    """

    chains: dict[str, np.ndarray]
    gradients: int
    worth: float | None = None
    note: str = ""


def _chains(samples: dict) -> dict:
    return {name: np.asarray(x) for name, x in samples.items()}


def nuts(problem, key, number: int) -> Drawn:
    mcmc = MCMC(
        NUTS(problem.by_hand), num_warmup=number // 2, num_samples=number,
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(key, extra_fields=("num_steps",))
    steps = int(np.sum(mcmc.get_extra_fields()["num_steps"]))
    return Drawn(_chains(mcmc.get_samples(group_by_chain=True)), steps)


def _neutra(make_guide: Callable, rate: float) -> Callable:
    def sample(problem, key, number: int) -> Drawn:
        key_guide, key_chain = jr.split(key)
        guide = make_guide(problem.by_hand)
        svi = SVI(problem.by_hand, guide, optax.adam(rate), Trace_ELBO())
        trained = svi.run(key_guide, 2 * number, progress_bar=False)
        neutra = NeuTraReparam(guide, trained.params)
        mcmc = MCMC(
            NUTS(neutra.reparam(problem.by_hand)), num_warmup=number // 2,
            num_samples=number, progress_bar=False,
        )  # fmt: skip
        mcmc.run(key_chain, extra_fields=("num_steps",))
        shared = mcmc.get_samples(group_by_chain=True)["auto_shared_latent"]
        drawn = neutra.transform_sample(shared)
        steps = int(np.sum(mcmc.get_extra_fields()["num_steps"]))
        return Drawn(_chains(drawn), steps)

    return sample


class _Density:
    """The model by hand as a function of one vector."""

    def __init__(self, problem, key):
        info = initialize_model(key, problem.by_hand)
        self.start, unravel = ravel_pytree(info.param_info.z)
        self.log_density = lambda x: -info.potential_fn(unravel(x))
        # Of draws `(chains, draws, K)`, one after the other.
        self._values = jax.jit(
            lambda x: jax.lax.map(lambda x: info.postprocess_fn(unravel(x)), x)
        )

    def chains(self, x) -> dict:
        flat = self._values(jnp.asarray(x).reshape(-1, x.shape[-1]))
        return {
            name: np.asarray(v).reshape(*x.shape[:2], *v.shape[1:])
            for name, v in flat.items()
        }


def low_rank_nuts(problem, key, number: int) -> Drawn:
    import blackjax

    key_model, key_warm, key_chain = jr.split(key, 3)
    density = _Density(problem, key_model)
    warm_up = blackjax.window_adaptation_low_rank(blackjax.nuts, density.log_density)
    (state, settings), _ = jax.jit(
        lambda key: warm_up.run(key, density.start, num_steps=number // 2)
    )(key_warm)
    kernel = blackjax.nuts(density.log_density, **settings)

    @jax.jit
    def run(state, key):
        def step(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps)

        return jax.lax.scan(step, state, jr.split(key, number))[1]

    x, steps = run(state, key_chain)
    return Drawn(density.chains(np.asarray(x)[None]), int(np.sum(steps)))


def adjusted_mclmc(problem, key, number: int) -> Drawn:
    import blackjax
    from blackjax.mcmc.adjusted_mclmc_dynamic import build_kernel, rescale

    key_model, key_init, key_tune, key_chain = jr.split(key, 4)
    density = _Density(problem, key_model)
    algorithm = blackjax.adjusted_mclmc_dynamic

    def kernel(key, state, logdensity_fn, step_size, inverse_mass_matrix, average):
        made = build_kernel(
            integration_steps_fn=lambda key: jnp.clip(
                jnp.ceil(jr.uniform(key) * rescale(average)), 1, None
            )
        )
        return made(
            key, state, logdensity_fn, step_size,
            inverse_mass_matrix=inverse_mass_matrix,
        )  # fmt: skip

    state = algorithm.init(density.start, density.log_density, key_init)
    state, found, _ = blackjax.adjusted_mclmc_find_L_and_step_size(
        mclmc_kernel=kernel, logdensity_fn=density.log_density, num_steps=number,
        state=state, rng_key=key_tune, target=0.9,
    )  # fmt: skip
    average = found.L / found.step_size

    @jax.jit
    def run(state, key):
        def step(state, key):
            state, info = kernel(
                key, state, density.log_density, found.step_size,
                found.inverse_mass_matrix, average,
            )  # fmt: skip
            return state, (state.position, info.num_integration_steps)

        return jax.lax.scan(step, state, jr.split(key, number))[1]

    x, steps = run(state, key_chain)
    return Drawn(density.chains(np.asarray(x)[None]), int(np.sum(steps)))


def _nutpie(**settings: Any) -> Callable:
    def sample(problem, key, number: int) -> Drawn:
        import nutpie

        density = _Density(problem, key)
        size = len(density.start)
        slope = jax.jit(jax.value_and_grad(density.log_density))

        def make_logp():
            def logp(x):
                value, grad = slope(x)
                return float(value), np.asarray(grad)

            return logp

        model = nutpie.compiled_pyfunc.from_pyfunc(
            size, make_logp, lambda *_: lambda x: {"x": np.asarray(x)},
            [np.dtype(np.float64)], [(size,)], ["x"],
            make_initial_point_fn=lambda seed: np.asarray(density.start),
        )  # fmt: skip
        seed = int(jr.randint(key, (), 0, 2**31 - 1))
        trace = nutpie.sample(
            model, draws=number, tune=number // 2, chains=1, cores=1, seed=seed,
            progress_bar=False, **settings,
        )  # fmt: skip
        steps = int(trace.sample_stats["n_steps"].sum())
        return Drawn(density.chains(np.asarray(trace.posterior["x"])), steps)

    return sample


def _guided(method: str) -> Callable:
    def sample(problem, key, number: int) -> Drawn:
        fit = gpx.fit_guided(
            problem.ours, *problem.args, method=method, key=key, progress=False,
            num_samples=number // 2,
        )  # fmt: skip
        weighed = fit.info["method"] == "importance"
        said = [f"k-hat {fit.info['k_hat']:.2f}", fit.info["method"]]
        said += [note.kind for note in fit.check() if note.severity != "remark"]
        worth = fit.info["importance_ess"] if weighed else None
        gradients = fit.info.get("num_gradients", 0)
        return Drawn(_chains(fit.chains()), gradients, worth, ", ".join(said))

    return sample


def our_nuts(problem, key, number: int) -> Drawn:
    fit = gpx.fit_nuts(
        problem.ours, *problem.args, key=key, num_warmup=number // 2,
        num_samples=number, num_chains=1, progress=False,
    )  # fmt: skip
    said = ", ".join(note.kind for note in fit.check())
    return Drawn(_chains(fit.chains()), fit.info["num_gradients"], None, said)


# By name; the first is what ratios refer to.
SAMPLERS: dict[str, Callable] = {
    "NumPyro NUTS, by hand": nuts,
    "fit_guided, auto": _guided("auto"),
    "fit_guided, importance": _guided("importance"),
    "fit_guided, hmc": _guided("hmc"),
    "fit_nuts": our_nuts,
    "NeuTra, AutoMultivariateNormal": _neutra(AutoMultivariateNormal, 0.01),
    "NeuTra, AutoBNAFNormal": _neutra(AutoBNAFNormal, 0.003),
    "blackjax NUTS, low rank": low_rank_nuts,
    "blackjax adjusted MCLMC": adjusted_mclmc,
}
if importlib.util.find_spec("nutpie") is not None:
    SAMPLERS["nutpie"] = _nutpie()
    SAMPLERS["nutpie, low rank"] = _nutpie(low_rank_modified_mass_matrix=True)
