"""L-BFGS on bounds without noise."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.random as jr
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from numpyro_gpx import checks
from numpyro_gpx.engines.engine import Engine, Outcome
from numpyro_gpx.engines.retry import NotFinite
from numpyro_gpx.engines.training import Training, guide_of, without_density
from numpyro_gpx.engines.watch import Stopped
from numpyro_gpx.notes import Note
from numpyro_gpx.program.compile_cache import compiled, once
from numpyro_gpx.program.elbo import ELBO
from numpyro_gpx.program.numpy_values import placed
from numpyro_gpx.results.facts import VARIATIONAL

__all__ = ["LBFGS"]

# A quadratic through the last points promises no more than this many nats: converged.
_NEGLIGIBLE = 0.01


class LBFGS(Engine):
    """Fits a deterministic guide with L-BFGS.

    For guides whose bound has no Monte Carlo noise: hyperparameters as points, as in
    `OptimalGaussian(model)` and `WhitenedGaussian(model)`.

    Attributes:
        guide: A guide for the model, or its class.
        max_steps: Iterations at most.

    Its fits have in `fit.info` the `losses`, one an evaluation, `num_steps`, whether it
    `converged`, SciPy's `message`, and `promised`, the nats by which a quadratic
    through the last points would still lower the loss; with latent inputs also `elbo`
    and `elbo_standard_error`, of 1000 draws.
    """

    name: ClassVar[str] = "lbfgs"
    approximation: ClassVar[str] = VARIATIONAL

    guide: Any
    _: dataclasses.KW_ONLY
    max_steps: int = 2000

    def __check_init__(self):
        checks.at_least("max_steps", self.max_steps, 1)

    def objection(self, program):
        without = without_density(guide_of(self.guide, program))
        if without is not None:
            return without
        does = {
            "subsamples": sorted(program.structure.plates),
            "draws noise at": sorted(program.structure.noise),
        }
        found = [f"{verb} {names}" for verb, names in does.items() if names]
        if found:
            return (
                f"It needs a deterministic bound; the model {' and '.join(found)}. "
                "Use `fit_svi`."
            )
        return None

    def run(self, program, key, *, start, watch) -> Outcome:
        training = Training(program, self.guide, optax.identity(), ELBO(), start)
        if not training.posterior({}, key).deterministic_objective():
            raise ValueError(
                "`fit_lbfgs` needs a deterministic guide; "
                f"{type(training.guide).__name__} draws hyperparameters or latent "
                "inputs. Pass `theta='point'` and a rule with fixed points, or use "
                "`fit_svi`."
            )
        key, key_draws = once(_two_keys)(key)
        minimiser = _Minimiser(training, key)
        found = watch.whole(
            "lbfgs",
            lambda tick: minimiser.minimise(self.max_steps, tick),
            self.max_steps,
        )
        info = {
            "losses": np.asarray(minimiser.losses),
            "num_steps": minimiser.num_steps,
            "converged": False,
            "message": "interrupted",
        }
        notes: list[Note] = []
        if found is not None:
            promised = minimiser.promised(found)
            info["promised"] = promised
            info["message"] = str(found.message)
            # SciPy may stop at rounding and call it abnormal, or call it success.
            info["converged"] = promised < _NEGLIGIBLE
            if not info["converged"]:
                notes = [_not_converged(info, minimiser.flat.dtype)]
        return training.outcome(minimiser.params(), key_draws, info, notes, watch)


def _two_keys(key):
    key_loss, key_draws = jr.split(key)
    return key_loss, key_draws


class _Minimiser:
    """The loss as a function of one vector."""

    def __init__(self, training: Training, key):
        svi, call = training.svi, training.program.call

        def initialise(key, call, start):
            state = svi.init(key, *call.args, init_params=start, **call.kwargs)
            return svi.optim.get_params(state.optim_state)

        free = once(initialise)(key, call, training.params)
        self.flat, self._unravel = ravel_pytree(free)
        self._svi, self._training = svi, training
        self._inputs = key, call
        self.losses: list[float] = []
        self.num_steps = 0
        self._best = np.inf, np.asarray(self.flat, np.float64)

        def value_and_grad(flat, key, call):
            def loss(flat):
                params = svi.constrain_fn(self._unravel(flat))
                return -svi.loss.mean(key, params, svi.guide, call)

            return jax.value_and_grad(loss)(flat)

        self._evaluate = compiled(value_and_grad, self.flat, *self._inputs)

    def minimise(self, max_steps: int, tick):
        """What SciPy found; `None` if it was stopped."""
        import scipy.optimize

        def after_step(intermediate_result):
            self.num_steps += 1
            tick(f"loss {intermediate_result.fun:.5g}")

        try:
            return scipy.optimize.minimize(
                self._objective, self._best[1], jac=True, method="L-BFGS-B",
                callback=after_step,
                options={
                    "maxiter": max_steps, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-6,
                },
            )  # fmt: skip
        except Stopped:
            return None

    def params(self) -> dict:
        """The parameters of the lowest loss, on their supports."""
        best = placed(self._best[1].astype(self.flat.dtype))
        return once(lambda flat: self._svi.constrain_fn(self._unravel(flat)))(best)

    def promised(self, found) -> float:
        """The fall of the loss to the minimum of SciPy's quadratic, in nats."""
        grad = found.jac
        return float(0.5 * grad @ (found.hess_inv @ grad))

    def _objective(self, x):
        value, grad = self._evaluate(placed(x.astype(self.flat.dtype)), *self._inputs)
        value, grad = float(value), np.asarray(grad, np.float64)
        finite = np.isfinite(value) and np.all(np.isfinite(grad))
        if not self.losses and not finite:
            params = self._svi.constrain_fn(self._unravel(self.flat))
            raise NotFinite(
                f"The loss is {value} at the starting values, with a gradient of which "
                f"{np.count_nonzero(~np.isfinite(grad))} entries are not finite"
                f"{self._training.where_not_finite(params)}."
            )
        self.losses.append(value)
        if finite and value < self._best[0]:
            self._best = value, np.array(x)
        # A line search that meets NaN must step back, not stop. So must one that meets
        # it in the gradient alone, as where a lengthscale overflows: the loss is finite
        # there, and the next point would be NaN.
        return (value, grad) if finite else (1e300, np.zeros_like(x))


def _not_converged(info: dict, dtype) -> Note:
    single = dtype == np.float32
    why = (
        "float32 is too coarse for its line search"
        if single
        else f"SciPy says: {info['message']}"
    )
    advice = (
        "Compute in float64: `jax.config.update('jax_enable_x64', True)` before "
        "anything else, or use `fit_svi`."
        if single
        else "Raise `max_steps`, go on from here (`init=fit`), or use `fit_svi`."
    )
    return Note(
        "not_converged", "doubt",
        f"L-BFGS stopped after {info['num_steps']} steps before it had converged, up "
        f"to {info['promised']:.2g} nats short by a quadratic through its last points: "
        f"{why}.",
        advice,
        {"num_steps": info["num_steps"], "promised": info["promised"]},
    )  # fmt: skip
