r"""The implicit guide: a generator without a density, a discriminator that guesses it.

The generator turns noise into all inducing variables at once,

.. math:: v = m + L\,(e + g_\Phi(Z, \varepsilon, \mathrm{sgn}\,\varepsilon, e)),
    \qquad e, \varepsilon \sim \mathcal N(0, I),

tied to the inducing inputs: one network for each layer, applied to each row of `Z`,
that also sees noise :math:`\varepsilon` shared by all layers, so that these correlate.
Its signs let the map jump: a smooth one must stretch to leave a gap between modes, and
in training stops short of it (measured; `benchmarks/multimodal_posterior.py`). The
affine part makes a Gaussian the starting point. The density is that of a *contrast*
`r` that can be drawn and evaluated, times a ratio that the discriminator learns by
telling draws of the two apart,

.. math:: \log q(v) \approx \log r(v) + T_\Psi(v, Z).

With `r` the prior this is thesis eq. 4.4. By default `r` is the Gaussian that has the
moments of the generator's draws (adaptive contrast): nearer to `q`, so that the ratio
is smaller and easier to learn; where the discriminator knows nothing, :math:`T = 0`,
the generator is trained as a Gaussian guide is.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from numpyro import handlers

from numpyro_gpx import checks
from numpyro_gpx.guides.parts.base import INNER_SCALE, SiteGuide
from numpyro_gpx.guides.parts.discriminator import (
    Blocks,
    Discriminator,
    Moments,
    gaussian_log_density,
)
from numpyro_gpx.guides.parts.factors import dense_factor
from numpyro_gpx.guides.parts.networks import Network
from numpyro_gpx.program.starts import init_to_prior_median
from numpyro_gpx.sites.marks import AUXILIARY

__all__ = ["Implicit"]

# Draws of the prior that tell how wide a site starts.
_PRIOR_DRAWS = 500


class Implicit(SiteGuide):
    r"""A guide that can be drawn from but has no density; train it by `fit_implicit`.

    Sites fall into blocks: each GP site is one, `(P, M)` numbers at M inducing inputs;
    the hyperparameters together are another, at M unit vectors. Parameters are
    `{block}_auto_loc`, `_scale_tril`, `_generator`, `_discriminator`, and
    `_contrast_loc`, `_contrast_scale_tril`, which training sets and no gradient moves.

    Its `log q`, and so `fit.elbo()`, are estimates: they use the discriminator.

    Args:
        model: The model.
        theta: `"point"` (a MAP estimate on the support, as in the thesis), or `"joint"`
            to generate the hyperparameters, or all sites of a plain model, too.
        contrast: `"gaussian"` (adaptive) or `"prior"` (the thesis).
        widths: Hidden widths of the generators.
        discriminator_widths: Hidden widths of the discriminator.
        noise_dim: Size of the shared noise.
        init_scale: Standard deviation at the start, in units of the prior's. If left
            out it is 1, but 0.001 in inner layers of a deep GP, as in
            `WhitenedGaussian`, unless the prior is the contrast.
        prefix: Names parameters.
        init_loc_fn: Where the hyperparameters start.

    References:
        Yu et al. (2019); thesis 4.3, eq. 4.2-4.6. Mescheder et al. (2017), adaptive
        contrast.
    """

    has_density = False

    def __init__(
        self, model, *, theta="point", contrast="gaussian", widths=(64, 64),
        discriminator_widths=(32, 32), noise_dim=8, init_scale=None, prefix="auto",
        init_loc_fn=init_to_prior_median,
    ):  # fmt: skip
        checks.one_of("theta", theta, ("point", "joint"))
        checks.one_of("contrast", contrast, ("gaussian", "prior"))
        checks.at_least("noise_dim", noise_dim, 0)
        for name, each in (
            ("widths", widths), ("discriminator_widths", discriminator_widths)
        ):  # fmt: skip
            checks.sequence(name, each)
            for width in each:
                checks.at_least(f"{name} (each)", width, 1)
        if init_scale is not None and not init_scale > 0.0:
            raise ValueError(f"`init_scale` must be positive; got {init_scale!r}.")
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self.theta, self.contrast = theta, contrast
        self.widths = tuple(widths)
        self.discriminator_widths = tuple(discriminator_widths)
        self.noise_dim, self.init_scale = noise_dim, init_scale

    @property
    def config(self) -> dict[str, Any]:
        return {
            "theta": self.theta,
            "contrast": self.contrast,
            "widths": list(self.widths),
            "discriminator_widths": list(self.discriminator_widths),
            "noise_dim": self.noise_dim,
            "init_scale": self.init_scale,
            "prefix": self.prefix,
        }

    def meaning(self, parameter):
        """As in the base; the affine part may start from a Gaussian guide's."""
        kind, *rest = super().meaning(parameter)
        if parameter.endswith(("_loc", "_scale_tril")):
            kind = kind if "_contrast_" in parameter else "WhitenedGaussian"
        return kind, *rest

    def part_of(self, parameter: str) -> str:
        """What it belongs to: `discriminator`, `generator`, `contrast` or `theta`."""
        for name in self.blocks:
            stem = f"{name}_{self.prefix}_"
            if parameter.startswith(f"{stem}contrast_"):
                return "contrast"
            if parameter in {f"{stem}{x}" for x in ("loc", "scale_tril", "generator")}:
                return "generator"
        if parameter.endswith(f"_{self.prefix}_discriminator"):
            return "discriminator"
        return "theta"

    def learn(self, structure, call):
        super().learn(structure, call)
        if not self.blocks:
            self._structure = None
            raise ValueError(
                "`Implicit` has nothing to generate: the model has no GP site, and "
                "`theta='point'` keeps the others as points. Pass `theta='joint'`."
            )

    def __call__(self, *args, **kwargs):
        call = self._heard(*args, **kwargs)
        points = self._points(call)
        # Its density has no part in that of the values: masked, it counts as 0.
        base = dist.Normal(jnp.zeros(self.noise_size, self.dtype), 1.0)
        noise = numpyro.sample(
            f"_{self.prefix}_noise", base.to_event(1).mask(False),
            infer=AUXILIARY,
        )  # fmt: skip
        blocks = self.generate(noise, call)
        log_q = self.log_density(blocks, call)
        numpyro.sample(
            f"_{self.prefix}_density", dist.Delta(jnp.zeros_like(log_q), log_q),
            infer=AUXILIARY,
        )  # fmt: skip
        values = self.register(points, with_density=False)
        return {**values, **self.register(self._unpack(blocks))}

    # What is generated.

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Shapes `(P, M)` of the blocks by name."""
        sites = self.structure.latents
        found: dict[str, tuple[int, int]] = {}
        if self._vector:
            sizes = (math.prod(sites[n].unconstrained_shape) for n in self._vector)
            found["theta"] = (1, sum(sizes))
        for name in self.structure.gps:
            found[name] = (math.prod(sites[name].shape[:-1]), sites[name].shape[-1])
        return found

    @property
    def noise_size(self) -> int:
        """How many normal numbers a draw takes."""
        return self.noise_dim + sum(p * m for p, m in self.blocks.values())

    def generate(self, noise: Float[Array, " K"], call) -> Blocks:
        """The blocks `(P, M)` that the generator makes of the noise."""
        shared, rest = noise[: self.noise_dim], noise[self.noise_dim :]
        inputs = self.inputs(call)
        found = {}
        for name, (P, M) in self.blocks.items():
            e, rest = rest[: P * M].reshape(P, M), rest[P * M :]
            Z = inputs[name]
            # Signs let it jump, as between modes, where a smooth map must stretch.
            seen = jnp.concatenate([shared, jnp.sign(shared)])
            seen = jnp.broadcast_to(seen[None], (M, seen.size))
            features = jnp.concatenate([Z, seen, e.T], axis=1)
            network = Network(features.shape[1], self.widths, P)
            weights = self._weights(f"{name}_{self.prefix}_generator", network)
            bent = e + network(weights, features).T  # (P, M)
            found[name] = self._affine(name, call).apply(bent)
        return found

    def inputs(self, call) -> Blocks:
        """What ties the networks: standardised inducing inputs `(M, D)` by block."""
        values = self._points(call)
        if self._vector:
            loc = self._affine("theta", call).mean[0]
            values.update(self.unravel_unconstrained(self._vector, loc))
        Z = self.inducing_inputs(self.structure.constrain(values), call)
        return {
            name: Z.get(name, jnp.eye(M)).astype(self.dtype)
            for name, (_, M) in self.blocks.items()
        }

    # What its density is thought to be.

    def log_density(self, blocks: Blocks, call) -> Float[Array, ""]:
        r"""The estimate :math:`\log r + T` of the log density on the real line.

        Only the values carry gradients: the discriminator and the contrast are those of
        the present generator (:math:`\mathbb E_q \nabla_\Psi T^* = 0`).
        """
        moments = jax.lax.stop_gradient(self.moments(call))
        whitened = {name: moments[name].standardise(x) for name, x in blocks.items()}
        weights = jax.lax.stop_gradient(self._discriminator_weights(call))
        inputs = jax.lax.stop_gradient(self.inputs(call))
        ratio = self.discriminator(inputs)(weights, whitened, inputs)
        if self.contrast == "prior":
            return ratio + self._log_prior(blocks, call)
        return ratio + gaussian_log_density(whitened, moments)

    def discriminator(self, inputs: Blocks) -> Discriminator:
        """The discriminator for inputs such as `inputs` returns."""
        sizes = {n: inputs[n].shape[1] + P for n, (P, _) in self.blocks.items()}
        return Discriminator(sizes, self.discriminator_widths, self.prefix)

    def _discriminator_weights(self, call) -> dict:
        networks = self.discriminator(self.inputs(call)).networks
        return {name: self._weights(name, net) for name, net in networks.items()}

    def moments(self, call) -> dict[str, Moments]:
        """Moments of the contrast by block."""
        kept = self.kept_moments()
        if self.contrast == "prior":
            return kept
        return {name: self._affine(name, call).after(kept[name]) for name in kept}

    def kept_moments(self) -> dict[str, Moments]:
        """The parameters behind `moments`.

        An adaptive contrast keeps those of the draws before their affine part, which
        change little from step to step: it then follows the affine part at once.
        """
        found = {}
        for name, (P, M) in self.blocks.items():
            stem = f"{name}_{self.prefix}_contrast"
            eye = jnp.broadcast_to(jnp.eye(M, dtype=self.dtype), (P, M, M))
            mean = numpyro.param(f"{stem}_loc", jnp.zeros((P, M), self.dtype))
            found[name] = Moments(mean, numpyro.param(f"{stem}_scale_tril", eye))
        return found

    def before_affine(self, drawn: Blocks, call) -> Blocks:
        """Draws `(S, P, M)` of the blocks as they were before their affine part."""
        found = {}
        for name, x in drawn.items():
            affine = self._affine(name, call)
            found[name] = jax.vmap(affine.standardise)(x)
        return found

    def moment_params(self, moments: dict[str, tuple]) -> dict:
        """Parameters that make these the moments of the contrast."""
        found: dict[str, Array] = {}
        for name, (mean, root) in moments.items():
            stem = f"{name}_{self.prefix}_contrast"
            found |= {f"{stem}_loc": mean, f"{stem}_scale_tril": root}
        return found

    def prior_draw(self, key, call) -> Blocks:
        """A draw of the blocks from the prior, on the real line."""
        points = self.structure.constrain(self._points(call))
        trace = self._trace(points, call, key)
        names = (*self._vector, *self.structure.gps)
        drawn = {name: trace[name]["value"] for name in names}
        return self._pack(self.structure.unconstrain(drawn))

    # What these are built from.

    @property
    def _vector(self) -> tuple[str, ...]:
        """Sites without inducing inputs that are generated."""
        drawn = self.structure.hyperparameters if self.theta == "joint" else ()
        return (*drawn, *self.structure.integrated)

    @property
    def dtype(self):
        """What the generated numbers are."""
        return jnp.result_type(*(s.dtype for s in self.structure.latents.values()))

    def _weights(self, parameter, network):
        return numpyro.param(parameter, lambda key: network.initial(key, self.dtype))

    def _points(self, call) -> dict:
        """Hyperparameters that are points, on the real line."""
        names = () if self.theta == "joint" else self.structure.hyperparameters
        if not names:
            return {}
        return self.unravel_unconstrained(names, self.theta_loc(call))

    def _affine(self, name, call) -> Moments:
        """The affine part of a block's generator, which starts at the prior."""
        P, M = self.blocks[name]
        site = self.structure.latents.get(name)
        shape = (M,) if site is None else site.shape

        def loc(key):
            if name in self.structure.gps:
                return jnp.zeros(shape, self.dtype)
            return ravel_pytree(self.start(self._vector, key, call))[0]

        def scale_tril(key):
            return self._spread(name, key, call).reshape(*shape, M)

        stem = f"{name}_{self.prefix}"
        mean = numpyro.param(f"{stem}_loc", jax.jit(loc))
        root = numpyro.param(
            f"{stem}_scale_tril", jax.jit(scale_tril), constraint=dense_factor
        )
        return Moments(mean.reshape(P, M), root.reshape(P, M, M))

    def _spread(self, name, key, call):
        """Diagonal factors `(P, M, M)` as wide as the prior, times `init_scale`."""
        P, M = self.blocks[name]
        eye = jnp.eye(M, dtype=self.dtype)
        site = self.structure.latents.get(name)
        scale = self.init_scale
        if scale is None:
            # So far from the prior a ratio to it could not be learnt.
            narrow = self.contrast == "gaussian" and site is not None and site.inner
            scale = INNER_SCALE if narrow else 1.0
        if site is not None and site.whitened:
            return scale * jnp.broadcast_to(eye, (P, M, M))
        key_params, key_draws = jr.split(key)
        # The parameters that draws need are made here, and not seen outside.
        with handlers.block(), handlers.seed(rng_seed=key_params):
            draws = jax.vmap(lambda k: self.prior_draw(k, call)[name])(
                jr.split(key_draws, _PRIOR_DRAWS)
            )
        # Half the distance between the quantiles at one standard deviation: also of
        # priors that have no variance.
        low, high = jnp.quantile(draws, jnp.asarray([0.16, 0.84]), axis=0)
        return scale * 0.5 * (high - low)[..., None] * eye[None]

    def _log_prior(self, blocks, call):
        """Log prior of the generated sites on the real line, moved by these alone."""
        drawn = self._unpack(blocks)
        values = self.structure.constrain(drawn)
        points = self.structure.constrain(self._points(call))
        sites = self._trace({**points, **values}, call).items()
        params = {n: site["value"] for n, site in sites if site["type"] == "param"}
        fixed = jax.lax.stop_gradient({**points, **params})
        with handlers.block():
            trace = call.trace({**fixed, **values}, jr.key(0))
        total = jnp.zeros((), self.dtype)
        for name, x in drawn.items():
            log_det = self.structure.latents[name].transform.log_abs_det_jacobian(
                x, values[name]
            )
            total += jnp.sum(trace[name]["fn"].log_prob(values[name]))
            total += jnp.sum(log_det)
        return total

    def _unpack(self, blocks: Blocks) -> dict:
        """Values by site on the real line."""
        sites = self.structure.latents
        found = {n: blocks[n].reshape(sites[n].shape) for n in self.structure.gps}
        if self._vector:
            found |= self.unravel_unconstrained(self._vector, blocks["theta"][0])
        return found

    def _pack(self, values: dict) -> Blocks:
        """The inverse of `_unpack`."""
        found = {}
        if self._vector:
            vector = ravel_pytree({name: values[name] for name in self._vector})[0]
            found["theta"] = vector[None].astype(self.dtype)
        for name in self.structure.gps:
            found[name] = values[name].reshape(self.blocks[name])
        return found
