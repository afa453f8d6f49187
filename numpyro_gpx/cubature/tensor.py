"""Product rules: expectations of a function of a few independent Gaussian variables."""

__all__ = ["tensor_nodes"]

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def tensor_nodes(
    points: Sequence[Float[Array, "..."]], weights: Sequence[Float[Array, "..."]]
) -> tuple[Float[Array, "S ... L"], Float[Array, "S ..."]]:
    """All combinations of the nodes of L one-dimensional rules.

    Args:
        points: For each variable its nodes, `(K_l, ...)`, of one shape after
            broadcasting but for the first axis.
        weights: For each variable the weights of its nodes, likewise.

    Returns:
        Nodes `(S, ..., L)` with `S` the product of all `K_l`, and weights `(S, ...)`.
    """
    shape = jnp.broadcast_shapes(*(x.shape[1:] for x in (*points, *weights)))
    sizes = [x.shape[0] for x in points]

    def spread(values, axis):
        values = jnp.broadcast_to(values, (values.shape[0], *shape))
        before = [1] * axis + [sizes[axis]] + [1] * (len(sizes) - axis - 1)
        wide = values.reshape(*before, *shape)
        return jnp.broadcast_to(wide, (*sizes, *shape)).reshape(-1, *shape)

    nodes = jnp.stack([spread(x, i) for i, x in enumerate(points)], axis=-1)
    product = spread(weights[0], 0)
    for i, w in enumerate(weights[1:], start=1):
        product = product * spread(w, i)
    return nodes, product
