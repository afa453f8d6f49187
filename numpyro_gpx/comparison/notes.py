"""What a reader must know before comparing fits."""

from __future__ import annotations

import numpy as np

from numpyro_gpx.results.targets import is_binary, noise_target

__all__ = ["notes_for"]


def notes_for(fits, entries, reference, test, site) -> tuple[str, ...]:
    """Sentences on different targets or models, missing sites, doubts about fits."""
    notes = []
    targets = {name: fit.target for name, fit in fits.items()}
    if len(set(targets.values())) > 1:
        notes.append(
            f"The fits have different targets ({_listed(targets)}): distances include "
            "the sparse approximation."
        )
    if "sparse" in targets.values():
        notes.append(
            "A sparse target is the best posterior that the inducing variables can "
            "express, not the exact one."
        )
    noises = {
        name: noise_target(fit) for name, fit in fits.items() if fit.structure.noise
    }
    if len({noise[:1] for noise in noises.values()}) > 1:
        notes.append(
            f"The fits have different noise targets ({_listed(noises)}): A averages "
            "the log likelihood over the noise between layers, B samples the noise "
            "with the other sites. Their posteriors differ, whatever the engine."
        )
    if test is not None and len({is_binary(fit, site) for fit in fits.values()}) > 1:
        notes.append(
            "Some likelihoods are binary and some are not: probabilities and densities "
            "of the test targets are not comparable."
        )
    others = [n for n, fit in fits.items() if fit.model is not fits[reference].model]
    if others:
        notes.append(
            f"Fitted with another model function than {reference}: "
            f"{', '.join(others)}. Sites of the same name are taken to mean the same."
        )
    for name, group in entries.items():
        unmatched = [
            s for s in group if set(group[s]) != set(entries[reference].get(s, {}))
        ]
        if unmatched:
            notes.append(
                f"{name}: no distances for {', '.join(unmatched)}, which {reference} "
                "does not have in the same shape."
            )
    if test is not None and any(fit.structure.row_sites for fit in fits.values()):
        notes.append(
            "Latent inputs of the test rows are drawn from their prior: scores are of "
            "new rows, not of reconstructions."
        )
    raw = dict.fromkeys(
        s for name, fit in fits.items() for s in fit.structure.row_sites
        if s in entries[name] and fit.structure.gps
    )  # fmt: skip
    if raw:
        notes.append(
            f"Latent inputs ({', '.join(raw)}) are known up to symmetries at best: "
            "compare what does not depend on them, such as "
            "`summaries={'distance': gpx.latent_space.pairwise_distances('h')}`."
        )
    notes += _data_notes(fits, reference)
    notes += _point_notes(fits, entries, reference)
    notes += _bound_notes(fits, entries)
    notes += [f"{name}: {note}" for name, fit in fits.items() for note in fit.notes]
    return tuple(notes)


def _data_notes(fits, reference):
    """On fits to other data than the reference's."""
    mine = fits[reference].program.observed
    others = [
        name
        for name, fit in fits.items()
        for site, y in fit.program.observed.items()
        if site in mine and not np.array_equal(y, mine[site], equal_nan=True)
    ]
    if not others:
        return []
    return [
        f"Fitted to other data than {reference}: {', '.join(dict.fromkeys(others))}. "
        "Posteriors and bounds differ for that reason alone."
    ]


def _point_notes(fits, entries, reference):
    """On hyperparameters that have no spread."""
    notes = []
    names = fits[reference].structure.hyperparameters
    if len(fits) > 1 and names and _has_points(names, entries[reference]):
        notes.append(
            f"{reference}, the reference, holds {', '.join(names)} as points: no "
            "distances for these. `reference=` names another fit."
        )
    return notes


def _bound_notes(fits, entries):
    """On bounds that cannot be laid side by side."""
    notes = []
    points = {
        name: _has_points(fit.structure.hyperparameters, entries[name])
        for name, fit in fits.items()
        if fit.structure.hyperparameters and not fit.is_mcmc
    }
    if len(set(points.values())) > 1:
        listed = _listed({n: "point" if p else "drawn" for n, p in points.items()})
        notes.append(
            f"Hyperparameters are points in some fits only ({listed}): their bounds "
            "leave out what the others pay for being uncertain, and are not comparable."
        )
    guessed = [name for name, fit in fits.items() if "elbo_kind" in fit.info]
    if guessed:
        notes.append(
            f"The bound of {', '.join(guessed)} is an estimate, in which a "
            "discriminator's guess stands for the divergence; its standard error does "
            "not cover that."
        )
    return notes


def _has_points(names, entries) -> bool:
    draws = [x for name in names for x in entries.get(name, {}).values()]
    return bool(draws) and all(np.ptp(x) <= 1e-6 * np.max(np.abs(x)) for x in draws)


def _listed(values):
    return ", ".join(f"{name}: {value}" for name, value in values.items())
