"""The ground we stand on: jaxlib must add up.

Versions 0.10.2 and 0.11.0 do not (jax issues 39103 and 39741): large sums are handed to
a library whose threads race on a CPU. `pyproject.toml` leaves them out; this says so
where another build has the same fault.
"""

import os
import subprocess
import sys

import pytest

SUMS_OF_BROADCASTS = """
import jax, jax.numpy as jnp
total = jax.jit(lambda x: jnp.sum(jnp.broadcast_to(x, (2, 1024, 1024))))
column = jnp.ones((1024, 1), jnp.float32)
assert {float(total(column)) for _ in range(100)} == {2.0 * 1024.0**2}
"""

PRODUCTS_KEEP_THEIR_LAST_ROWS = """
import jax, jax.numpy as jnp
i = jnp.arange(16_385.0)
rows = jnp.stack([i, jnp.zeros_like(i), jnp.zeros_like(i)], axis=1)
squares = jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))
assert float(jax.jit(squares)(rows)[-1]) == 16_384.0**2
"""


@pytest.mark.parametrize("code", [SUMS_OF_BROADCASTS, PRODUCTS_KEEP_THEIR_LAST_ROWS])
def test_jaxlib_adds_up(code):
    """As users have it, without the compiler's flags of conftest.py."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env["JAX_PLATFORMS"] = "cpu"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
