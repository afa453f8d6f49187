"""A Gaussian process as one NumPyro site: `gp`."""

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
from numpyro_gpx.inducing import Inducing, Points
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.means import Mean, Zero
from numpyro_gpx.processes.conditional import conditional, expected_conditional
from numpyro_gpx.processes.latent import Gaussian, Term
from numpyro_gpx.processes.prior import SparsePrior
from numpyro_gpx.sites.gp_calls import multiplies_only, send_call
from numpyro_gpx.sites.marks import GPMark, as_infer
from numpyro_gpx.uncertain import InputBelief

__all__ = ["GP", "gp"]


class GP(eqx.Module):
    """A Gaussian process with its inducing variables: call it at inputs.

    Made by `gpx.gp`. `f(X)` gives the marginals of `f` at the rows of `X`, and
    `f(X, full_cov=True)` their joint distribution. Latents of different GPs may be
    added and multiplied.

    Attributes:
        name: The site's name.
        prior: Kernel, inducing variables, mean and the root of `Kuu`.
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
    ) -> Gaussian:
        """Marginals `(N,)` or `(N, P)` of the function at the rows of `X`.

        Where the rows are Gaussian (a belief about latent inputs), mean and variance
        over both.
        """
        if isinstance(X, InputBelief):
            if full_cov:
                raise ValueError(
                    f"`{self.name}` at uncertain inputs has no joint distribution of "
                    "its rows; leave `full_cov` out, or call it at known inputs."
                )
        else:
            X = checks.inputs("X", X)

        def evaluate():
            if isinstance(X, InputBelief):
                latent = expected_conditional(self.prior, X, self.whitened)
            else:
                latent = conditional(self.prior, X, self.whitened, full_cov=full_cov)
            return self.signed(latent, X)

        return send_call(self, X, full_cov=full_cov, evaluate=evaluate)

    def signed(self, latent: Gaussian, X) -> Gaussian:
        """The latent with its origin written on it."""
        return dataclasses.replace(
            latent, origin=(Term(self, X),), sites=frozenset([self.name])
        )

    def part(self, index: int, X, *, full_cov: bool = False) -> Gaussian:
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
    :math:`u = m_u + R v \sim \mathcal N(m_u, K_{uu})`, of shape `(M,)`, or `(P, M)`;
    all of it is event. Inducing inputs that are learnt are the parameter `{name}/Z`,
    `(M, D)`.

    Args:
        name: Name of the site.
        kernel: Covariance function, or one for each output.
        inducing: `gpx.inducing.Points(Z)`, with `learn=True` if the inducing inputs
            are to be learnt, or `gpx.inducing.Data(X_train)` for the full GP.
        mean: Mean function; zero if left out.
        num_outputs: Number of outputs P; left out, the GP has a single output and
            `f(X)` has shape `(N,)`.
        whiten: Whether the site holds `v` or `u` itself.

    Returns:
        A callable: `f(X)` for the marginals at `X`.

    References:
        Hensman, Matthews & Ghahramani (2015); tutorial eq. 67.
    """
    if isinstance(num_outputs, tuple | list):
        raise TypeError(
            f"`num_outputs` must be a whole number; got {num_outputs}. For a matrix of "
            "functions take columns in its shape: "
            "`f(X)[:, np.arange(P * Q).reshape(P, Q)]`."
        )
    kernels, num_outputs = _kernels(kernel, num_outputs)
    checks.instance("inducing", inducing, Inducing, "such as gpx.inducing.Points(Z)")
    if isinstance(inducing, Points) and inducing.learn:
        inducing = Points(numpyro.param(f"{name}/Z", inducing.Z))
    mean = Zero() if mean is None else mean
    prior = SparsePrior.create(
        kernels, inducing, mean, multiplies=multiplies_only(name)
    )
    outputs = () if num_outputs is None else (num_outputs,)
    shape = (*outputs, inducing.size)
    fn = _site_prior(prior, shape, num_outputs, whiten)
    seen = _NameSeen()
    with seen:
        mark = GPMark(prior, num_outputs, whiten)
        value = numpyro.sample(name, fn, infer=as_infer(mark))
    name = seen.name
    if not isinstance(value, Belief):
        checks.site_value(name, value, shape)
    return GP(name, prior, value, whiten)


def _site_prior(prior: SparsePrior, shape, num_outputs, whiten: bool):
    """The distribution of the site: of `v`, or of `u`."""
    if whiten:
        floats = jax.tree.leaves(eqx.filter(prior.factor, eqx.is_inexact_array))
        zeros = jnp.zeros(shape, jnp.result_type(*floats))
        base = dist.Normal(zeros, jnp.ones_like(zeros), validate_args=False)
        return base.to_event(len(shape))
    base = dist.MultivariateNormal(
        prior.inducing_mean(num_outputs),
        scale_tril=prior.lower(),
        validate_args=False,
    )
    return base.to_event(len(shape) - 1)


class _NameSeen(Messenger):
    """Learns what a site is called once `scope` and the like have renamed it."""

    name = ""

    def postprocess_message(self, msg):
        if msg["type"] == "sample":
            self.name = msg["name"]


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
