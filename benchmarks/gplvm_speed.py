"""Cost of the GPLVM's objectives, against each other and against GPflow.

    python benchmarks/gplvm_speed.py [--gpflow PYTHON]

Value and gradient with respect to everything that is learnt, float64, medians over
alternating repeats. GPflow brings its own TensorFlow: name the Python interpreter of an
environment that has it (`pip install gpflow`); it is run alternately with ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np

NUM_OUTPUTS, NUM_LATENTS, NUM_INDUCING, REPEATS = 12, 5, 20, 60


def make_data(num_rows):
    """Observations of a smooth map of latent numbers, and where the guide starts."""
    rng = np.random.default_rng(0)
    H = rng.normal(size=(num_rows, NUM_LATENTS))
    waves = np.sin(H @ rng.normal(size=(NUM_LATENTS, NUM_OUTPUTS)))
    Y = waves + 0.1 * rng.normal(size=waves.shape)
    return Y, H, H[:NUM_INDUCING].copy()


def our_step(num_rows, rule_name, kernel_name="RBF"):
    """A function without arguments: one value and gradient."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    import jax.random as jr
    import optax
    from numpyro.infer import SVI

    import numpyro_gpx as gpx

    Y, H, Z = make_data(num_rows)
    kernel = gpx.models.priors.stationary(
        getattr(gpx.kernels, kernel_name), num_dims=NUM_LATENTS
    )
    model = gpx.models.gplvm(
        gpx.inducing.Points(Z, learn=True), num_outputs=NUM_OUTPUTS, kernel=kernel
    )
    rule = getattr(gpx.cubature, rule_name)()
    guide = gpx.guides.UnscentedLatent(
        gpx.guides.OptimalGaussian(model), rule=rule, init=H
    )
    loss = gpx.infer.ELBO()
    svi = SVI(model, guide, optax.adam(0.01), loss)
    Y = jnp.asarray(Y)
    state = jax.jit(svi.init)(jr.key(0), Y)
    params = svi.optim.get_params(state.optim_state)

    @jax.jit
    def value_and_grad(params, Y):
        def negative(params):
            constrained = svi.constrain_fn(params)
            return loss.loss(jr.key(0), constrained, model, guide, Y)

        return jax.value_and_grad(negative)(params)

    def step():
        value, slope = value_and_grad(params, Y)
        jax.block_until_ready(slope)
        return float(value)

    return step


def gpflow_step(num_rows):
    """The same of `gpflow.models.BayesianGPLVM`, compiled by `tf.function`."""
    import gpflow
    import tensorflow as tf

    Y, H, Z = make_data(num_rows)
    kernel = gpflow.kernels.SquaredExponential(lengthscales=np.ones(NUM_LATENTS))
    model = gpflow.models.BayesianGPLVM(
        tf.constant(Y),
        X_data_mean=tf.constant(H),
        X_data_var=tf.constant(np.full_like(H, 0.1)),
        kernel=kernel,
        inducing_variable=Z,
    )
    model.likelihood.variance.assign(0.6744897501960817**2)  # median of our prior

    @tf.function
    def value_and_grad():
        with tf.GradientTape() as tape:
            loss = model.training_loss()
        return loss, tape.gradient(loss, model.trainable_variables)

    def step():
        value, slopes = value_and_grad()
        for slope in slopes:
            tf.convert_to_tensor(slope).numpy()
        return float(value)

    return step


def median_seconds(steps):
    """Medians over repeats taken in turn."""
    times = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(5):
            step()
    for _ in range(REPEATS):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    return {name: float(np.median(x)) for name, x in times.items()}


def log_prior():
    """Our priors at their medians, which GPflow's model has not."""
    log_normal = -0.5 * np.log(2.0 * np.pi)  # of the variance and each lengthscale
    half_normal = 0.5 * np.log(2.0 / np.pi) - 0.5 * 0.6744897501960817**2
    return (1 + NUM_LATENTS) * log_normal + half_normal


def against_gpflow(python, num_rows):
    """Alternate whole processes, ours and GPflow's, three times each."""
    found = {"ours": [], "gpflow": []}
    values = {}
    for _ in range(3):
        for name, interpreter in (("ours", sys.executable), ("gpflow", python)):
            command = [interpreter, __file__, "--child", name, str(num_rows)]
            out = subprocess.run(command, check=True, capture_output=True, text=True)
            record = json.loads(out.stdout.splitlines()[-1])
            found[name].append(record["seconds"])
            values[name] = record["value"]
    medians = {name: float(np.median(x)) for name, x in found.items()}
    return {"seconds": medians, "values": values}


def child(name, num_rows):
    step = gpflow_step(num_rows) if name == "gpflow" else our_step(num_rows, "Analytic")
    value = step()
    print(json.dumps({"seconds": median_seconds({name: step})[name], "value": value}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpflow", default=None, help="a Python that has GPflow")
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child[0], int(options.child[1]))
    from results import markdown_table, write

    steps = {
        "analytic, RBF": our_step(1000, "Analytic"),
        "unscented, RBF": our_step(1000, "Unscented"),
        "unscented, Matern 3/2": our_step(1000, "Unscented", "Matern32"),
    }
    ours = median_seconds(steps)
    analytic = ours["analytic, RBF"]
    rows = [[name, 1e3 * x, x / analytic] for name, x in ours.items()]
    text = (
        "# Cost of the GPLVM's objectives\n\nValue and gradient of the collapsed "
        "objective, float64, Q = 5, M = 20, 12 outputs; medians.\n\n## N = 1000\n\n"
        + markdown_table(["objective", "ms", "relative to analytic"], rows)
    )
    record = {"rows_1000": ours}
    if options.gpflow:
        peer = against_gpflow(options.gpflow, 500)
        record["gpflow"] = peer
        seconds = peer["seconds"]
        ratio = seconds["ours"] / seconds["gpflow"]
        difference = peer["values"]["ours"] + log_prior() - peer["values"]["gpflow"]
        record["difference_of_bounds"] = difference
        lines = [[name, 1e3 * x] for name, x in seconds.items()]
        text += (
            "\n\n## N = 500, against GPflow's BayesianGPLVM\n\n"
            + markdown_table(["library", "ms"], lines)
            + f"\n\nRatio ours / GPflow: {ratio:.2f}. At the same parameters the two "
            f"bounds differ by {difference:.1g} of {peer['values']['gpflow']:.0f} nats."
        )
    write("gplvm_speed", record, text)
    return None


if __name__ == "__main__":
    main()
