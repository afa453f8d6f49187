"""Several fits side by side: `compare`, and what it returns."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from numpyro_gpx import plots
from numpyro_gpx.comparison.notes import notes_for
from numpyro_gpx.comparison.scores import ScoredRows, score_table
from numpyro_gpx.comparison.site_table import site_table
from numpyro_gpx.comparison.text import as_text
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.row_chunks import num_rows_of
from numpyro_gpx.results.scalar_entries import scalar_entries
from numpyro_gpx.results.targets import is_binary

if TYPE_CHECKING:  # loaded on first use
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Comparison", "compare"]


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` found; printing it shows tables of at most 100 columns.

    Attributes:
        sites: One row for each scalar and fit, indexed by `(site, fit)`: posterior
            `mean` and `sd`; bulk `ess` and `r_hat` (NaN for variational fits, whose
            draws are independent, and `r_hat` for a single chain); `distance`, the
            Wasserstein distance to the reference in units of its sd; and `floor`, the
            distance that two equal normal posteriors would show on average at these
            numbers of effective draws. Long sites have two rows, the mean and the worst
            over their entries.
        fits: One row a fit: `engine`, `target`, `approximation`, `noise`;
            `log_density`, the mean log predictive density of a test row, with its
            standard error, and its `difference` to the reference's, with the standard
            error of the paired difference; `rmse` and `coverage_90` (share of targets
            inside the central 90 % predictive interval), or for binary targets
            `error_rate` (at probability 0.5) and `ece_10_bins` (expected calibration
            error); `elbo` with its standard error, NaN for samplers; `seconds`. Without
            test rows, nothing of predictions.
        reference: Name of the fit that distances refer to.
        notes: What a reader must know before comparing.
        members: The fits.
        num_rows: Number of test rows, 0 if there were none.
    """

    sites: pd.DataFrame
    fits: pd.DataFrame
    reference: str
    notes: tuple[str, ...]
    members: dict[str, Fit]
    num_rows: int

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        reference = html.escape(self.reference)
        rows = f"; {self.num_rows} test rows" if self.num_rows else ""
        head = f"<p>Reference: {reference}{rows}.</p>"
        tables = self.fits.to_html(na_rep="") + self.sites.to_html(na_rep="")
        return f"{head}<ul>{notes}</ul>{tables}"

    def plot(self) -> Figure:
        """Marginal posteriors, distances to the reference and test scores."""
        return plots.comparison(self)


def compare(
    fits: dict[str, Fit],
    X_test=None,
    y_test=None,
    *,
    reference: str | None = None,
    site: str | None = None,
    num_draws: int = 1000,
    summaries: dict[str, Callable] | None = None,
) -> Comparison:
    """Lay fits side by side: posterior marginals, and predictions of test rows.

    Without test rows, posteriors alone: of plain NumPyro models as well.

    Args:
        fits: Fits by name.
        X_test: Test inputs, or a tuple of all the model's arguments without targets,
            such as `(X_test, exposure_test)`; they are passed to `fit.predict`. `None`
            for models without inputs, or without test rows.
        y_test: Test targets `(N,)` or `(N, P)`; without them nothing is predicted.
        reference: Name of the fit that distances refer to; by default the first that
            samples its target exactly in the limit (NUTS), else the first.
        site: Observed site; may be left out if the models have one.
        num_draws: Draws taken from variational fits; of samplers all are used.
        summaries: Functions of draws by site, `(S, ...)`, that return `(S, K)`, by
            name. They are compared in the place of latent inputs, which are known up to
            rotations and signs at best:
            `{"distance": gpx.latent_space.pairwise_distances("h")}`.

    Returns:
        Tables (`.sites`, `.fits`) that print as text; `.plot()` for a figure.

    References:
        Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021) for ESS and R-hat.
    """
    _check_fits(fits, reference)
    name = _default_reference(fits) if reference is None else reference
    test = None if y_test is None else _test_rows(fits, X_test, y_test, site)
    if test is None and (X_test is not None or site is not None):
        raise ValueError(
            f"`{'site' if X_test is None else 'X_test'}` was given without `y_test`. "
            "Pass the targets too, or leave out both to compare posteriors alone."
        )
    entries = {
        label: scalar_entries(fit, num_draws, summaries) for label, fit in fits.items()
    }
    sites = site_table(fits, entries, name)
    scores = score_table(fits, test, name, site)
    notes = notes_for(fits, entries, name, test, site)
    number = 0 if test is None else test.y.shape[0]
    return Comparison(sites, scores, name, notes, dict(fits), number)


def _test_rows(fits, X_test, y_test, site) -> ScoredRows:
    y = np.asarray(y_test)
    if X_test is None:
        args, kwargs = (), {"num_rows": len(y)}
    else:
        args, kwargs = (X_test if isinstance(X_test, tuple) else (X_test,)), {}
        _check_inputs(args)
        for fit in fits.values():
            call = fit.new_call(*args)
            _check_rows(
                num_rows_of(fit.program, call, fit.structure.observed_site(site)), y
            )
    _check_targets(y)
    binary = all(is_binary(fit, site) for fit in fits.values())
    if binary and not np.isin(y, (0, 1)).all():
        raise ValueError(
            "`y_test` must hold the labels 0 and 1 of a binary likelihood; got "
            f"{np.unique(y)[:5].tolist()}."
        )
    return ScoredRows(args, kwargs, y, binary)


def _default_reference(fits):
    for name, fit in fits.items():
        if fit.is_mcmc and fit.approximation == "asymptotically exact":
            return name
    return next(iter(fits))


def _check_fits(fits, reference):
    if not isinstance(fits, dict) or not fits:
        raise ValueError(
            "`fits` must be a dictionary of fits by name, such as {'nuts': nuts_fit}; "
            f"got {'an empty one' if fits == {} else type(fits).__name__}."
        )
    for name, fit in fits.items():
        if not isinstance(fit, Fit):
            raise ValueError(
                f"`fits[{name!r}]` must be a gpx.Fit; got {type(fit).__name__}. Plain "
                "NumPyro results become one by gpx.Fit.from_svi or gpx.Fit.from_mcmc."
            )
    if reference is not None and reference not in fits:
        raise ValueError(
            f"`reference` must be one of the names {list(fits)}; got {reference!r}."
        )


def _check_inputs(X_test):
    if not X_test or np.ndim(X_test[0]) == 0:
        raise ValueError(
            "`X_test` must be an array of inputs (N, D), or a tuple of the model's "
            "arguments that starts with one."
        )
    if np.shape(X_test[0])[0] == 0:
        raise ValueError("`X_test` has no rows; pass at least one.")


def _check_rows(rows: int, y):
    if y.shape[:1] != (rows,):
        raise ValueError(
            f"`X_test` and `y_test` must have the same number of rows; got {rows} and "
            f"{y.shape[0] if y.ndim else 'a scalar'}."
        )


def _check_targets(y):
    if not np.isfinite(y.astype(float)).all():
        raise ValueError("`y_test` must be finite; drop the rows with NaN or inf.")
