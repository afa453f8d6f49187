"""Free simulation of the airline passengers: table 3 of the dissertation.

    python benchmarks/free_simulation.py --data DIR [--quick]

A GP on twelve lags is trained by maximum likelihood and then simulated from the first
twelve months to the end, predictions fed back as uncertain inputs. NLPD and RMSE in
thousands of passengers, on the months after the training data.
"""

from __future__ import annotations

import argparse
import time

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
from datasets import add_data_option, data_folder, load
from numpyro.distributions import constraints
from results import markdown_table, write

import numpyro_gpx as gpx
from numpyro_gpx.cubature import Analytic, GaussHermite, MonteCarlo, Unscented
from numpyro_gpx.simulation import Simulation

NUM_LAGS = 12
# Starting values: lengthscales in units of the columns' sd, noise variance, period (of
# the periodic kernel, in sd of the series). The first is that of the author's code.
STARTS = ((10.0, 0.01, 1.0), (10.0, 0.1, 4.0), (3.0, 0.01, 4.0), (3.0, 0.1, 1.0))
KERNELS = ("RBF+Linear", "Per.+RBF+Lin.")
# Training months: the dissertation says four years, its code takes 48 rows of 12 lags.
SETTINGS = {"text": 48, "code": 60}
# NLPD and RMSE, with standard deviations where there are any.
PAPER = {
    ("GP-NARX", "RBF+Linear"): ("11.37", "69.40"),
    ("GP-NARX", "Per.+RBF+Lin."): ("7.46", "44.98"),
    ("Analytic", "RBF+Linear"): ("7.08", "68.93"),
    ("GH-4096", "RBF+Linear"): ("7.07", "68.88"),
    ("GH-4096", "Per.+RBF+Lin."): ("5.20", "45.00"),
    ("UT-24", "RBF+Linear"): ("7.10", "69.11"),
    ("UT-24", "Per.+RBF+Lin."): ("5.26", "45.27"),
    ("MC-24", "RBF+Linear"): ("7.52 ± 0.41", "71.16 ± 3.15"),
    ("MC-24", "Per.+RBF+Lin."): ("5.41 ± 0.17", "46.99 ± 3.04"),
    ("MC-200", "RBF+Linear"): ("7.09 ± 0.20", "68.82 ± 2.09"),
    ("MC-200", "Per.+RBF+Lin."): ("5.19 ± 0.06", "45.19 ± 1.32"),
    ("MC-4096", "RBF+Linear"): ("7.07 ± 0.03", "68.81 ± 0.37"),
    ("MC-4096", "Per.+RBF+Lin."): ("5.19 ± 0.01", "45.29 ± 0.28"),
}


def methods(quick):
    """Rule, whether lags are joint, and number of repeats, by name."""
    rules = {
        "GP-NARX": (GaussHermite(1), False, 1),
        "Analytic": (Analytic(), False, 1),
        "GH-4096": (GaussHermite(2), False, 1),
        "UT-24": (Unscented(), False, 1),
        "MC-24": (MonteCarlo(24), False, 10),
        "MC-200": (MonteCarlo(200), False, 10),
        "MC-4096": (MonteCarlo(4096), False, 3),
        "GH-4096, joint": (GaussHermite(2), True, 1),
        "UT-24, joint": (Unscented(), True, 1),
    }
    if quick:
        return {name: rules[name] for name in ("GP-NARX", "UT-24", "UT-24, joint")}
    return rules


def positive_param(name, value):
    return numpyro.param(name, jnp.asarray(value), constraint=constraints.positive)


def make_model(X, kernel_name, start):
    lengthscale, noise_var, period = start

    def kernel():
        found = gpx.kernels.RBF(
            variance=positive_param("variance", 1.0),
            lengthscale=positive_param("lengthscale", lengthscale * X.std(axis=0)),
        ) + gpx.kernels.Linear(
            positive_param("slope_variance", np.full(NUM_LAGS, 0.01 / NUM_LAGS))
        )
        if kernel_name == "RBF+Linear":
            return found
        return found + gpx.kernels.Periodic(
            variance=positive_param("periodic_variance", 1.0),
            lengthscale=positive_param("periodic_lengthscale", 2.0),
            period=positive_param("period", period),
        )

    def likelihood():
        return gpx.likelihoods.Gaussian(positive_param("noise", noise_var**0.5))

    inducing = gpx.inducing.Data(X)
    return gpx.models.svgp(inducing, kernel=kernel, likelihood=likelihood)


def train(X, y, kernel_name, starts, max_steps):
    """A fit from each of the starting values."""
    fits = []
    for start in starts:
        model = make_model(X, kernel_name, start)
        guide = gpx.guides.OptimalGaussian(model)
        fits.append(
            gpx.fit_lbfgs(
                model, guide, X, y, key=jr.key(0), max_steps=max_steps, progress=False
            )
        )
    return fits


def score(sim, y):
    """NLPD and RMSE on the last months, as many as `y` has."""
    log_prob = sim.log_prob(np.concatenate([np.zeros(len(sim) - len(y)), y]))
    return {
        "nlpd": float(-log_prob[-len(y) :].mean()),
        "rmse": float(np.sqrt(np.mean((sim.mean[-len(y) :] - y) ** 2))),
    }


def run(series, setting, kernel_name, quick):
    num_train = SETTINGS[setting]
    rows, targets = gpx.timeseries.lagged(series[:num_train], NUM_LAGS)
    shift, scale = targets.mean(), targets.std()
    X, y = (rows - shift) / scale, (targets - shift) / scale
    history = (series[:NUM_LAGS] - shift) / scale

    def scored(fit, rule, joint, key):
        num_steps = len(series) - NUM_LAGS
        sim = gpx.timeseries.simulate(
            fit, history, num_steps, rule=rule, joint=joint, key=key
        )
        return score(sim.rescaled(shift, scale), series[num_train:])

    def path_scores(fit):
        """Scores of the mean and variance of drawn paths, which the rules imitate."""
        before = time.perf_counter()
        paths = gpx.timeseries.simulate_paths(
            fit, history, len(series) - NUM_LAGS, key=jr.key(0), num_paths=4096
        )
        sim = Simulation(paths.mean(0), paths.var(0)).rescaled(shift, scale)
        return {
            "method": "4096 paths",
            "scores": [score(sim, series[num_train:])],
            "seconds": time.perf_counter() - before,
        }

    tried = STARTS[:1] if quick else STARTS
    fits = train(X, y, kernel_name, tried, 5 if quick else 2000)
    evidence = [fit.elbo().value for fit in fits]
    best = fits[int(np.argmax(evidence))]
    chosen = methods(quick)
    if kernel_name != "RBF+Linear":  # the periodic kernel has no psi statistics
        chosen.pop("Analytic", None)
    results = []
    for name, (rule, joint, repeats) in chosen.items():
        before = time.perf_counter()
        scores = [scored(best, rule, joint, jr.key(i)) for i in range(repeats)]
        seconds = (time.perf_counter() - before) / repeats
        results.append(
            {
                "setting": setting,
                "kernel": kernel_name,
                "method": name,
                "scores": scores,
                "seconds": seconds,
            }
        )
        print(setting, kernel_name, name, scores[0], flush=True)
    results.append({**results[-1], **path_scores(best)})
    starts = [
        {
            "setting": setting,
            "kernel": kernel_name,
            "start": start,
            "evidence": value,
            "noise_sd": float(scale * fit.params["noise"]),
            "GP-NARX": scored(fit, GaussHermite(1), False, jr.key(0)),
            "UT-24": scored(fit, Unscented(), False, jr.key(0)),
            "params": {name: np.asarray(x).tolist() for name, x in fit.params.items()},
        }
        for start, value, fit in zip(tried, evidence, fits, strict=True)
    ]
    return results, starts


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    parser.add_argument("--quick", action="store_true", help="few steps and methods")
    parser.add_argument("--output", default="free_simulation", help="name of results")
    args = parser.parse_args(arguments)
    _, series = load(data_folder(args.data), "airpassengers")
    results, starts = [], []
    for setting in SETTINGS:
        for kernel_name in KERNELS:
            found, tried = run(series, setting, kernel_name, args.quick)
            results += found
            starts += tried
    write(args.output, {"results": results, "starts": starts}, report(results, starts))


def report(results, starts):
    parts = ["# Table 3 of the dissertation: free simulation of airline passengers"]
    parts += ["", CHOICES.strip()]
    for setting, words in WORDS.items():
        rows = [_row(r) for r in results if r["setting"] == setting]
        header = ["method", "kernel", "paper: NLPD", "ours", "paper: RMSE", "ours"]
        parts += ["", words, "", markdown_table([*header, "seconds"], rows)]
    header = ["months", "kernel", "lengthscale, noise, period", "log evidence"]
    header += ["noise sd", "GP-NARX: NLPD, RMSE", "UT-24: NLPD, RMSE"]
    table = markdown_table(header, [_start_row(r) for r in starts])
    parts += ["", "## Every start", "", STARTS_WORDS.strip(), "", table]
    return "\n".join([*parts, "", COMMENTS.strip()])


def _row(result):
    name, kernel = result["method"], result["kernel"]
    paper = PAPER.get((name, kernel), ("", ""))
    ours = [_spread([s[part] for s in result["scores"]]) for part in ("nlpd", "rmse")]
    seconds = f"{result['seconds']:.2f}"
    return [name, kernel, paper[0], ours[0], paper[1], ours[1], seconds]


def _spread(values):
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def _start_row(tried):
    def pair(name):
        return f"{tried[name]['nlpd']:.2f}, {tried[name]['rmse']:.2f}"

    months, start = SETTINGS[tried["setting"]], ", ".join(map(str, tried["start"]))
    evidence, noise = f"{tried['evidence']:.2f}", f"{tried['noise_sd']:.2f}"
    return [
        months, tried["kernel"], start, evidence, noise, pair("GP-NARX"), pair("UT-24")
    ]  # fmt: skip


CHOICES = """
NLPD and RMSE in thousands of passengers, on the months after the training data; the
simulation starts from the first twelve months, which are known, and goes to the end.
Hyperparameters maximise the evidence (L-BFGS, every training row an inducing point).

What the dissertation leaves open was chosen before any test figure was seen, from the
author's code (github.com/spectraldani/UnscentedGPLVM, `dynamic.ipynb`): the series is
standardised by the training targets, RBF and linear kernel have a lengthscale and a
variance for each lag, the periodic kernel (a function of the lags, not of time) has one
of each. That code also trains on 48 *rows*, hence 60 months, where the text says the
first four years; both are below. Of four starting values, the code's and three others,
the fit with the highest evidence counts; all are listed at the end.

Lags are independent, as in the dissertation, except where a row says `joint`. `4096
paths` is the mean and variance of drawn paths: what all the rules imitate by Gaussians.
Random rules: mean and standard deviation of ten repeats, three for MC-4096. Seconds
include compilation, and are those of one repeat.
"""

WORDS = {
    "text": "## As the text says: 48 months for training (36 rows), 96 for testing",
    "code": "## As the author's code does: 60 months for training (48 rows), 84 for "
    "testing",
}

STARTS_WORDS = """
Lengthscales in units of a lag's standard deviation, noise variance and period in
standardised units. Nothing was chosen by the test figures, which are here to show how
much hangs on the optimum that was found.
"""

COMMENTS = """
## Where figures differ

* On the text's 48 months RBF+Linear is far worse than the table in both scores. On the
  code's 60 months every uncertain-input row of it is within 0.25 in NLPD (within 0.1
  without MC-24) and within 5 in RMSE: the table looks like one of the code's split.
  What is left, also in GP-NARX (12.59 against 11.37), we put down to the optimum that
  was found, as no uncertainty is fed back there; we have not seen the author's.
* Per.+RBF+Lin. on the code's split is worse than the table, by 0.5 to 0.8 in NLPD (1.7
  for GP-NARX) and 13 to 18 in RMSE. The optimum with the highest evidence has next to
  no noise (0.69 against 8.81 for RBF+Linear), and the four starts end in four optima,
  whose RMSE goes from 58 to 153: with 29 hyperparameters on 48 rows the optimum matters
  more than the rule. There two nodes a lag are not enough either: GH-4096 and MC-4096
  are 3 apart in RMSE. On the text's split the NLPD of uncertain inputs is within 0.13
  of the table (0.8 for GP-NARX) and RMSE 8 to 12 above it, again with hardly any noise.
* The dissertation's order of the methods holds: means fed back alone are far too sure;
  GH and the analytic rule agree within 0.02 in NLPD for RBF+Linear; UT is within 0.15
  of them, at 24 points; MC-24 is worse than UT or level with it, and noisy.
* Taking lags for independent costs more than the choice between GH, UT and MC-200, but
  for Per.+RBF+Lin. on the text's split, where it costs nothing: with covariances kept
  (`joint`) GH is within 0.02 in NLPD of the drawn paths and UT within 0.15; with
  independent lags GH is off by 1.2, 1.5 and 0.3.
* The author's code starts from lags with the noise's variance, ours from known ones.
"""


if __name__ == "__main__":
    main()
