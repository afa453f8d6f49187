"""One result for every engine: draws, predictions, functions, bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from numpyro_gpx.numerics.threads import one_at_a_time
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.elbo import Loss
from numpyro_gpx.program.options import takes_options
from numpyro_gpx.results import queries
from numpyro_gpx.results.arviz import to_arviz
from numpyro_gpx.results.bound import Estimate, bound_of
from numpyro_gpx.results.contents import FitContents
from numpyro_gpx.results.from_numpyro import mcmc_parts, svi_parts
from numpyro_gpx.results.posteriors import GuidePosterior, Moments
from numpyro_gpx.results.predict import SiteView
from numpyro_gpx.results.prediction import Prediction
from numpyro_gpx.results.prior import prior_parts
from numpyro_gpx.results.save import save
from numpyro_gpx.results.site_draws import with_deterministic
from numpyro_gpx.results.summary import summary

__all__ = ["Fit"]

# Rows predicted at once.
_CHUNK_ROWS = 1024


class Fit(FitContents):
    """The result of fitting a model, whatever the engine.

    Made by `gpx.fit` and its short forms, by `gpx.load`, and from what plain NumPyro
    returns. What it holds are attributes, listed at `FitContents`.
    """

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

        Latent sites may be discrete, as of `DiscreteHMCGibbs`: predictions average over
        their draws.

        Args:
            mcmc: The `numpyro.infer.MCMC`.
            args: Arguments of the model, as given to `mcmc.run`.
            engine: Name of the engine; by default that of the kernel.
            params: Values of the model's `numpyro.param`s; by default the kernel's.
            kwargs: Keyword arguments of the model.
        """
        parts = mcmc_parts(mcmc, *args, engine=engine, params=params, **kwargs)
        return cls(**parts)

    @classmethod
    @takes_options
    def from_prior(
        cls, model, *args, key, num_draws: int = 1000, params=None, **kwargs
    ) -> Fit:
        """Draws of the prior, for coherent functions and predictions before any data.

        `Fit.from_prior(model, X, key=key).functions(key, 10)(X)` draws ten functions.
        (NumPyro's `Predictive` draws the rows of a GP independently, given `v`.)

        Args:
            model: A NumPyro function.
            args: Its arguments; targets may be left out.
            key: Random key.
            num_draws: How many draws of the latent sites.
            params: Values of the model's `numpyro.param`s.
            kwargs: Its keyword arguments.
        """
        parts = prior_parts(
            model, *args, key=key, num_draws=num_draws, params=params, **kwargs
        )
        return cls(**parts)

    def chains(self, num_draws: int | None = None) -> dict[str, np.ndarray]:
        """Draws by site, `(chains, draws, ...)`, deterministic sites included.

        Args:
            num_draws: Draws in all, rounded up to equal chains; by default all of a
                sampler's, of which there cannot be more, or 1000 of a guide's.
        """
        chains = self.posterior.chains(num_draws)
        return with_deterministic(self.program, self.params, chains)

    def draws(self, num_draws: int | None = None) -> dict[str, np.ndarray]:
        """Draws by site, `(draws, ...)`, chains one after the other.

        Args:
            num_draws: How many; see `chains`.
        """
        chains = self.chains(num_draws)
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in chains.items()}
        return {name: x[:num_draws] for name, x in flat.items()}

    def summary(self, sites=None, *, num_draws: int | None = None):
        """A table of means, standard deviations and intervals, as ArviZ makes it.

        Args:
            sites: Names of sites; by default all but GPs and latent inputs.
            num_draws: How many draws; see `chains`.

        Returns:
            A `pandas.DataFrame`; of chains with ESS and R-hat.
        """
        return summary(self, sites, num_draws)

    @takes_options
    def predict(
        self, *args, of=None, site=None, num_components=None, given=None,
        chunk_rows=_CHUNK_ROWS, **kwargs,
    ) -> Prediction:  # fmt: skip
        """Predict at new arguments of the model, targets left out.

        Gaussian beliefs are integrated exactly; draws are averaged over. Row-local
        sites and noise are drawn from their prior. Works inside `jax.jit`, `jax.grad`
        and `jax.vmap`.

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
        if given and not args and not self.call.takes_inputs:
            kwargs.setdefault("num_rows", len(next(iter(given.values()))))
        return queries.predicted(
            self, self.new_call(*args, **kwargs), of=of, site=site,
            num_components=num_components, given=given, chunk_rows=chunk_rows,
        )  # fmt: skip

    def replicate(self, *, site=None, num_components=None) -> Prediction:
        """The predictive distribution of new targets at the training rows.

        Unlike `predict`, it keeps the posterior of row-local sites.
        """
        components = self._all_components(num_components)
        return queries.replicated(self, site, components)

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

    def parts(
        self, *args, site=None, num_components=None, **kwargs
    ) -> dict[str, Prediction]:
        """Posterior of each summand of the latent function, by label.

        A sum of GPs falls into its GPs, a sum kernel into its parts, labelled `f[0]`,
        `f[1]`, ... in the order in which they were added. Mean functions are left out.

        Args:
            args: Arguments of the model, e.g. `X_test`.
            site: Observed site; may be left out if there is one.
            num_components: Posterior draws to average over.
            kwargs: Keyword arguments of the model.
        """
        call = self.new_call(*args, **kwargs)
        return queries.parts(self, call, site=site, num_components=num_components)

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
        return queries.functions(self, key, num_draws, site=site)

    def full_cov(self, *args, site=None, num_components=None, **kwargs):
        r"""Covariance of the latent function between rows, `(N, N)` or `(P, N, N)`.

        :math:`\mathrm E[\mathrm{cov}(f \mid \theta)] + \mathrm{cov}(\mathrm E[f \mid
        \theta])`, over posterior draws of what is not integrated exactly.

        Args:
            args: Arguments of the model, e.g. `X_test`.
            site: Observed site; may be left out if there is one.
            num_components: Posterior draws to average over.
            kwargs: Keyword arguments of the model.
        """
        call = self.new_call(*args, **kwargs)
        return queries.row_covariance(
            self, call, site=site, num_components=num_components
        )

    def elbo(
        self, num_particles: int = 200, *, key=None, all_rows: bool = False
    ) -> Estimate:
        """Estimate the bound on the training data; NaN for samplers.

        Latent inputs are drawn, so that it is a bound whatever their rule; a fit of the
        importance-weighted bound reports that one.

        Args:
            num_particles: How many estimates are averaged.
            key: Random key; by default always the same.
            all_rows: Whether each estimate uses all rows, also of a fit on minibatches;
                otherwise those of a minibatch, which cost less and vary more.
        """
        return self._estimate(self.loss.bound(), num_particles, key, all_rows)

    def objective(
        self, num_particles: int = 200, *, key=None, all_rows: bool = False
    ) -> Estimate:
        """What the fit maximised, on the training data; NaN for samplers.

        Differs from `elbo` where latent inputs are integrated by a rule: with one of
        low order it is no bound.

        Args:
            num_particles: How many estimates are averaged.
            key: Random key; by default always the same.
            all_rows: As in `elbo`.
        """
        return self._estimate(self.loss, num_particles, key, all_rows)

    def _estimate(self, loss: Loss, num_particles, key, all_rows: bool) -> Estimate:
        call = self.call.batched(None if all_rows else self.batch_size)
        key = self.key if key is None else key
        return bound_of(self.program, call, self.posterior, loss, num_particles, key)

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
            log_likelihood: Whether to compute pointwise densities.
                `log_predictive_density` holds :math:`\log\int p(y_n \mid f)\,
                p(f \mid v, \theta)\,df`, and `expected_log_likelihood` what the
                target density sums over; `gpx.loo` needs both. Where they are one, for
                chains of an exact target, the first is called `log_likelihood`, and
                `arviz.loo` takes it.
            posterior_predictive: Whether to draw new targets for the training rows.

        Returns:
            Groups posterior, posterior_predictive, log_predictive_density or
            log_likelihood, expected_log_likelihood, sample_stats, observed_data; of a
            model without data, the posterior alone; of draws of the prior, prior and
            prior_predictive.
        """
        return to_arviz(self, num_draws, log_likelihood, posterior_predictive)

    def save(self, path) -> None:
        """Write the fit to `path` (NumPy archive, no pickle); see `gpx.load`."""
        save(self, path, stacklevel=2)

    def site_view(self, site=None) -> SiteView:
        """What is needed to evaluate the model at one observed site.

        Raises if the model reads other values than it did at the fit.
        """
        self.program.check_unchanged()
        found = self.structure.observed_site(site)
        return SiteView(self.call, self.params, found, self.is_prior)

    def new_call(self, *args, **kwargs) -> Call:
        """The model at new arguments, checked."""
        call = self.program.at(*args, **kwargs)
        # Let the model complain of shapes before rows are padded.
        self.program.check_new(call)
        return call

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
            with one_at_a_time(), jax.ensure_compile_time_eval():
                self._components[number, random_rows] = self.posterior.components(
                    number, random_rows=random_rows
                )
        return self._components[number, random_rows]
