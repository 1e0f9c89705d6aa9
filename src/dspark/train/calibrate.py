"""Sequential temperature scaling of a head's confidence, and how far confidence is from what happens.
It must never be fitted on rows that the head was trained on.

Shapes: M drafted blocks, B positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int8]
GRID = np.exp(np.linspace(np.log(0.1), np.log(10.0), 401))
NUM_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Of one position's survival: expected calibration error, Brier score, area under the ROC curve, rows, and the
    bins of the diagram as (mean predicted, share observed, rows)."""

    ece: float
    brier: float
    auc: float
    num_rows: int
    bins: list[tuple[float, float, int]]

    def as_dict(self) -> dict[str, object]:
        """For JSON, which has no NaN."""
        return {name: None if isinstance(v, float) and np.isnan(v) else v for name, v in vars(self).items()}


def survival(logits: Floats, temperatures: Sequence[float] = ()) -> Floats:
    """logits (M, B) -> probability that drafts 0..j are all accepted (M, B): the running product of
    sigmoid(logit / temperature) (DSpark, section 3.2.1)."""
    scale = np.array(temperatures) if len(temperatures) else np.ones(logits.shape[1])
    return np.cumprod(1 / (1 + np.exp(-logits / scale)), axis=1, dtype=np.float64)


def fit_temperatures(logits: Floats, right: Ints) -> list[float]:
    """One temperature a position, first to last: each makes the calibration error of the survival up to it least,
    given those before it (DSpark, section 3.2.1). logits (M, B); right (M, B): 1 when drafts 0..j were all right, 0
    when not, -1 where the answer had ended. A position without rows keeps 1."""
    found: list[float] = []
    before = np.ones(len(logits))
    for j in range(logits.shape[1]):
        rows = right[:, j] >= 0
        best, best_error = 1.0, np.inf
        if rows.any():
            for temperature in GRID:
                claim = before[rows] / (1 + np.exp(-logits[rows, j] / temperature))
                error = reliability(claim, right[rows, j]).ece
                # Ties (and noise of one bin's edge) go to the temperature nearest 1.
                if error < best_error - 1e-4 or (
                    error < best_error + 1e-4 and abs(np.log(temperature)) < abs(np.log(best))
                ):
                    best, best_error = float(temperature), min(error, best_error)
        found.append(best)
        before = before / (1 + np.exp(-logits[:, j] / best))
    return found


def reliability(claims: Floats, right: Ints) -> Reliability:
    """claims (M,) probabilities, right (M,) 0 or 1; NUM_BINS bins of equal width."""
    index = np.minimum((claims * NUM_BINS).astype(int), NUM_BINS - 1)
    bins, error = [], 0.0
    for b in range(NUM_BINS):
        inside = index == b
        if inside.any():
            predicted, observed, count = float(claims[inside].mean()), float(right[inside].mean()), int(inside.sum())
            bins.append((predicted, observed, count))
            error += abs(predicted - observed) * count / len(claims)
    return Reliability(
        ece=error,
        brier=float(((claims - right) ** 2).mean()),
        auc=_auc(claims, right),
        num_rows=len(claims),
        bins=bins,
    )


def by_position(logits: Floats, right: Ints, temperatures: Sequence[float] = ()) -> list[Reliability]:
    """Reliability of the survival at each position over the rows that reached it."""
    claims = survival(logits, temperatures)
    found = []
    for j in range(logits.shape[1]):
        rows = right[:, j] >= 0
        found.append(reliability(claims[rows, j], right[rows, j]))
    return found


def overall_ece(found: Sequence[Reliability]) -> float:
    """Mean over positions, weighted by rows."""
    total = sum(r.num_rows for r in found)
    return sum(r.ece * r.num_rows for r in found) / total if total else float("nan")


def _auc(claims: Floats, right: Ints) -> float:
    """Probability that a right row has the higher claim, ties half (Mann-Whitney U)."""
    num_right = int((right == 1).sum())
    num_wrong = len(right) - num_right
    if not num_right or not num_wrong:
        return float("nan")
    _, inverse, counts = np.unique(claims, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[right == 1].sum() - num_right * (num_right + 1) / 2) / (num_right * num_wrong))
