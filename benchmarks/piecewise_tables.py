"""Tables 1 and 2 of the piecewise-link paper, on the same data sets.

    python benchmarks/piecewise_tables.py --data DIR [--sets banana heart] [--resume]

Ten-fold cross-validation; inputs (and real targets) standardised by the training rows;
RBF kernel with one lengthscale, hyperparameters and inducing inputs learnt; inducing
inputs start at training rows, 10 of them (30 for SVGP regression); Adam at 0.05. What
the paper leaves open was fixed before the first run: 20 pieces on [-3, 3], 1000 steps
on all rows.
"""

from __future__ import annotations

import argparse
import json

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import optax
from datasets import add_data_option, data_folder, folds, load
from numpyro.distributions import constraints
from results import FOLDER, markdown_table, write

import numpyro_gpx as gpx

NUM_STEPS = 1000
PIECES = dict(num_pieces=20, lower=-3.0, upper=3.0)
BINARY = ("banana", "heart", "pima", "wdbc")
REAL = ("boston", "concrete", "winered", "winewhite")
MODELS = {
    **dict.fromkeys(BINARY, ("SFGP", "SFGP-l", "SVGP")),
    **dict.fromkeys(REAL, ("SFGP-l", "SFGP-Prior", "SVGP")),
}
# Log-likelihood and its standard deviation, F1 or RMSE and its standard deviation.
PAPER = {
    ("banana", "SFGP"): (-0.260, 0.020, 0.876, 0.019),
    ("banana", "SFGP-l"): (-0.258, 0.022, 0.876, 0.019),
    ("banana", "SVGP"): (-0.272, 0.019, 0.872, 0.014),
    ("heart", "SFGP"): (-0.397, 0.083, 0.822, 0.075),
    ("heart", "SFGP-l"): (-0.402, 0.091, 0.816, 0.085),
    ("heart", "SVGP"): (-0.441, 0.091, 0.819, 0.071),
    ("pima", "SFGP"): (-0.241, 0.096, 0.912, 0.073),
    ("pima", "SFGP-l"): (-0.233, 0.091, 0.916, 0.067),
    ("pima", "SVGP"): (-0.608, 0.307, 0.703, 0.263),
    ("wdbc", "SFGP"): (-0.093, 0.033, 0.961, 0.031),
    ("wdbc", "SFGP-l"): (-0.085, 0.033, 0.962, 0.020),
    ("wdbc", "SVGP"): (-0.155, 0.069, 0.954, 0.025),
    ("boston", "SFGP-l"): (-0.859, 1.099, 0.451, 0.296),
    ("boston", "SFGP-Prior"): (-0.700, 0.491, 0.471, 0.284),
    ("boston", "SVGP"): (-0.853, 0.419, 0.508, 0.269),
    ("concrete", "SFGP-l"): (-0.394, 0.241, 0.348, 0.076),
    ("concrete", "SFGP-Prior"): (-0.473, 0.179, 0.320, 0.096),
    ("concrete", "SVGP"): (-0.733, 0.109, 0.401, 0.114),
    ("winered", "SFGP-l"): (-1.205, 0.081, 0.807, 0.071),
    ("winered", "SFGP-Prior"): (-1.236, 0.097, 0.842, 0.117),
    ("winered", "SVGP"): (-1.226, 0.107, 0.802, 0.064),
    ("winewhite", "SFGP-l"): (-1.237, 0.083, 0.831, 0.071),
    ("winewhite", "SFGP-Prior"): (-1.239, 0.071, 0.839, 0.070),
    ("winewhite", "SVGP"): (-1.277, 0.127, 0.831, 0.074),
}


def positive_param(name, value):
    return numpyro.param(name, jnp.asarray(value), constraint=constraints.positive)


def make_likelihood(name, binary):
    if binary:
        links = {
            "SFGP": lambda: gpx.links.PiecewiseConstant.of("logit", **PIECES),
            "SFGP-l": lambda: gpx.links.learnt_link("link", "logit", **PIECES),
            "SVGP": lambda: "logit",
        }
        return gpx.likelihoods.Bernoulli(link=links[name]())
    links = {
        "SFGP-l": lambda: gpx.links.learnt_link("link", "identity", **PIECES),
        "SFGP-Prior": lambda: gpx.links.random_link("link", integrate=True, **PIECES),
        "SVGP": lambda: "identity",
    }
    return gpx.likelihoods.Gaussian(positive_param("noise", 0.5), link=links[name]())


def make_model(name, binary, Z):
    def model(X, y=None):
        kernel = gpx.kernels.RBF(
            variance=positive_param("variance", 1.0),
            lengthscale=positive_param("lengthscale", np.sqrt(X.shape[1])),
        )
        inducing = gpx.inducing.Points(Z, learn=True)
        f = gpx.gp("f", kernel, inducing=inducing)
        likelihood = make_likelihood(name, binary)
        with numpyro.plate("data", X.shape[0]):
            gpx.observe("y", f(X), likelihood, obs=y)

    return model


def f1_score(labels, truth):
    both = np.sum(labels & truth)
    return 2.0 * both / max(np.sum(labels) + np.sum(truth), 1)


def run(name, binary, fold, seed, num_steps):
    rng = np.random.default_rng(seed)
    number = 30 if name == "SVGP" and not binary else 10
    distinct = np.unique(fold.X, axis=0)
    Z = rng.choice(distinct, min(number, len(distinct)), replace=False)
    model = make_model(name, binary, Z)
    fit = gpx.fit_svi(
        model,
        gpx.guides.WhitenedGaussian(model),
        fold.X,
        fold.y,
        key=jr.key(seed),
        num_steps=num_steps,
        optimizer=optax.adam(0.05),
        progress=False,
    )
    prediction = fit.predict(fold.X_test)
    if binary:
        score = f1_score(prediction.mean > 0.5, fold.y_test == 1)
    else:
        score = np.sqrt(np.mean((prediction.mean - fold.y_test) ** 2))
    return {
        "log_likelihood": float(prediction.log_prob(fold.y_test).mean()),
        "score": float(score),
        "bound": fit.elbo().value,
        "seconds": fit.seconds,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_option(parser)
    parser.add_argument("--sets", nargs="+", default=[*BINARY, *REAL])
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--resume", action="store_true", help="skip what is done")
    parser.add_argument("--output", default="piecewise_tables", help="name of results")
    args = parser.parse_args(arguments)
    folder = data_folder(args.data)
    done = FOLDER / f"{args.output}.json"
    results = json.loads(done.read_text())["results"] if args.resume else []
    finished = {(r["set"], r["model"], r["fold"]) for r in results}
    for name in args.sets:
        X, y = load(folder, name)
        binary = name in BINARY
        parts = folds(X, y, args.folds, scale_targets=not binary)
        for number, fold in enumerate(parts):
            for model in MODELS[name]:
                if (name, model, number) in finished:
                    continue
                found = run(model, binary, fold, number, args.steps)
                results.append({"set": name, "model": model, "fold": number, **found})
                print(results[-1], flush=True)
            done.write_text(json.dumps({"results": results}))
    write(args.output, {"results": results}, report(results))


def report(results):
    rows = []
    for name, models in MODELS.items():
        for model in models:
            own = _of(results, name, model)
            if own:
                rows.append(_row(name, model, own))
    header = ["set", "model", "paper: log-lik.", "ours", "paper: F1 / RMSE", "ours"]
    return "\n".join(
        [
            "# Tables 1 and 2 of the piecewise-link paper",
            "",
            "Mean and standard deviation over ten folds; log-likelihood of a test row "
            "in standardised units; F1 for the binary sets, RMSE for the others. `*` "
            "marks rows that differ from the paper's by more than one of its standard "
            "deviations.",
            "",
            markdown_table([*header, "seconds a fit"], rows),
            "",
            "The paper's best model of each set, and ours with the highest mean "
            "training bound:",
            "",
            markdown_table(
                ["set", "paper's best", "ours", "model", "within one sd or better"],
                [_best(name, results) for name in MODELS if _of(results, name)],
            ),
            "",
            COMMENTS.strip(),
        ]
    )


def _of(results, name, model=None):
    return [
        r
        for r in results
        if r["set"] == name and (model is None or r["model"] == model)
    ]


def _best(name, results):
    """The paper's best against the model that the training bound would choose."""
    ours = {m: _of(results, name, m) for m in MODELS[name]}
    chosen = max(ours, key=lambda m: np.mean([r["bound"] for r in ours[m]]))
    values = np.array([r["log_likelihood"] for r in ours[chosen]])
    best = max((PAPER[name, m][:2] for m in MODELS[name]), key=lambda pair: pair[0])
    reached = values.mean() >= best[0] - best[1]
    return [
        name, _shown(*best), _shown(values.mean(), values.std()), chosen,
        "yes" if reached else "no",
    ]  # fmt: skip


def _row(name, model, own):
    def measured(key):
        values = np.array([r[key] for r in own])
        return values.mean(), values.std()

    log_lik, score = measured("log_likelihood"), measured("score")
    paper = PAPER[name, model]
    far = abs(log_lik[0] - paper[0]) > paper[1] or abs(score[0] - paper[2]) > paper[3]
    seconds = float(np.median([r["seconds"] for r in own]))
    return [
        name,
        model + (" *" if far else ""),
        _shown(*paper[:2]),
        _shown(*log_lik),
        _shown(*paper[2:]),
        _shown(*score),
        round(seconds, 1),
    ]


def _shown(mean, sd):
    return f"{mean:.3f} ± {sd:.3f}"


COMMENTS = """
Rows that differ by more than one standard deviation of the paper's:

- banana: SFGP-l and SVGP are better, by 0.023 and 0.031 in log-likelihood; SFGP, with
  the same link as the paper's, agrees with it. The paper does not say how long it
  trained.
- pima is probably not the paper's "diabetes", which it does not name further: an F1 of
  0.91 is not reached on pima by any of the three models.
- wdbc: the F1 of SFGP-l and SVGP is higher by 0.022 and 0.030, SVGP's log-likelihood
  by 0.075. F1 depends on which class is called positive; here it is the benign one (as
  in scikit-learn), the larger class.
- boston: SVGP is better by 0.46, and better than the paper's own piecewise models.
- concrete: SFGP-l and SFGP-Prior are worse by 0.32 and 0.22, SVGP is better by 0.19. On
  three folds, 5000 steps instead of 1000 change little (SFGP-l -0.782 for -0.787,
  SFGP-Prior -0.739 for -0.743). With one lengthscale a column, where eq. 3 of the paper
  has a single one, they become -0.594 and -0.593, within one standard deviation, and
  their RMSE 0.43: the paper's code probably had such a kernel, and something more.

SFGP-l beats SFGP on banana and wdbc, but so does SVGP, whose logistic link is exact:
what the learnt link mends there is mostly that the fixed one ends at -3 and 3. On the
four regressions a plain SVGP with 30 inducing points is as good as, or better than,
both learnt links with 10.
"""


if __name__ == "__main__":
    main()
