"""What a guide says of a latent input: its belief, and the points of its rule."""

from __future__ import annotations

from typing import ClassVar

import equinox as eqx
import numpyro.distributions as dist
from jaxtyping import Array, Float

from numpyro_gpx.beliefs import (
    Belief,
    DiagonalBelief,
    GaussianBelief,
    gaussian_base,
    kl_to_prior,
)
from numpyro_gpx.joint_beliefs import Axis
from numpyro_gpx.sites.marks import Held, Mark
from numpyro_gpx.uncertain import InputBelief

__all__ = ["LatentInput", "integration"]


class LatentInput(Mark):
    """The mark that a guide leaves at a latent input.

    Attributes:
        belief: Gaussian rows `(N, Q)` on the real line.
        points: Point sets `(S, N, ...)` on the site's support; `None` for the analytic
            rule, which hands the belief itself to the model.
        weights: Weights of the point sets, `(S,)`.
        random: Whether the rule draws its points.
        signed: Whether weights may be negative.
        unconstrained: Whether the site's support is the real line.
    """

    owner: ClassVar[str] = Held.owner

    belief: InputBelief
    points: Float[Array, "S N ..."] | None
    weights: Float[Array, " S"] | None
    random: bool = eqx.field(static=True)
    signed: bool = eqx.field(static=True)
    unconstrained: bool = eqx.field(static=True)

    def has_closed_kl(self, prior: dist.Distribution) -> bool:
        """Whether the divergence to `prior` is known; else the points estimate it."""
        gaussian = self.unconstrained and gaussian_base(prior) is not None
        if self.points is None and not gaussian:
            raise ValueError(
                "The analytic rule needs a normal prior of the latent input; got "
                f"{type(prior).__name__}. Use another rule, such as "
                "`gpx.cubature.Unscented()`."
            )
        return gaussian

    def kl(self, prior: dist.Distribution) -> Array:
        """Divergence of all rows to a Gaussian prior, a scalar."""
        mean, scale = self.belief.mean, self.belief.scale
        belief: Belief = (
            DiagonalBelief(mean, scale)
            if self.belief.is_diagonal
            else GaussianBelief(mean, scale)
        )
        if prior.event_shape == ():  # one latent number a row
            prior = dist.Normal(prior.mean[:, None], prior.variance[:, None] ** 0.5)
        return kl_to_prior(belief, prior)


def integration(
    latents: dict[str, LatentInput],
) -> tuple[Axis | None, dict[str, InputBelief]]:
    """What to hand to the model in the place of latent inputs.

    Returns:
        The axis over their rule's point sets, `(S, N, ...)` by site; or, where the rule
        is analytic, `None` and the beliefs by site.
    """
    points = {n: x.points for n, x in latents.items() if x.points is not None}
    weights = next((x.weights for x in latents.values()), None)
    if weights is None or len(points) < len(latents):
        return None, {name: latent.belief for name, latent in latents.items()}
    return Axis(points, weights), {}
