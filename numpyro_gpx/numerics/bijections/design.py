"""What one block of a flow consists of, and where its parameters start."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from numpyro_gpx.numerics.bijections.base import Bijection, Chain, Stack
from numpyro_gpx.numerics.bijections.channels import ChannelMixing
from numpyro_gpx.numerics.bijections.coupling import SplineCoupling
from numpyro_gpx.numerics.bijections.layout import Layout
from numpyro_gpx.numerics.bijections.points import PointMixing
from numpyro_gpx.numerics.bijections.splines import (
    ElementwiseSplines,
    num_spline_parameters,
)

__all__ = ["Design", "Start"]

# Fixes which entries go into which half: part of the architecture, not of its start.
_SHUFFLE_SEED = 0


class Start(NamedTuple):
    """Where an array of parameters starts, and in which units it is held.

    Attributes:
        shape: Its shape.
        sd: It starts at normal draws of this spread about 0.
        unit: What is used is the parameter times this. For sums over many terms it is
            one over the root of their number: a step of the optimiser then moves the
            sum by about as much, however wide the layer is.
    """

    shape: tuple[int, ...]
    sd: float = 0.0
    unit: float = 1.0

    def draw(self, key, dtype) -> Array:
        if self.sd == 0.0:
            return jnp.zeros(self.shape, dtype)
        return self.sd * jr.normal(key, self.shape, dtype)


class Design(NamedTuple):
    """The nonlinear part of a flow: equal blocks, each the identity at the start.

    Each block is a coupling, a mixing of points and a mixing of channels; without
    couplings, splines of single entries and a mixing of channels.

    Attributes:
        layout: How the layers lie in the vector.
        num_blocks: Number of blocks.
        num_bins: Bins of the splines.
        hidden: Width of the couplings' networks.
        bound: Half the side of the splines' box.
        channels_only: Whether to leave different points independent, as in thesis 5.5.
    """

    layout: Layout
    num_blocks: int
    num_bins: int
    hidden: int
    bound: float
    channels_only: bool

    def starts(self) -> dict[str, Start]:
        """Starts of the parameters by name, each with a leading axis over blocks."""
        K, C, H = self.layout.size, self.layout.num_channels, self.hidden
        R = num_spline_parameters(self.num_bins)
        found = {
            "channels_lower": Start((C, C), unit=C**-0.5),
            "channels_upper": Start((C, C), unit=C**-0.5),
            "channels_log_scale": Start((C,)),
        }
        if self.channels_only:
            found["splines"] = Start((K, R))
        else:
            Kb = K // 2
            Ka = K - Kb
            found["coupling_free"] = Start((Ka, R))
            found["coupling_hidden_in"] = Start((Ka, H), 1.0, Ka**-0.5)
            found["coupling_hidden_bias"] = Start((H,), 1.0)
            found["coupling_hidden_mid"] = Start((H, H), 1.0, H**-0.5)
            found["coupling_gains"] = Start((Kb, H), 1.0)
            found["coupling_readout"] = Start((H, R + 2), unit=H**-0.5)
            found["coupling_offsets"] = Start((Kb, R + 2))
            found |= {
                f"points_{i}": Start((M, M), unit=M**-0.5)
                for i, (_, M) in enumerate(self.layout.shapes)
                if M > 1
            }
        return {
            name: start._replace(shape=(self.num_blocks, *start.shape))
            for name, start in found.items()
        }

    def build(self, parameters: dict[str, Array]) -> Bijection:
        """The blocks with these parameters."""
        starts = self.starts()
        parameters = {name: starts[name].unit * x for name, x in parameters.items()}
        channels = ChannelMixing(
            self.layout,
            parameters["channels_lower"],
            parameters["channels_upper"],
            parameters["channels_log_scale"],
        )
        if self.channels_only:
            splines = ElementwiseSplines(parameters["splines"], self.bound)
            return Stack(Chain((splines, channels)))
        order = self._orders()
        coupling = SplineCoupling(
            jnp.asarray(order),
            jnp.asarray(np.argsort(order, axis=1)),
            **{
                name.removeprefix("coupling_"): x
                for name, x in parameters.items()
                if name.startswith("coupling_")
            },
            bound=self.bound,
        )
        points = PointMixing(
            self.layout,
            tuple(
                parameters.get(f"points_{i}") for i in range(len(self.layout.shapes))
            ),
            jnp.arange(self.num_blocks) % 2 == 1,
        )
        return Stack(Chain((coupling, points, channels)))

    def _orders(self) -> np.ndarray:
        """Permutations `(num_blocks, K)`: shuffled, and every second one turned round.

        So what decides in one block is decided in the next, across all layers.
        """
        rng = np.random.default_rng(_SHUFFLE_SEED)
        rows: list[np.ndarray] = []
        for i in range(self.num_blocks):
            rows.append(
                rng.permutation(self.layout.size) if i % 2 == 0 else rows[-1][::-1]
            )
        return np.stack(rows).astype(np.int32)
