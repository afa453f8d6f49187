"""The table of fits: what each is, and how it predicts the test rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_gpx.results.prediction import Prediction
from numpyro_gpx.results.targets import labels, noise_target

__all__ = ["NUM_BINS", "ScoredRows", "score_table"]

# Bins of the expected calibration error.
NUM_BINS = 10
# Draws of latent inputs that predictions average over.
_NUM_PRIOR_DRAWS = 1000


class ScoredRows(NamedTuple):
    """What fits are scored on.

    Attributes:
        args: Arguments of `fit.predict`.
        kwargs: Its keyword arguments.
        y: Targets.
        binary: Whether these are labels 0 and 1 to all fits.
    """

    args: tuple
    kwargs: dict
    y: np.ndarray
    binary: bool


def score_table(fits, test: ScoredRows | None, reference, site):
    """Scores of the test rows, if any, ELBO and seconds; see `Comparison.fits`."""
    import pandas as pd

    scores: dict[str, dict] = {name: {} for name in fits}
    if test is not None:
        scores = _scores(fits, test, reference, site)
    rows = []
    for label, fit in fits.items():
        elbo = fit.elbo()
        rows.append(
            {
                "engine": fit.engine,
                "target": fit.target,
                "approximation": fit.approximation,
                "noise": noise_target(fit),
                **scores[label],
                "elbo": elbo.value,
                "elbo_se": elbo.standard_error,
                "seconds": fit.seconds,
            }
        )
    return pd.DataFrame(rows, index=pd.Index(fits, name="fit"))


def _scores(fits, test: ScoredRows, reference, site) -> dict[str, dict]:
    """Log density, its difference to the reference's and errors, by fit."""
    found = {}
    for label, fit in fits.items():
        # Latent inputs are drawn from their prior, which takes more than a few draws.
        number = _NUM_PRIOR_DRAWS if fit.structure.row_sites else None
        prediction = fit.predict(
            *test.args, site=site, num_components=number, **test.kwargs
        )
        if test.y.shape != prediction.shape:
            raise ValueError(
                f"`y_test` must have the shape {prediction.shape} of the predictions "
                f"of fit {label!r}; got {test.y.shape}."
            )
        errors = _errors(
            prediction, test.y, binary=test.binary, has_labels=labels(fit, site)
        )
        found[label] = prediction.log_prob(test.y), errors
    scores = {}
    for label, (log_density, errors) in found.items():
        difference = log_density - found[reference][0]
        scores[label] = {
            "log_density": log_density.mean(),
            "log_density_se": _standard_error(log_density),
            "difference": difference.mean(),
            "difference_se": _standard_error(difference),
            **errors,
        }
    return scores


def _errors(prediction: Prediction, y, *, binary, has_labels):
    if has_labels:
        return {"error_rate": np.mean(np.argmax(prediction.probabilities, -1) != y)}
    if binary:
        p = prediction.mean.ravel()
        return {
            "error_rate": np.mean((p > 0.5) != (y.ravel() == 1)),
            f"ece_{NUM_BINS}_bins": _calibration_error(p, y.ravel()),
        }
    lower, upper = prediction.quantile([0.05, 0.95])
    return {
        "rmse": np.sqrt(np.mean((prediction.mean - y) ** 2)),
        "coverage_90": np.mean((lower <= y) & (y <= upper)),
    }


def _calibration_error(p, y):
    r""":math:`\sum_b \frac{N_b}{N} |\bar y_b - \bar p_b|` over bins of equal width."""
    bins = np.minimum((p * NUM_BINS).astype(int), NUM_BINS - 1)
    excess = np.bincount(
        bins, weights=y - p, minlength=NUM_BINS
    )  # N_b (mean y - mean p)
    return np.abs(excess).sum() / p.size


def _standard_error(rows):
    return rows.std(ddof=1) / np.sqrt(rows.size) if rows.size > 1 else np.nan
