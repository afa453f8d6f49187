"""Numbers that no change of the code's layout may move; remake `frozen.json` with
`python tests/golden/frozen.py`.

Nine models that between them use every kind of site. What is stored: log density and
gradient at five points, a guide's belief and predictions at fixed parameters, the loss
after 50 steps of Adam(0.01), one transition of NUTS. Where an interface changes, the
words here change with it, never the numbers: they were made at commit 5b518b5.
"""

import json
import warnings
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import log_density

import numpyro_gpx as gpx

FILE = Path(__file__).with_name("frozen.json")

RNG = np.random.default_rng(3)
X = jnp.asarray(RNG.uniform(-2.0, 2.0, (14, 2)))
X_NEW = jnp.asarray(RNG.uniform(-2.0, 2.0, (5, 2)))
Z = RNG.uniform(-2.0, 2.0, (4, 2))
WAVE = np.asarray(jnp.sin(2.0 * X[:, 0]) + 0.5 * X[:, 1])
LABELS = (WAVE + 0.3 * RNG.normal(size=14) > 0.0).astype(float)
COUNTS = RNG.poisson(np.exp(0.5 * WAVE)).astype(float)
REAL = WAVE + 0.3 * RNG.normal(size=14)
TABLE = np.stack([REAL, REAL**2, -REAL], axis=1)
GAPS = np.where(RNG.uniform(size=TABLE.shape) < 0.2, np.nan, TABLE)
WEIGHTS = RNG.uniform(0.5, 1.5, 14)
MASK = RNG.uniform(size=14) < 0.8


def _kernel(name="", kind=gpx.kernels.RBF):
    return kind(
        variance=numpyro.sample(f"{name}variance", dist.LogNormal(0.0, 1.0)),
        lengthscale=numpyro.sample(f"{name}lengthscale", dist.LogNormal(0.0, 1.0)),
    )


def _rows(X, batch_size=None):
    return numpyro.plate("data", X.shape[0], subsample_size=batch_size)


def classifier(X, y=None, *, batch_size=None):
    f = gpx.gp("f", _kernel(), inducing=gpx.inducing.Points(Z))
    with _rows(X, batch_size) as i:
        gpx.observe("y", f(X[i]), gpx.likelihoods.Bernoulli(), obs=y, rows=i)


def regression(X, y=None):
    """Unwhitened, with a mean function, an offset, weights and a mask."""
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = gpx.gp(
        "f", _kernel(kind=gpx.kernels.Matern52), inducing=gpx.inducing.Points(Z),
        mean=gpx.means.Linear(jnp.array([0.3, -0.2]), 0.1), whiten=False,
    )  # fmt: skip
    known = len(X) == len(WEIGHTS)
    with _rows(X):
        gpx.observe(
            "y", f(X), gpx.likelihoods.Gaussian(noise), obs=y,
            offset=0.1 * X[:, 0], weights=WEIGHTS if known else None,
            mask=MASK if known else None,
        )  # fmt: skip


def full_gp(X_, y=None):
    f = gpx.gp("f", _kernel(), inducing=gpx.inducing.Data(X))
    with _rows(X_):
        gpx.observe("y", f(X_), gpx.likelihoods.Poisson(), obs=y)


def exact(X, y=None):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    kernel = _kernel() + _kernel("rough_", gpx.kernels.Matern32)
    gpx.exact("y", kernel, X, noise, obs=y)


def product(X, y=None):
    f, g, h = (
        gpx.gp(name, _kernel(f"{name}_"), inducing=gpx.inducing.Points(Z))
        for name in "fgh"
    )
    with _rows(X):
        latent = f(X) * g(X) + h(X)
        gpx.observe("y", latent, gpx.likelihoods.StudentT(4.0, 0.5), obs=y)


def outputs(X, y=None):
    """Three outputs with kernels of their own, and gaps."""
    kernels = [_kernel(f"{p}_") for p in range(3)]
    f = gpx.gp("f", kernels, inducing=gpx.inducing.Points(Z))
    with _rows(X):
        noise = gpx.likelihoods.Gaussian(jnp.array([0.3, 0.4, 0.5]))
        gpx.observe("y", f(X), noise, obs=y, missing=True)


def two_latents(X, y=None):
    f = gpx.gp("f", _kernel("f_"), inducing=gpx.inducing.Points(Z))
    g = gpx.gp("g", _kernel("g_"), inducing=gpx.inducing.Points(Z[:3]))
    with _rows(X):
        likelihood = gpx.likelihoods.HeteroscedasticGaussian()
        gpx.observe("y", gpx.stack(f(X), g(X)), likelihood, obs=y)


deep = gpx.models.deep_gp(
    gpx.inducing.Points(Z, learn=True),
    widths=(2,),
    likelihood=gpx.likelihoods.Gaussian(0.3),
)
latent = gpx.models.latent_gp(
    gpx.inducing.Points(np.concatenate([Z, Z[:, :1] ** 2], axis=1), learn=True),
    num_latents=1,
    num_outputs=3,
)

CASES = {
    "classifier": (classifier, LABELS),
    "regression": (regression, REAL),
    "full_gp": (full_gp, COUNTS),
    "exact": (exact, REAL),
    "product": (product, REAL),
    "outputs": (outputs, GAPS),
    "two_latents": (two_latents, REAL),
    "deep": (deep, REAL),
    "latent": (latent, TABLE),
}


def _wrapped(guide):
    return lambda model: gpx.guides.UnscentedLatent(guide(model))


GUIDES = {
    "classifier": [gpx.guides.WhitenedGaussian, gpx.guides.ConditionalGaussian],
    "regression": [gpx.guides.OptimalGaussian, gpx.guides.ConditionalGaussian],
    "full_gp": [gpx.guides.WhitenedGaussian],
    "product": [gpx.guides.WhitenedGaussian],
    "outputs": [gpx.guides.OptimalGaussian, gpx.guides.ConditionalGaussian],
    "two_latents": [gpx.guides.WhitenedGaussian],
    "deep": [gpx.guides.WhitenedGaussian],
    "latent": [_wrapped(gpx.guides.WhitenedGaussian)],
}


# What the names were when the numbers were made, whose order they keep.
OLD_NAMES = {"f/Z": "Z", "f1/Z": "Z1", "f2/Z": "Z2"}


def in_order(names):
    return sorted(names, key=lambda name: OLD_NAMES.get(name, name))


def points(model, y):
    """Five values of every latent site and parameter, by name."""
    with handlers.seed(rng_seed=0):
        trace = handlers.trace(model).get_trace(X, y)
    found = []
    for number in range(5):
        rng = np.random.default_rng(number)
        values = {}
        for name in in_order(trace):
            site = trace[name]
            if site["type"] == "param":
                move = 0.1 * rng.normal(size=site["value"].shape)
                values[name] = site["value"] + move
            elif site["type"] == "sample" and not site["is_observed"]:
                transform = biject_to(site["fn"].support)
                shape = transform.inverse_shape(jnp.shape(site["value"]))
                values[name] = transform(jnp.asarray(0.5 * rng.normal(size=shape)))
        found.append(values)
    return found


def densities(model, y):
    """Log density and its gradient, all sites in one vector, at five points."""

    def value(values):
        return log_density(model, (X, y), {}, values)[0]

    program = jax.jit(jax.value_and_grad(value))
    found = [program(values) for values in points(model, y)]
    return {
        "log_density": [float(v) for v, _ in found],
        "gradient": [
            np.concatenate([np.ravel(g[n]) for n in in_order(g)]).tolist()
            for _, g in found
        ],
    }


def transition(model, y):
    """One step of NUTS from the first point."""
    values = points(model, y)[0]
    substituted = handlers.substitute(
        model, data={n: x for n, x in values.items() if n in OLD_NAMES}
    )
    with handlers.seed(rng_seed=0):
        trace = handlers.trace(substituted).get_trace(X, y)
    latents = {
        n: biject_to(s["fn"].support).inv(values[n])
        for n, s in trace.items()
        if s["type"] == "sample" and not s["is_observed"]
    }
    kernel = numpyro.infer.NUTS(
        substituted, step_size=0.05, adapt_step_size=False, adapt_mass_matrix=False,
        max_tree_depth=3,
    )  # fmt: skip
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False)
    mcmc.run(jr.key(1), X, y, init_params=latents)
    draws = mcmc.get_samples()
    return np.concatenate([np.ravel(draws[n]) for n in sorted(latents)]).tolist()


def guided(model, make, y):
    """Loss after 50 steps; belief, bound and predictions at fixed parameters."""
    options = dict(key=jr.key(5), progress=False, optimizer=optax.adam(0.01))
    fit = gpx.fit_svi(model, make(model), X, y, num_steps=50, **options)
    rng = np.random.default_rng(7)
    guide = make(model)
    svi = numpyro.infer.SVI(model, guide, optax.adam(0.01), gpx.infer.ELBO())
    params = svi.get_params(svi.init(jr.key(0), X, y))
    for name in in_order(params):
        x = params[name]
        move = 0.1 * rng.uniform(size=x.shape)
        params[name] = x + (np.tril(move) if name.endswith("tril") else move)
    fixed = gpx.Fit.from_svi(svi, params, X, y, key=jr.key(2))
    with handlers.seed(rng_seed=1), handlers.substitute(data=params):
        site = handlers.trace(guide).get_trace(X, y)["f1" if model is deep else "f"]
    found = {
        "losses": fit.info["losses"][[0, 9, -1]].tolist(),
        "belief_mean": np.ravel(site["fn"].mean).tolist(),
        "belief_variance": np.ravel(site["fn"].variance).tolist(),
        "objective": fixed.objective(3).value,
        "elbo": fixed.elbo(3).value,
    }
    prediction = fixed.predict(X_NEW, num_components=4)
    function = fixed.predict(X_NEW, num_components=4, of="latent")
    found["mean"] = np.ravel(prediction.mean).tolist()
    found["var"] = np.ravel(prediction.var).tolist()
    found["latent_mean"] = np.ravel(function.mean).tolist()
    found["latent_var"] = np.ravel(function.var).tolist()
    found["log_prob"] = np.ravel(prediction.log_prob(jnp.nan_to_num(y[:5]))).tolist()
    return found


def minibatches():
    """Losses of 50 steps on minibatches, which fix the keys' use as well."""
    fit = gpx.fit_svi(
        classifier, gpx.guides.WhitenedGaussian(classifier, theta="full"), X, LABELS,
        key=jr.key(5), num_steps=50, batch_size=5, progress=False,
        optimizer=optax.adam(0.01),
    )  # fmt: skip
    return fit.info["losses"][[0, 9, -1]].tolist()


def exact_predictions():
    """Of the exact GP at two draws, with its parts and its leave-one-out scores."""
    draws = [points(exact, REAL)[k] for k in range(2)]
    stacked = {n: np.stack([d[n] for d in draws])[None] for n in draws[0]}
    posterior = gpx.fit_nuts(
        exact, X, REAL, key=jr.key(0), num_warmup=0, num_samples=2, num_chains=1,
        progress=False,
    )  # fmt: skip
    posterior.posterior.draws = stacked
    prediction = posterior.predict(X_NEW)
    parts = posterior.parts(X_NEW)
    return {
        "mean": np.ravel(prediction.mean).tolist(),
        "var": np.ravel(prediction.var).tolist(),
        "parts": {n: np.ravel(p.mean).tolist() for n, p in sorted(parts.items())},
    }


def compute(case: str) -> dict:
    """All numbers of one case, or of `minibatches` and `exact_predictions`."""
    if case not in CASES:
        return {"value": globals()[case]()}
    model, y = CASES[case]
    y = jnp.asarray(y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {**densities(model, y), "transition": transition(model, y)}
        for number, make in enumerate(GUIDES.get(case, [])):
            found[f"guide {number}"] = guided(model, make, y)
    return found


NAMES = (*CASES, "minibatches", "exact_predictions")

if __name__ == "__main__":
    FILE.write_text(json.dumps({name: compute(name) for name in NAMES}, indent=1))
