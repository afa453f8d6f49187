"""One result for every engine: draws, predictions, functions, bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.random as jr
import numpy as np

from numpyro_gpx import checks
from numpyro_gpx.numerics.threads import single_blas_thread
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.elbo import ELBO, Loss
from numpyro_gpx.program.program import Program
from numpyro_gpx.program.structure import Structure
from numpyro_gpx.results.arviz import to_arviz
from numpyro_gpx.results.bound import Estimate, estimate
from numpyro_gpx.results.from_numpyro import mcmc_parts, svi_parts
from numpyro_gpx.results.posteriors import GuidePosterior, Moments, Posterior
from numpyro_gpx.results.predict import (
    Problem,
    latent_draws,
    parts_at,
    sites_at,
    sites_in_pieces,
)
from numpyro_gpx.results.prediction import Prediction
from numpyro_gpx.results.row_chunks import row_chunks, row_values
from numpyro_gpx.results.samplers import approximation_of
from numpyro_gpx.results.save import save

__all__ = ["Fit"]

# Rows predicted at once.
_CHUNK_ROWS = 1024


class Fit:
    """The result of fitting a model, whatever the engine.

    Args:
        program: The model with its training arguments, and what was found there.
        posterior: Draws, or a guide with its parameters.
        engine: `"svi"`, `"lbfgs"`, `"nuts"`, `"sghmc"`, ...
        params: Values of `numpyro.param`s in the model.
        seconds: Wall-clock time of the fit, compilation included.
        info: What the engine recorded: losses, divergences, step sizes.
        batch_size: Rows of a minibatch, if the fit used any.
        sample_stats: Per-draw records `(chains, draws)`, for ArviZ.
        loss: What a variational fit minimised; `gpx.infer.ELBO()` if left out.
    """

    def __init__(
        self,
        program: Program,
        posterior: Posterior,
        *,
        engine: str,
        params: dict | None = None,
        seconds: float = float("nan"),
        info: dict[str, Any] | None = None,
        batch_size: int | None = None,
        sample_stats: dict | None = None,
        loss: Loss | None = None,
    ):
        self.program = program
        self.posterior = posterior
        self.engine = engine
        self.params = params or {}
        self.seconds = seconds
        self.info = info or {}
        self.batch_size = batch_size
        self.sample_stats = sample_stats or {}
        self.loss = ELBO() if loss is None else loss
        self._components: dict[tuple[int | None, bool], Any] = {}

    def __repr__(self) -> str:
        sites = ", ".join(self.structure.latents)
        return f"Fit({self.engine}, {self.target} target; sites: {sites})"

    @property
    def model(self) -> Callable:
        """The NumPyro function."""
        return self.program.model

    @property
    def call(self) -> Call:
        """The model with its training arguments."""
        return self.program.call

    @property
    def structure(self) -> Structure:
        """The model's sites."""
        return self.program.structure

    @property
    def jitter(self) -> float | None:
        """Relative jitter that was used; `None` for the default."""
        return self.program.call.jitter

    @classmethod
    def from_svi(cls, svi, result, *args, key=None, **kwargs) -> Fit:
        """A fit from plain NumPyro SVI.

        Args:
            svi: The `numpyro.infer.SVI`.
            result: What `svi.run` returned, or a dict of parameters.
            args: Arguments of the model.
            key: Fixes the draws.
            kwargs: Keyword arguments of the model.
        """
        return cls(**svi_parts(svi, result, *args, key=key, **kwargs))

    @classmethod
    def from_mcmc(
        cls, mcmc, *args, engine: str | None = None, params=None, **kwargs
    ) -> Fit:
        """A fit from plain NumPyro MCMC that has run.

        Args:
            mcmc: The `numpyro.infer.MCMC`.
            args: Arguments of the model, as given to `mcmc.run`.
            engine: Name of the engine; by default that of the kernel.
            params: Values of the model's `numpyro.param`s; by default the kernel's.
            kwargs: Keyword arguments of the model.
        """
        parts = mcmc_parts(mcmc, *args, engine=engine, params=params, **kwargs)
        return cls(**parts)

    @property
    def target(self) -> str:
        """What the model's density is: `"exact"`, or the `"sparse"` approximation.

        The engine adds an approximation of its own (`approximation`).
        """
        return self.program.target

    @property
    def approximation(self) -> str:
        """How the draws relate to the target density."""
        return approximation_of(self.engine)

    @property
    def is_mcmc(self) -> bool:
        """Whether the draws form Markov chains."""
        return not self.posterior.independent

    def chains(self, num_draws: int | None = None) -> dict[str, np.ndarray]:
        """Draws by site, `(chains, draws, ...)`.

        Args:
            num_draws: Draws in all, rounded up to equal chains; by default all of a
                sampler's, of which there cannot be more, or 1000 of a guide's.
        """
        return self.posterior.chains(num_draws)

    def draws(self, num_draws: int | None = None) -> dict[str, np.ndarray]:
        """Draws by site, `(draws, ...)`, chains one after the other.

        Args:
            num_draws: How many; see `chains`.
        """
        chains = self.chains(num_draws)
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in chains.items()}
        return {name: x[:num_draws] for name, x in flat.items()}

    def predict(
        self, *args, of=None, site=None, num_components=None, given=None,
        chunk_rows=_CHUNK_ROWS, **kwargs,
    ) -> Prediction:  # fmt: skip
        """Predict at new arguments of the model, targets left out.

        Gaussian beliefs are integrated exactly; draws are averaged over. Row-local
        sites and noise are drawn from their prior.

        Args:
            args: Arguments of the model, e.g. `X_test`. A model without inputs takes
                none, and `num_rows=` (or `given=`).
            of: What to predict: the targets if left out; `"latent"` for their latent
                function; or the name of a GP site that enters it, such as `"f"`.
            site: Observed site; may be left out if there is one.
            num_components: Posterior draws to average over.
            given: Values of row-local sites, such as latent inputs, `(N, ...)` by name,
                instead of draws from their prior.
            chunk_rows: Rows computed at once. Arrays with as many rows as the first
                argument are cut, unless they had another number of rows than it in
                training; `None` computes all rows in one piece.
            kwargs: Keyword arguments of the model.
        """
        problem = self.problem(site)
        if given and not args and not self.call.takes_inputs:
            kwargs.setdefault("num_rows", len(next(iter(given.values()))))
        call = self.new_call(*args, **kwargs)
        given = row_values(self.structure, given, call.num_rows)
        components = self.global_components(num_components, given)
        pieces = list(row_chunks(self.program, call, problem.site, chunk_rows, given))
        with single_blas_thread():
            found = sites_in_pieces(
                problem, components, pieces, self.key, of=of,
                trained=self.program.observation(problem.site).needs_training,
            )  # fmt: skip
        return Prediction(found, [size for *_, size in pieces], self.key)

    def replicate(self, *, site=None, num_components=None) -> Prediction:
        """The predictive distribution of new targets at the training rows.

        Unlike `predict`, it keeps the posterior of row-local sites.
        """
        components = self._all_components(num_components)
        with single_blas_thread():
            fn = sites_at(self.problem(site), components, self.call, self.key, of=None)
        shape = jax.eval_shape(lambda fn: jax.vmap(lambda f: f.mean)(fn), fn).shape
        return Prediction([fn], [shape[1]], self.key)

    def latent_inputs(self, site: str | None = None) -> Moments:
        """Posterior mean and standard deviation of the rows' latent inputs.

        Args:
            site: A site of the rows; may be left out if there is one.
        """
        names = self.structure.row_sites
        if site is None and len(names) == 1:
            (site,) = names
        if site not in names:
            raise ValueError(
                f"`site` must be one of the rows' latent sites {list(names)}; got "
                f"{site!r}."
            )
        return Moments(*map(np.asarray, self.posterior.moments(site)))

    def parts(self, *args, site=None, num_components=None, **kwargs):
        """Posterior of each summand of the latent function, by label.

        A sum of GPs falls into its GPs, a sum kernel into its parts, labelled `f[0]`,
        `f[1]`, ... in the order in which they were added. Mean functions are left out.

        Args:
            args: Arguments of the model, e.g. `X_test`.
            site: Observed site; may be left out if there is one.
            num_components: Posterior draws to average over.
            kwargs: Keyword arguments of the model.

        Returns:
            A dictionary of `Prediction`s of the parts of the function.
        """
        problem = self.problem(site)
        components = self.global_components(num_components)
        call = self.new_call(*args, **kwargs)
        with single_blas_thread():
            parts = parts_at(problem, components, call, self.key)
        return {
            name: Prediction([fn], [fn.latent.mean.shape[1]], self.key)
            for name, fn in parts.items()
        }

    def functions(self, key, num_draws: int, *, site=None) -> Callable:
        """Coherent draws of the latent function.

        Args:
            key: Fixes the draws.
            num_draws: Number of functions.
            site: Observed site; may be left out if there is one.

        Returns:
            A callable: at the model's arguments (e.g. `X`) it gives the functions'
            values `(num_draws, N)` or `(num_draws, N, P)`, rows jointly drawn. Ask for
            all rows in one call; each call forms their N x N covariance.
        """
        problem = self.problem(site)
        checks.key(key)
        checks.at_least("num_draws", num_draws, 1)
        key_draws, key_rest = jr.split(key)
        drawn = self.posterior.sample(key_draws, num_draws)
        draws = {name: drawn[name] for name in self.structure.global_sites}

        def values(*args, **kwargs) -> np.ndarray:
            call = self.new_call(*args, **kwargs)
            with single_blas_thread():
                return np.asarray(latent_draws(problem, draws, call, key_rest))

        return values

    def elbo(self, num_particles: int = 200, *, key=None) -> Estimate:
        """Estimate the bound on the training data; NaN for samplers.

        Uses minibatches of the fit's `batch_size` if it had one. Latent inputs are
        drawn, so that it is a bound whatever their rule; a fit of the
        importance-weighted bound reports that one.
        """
        return estimate(self, self.loss.bound(), num_particles, key)

    def objective(self, num_particles: int = 200, *, key=None) -> Estimate:
        """What the fit maximised, on the training data; NaN for samplers.

        Differs from `elbo` where latent inputs are integrated by a rule: with one of
        low order it is no bound.
        """
        return estimate(self, self.loss, num_particles, key)

    @property
    def integrates_latents(self) -> bool:
        """Whether latent inputs were integrated by a rule."""
        posterior = self.posterior
        return isinstance(posterior, GuidePosterior) and posterior.integrates_latents()

    def to_arviz(
        self,
        *,
        num_draws: int | None = None,
        log_likelihood: bool = True,
        posterior_predictive: bool = True,
    ):
        r"""The fit as `arviz.InferenceData`, the same for every engine.

        A variational fit gives four "chains" of independent draws.

        Args:
            num_draws: Draws in all; by default all of a sampler's, 1000 of a guide's.
            log_likelihood: Whether to compute pointwise densities. `log_likelihood`
                holds :math:`\log\int p(y_n \mid f)\,p(f \mid v, \theta)\,df`, and
                `expected_log_likelihood` what the target density sums over.
            posterior_predictive: Whether to draw new targets for the training rows.

        Returns:
            Groups posterior, posterior_predictive, log_likelihood,
            expected_log_likelihood, sample_stats, observed_data; of a model without
            data, the posterior alone.
        """
        return to_arviz(self, num_draws, log_likelihood, posterior_predictive)

    def save(self, path) -> None:
        """Write the fit to `path` (NumPy archive, no pickle); see `gpx.load`."""
        save(self, path)

    @property
    def key(self):
        """The key of what must not change from call to call, nor after loading."""
        return jr.key(0)

    def problem(self, site=None) -> Problem:
        """What is needed to evaluate the model at one observed site.

        Raises if the model reads other values than it did at the fit.
        """
        self.program.check_unchanged()
        return Problem(self.call, self.params, self.observed_site(site))

    def new_call(self, *args, **kwargs) -> Call:
        """The model at new arguments, checked."""
        call = self.program.at(*args, **kwargs)
        # Let the model complain of shapes before rows are padded.
        self.program.check_new(call)
        return call

    def observed_site(self, site: str | None = None) -> str:
        """The observed site called `site`, or the only one."""
        names = self.structure.observed
        if site is None and len(names) == 1:
            return names[0]
        if not names:
            raise ValueError(
                "The model observes no data that could be predicted or scored; use "
                "`fit.draws()`."
            )
        if site not in names:
            raise ValueError(
                f"`site` must be one of the observed sites {list(names)}; got {site!r}."
            )
        return site

    def global_components(self, number: int | None = None, given=()) -> dict[str, Any]:
        """Values of global sites, draws or beliefs, with a leading axis.

        Predictions average over them.

        Args:
            number: How many; one is enough if nothing is drawn.
            given: Row-local sites whose values are known.
        """
        components = self._all_components(number, given)
        return {name: components[name] for name in self.structure.global_sites}

    def _all_components(self, number, given=()):
        # Noise and row-local sites are drawn once for each component.
        drawn = set(self.structure.noise) | set(self.structure.row_sites)
        random_rows = bool(drawn - set(given))
        if (number, random_rows) not in self._components:
            # Inside somebody's `jit` it would be a tracer, and kept.
            with single_blas_thread(), jax.ensure_compile_time_eval():
                self._components[number, random_rows] = self.posterior.components(
                    number, random_rows=random_rows
                )
        return self._components[number, random_rows]
