"""Deep GPs: layers of GPs, each one's draw the input of the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_gpx import checks
from numpyro_gpx.inducing import Points
from numpyro_gpx.kernels import Kernel
from numpyro_gpx.likelihoods import Likelihood
from numpyro_gpx.means import Mean, Projection, Zero, skip
from numpyro_gpx.models.priors import gaussian_noise, resolve, stationary
from numpyro_gpx.sites import gp, observe, propagate
from numpyro_gpx.uncertain import join

__all__ = ["deep_gp"]

Part = Kernel | Mean | Callable


def deep_gp(
    inducing: Points | Sequence[Points],
    *,
    widths: Sequence[int] = (),
    num_outputs: int | None = None,
    kernel: Part | Sequence[Part] | None = None,
    mean: Sequence[Part] | None = None,
    likelihood: Likelihood | Callable[[], Likelihood] | None = None,
    num_latents: int | Sequence[int] = 0,
    full_cov: bool = False,
) -> Callable:
    r"""A deep GP: :math:`y_n \sim p(y \mid f_L(\dots f_2(f_1(x_n))))`.

    Layer `l` is the GP site `f{l}`; what it passes on is `layer{l}`, drawn by
    `gpx.propagate`. The priors of its kernel are under `f{l}/`, its inducing inputs, if
    they are learnt, the parameter `f{l}/Z`. With `num_latents` a layer also sees a
    latent input of each row, the site `h{l}` (eq. 80).

    Args:
        inducing: `gpx.inducing.Points(Z, learn=True)` of the first layer, `Z` `(M, D)`;
            those of later layers start where the mean functions take them, one at
            each place, and are learnt if those of the first are. Or one for each layer,
            columns of the latent input last.
        widths: Outputs of the inner layers; none of them is a sparse GP.
        num_outputs: Outputs of the last layer; left out, targets are `(N,)`.
        kernel: A kernel, or a function that draws one from its priors, for all layers
            or one for each; RBF with one lengthscale per column if left out.
        mean: Mean functions of the layers, or functions that make them
            (`models.priors.convolution`); if left out, inner layers pass their inputs
            on (`gpx.means.skip` of the inducing inputs; `mean=(gpx.means.skip(X,
            width), ...)` takes the directions of the data) and the last one has mean 0.
        likelihood: A likelihood, or a function that draws one; Gaussian noise with a
            half-normal prior if left out.
        num_latents: Latent columns of the first layer, or of each layer.
        full_cov: Whether the rows of inner layers are drawn jointly. For small data:
            it costs N x N.

    Returns:
        A model `(X, y=None, *, batch_size=None)`.

    References:
        Damianou & Lawrence (2013); Salimbeni & Deisenroth (2017); Salimbeni et al.
        (2019); tutorial 2.5, 4.4-4.6.
    """
    likelihood = gaussian_noise if likelihood is None else likelihood
    checks.sequence("widths", widths)
    layers = _layers(inducing, tuple(widths), num_outputs, kernel, mean, num_latents)
    width = layers[0].inducing.Z.shape[1] - layers[0].num_latents

    def model(X, y=None, *, batch_size=None):
        checks.matrix("X", X, "(N, D)")
        if X.shape[1] != width:
            raise ValueError(
                f"`X` must have the {width} known columns of `inducing`; got shape "
                f"{X.shape}."
            )
        fs = [_gp(f"f{number}", layer) for number, layer in enumerate(layers, start=1)]
        noise = resolve(likelihood)
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            x = X[i]
            for number, (layer, f) in enumerate(zip(layers, fs, strict=True), start=1):
                if layer.num_latents:
                    prior = dist.Normal(jnp.zeros(layer.num_latents), 1.0)
                    h = numpyro.sample(f"h{number}", prior.to_event(1))
                    x = join(x, h)
                if number < len(layers):
                    x = propagate(f"layer{number}", f(x, full_cov=full_cov))
            observe("y", f(x), noise, obs=y, rows=i)

    return model


class _Layer(NamedTuple):
    """What one layer consists of; parts may be functions that draw them."""

    inducing: Points
    num_outputs: int | None
    kernel: Part
    mean: Part
    num_latents: int


def _gp(name, layer: _Layer):
    with handlers.scope(prefix=name):
        kernel, mean = resolve(layer.kernel), resolve(layer.mean)
    return gp(
        name,
        kernel,
        inducing=layer.inducing,
        mean=mean,
        num_outputs=layer.num_outputs,
    )


def _layers(inducing, widths, num_outputs, kernel, mean, num_latents) -> list[_Layer]:
    """All layers, with what was left out filled in."""
    for width in widths:
        checks.at_least("widths (each)", width, 1)
    depth = len(widths) + 1
    every = isinstance(inducing, Sequence)
    given = inducing if every else [inducing] + [None] * (depth - 1)
    given = _one_each("inducing", given, depth)
    kernels = _one_each("kernel", kernel, depth)
    means = _one_each("mean", mean, depth)
    latents = _latent_columns(num_latents, depth)
    layers: list[_Layer] = []
    for number, outputs in enumerate((*widths, num_outputs)):
        q, last = latents[number], number == depth - 1
        points = _points(layers, given[number], q, every)
        m = means[number]
        if m is None:
            m = Zero() if last else _skip(points.Z, q, outputs)
        k = kernels[number]
        k = stationary(num_dims=points.Z.shape[1]) if k is None else k
        layers.append(_Layer(points, outputs, k, m, q))
    return layers


def _one_each(name, parts, depth) -> list:
    """`parts` as a list with one entry for each layer."""
    if parts is None or not isinstance(parts, Sequence):
        return [parts] * depth
    if len(parts) != depth:
        raise ValueError(
            f"`{name}` must be one for all layers or one for each of the {depth} "
            f"layers (`widths` and the last); got {len(parts)}."
        )
    return list(parts)


def _latent_columns(num_latents, depth) -> list[int]:
    """Latent columns of each layer."""
    if isinstance(num_latents, int):
        num_latents = [num_latents] + [0] * (depth - 1)
    latents = _one_each("num_latents", num_latents, depth)
    for number in latents:
        checks.at_least("num_latents", number, 0)
    return latents


def _points(layers, given, num_latents, every) -> Points:
    """Inducing points of the next layer: given, or passed on by the layer below."""
    if given is None:
        below = layers[-1]
        with handlers.block(), handlers.seed(rng_seed=0):
            Z = resolve(below.mean)(below.inducing.Z)
        # Where a mean function takes two of them to one place, once.
        Z = Z[np.sort(np.unique(np.asarray(Z), axis=0, return_index=True)[1])]
        learn = below.inducing.learn
    else:
        usual = "such as gpx.inducing.Points(Z, learn=True)"
        checks.instance("inducing", given, Points, usual)
        if every or num_latents == 0:
            return given
        Z, learn = given.Z, given.learn
    # Columns of the latent input: draws from its prior.
    rng = np.random.default_rng(len(layers))
    drawn = jnp.asarray(rng.normal(size=(len(Z), num_latents)), Z.dtype)
    return Points(jnp.concatenate([Z, drawn], axis=1), learn)


def _skip(Z, num_latents, width) -> Mean:
    """The known inputs pass by an inner layer; latent ones do not."""
    known = skip(Z[:, : Z.shape[1] - num_latents], width)
    if num_latents == 0:
        return known
    matrix = known(np.eye(Z.shape[1] - num_latents))
    return Projection(jnp.concatenate([matrix, jnp.zeros((num_latents, width))]))
