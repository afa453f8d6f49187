"""Predictions return: jaxlib 0.10 hangs where batches of matrices meet.

Its LAPACK kernels hand a batch to the threads that they themselves run on, and wait: as
many such calls at once as there are threads, and nobody is left to do the work. It is a
race, so one test looks at the programs (no batched call, no race) and one at the clock.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpx as gpx
from numpyro_gpx.numerics.factor import factorise
from numpyro_gpx.numerics.threads import batches_hang
from numpyro_gpx.program import compile_cache
from numpyro_gpx.program.compile_cache import lowered
from numpyro_gpx.results import posteriors, predict

X = jnp.linspace(-1.0, 1.0, 12)[:, None]
Z = X[::3]


def three_gps(X, y=None):
    parts = [
        gpx.gp(
            name,
            gpx.kernels.RBF(
                lengthscale=numpyro.sample(f"{name}_scale", dist.LogNormal(0.0, 1.0))
            ),
            inducing=gpx.inducing.Points(Z),
        )
        for name in "fgh"
    ]
    with numpyro.plate("data", X.shape[0]):
        latent = parts[0](X) + parts[1](X) + parts[2](X)
        gpx.observe("y", latent, gpx.likelihoods.Gaussian(0.3), obs=y)


def exact_sum(X, y=None):
    kernel = gpx.kernels.RBF() + gpx.kernels.Matern32(
        lengthscale=numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    )
    gpx.exact("y", kernel, X, 0.3, obs=y)


def fitted(model):
    guide = gpx.guides.ConditionalGaussian(model)
    options = dict(key=jr.key(0), num_steps=2, progress=False)
    return gpx.fit_svi(model, guide, X, jnp.sin(3.0 * X[:, 0]), **options)


def batched_calls(text):
    """LAPACK calls on more than one matrix in a lowered program."""
    found = re.findall(r"custom_call @(lapack_\w+)\(.*\((tensor<[^)]*)\)", text)
    return [line for line in found if re.search(r"tensor<\d+x\d+x\d+x", line[1])]


@pytest.mark.parametrize("model", [three_gps, exact_sum])
def test_no_program_factorises_a_batch(model):
    fit = fitted(model)
    view, components = fit.site_view(), fit.global_components(20)
    key, keys = jr.key(0), jr.split(jr.key(0), 20)
    guided = (fit.posterior.guide, fit.params, fit.call, keys)
    draws = posteriors._draw(*guided)[0]
    programs = {
        "sites": lowered(predict._sites_at, view, components, fit.call, key, None),
        "functions": lowered(predict._latent_draws, view, components, fit.call, key),
        "parts": lowered(predict._parts_at, view, components, fit.call, key),
        "rows": lowered(predict._row_densities_at, view, components, key),
        "pointwise": lowered(predict._pointwise, view, draws, key),
        "draws": lowered(posteriors._draw, *guided),
        "beliefs": lowered(posteriors._beliefs, *guided),
    }
    for name, program in programs.items():
        text = program.as_text()
        # Models without a GP site have none to factorise in their guide.
        if model is three_gps or name not in ("draws", "beliefs"):
            assert "lapack_" in text, name
        assert not batched_calls(text), (name, batched_calls(text))


def test_the_test_above_sees_batches():
    batch = jnp.broadcast_to(jnp.eye(3), (4, 3, 3))
    text = jax.jit(jnp.linalg.cholesky).lower(batch).as_text()
    assert batched_calls(text)


def test_factors_of_several_outputs_are_computed_one_after_the_other():
    K = jnp.broadcast_to(jnp.eye(3), (4, 3, 3))
    for fn in (
        jax.vmap(factorise),
        jax.grad(lambda K: jax.vmap(factorise)(K).W.sum()),
        jax.vmap(jax.grad(lambda K: factorise(K).log_det())),
    ):
        assert not batched_calls(jax.jit(fn).lower(K).as_text())


def full(X, y=None):
    kernel = gpx.kernels.RBF(numpyro.sample("variance", dist.LogNormal(0.0, 1.0)))
    f = gpx.gp("f", kernel, inducing=gpx.inducing.Data(ROWS))
    with numpyro.plate("data", X.shape[0]):
        gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(), obs=y)


ROWS = jnp.linspace(-1.0, 1.0, 12)[:, None]


def test_vectorized_chains_factorise_no_batch(monkeypatch):
    texts = []
    compile_it = compile_cache._executable

    def noted(low, options):
        texts.append(low.as_text())
        return compile_it(low, options)

    monkeypatch.setattr(compile_cache, "_executable", noted)
    options = dict(num_warmup=2, num_samples=4, num_chains=3, progress=False)
    labels = (jnp.sin(3.0 * X[:, 0]) > 0.0).astype(float)
    gpx.fit_nuts(full, X, labels, key=jr.key(0), chain_method="vectorized", **options)
    assert sum("lapack_" in text for text in texts) >= 3  # starts, states, transitions
    if batches_hang():
        assert not any(map(batched_calls, texts))


REPEATED = """
import jax, jax.numpy as jnp, jax.random as jr
jax.config.update("jax_enable_x64", True)
import importlib.util
spec = importlib.util.spec_from_file_location("cases", {path!r})
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)
X = cases.X
for model in (cases.three_gps, cases.exact_sum):
    fit = cases.fitted(model)
    for i in range(60):
        fit.parts(X)
        fit.posterior.sample(jr.key(i), 20)
        fit.functions(jr.key(i), 20)(X)
print("done")
"""


def test_sixty_calls_return(patience):
    """As users have it, without the compiler's flags of conftest.py."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env["JAX_PLATFORMS"] = "cpu"
    code = REPEATED.format(path=__file__)
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True,
        timeout=240 * patience,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr.decode()
    assert b"done" in run.stdout
