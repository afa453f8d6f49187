"""What is to be said of draws through a guide."""

from __future__ import annotations

import numpy as np

from numpyro_gpx.engines.importance import Weighted
from numpyro_gpx.notes import Note

__all__ = ["TOO_HEAVY", "hmc_notes", "importance_notes"]

# k-hat from which importance sampling is not to be believed, and from which it is
# worth a word (Vehtari et al. 2024).
TOO_HEAVY, _HEAVY = 0.7, 0.5
# Fewer effective draws in the tails say little of a 90 % interval.
_FEW_IN_TAILS = 100


def importance_notes(weighted: Weighted) -> tuple[Note, ...]:
    evidence = {"k_hat": weighted.k_hat, "ess": weighted.ess}
    advice = "Train the guide longer, or use `method='hmc'`."
    if weighted.k_hat >= TOO_HEAVY:
        return (
            Note(
                "k_hat", "wrong",
                f"The weights have a tail that is too heavy (k-hat {weighted.k_hat:.2f}"
                f", above {TOO_HEAVY}): averages over these draws may be far off.",
                advice, evidence,
            ),
        )  # fmt: skip
    if weighted.k_hat >= _HEAVY:
        return (
            Note(
                "k_hat", "remark",
                f"The weights have a heavy tail (k-hat {weighted.k_hat:.2f}); averages "
                f"are still right, of {weighted.ess:.0f} effective draws.",
                advice, evidence,
            ),
        )  # fmt: skip
    return ()


def hmc_notes(weighted: Weighted, info, stats, mixing, dropped) -> tuple[Note, ...]:
    notes = []
    if dropped:
        notes.append(
            Note(
                "light_tails", "remark",
                "Tails mixed far worse than the middle: from then on one transition in "
                f"five went through a weakened guide, and the {dropped} draws before "
                "were left out.",
                "Nothing is wrong; longer chains have more of the tails.",
                {"dropped": dropped},
            )
        )  # fmt: skip
    elif mixing:
        notes.append(
            Note(
                "light_tails", "remark",
                f"The guide is too narrow somewhere (k-hat {weighted.k_hat:.2f}); one "
                "transition in five went through a weakened one.",
                "Look at R-hat and ESS: `fit.summary()`.",
                {"k_hat": weighted.k_hat},
            )
        )  # fmt: skip
    if info["tail_ess"] < _FEW_IN_TAILS:
        notes.append(
            Note(
                "tail_ess", "doubt",
                f"The tails of the hyperparameters are worth {info['tail_ess']:.0f} "
                f"draws, fewer than {_FEW_IN_TAILS}: intervals are uncertain.",
                "Raise `num_samples`, or train the guide longer.",
                {"tail_ess": info["tail_ess"], "bulk_ess": info["bulk_ess"]},
            )
        )  # fmt: skip
    acceptance = info["acceptance_rate"]
    if acceptance < 0.5:
        notes.append(
            Note(
                "acceptance", "wrong",
                f"Only {100 * acceptance:.0f} % of the trajectories were accepted: the "
                "guide's map does not lead to this posterior.",
                "Use `fit_nuts`, or train the guide longer.",
                {"acceptance_rate": acceptance},
            )
        )  # fmt: skip
    kicks = float(np.mean(stats["n_steps"]))
    low, high = info["x_sd"]
    if kicks > 8.0 or low < 0.5 or high > 2.0:
        notes.append(
            Note(
                "guide", "remark",
                f"The guide fits poorly ({kicks:.1f} gradients a draw; in its "
                f"coordinates the posterior's sd is {low:.2g} to {high:.2g}, 1 if it "
                "were exact): draws are right, but dear.",
                "Train the guide longer, or use `fit_nuts`.",
                {"gradients_a_draw": kicks, "x_sd": (low, high)},
            )
        )  # fmt: skip
    return tuple(notes)
