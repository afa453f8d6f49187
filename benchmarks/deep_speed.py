"""Time of one training step of a two-layer deep GP, beside GPyTorch and GPflux.

    python benchmarks/deep_speed.py [--gpytorch PYTHON] [--gpflux PYTHON]

Doubly stochastic variational inference, N = 10000, D = 8, width 8, 128 inducing inputs,
minibatches of 512, float64, Adam, one Monte Carlo sample, a shared kernel with one
lengthscale a column in each layer, inducing inputs learnt. Each library in processes of
its own, taken in turn three times; medians. The peers bring PyTorch and TensorFlow:
name the interpreters of environments that have them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np

NUM_ROWS, NUM_COLUMNS, NUM_INDUCING, BATCH = 10000, 8, 128, 512
STEPS = 200


def make_data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(NUM_ROWS, NUM_COLUMNS))
    y = np.sin(X @ rng.normal(size=NUM_COLUMNS)) + 0.1 * rng.normal(size=NUM_ROWS)
    return X, y, X[rng.choice(NUM_ROWS, NUM_INDUCING, replace=False)].copy()


def ours():
    """Milliseconds of a step."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.random as jr
    import optax

    import numpyro_gpx as gpx

    X, y, Z = make_data()
    model = gpx.models.deep_gp(
        gpx.inducing.Points(Z, learn=True), widths=(NUM_COLUMNS,)
    )
    fit = gpx.fit_svi(
        model, gpx.guides.WhitenedGaussian(model), X, y, key=jr.key(0),
        num_steps=5 * STEPS, batch_size=BATCH, optimizer=optax.adam(0.01),
        progress=False,
    )  # fmt: skip
    return 1e3 * fit.info["seconds_per_step"]


def gpytorch():
    """The same with `gpytorch.models.deep_gps`."""
    import torch
    from gpytorch.distributions import MultivariateNormal
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.likelihoods import GaussianLikelihood
    from gpytorch.means import ConstantMean, LinearMean
    from gpytorch.mlls import DeepApproximateMLL, VariationalELBO
    from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
    from gpytorch.settings import num_likelihood_samples
    from gpytorch.variational import (
        CholeskyVariationalDistribution,
        VariationalStrategy,
    )

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    X, y, Z = (torch.tensor(x) for x in make_data())

    class Layer(DeepGPLayer):
        def __init__(self, outputs):
            batch = torch.Size([] if outputs is None else [outputs])
            points = Z.expand(*batch, *Z.shape).clone()
            q = CholeskyVariationalDistribution(NUM_INDUCING, batch_shape=batch)
            strategy = VariationalStrategy(
                self, points, q, learn_inducing_locations=True
            )
            super().__init__(strategy, NUM_COLUMNS, outputs)
            inner = outputs is not None
            self.mean_module = LinearMean(NUM_COLUMNS) if inner else ConstantMean()
            self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=NUM_COLUMNS))

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Model(DeepGP):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(NUM_COLUMNS), Layer(None)
            self.likelihood = GaussianLikelihood()

        def forward(self, x):
            return self.second(self.first(x))

    model = Model()
    bound = DeepApproximateMLL(VariationalELBO(model.likelihood, model, NUM_ROWS))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)

    def step():
        rows = torch.randint(0, NUM_ROWS, (BATCH,))
        optimiser.zero_grad()
        with num_likelihood_samples(1):
            loss = -bound(model(X[rows]), y[rows])
        loss.backward()
        optimiser.step()

    return timed(step)


def gpflux():
    """The same with GPflux layers, compiled by `tf.function`."""
    import gpflow
    import tensorflow as tf
    import tf_keras
    from gpflux.layers import GPLayer, LikelihoodLayer
    from gpflux.models import DeepGP

    tf.keras.backend.set_floatx("float64")
    tf_keras.backend.set_floatx("float64")
    X, y, Z = make_data()

    def layer(outputs, mean):
        kernel = gpflow.kernels.SharedIndependent(
            gpflow.kernels.SquaredExponential(lengthscales=np.ones(NUM_COLUMNS)),
            output_dim=outputs,
        )
        points = gpflow.inducing_variables.SharedIndependentInducingVariables(
            gpflow.inducing_variables.InducingPoints(Z.copy())
        )
        return GPLayer(kernel, points, NUM_ROWS, mean_function=mean, whiten=True)

    layers = [
        layer(NUM_COLUMNS, gpflow.functions.Identity()),
        layer(1, gpflow.functions.Zero()),
    ]
    likelihood = LikelihoodLayer(gpflow.likelihoods.Gaussian(0.1))
    model = DeepGP(layers, likelihood, num_data=NUM_ROWS)
    optimiser = tf_keras.optimizers.Adam(0.01)
    data = tf.constant(X), tf.constant(y[:, None])
    variables = None

    @tf.function
    def gradients():
        rows = tf.random.uniform((BATCH,), 0, NUM_ROWS, dtype=tf.int32)
        batch = tf.gather(data[0], rows), tf.gather(data[1], rows)
        with tf.GradientTape() as tape:
            loss = -model.elbo(batch)
        slopes = tape.gradient(loss, variables)
        optimiser.apply_gradients(zip(slopes, variables, strict=True))
        return loss

    model.elbo((data[0][:2], data[1][:2]))
    variables = model.trainable_variables
    optimiser.build(variables)
    return timed(lambda: gradients().numpy())


def timed(step):
    """Median milliseconds of a step, once it is warm."""
    for _ in range(20):
        step()
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpytorch", default=None, help="a Python that has GPyTorch")
    parser.add_argument("--gpflux", default=None, help="a Python that has GPflux")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(globals()[options.child]()))
        return
    from results import markdown_table, write

    pythons = {"ours": sys.executable}
    for name in ("gpytorch", "gpflux"):
        if getattr(options, name):
            pythons[name] = getattr(options, name)
    found = {name: [] for name in pythons}
    for _ in range(3):
        for name, python in pythons.items():
            command = [python, __file__, "--child", name]
            out = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(out.stdout.splitlines()[-1]))
    medians = {name: float(np.median(x)) for name, x in found.items()}
    rows = [[name, x, x / medians["ours"]] for name, x in medians.items()]
    text = (
        "# One training step of a two-layer deep GP\n\n"
        f"N = {NUM_ROWS}, D = width = {NUM_COLUMNS}, {NUM_INDUCING} inducing inputs, "
        f"minibatches of {BATCH}, float64, 2 cores; medians of three processes each, "
        "in turn.\n\n" + markdown_table(["library", "ms", "relative to ours"], rows)
    )
    write("deep_speed", {"milliseconds": found}, text)


if __name__ == "__main__":
    main()
