"""The ground we stand on: jaxlib must add up.

Versions 0.10.2 and 0.11.0 do not (jax issues 39103 and 39741): large sums are handed to
a library whose threads race on a CPU. `pyproject.toml` leaves them out; this says so
where another build has the same fault.
"""

import jax
import jax.numpy as jnp


def test_sums_of_broadcasts_are_the_same_at_every_call():
    total = jax.jit(lambda x: jnp.sum(jnp.broadcast_to(x, (2, 1024, 1024))))
    column = jnp.ones((1024, 1), jnp.float32)
    assert {float(total(column)) for _ in range(100)} == {2.0 * 1024.0**2}


def test_products_with_small_matrices_keep_their_last_rows():
    i = jnp.arange(16_385.0)
    rows = jnp.stack([i, jnp.zeros_like(i), jnp.zeros_like(i)], axis=1)
    squares = jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))
    assert float(jax.jit(squares)(rows)[-1]) == 16_384.0**2
