r"""The flow guide: one normalizing flow over all latent sites, with an exact density.

Standard normal noise passes through blocks (couplings by monotone splines, triangular
mixing of inducing points, 1x1 convolutions over the outputs of all layers), and then
through the Gaussian part,

.. math:: z = \mu(Z) + L\, W \big(\sigma(Z) \odot g(\varepsilon)\big).

The thesis puts the Gaussian first (eq. 5.11) and the flow after it. Here it comes last:
with the blocks at the identity, where training starts, both are the same Gaussian, but
the splines then work on numbers of order one, however narrow a layer is.
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
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_gpx import checks
from numpyro_gpx.guides.parts.base import INNER_SCALE, SiteGuide
from numpyro_gpx.guides.parts.factors import dense_factor
from numpyro_gpx.guides.parts.flow_layers import FlowLayer, GaussianPart
from numpyro_gpx.guides.parts.networks import Network
from numpyro_gpx.guides.parts.transport import FlowTransport
from numpyro_gpx.numerics.bijections import (
    Affine,
    Beside,
    Bijection,
    Chain,
    ChannelMixing,
    Design,
    Layout,
    Start,
    TriangularAffine,
    along_the_path,
    log_density,
)
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.starts import init_to_prior_median, initial_values
from numpyro_gpx.sites.marks import AUXILIARY

__all__ = ["Flow"]

# The layer of the hyperparameters; names its parameters, as in Gaussian guides.
_THETA = "theta"


class Flow(SiteGuide):
    r"""A normalizing flow over the vector of all latent sites, on the real line.

    GP sites `(P, M)` are layers of P channels at M inducing points; every entry of the
    other sites is a channel with one point. Parameters of the Gaussian part are those
    of `WhitenedGaussian` (`{site}_auto_loc`, `{site}_auto_scale_tril`), so that
    `fit_svi(..., init=gaussian_fit)` starts from a Gaussian; those of the blocks are
    `flow_auto_{part}`.

    The bound is mode-seeking: what the first draws do not reach, training may never
    find, and of two modes far apart it drops one. Start wide (`init_scale` about the
    prior's spread), let the model cool down (`fit_svi(..., temperature=200.0)`), take
    many draws a step (`loss=gpx.infer.ELBO(64)`) and a small learning rate: at 0.005
    draws between the modes make the shares drift until one mode is lost, at 0.0005 both
    stay (measured; `benchmarks/flow_modes.py`).

    Args:
        model: The model.
        theta: `"joint"`: hyperparameters, or all sites of a model without GPs, are part
            of the flow; `"point"`: they are a MAP estimate on the support.
        mixing: `"full"`; `"channel"`: only 1x1 convolutions and splines of single
            entries, so that inducing points stay independent (the thesis's form, an
            ablation); `"layerwise"`: a full flow for each layer, independent of the
            others (thesis figure 5.4, an ablation).
        num_blocks: Number of blocks; 0 leaves the Gaussian part.
        num_bins: Bins of the splines.
        hidden: Width of the couplings' networks.
        base_hidden: Width of the networks of `Z` that shift and scale the GP sites;
            `None` for none.
        bound: Half the side of the splines' box; outside it they are the identity.
        init_scale: Standard deviation on the real line at the start; if left out, 0.1,
            and 0.001 in the inner layers of deep GPs.
        path_gradient: Whether the gradient of the density goes through the draw alone.
            Where the guide can be exact it then has no noise: on a Gaussian posterior
            of 20 numbers, a divergence of 0.008 in place of 0.19 after 4000 steps. It
            takes an inverse at each step, hence float64: in float32 a deep GP of 900
            numbers diverged at a rate of 0.01, where the plain gradient did not.
        prefix: Names parameters.
        init_loc_fn: Where the sites that are no GPs start.

    References:
        Thesis 5.4-5.5, eq. 5.6-5.11.
    """

    # Rates above lose modes, see above.
    learning_rate = 0.01

    def __init__(
        self, model, *, theta="joint", mixing="full", num_blocks=4, num_bins=8,
        hidden=32, base_hidden=16, bound=5.0, init_scale=None,
        path_gradient=False, prefix="auto", init_loc_fn=init_to_prior_median,
    ):  # fmt: skip
        checks.one_of("theta", theta, ("joint", "point"))
        checks.one_of("mixing", mixing, ("full", "channel", "layerwise"))
        checks.at_least("num_blocks", num_blocks, 0)
        checks.at_least("num_bins", num_bins, 2)
        checks.at_least("hidden", hidden, 1)
        if base_hidden is not None:
            checks.at_least("base_hidden", base_hidden, 1)
        for name, x in {"bound": bound, "init_scale": init_scale}.items():
            if x is not None and not x > 0.0:
                raise ValueError(f"`{name}` must be positive; got {x!r}.")
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self.theta, self.mixing = theta, mixing
        self.can_transport = theta == "joint"
        self.num_blocks, self.num_bins, self.hidden = num_blocks, num_bins, hidden
        self.base_hidden, self.bound = base_hidden, float(bound)
        self.init_scale, self.path_gradient = init_scale, path_gradient

    @property
    def config(self) -> dict[str, Any]:
        names = (
            "theta", "mixing", "num_blocks", "num_bins", "hidden", "base_hidden",
            "bound", "init_scale", "path_gradient", "prefix",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def meaning(self, parameter):
        owner, _, part = parameter.rpartition(f"_{self.prefix}_")
        found = super().meaning(parameter)
        if part in ("loc", "scale", "scale_tril"):
            # The Gaussian that the blocks leave alone at the start.
            return "WhitenedGaussian", *found[1:]
        return *found, owner, self.mixing, self.theta, self.bound

    def learn(self, structure, call):
        super().learn(structure, call)
        if not self._names:
            raise ValueError(
                "The model has no GP sites, and `theta='point'` leaves the others out "
                f"of the flow: {list(structure.latents)}. Pass `theta='joint'`."
            )

    def __call__(self, *args, **kwargs):
        call = self._heard(*args, **kwargs)
        points = {} if self.theta == "joint" else self._points(call)
        flow = self.flow(call)
        noise = dist.Normal(jnp.zeros(self.size, self._dtype), 1.0).to_event(1)
        hidden = AUXILIARY
        x = numpyro.sample(f"_{self.prefix}_noise", noise, infer=hidden)
        z, log_det = flow.forward(x)
        # The noise carries its own density, each site that of its change of variables.
        log_change = (
            along_the_path(flow, x, z, log_det) if self.path_gradient else -log_det
        )
        change = dist.Delta(jnp.zeros_like(log_det), log_change)
        numpyro.sample(f"_{self.prefix}_change", change, infer=hidden)
        return {**points, **self.register(self.unflatten(z))}

    def log_prob(self, params, values: dict, *args, **kwargs):
        """Log density of the guide at values of its sites, by the inverse.

        Args:
            params: Parameters of the guide, and of the model if `Z` is one.
            values: Values on their supports by site; one draw.
            args: Arguments of the model.
            kwargs: Keyword arguments of the model.
        """
        call = self._recall(*args, **kwargs)
        missing = sorted(set(self._names) - set(values))
        if missing:
            raise ValueError(
                f"`values` must have a value of every site of the flow; it lacks "
                f"{missing}. `guide.sample_posterior` returns such values."
            )
        drawn = {name: jnp.asarray(values[name]) for name in self._names}
        z = self.structure.unconstrain(drawn)
        log_q = jnp.zeros((), self._dtype)
        for name, x in z.items():
            transform = self.structure.latents[name].transform
            change = transform.log_abs_det_jacobian(x, drawn[name])
            log_q = log_q - jnp.sum(change)
        with handlers.block(), handlers.seed(rng_seed=0):
            with handlers.substitute(data=params):
                flow = self.flow(call)
        return log_q + log_density(flow, self.flatten(z))

    def transport(self, params, call, root=None):
        return FlowTransport(self, params, call) if self.can_transport else None

    @property
    def size(self) -> int:
        """Numbers of all sites of the flow."""
        return sum(layer.size for layer in self._layers)

    def flow(self, call: Call) -> Bijection:
        """The flow with its parameters, from noise `(K,)` to the real line."""
        layers = self._layers
        inputs = self._inputs(call)
        if self.mixing == "layerwise":
            flows = tuple(
                self._group((layer,), layer.name, inputs, call) for layer in layers
            )
            return Beside(flows, tuple(layer.size for layer in layers))
        return self._group(layers, "flow", inputs, call)

    # Layers -------------------------------------------------------------------------

    @property
    def _names(self) -> tuple[str, ...]:
        """Sites of the flow, in the order of the vector."""
        sites = self.structure
        return sites.gps + sites.integrated + self._drawn_theta

    @property
    def _drawn_theta(self) -> tuple[str, ...]:
        """The hyperparameters that are part of the flow."""
        return self.structure.hyperparameters if self.theta == "joint" else ()

    @property
    def _layers(self) -> tuple[FlowLayer, ...]:
        sites = self.structure.latents
        layers = []
        for name in self.structure.gps:
            shape = sites[name].shape
            outputs = 1 if len(shape) == 1 else shape[0]
            layers.append(FlowLayer(name, (outputs, shape[-1]), shape))
        for name in self.structure.integrated:
            size = math.prod(sites[name].unconstrained_shape)
            layers.append(FlowLayer(name, (size, 1), (size,)))
        theta = [sites[name].unconstrained_shape for name in self._drawn_theta]
        if theta:
            size = sum(math.prod(shape) for shape in theta)
            layers.append(FlowLayer(_THETA, (size, 1), (size,)))
        return tuple(layers)

    @property
    def _dtype(self):
        sites = self.structure.latents
        return jnp.result_type(*(sites[name].dtype for name in self._names))

    def flatten(self, z: dict):
        """Values on the real line by site, as the vector that the flow makes."""
        return jnp.concatenate(
            [
                ravel_pytree({name: z[name] for name in self._sites_of(layer)})[0]
                for layer in self._layers
            ]
        )

    def unflatten(self, z) -> dict:
        """Values on the real line by site, from the flow's vector."""
        values: dict = {}
        start = 0
        for layer in self._layers:
            part = z[start : start + layer.size]
            values |= self.unravel_unconstrained(self._sites_of(layer), part)
            start += layer.size
        return values

    def _sites_of(self, layer: FlowLayer) -> tuple[str, ...]:
        return self._drawn_theta if layer.name == _THETA else (layer.name,)

    # Parameters ---------------------------------------------------------------------

    def _group(self, layers, owner, inputs, call) -> Bijection:
        """One flow over these layers: blocks, then the Gaussian part."""
        layout = Layout(tuple(layer.shape for layer in layers))
        channels_only = self.mixing == "channel"
        steps: list[Bijection] = []
        if self.num_blocks:
            design = Design(
                layout, self.num_blocks, self.num_bins, self.hidden, self.bound,
                channels_only,
            )  # fmt: skip
            steps.append(design.build(self._draw_all(owner, design.starts())))
        parts = [self._base(layer, inputs, call) for layer in layers]
        zeros = jnp.zeros(layout.size, self._dtype)
        steps.append(Affine(zeros, layout.join([base.log_scale for base in parts])))
        square = (layout.num_channels,) * 2
        last = {
            "mixing_lower": Start(square),
            "mixing_upper": Start(square),
            "mixing_log_scale": Start(square[:1]),
        }
        steps.append(ChannelMixing(layout, *self._draw_all(owner, last).values()))
        if channels_only:
            steps.append(Affine(layout.join([base.loc for base in parts]), zeros))
        else:
            gaussians = tuple(
                TriangularAffine(base.loc, base.scale_tril) for base in parts
            )
            steps.append(Beside(gaussians, tuple(layer.size for layer in layers)))
        return Chain(tuple(steps))

    def _draw_all(self, owner, starts: dict[str, Start]) -> dict:
        """Parameters of this owner, which start as told."""
        return {
            part: numpyro.param(
                f"{owner}_{self.prefix}_{part}",
                lambda key, start=start: start.draw(key, self._dtype),
            )
            for part, start in starts.items()
        }

    def _base(self, layer, inputs, call) -> GaussianPart:
        """The Gaussian part of a layer, as `WhitenedGaussian` has it, moved by `Z`."""
        stem = f"{layer.name}_{self.prefix}"
        loc = self._loc(layer, call)
        scale = self._initial_scale(layer.name)
        log_scale = jnp.zeros(layer.shape, self._dtype)
        scale_tril = None
        if self.mixing == "channel":
            sd = numpyro.param(
                f"{stem}_scale",
                jnp.full(layer.natural, scale, self._dtype),
                constraint=constraints.softplus_positive,
            )
            log_scale = jnp.log(sd).reshape(layer.shape)
        else:
            size = layer.natural[-1]
            eye = scale * jnp.eye(size, dtype=self._dtype)
            scale_tril = numpyro.param(
                f"{stem}_scale_tril",
                jnp.broadcast_to(eye, (*layer.natural, size)),
                constraint=dense_factor,
            ).reshape(-1, size, size)
        loc = loc.reshape(-1, layer.natural[-1])
        if layer.name in inputs:
            shift, stretch = self._network(stem, layer, inputs[layer.name])
            # In units of the initial scale: a narrow layer stays where it starts.
            loc, log_scale = loc + scale * shift, log_scale + stretch
        return GaussianPart(loc, log_scale, scale_tril)

    def _network(self, stem, layer, Z):
        """Shift and log scale `(P, M)` from the inducing inputs; 0 at the start."""
        P, M = layer.shape
        network = Network(Z.shape[1], (self.base_hidden,), 2 * P)
        weights = numpyro.param(
            f"{stem}_base", lambda key: network.initial(key, self._dtype)
        )
        out = network(weights, Z.astype(self._dtype))  # (M, 2P)
        return out[:, :P].T, out[:, P:].T

    def _initial_scale(self, name):
        if self.init_scale is not None:
            return self.init_scale
        inner = name != _THETA and self.structure.latents[name].inner
        return INNER_SCALE if inner else 0.1

    def _points(self, call) -> dict:
        """Hyperparameters as points, registered."""
        names = self.structure.hyperparameters
        if not names:
            return {}
        z = self.theta_loc(call)
        return self.register(self.unravel_unconstrained(names, z), with_density=False)

    def _loc(self, layer: FlowLayer, call):
        """The location of a layer: GPs start at 0, others where the guide is told."""
        if layer.name == _THETA:
            return self.theta_loc(call)

        def start(key):
            found = self.start((layer.name,), key, call)[layer.name]
            return found.reshape(layer.natural)

        return numpyro.param(f"{layer.name}_{self.prefix}_loc", jax.jit(start))

    def _inputs(self, call) -> dict:
        """What the networks of the Gaussian part see, by GP site.

        At the model's starting values: a flow has no single value of its sites.
        """
        if self.base_hidden is None or not self.structure.gps:
            return {}
        values = initial_values(
            call, self.structure, jr.key(0),
            init_strategy=self.init_loc_fn,
        )  # fmt: skip
        return self.inducing_inputs(values, call)
