"""The NumPyro sites of a GP model: `gp`, `observe`, `propagate`, `exact`.

Each registers ordinary sites, so that the model stays an ordinary NumPyro function.
Marks in a site's `infer` dictionary tell engines and guides what they need to know:
`"gp"` carries the prior of a GP site to guides that follow it, and `"noise"` marks
sites that are drawn afresh for every evaluation of the density (`"inner"` names the
GPs whose functions they draw).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.primitives import Messenger

from numpyro_gpx import checks
from numpyro_gpx.beliefs import Belief
from numpyro_gpx.conditionals import SparsePrior, conditional, expected_conditional
from numpyro_gpx.distributions import ExactRegression, ExpectedLikelihood
from numpyro_gpx.functions import current_function_key
from numpyro_gpx.inducing import Inducing
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.latents import GaussianLatent, Latent, as_latent, known_function
from numpyro_gpx.likelihoods import Gaussian, Likelihood
from numpyro_gpx.means import Mean, Zero
from numpyro_gpx.replicates import current_axis, shared_draw
from numpyro_gpx.uncertain import InputBelief

__all__ = ["GP", "exact", "gp", "observe", "propagate"]


class GP(eqx.Module):
    """A Gaussian process with its inducing variables: call it at inputs.

    Made by `gpx.gp`. `f(X)` gives the marginals of `f` at the rows of `X`, and
    `f(X, full_cov=True)` their joint distribution. Latents of different GPs may be
    added and multiplied.

    Attributes:
        name: The site's name.
        prior: Kernel, inducing variables, mean and the factor of `Kuu`.
        value: The site's value: a draw or a belief.
        whiten: Whether the value is `v` or `u`.
    """

    name: str = eqx.field(static=True)
    prior: SparsePrior
    value: Array | Belief
    whiten: bool = eqx.field(static=True)

    @property
    def whitened(self) -> Array | Belief:
        """The value in terms of `v`, whichever the site holds."""
        return self.value if self.whiten else self.prior.whiten(self.value)

    def __call__(
        self, X: Float[Array, "N D"] | InputBelief, *, full_cov: bool = False
    ) -> GaussianLatent:
        """Marginals `(N,)` or `(N, P)` of the function at the rows of `X`.

        Where the rows are Gaussian (`gpx.uncertain.InputBelief`), mean and variance
        over both.
        """
        if isinstance(X, InputBelief):
            return self._at_belief(X, full_cov)
        X = checks.inputs("X", X)
        key = current_function_key(self.name)
        if key is not None:
            joint = conditional(self.prior, X, self.whitened, full_cov=True)
            return known_function(joint.sample(key))
        latent = conditional(self.prior, X, self.whitened, full_cov=full_cov)
        return self._signed(latent, X)

    def _at_belief(self, X, full_cov):
        if full_cov or current_function_key(self.name) is not None:
            raise ValueError(
                f"`{self.name}` at uncertain inputs has no joint distribution of its "
                "rows; leave `full_cov` out, or call it at known inputs."
            )
        latent = expected_conditional(self.prior, X, self.whitened)
        return self._signed(latent, X)

    def _signed(self, latent, X):
        """The latent with its origin written on it."""
        sites = frozenset([self.name])
        return dataclasses.replace(latent, sources=((self, X),), sites=sites)

    def part(self, index: int, X, *, full_cov: bool = False) -> GaussianLatent:
        """Marginals of one summand of the kernel (without the mean function).

        Args:
            index: Which part, in the order of `kernel.parts`.
            X: Inputs `(N, D)`.
            full_cov: Also the covariance between rows.
        """
        X = checks.inputs("X", X)
        parts = tuple(kernel.parts[index] for kernel in self.prior.kernels)
        return conditional(
            self.prior, X, self.whitened, full_cov=full_cov, kernels=parts
        )


def gp(
    name: str,
    kernel: Kernel | Sequence[Kernel],
    *,
    inducing: Inducing,
    mean: Mean | None = None,
    num_outputs: int | None = None,
    whiten: bool = True,
) -> GP:
    r"""A Gaussian process as one NumPyro site, its inducing variables.

    Registers `name` with :math:`v \sim \mathcal N(0, I)`, so that
    :math:`u = m(Z) + L_{uu} v \sim \mathcal N(m(Z), K_{uu})`, of shape `(M,)`, or
    `(P, M)`; all of it is event.

    Args:
        name: Name of the site.
        kernel: Covariance function, or one for each output.
        inducing: `gpx.inducing.Points(Z)`, or `gpx.inducing.Data(X_train)` for the
            full GP.
        mean: Mean function; zero if left out.
        num_outputs: Number of outputs P; left out, the GP has a single output and
            `f(X)` has shape `(N,)`.
        whiten: Whether the site holds `v` or `u` itself.

    Returns:
        A callable: `f(X)` for the marginals at `X`.

    References:
        Hensman, Matthews & Ghahramani (2015); tutorial eq. 67.
    """
    kernels, num_outputs = _kernels(kernel, num_outputs)
    checks.instance("inducing", inducing, Inducing, "such as gpx.inducing.Points(Z)")
    mean = Zero() if mean is None else mean
    prior = SparsePrior.create(kernels, inducing, mean)
    outputs = () if num_outputs is None else (num_outputs,)
    shape = (*outputs, inducing.num_inducing)
    if whiten:
        zeros = jnp.zeros(shape, prior.factor.L.dtype)
        base = dist.Normal(zeros, jnp.ones_like(zeros), validate_args=False)
        fn = base.to_event(len(shape))
    else:
        base = dist.MultivariateNormal(
            prior.inducing_mean(num_outputs),
            scale_tril=prior.factor.L,
            validate_args=False,
        )
        fn = base.to_event(len(shape) - 1)
    seen = _NameSeen()
    with seen:
        value = numpyro.sample(
            name, fn, infer={"gp": GPSite(prior, num_outputs, whiten)}
        )
    name = seen.name
    if not isinstance(value, Belief):
        checks.site_value(name, value, shape)
    return GP(name, prior, value, whiten)


def _check_matched(name, latent, likelihood):
    matched = isinstance(latent, GaussianLatent) and latent.matched
    if matched and not (isinstance(likelihood, Gaussian) and likelihood.is_conjugate):
        raise ValueError(
            f"At uncertain inputs only the mean and variance of the latent function at "
            f"site `{name}` are known, which suffice for a Gaussian likelihood with "
            f"the identity as link; got {type(likelihood).__name__}. Use a rule with "
            "points, such as `gpx.cubature.Unscented()`."
        )


class _NameSeen(Messenger):
    """Learns what a site is called once `scope` and the like have renamed it."""

    name = ""

    def postprocess_message(self, msg):
        if msg["type"] == "sample":
            self.name = msg["name"]


class GPSite(eqx.Module):
    """What a guide may know about a GP site: its prior, given the hyperparameters."""

    prior: SparsePrior
    num_outputs: int | None = eqx.field(static=True)
    whiten: bool = eqx.field(static=True)


def observe(
    name: str,
    latent: Latent | Array,
    likelihood: Likelihood,
    obs: Array | None = None,
    *,
    offset: Array | None = None,
    weights: Array | None = None,
    mask: Array | None = None,
    missing: bool = False,
) -> Array:
    r"""Observe `y` through a likelihood, in expectation over the latent function.

    Registers `name` with
    :math:`\log\pi(y_n) = w_n\,\mathbb E_{p(f_n \mid v)}[\log p(y_n \mid f_n + o_n)]`;
    drawing from the site draws `f`, then `y`.

    Args:
        name: Name of the site.
        latent: `f(X)`, or sums, products and stacks of such; or an array, a known
            function. `(N,)` or `(N, P)`; a likelihood of several latent functions, such
            as `HeteroscedasticGaussian`, takes a row's P latents for one target.
        likelihood: `gpx.likelihoods.Gaussian(scale)` and the like.
        obs: Targets `(N,)` or `(N, P)`; `None` to draw them.
        offset: Added to the latent function, e.g. a log exposure; `(N,)` or `(N, P)`.
        weights: Multiplies each row's term, `(N,)`.
        mask: `False` leaves an entry out, `(N,)` or `(N, P)`; it may then be NaN.
        missing: Whether NaN in `obs` stands for a missing entry, to be left out.

    Returns:
        The observed or drawn targets.
    """
    checks.instance("likelihood", likelihood, Likelihood, "of gpx.likelihoods")
    f = as_latent(latent)
    checks.latents(name, f.shape, likelihood)
    _check_matched(name, f, likelihood)
    if offset is not None:
        # One number for the mean and the noise of a row would make no sense.
        spread = likelihood.latent_ndim == 0
        f = f + checks.rowwise("offset", name, offset, f.shape, spread=spread)
    if weights is not None:
        weights = checks.rowwise("weights", name, weights, f.shape[:1])
    if mask is not None:
        mask = checks.rowwise("mask", name, mask, likelihood.target_shape(f.shape))
    if missing and obs is not None:
        present = ~jnp.isnan(jnp.asarray(obs))
        mask = present if mask is None else mask & present
    fn = ExpectedLikelihood(f, likelihood, weights=weights, keep=mask)
    if obs is not None:
        obs = checks.targets(name, obs, fn, likelihood)
    return numpyro.sample(name, fn, obs=obs)


def propagate(name: str, latent: GaussianLatent) -> Array:
    r"""Draw a latent function to pass it on, as between the layers of a deep GP.

    Registers `name/noise` :math:`\varepsilon \sim \mathcal N(0, 1)`, which engines draw
    afresh for each evaluation of the density (doubly stochastic VI, Salimbeni &
    Deisenroth 2017), and `name` :math:`= \mu + \sigma\varepsilon` as deterministic.

    Args:
        name: Name of the deterministic site.
        latent: `f(X)`; with `full_cov=True` the rows are drawn jointly.

    Returns:
        The draw, `(N,)` or `(N, P)`.
    """
    checks.instance("latent", latent, GaussianLatent, "such as f(X)")
    axis = current_axis()
    replicates = () if axis is None else (jax.lax.axis_size(axis),)
    zeros = jnp.zeros(replicates + latent.shape, latent.mean.dtype)
    noise = numpyro.sample(
        f"{name}/noise",
        dist.Normal(zeros, 1.0).to_event(len(latent.shape) - 1),
        infer={"noise": True, "inner": latent.sites},
    )
    if axis is None:
        deviation = latent.correlate(noise)
    else:
        deviation = shared_draw(name, latent, noise, axis)
    return numpyro.deterministic(name, latent.mean + deviation)


def exact(
    name: str,
    kernel: Kernel,
    X: Float[Array, "N D"],
    scale,
    *,
    obs: Array | None = None,
    mean: Mean | None = None,
) -> Array:
    r"""Gaussian regression with the function marginalised.

    Registers `name` :math:`\sim \mathcal N(m(X), K_{ff} + \sigma^2 I)`, so that NUTS
    sees the evidence of the hyperparameters alone. Predictions condition on the
    training rows (`Fit.predict` does it).

    Args:
        name: Name of the site.
        kernel: Covariance function.
        X: Inputs `(N, D)`.
        scale: Noise standard deviation, a scalar or `(N,)`.
        obs: Targets `(N,)`; `None` to draw them.
        mean: Mean function; zero if left out.
    """
    X = checks.inputs("X", X)
    fn = ExactRegression(kernel, X, scale, Zero() if mean is None else mean)
    if obs is not None:
        obs = checks.exact_targets(name, obs, fn)
    return numpyro.sample(name, fn, obs=obs)


def _kernels(kernel, num_outputs):
    if isinstance(kernel, Kernel):
        return (kernel,), num_outputs
    kernels = tuple(kernel) if isinstance(kernel, Sequence) else (kernel,)
    for k in kernels:
        checks.instance("kernel", k, Kernel, "wrap other callables in kernels.Custom")
    if num_outputs is not None and num_outputs != len(kernels):
        raise ValueError(
            f"`kernel` must be one kernel or one for each output; got {len(kernels)} "
            f"for num_outputs={num_outputs}."
        )
    return kernels, len(kernels)
