"""Times workloads with the package on its path, of one commit; see `commits.py`."""

from __future__ import annotations

import sys
import time
import warnings

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.util import initialize_model

import numpyro_gpx as gpx

try:  # the layout from issue 14 on
    from numpyro_gpx.processes.collapse import collapsed_bound
    from numpyro_gpx.program.batches import draw_batch
    from numpyro_gpx.program.call import Call
    from numpyro_gpx.program.compile_cache import compiled
    from numpyro_gpx.program.density import Target
    from numpyro_gpx.program.program import Program
    from numpyro_gpx.program.structure import structure_of

    NEW = True
except ImportError:
    from numpyro_gpx.conditionals import collapsed_bound
    from numpyro_gpx.infer.structure import inspect_model
    from numpyro_gpx.infer.target import Target, draw_batch

    NEW = False

STEPS = 10


def compile_it(fn, *args):
    """As the commit's own fits do."""
    return compiled(fn, *args) if NEW else jax.jit(fn)


def data(num_rows, num_dims=8, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1.0, 1.0, (num_rows, num_dims))
    y = np.sin(3.0 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.normal(size=num_rows)
    return jnp.asarray(X), jnp.asarray(y)


def svgp(Z):
    def model(X, y=None, *, batch_size=None):
        prior = dist.LogNormal(jnp.zeros(X.shape[1]), 1.0).to_event(1)
        kernel = gpx.kernels.RBF(
            variance=numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
            lengthscale=numpyro.sample("lengthscale", prior),
        )
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Points(Z))
        with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as i:
            obs = None if y is None else y[i]
            gpx.observe("y", f(X[i]), gpx.likelihoods.Gaussian(noise), obs=obs)

    return model


def deep(Z):
    inducing = gpx.inducing.Points(Z, learn=True) if NEW else Z
    return gpx.models.deep_gp(inducing, widths=(8,))


def training(model, num_rows):
    """Some steps of SVI on minibatches, as a function without arguments."""
    X, y = data(num_rows)
    guide = gpx.guides.WhitenedGaussian(model)
    svi = SVI(model, guide, optax.adam(1e-2), gpx.infer.ELBO())
    state = svi.init(jr.key(0), X, y, batch_size=512)
    if NEW:
        structure = structure_of(Call(model, (X, y), {"batch_size": 512}))
    else:
        structure = inspect_model(model, (X, y), {"batch_size": 512})

    def block(state, key, X, y):
        def step(i, state):
            batch = draw_batch(jr.fold_in(key, i), structure)
            with handlers.substitute(data=batch):
                return svi.update(state, X, y, batch_size=512)[0]

        return jax.lax.fori_loop(0, STEPS, step, state)

    program = compile_it(block, state, jr.key(1), X, y)
    return lambda: program(state, jr.key(1), X, y)


def collapsed():
    X, y = data(10_000, seed=1)
    Z = X[::50]

    def bound(theta):
        kernel = gpx.kernels.RBF(variance=theta[0], lengthscale=theta[1:9])
        points = gpx.inducing.Points(Z)
        return collapsed_bound(kernel, points, X, y, noise_var=theta[9])

    theta = jnp.full(10, 0.7)
    program = compile_it(jax.value_and_grad(bound), theta)
    return lambda: program(theta)


def classifier_data():
    rng = np.random.default_rng(2)
    X = rng.uniform(-2.0, 2.0, (200, 2))
    f = np.sin(2.0 * X[:, 0]) + X[:, 1]
    return X, (f + 0.5 * rng.normal(size=200) > 0.0).astype(float)


def full():
    X_train, labels = classifier_data()

    def model(X, y=None):
        kernel = gpx.kernels.RBF(
            variance=numpyro.sample("variance", dist.LogNormal(0.0, 1.0)),
            lengthscale=numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0)),
        )
        f = gpx.gp("f", kernel, inducing=gpx.inducing.Data(X_train))
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), gpx.likelihoods.Bernoulli(), obs=y)

    X, y = jnp.asarray(X_train), jnp.asarray(labels)
    if NEW:
        target = Target(Program.of(Call.create(model, (X, y), {})).call)
    else:
        target = Target(model, (X, y), {})
    return gradient(lambda z: -target.log_density(z), "f")


def by_hand():
    X_train, labels = classifier_data()
    squares = jnp.asarray(((X_train[:, None] - X_train[None]) ** 2).sum(-1))

    def model(y):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        K = variance * jnp.exp(-0.5 * squares / lengthscale**2)
        L = jnp.linalg.cholesky(K + 1e-8 * variance * jnp.eye(200))
        v = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([200]).to_event(1))
        with numpyro.plate("data", 200):
            numpyro.sample("y", dist.Bernoulli(logits=L @ v), obs=y)

    found = initialize_model(jr.key(0), model, model_args=(jnp.asarray(labels),))
    return gradient(found.potential_fn, "f")


def whole_fit(how, num_rows, **options):
    """A fit from its call to its result, again and again; the first one compiles."""
    X, y = data(num_rows, 2)
    model = svgp(np.asarray(X[::10]))
    fit = getattr(gpx, how) if hasattr(gpx, how) else getattr(gpx.infer, how)
    guide = [gpx.guides.WhitenedGaussian] if how == "fit_svi" else []
    if guide and not NEW:
        guide = [guide[0](model)]

    def again():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of short chains: only time is asked for
            found = fit(model, *guide, X, y, key=jr.key(0), progress=False, **options)
        return found.draws()["variance"]

    return again


def gradient(potential, site):
    rng = np.random.default_rng(3)
    z = {
        site: jnp.asarray(rng.normal(size=200)),
        "variance": jnp.asarray(0.3),
        "lengthscale": jnp.asarray(-0.2),
    }

    def several(z):
        # As inside a chain: one gradient after the other.
        def step(_, z):
            slope = jax.grad(potential)(z)
            return jax.tree.map(lambda x, g: x - 1e-6 * g, z, slope)

        return jax.lax.fori_loop(0, STEPS, step, z)

    program = compile_it(several, z)
    return lambda: program(z)


MAKERS = {
    "svgp": lambda: training(svgp(data(20_000)[0][:256]), 20_000),
    "large": lambda: training(svgp(data(20_000)[0][:256]), 1_000_000),
    "deep": lambda: training(deep(np.asarray(data(10_000)[0][:128])), 10_000),
    "collapsed": collapsed,
    "full": full,
    "by hand": by_hand,
    "fit_svi": lambda: whole_fit("fit_svi", 500, num_steps=1000),
    "fit_nuts": lambda: whole_fit("fit_nuts", 200, num_warmup=50, num_samples=50),
    "fit_sghmc": lambda: whole_fit("fit_sghmc", 500, num_warmup=50, num_samples=50),
}


def main():
    made = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in made:
            made[name] = MAKERS[name]()
        before = time.perf_counter()
        jax.block_until_ready(made[name]())
        whole = name == "collapsed" or name.startswith("fit_")
        number = 1 if whole else STEPS
        print(f"seconds {(time.perf_counter() - before) / number}", flush=True)


if __name__ == "__main__":
    main()
