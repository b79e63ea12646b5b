"""Pass rates of reference models: what they say of a task that the trained model has not tried.

The columns are knots of a path from the weakest reference to the strongest; the trained model is a place on it, its
capability c. Two columns w and s make the line w + c (s - w) of BOTS (Shen et al., 2025, arXiv:2510.26374, section 4).
More columns bend the line at each. One column lies between "solves nothing" and "solves everything"; without columns
these two are all there is, and c is the pass rate itself. As in the publication c has no bounds, because a model may
outgrow its references: the first and the last line are extrapolated, and only predicted pass rates are clipped.

Axes: N tasks, J tasks with feedback, K knots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_GAP = 1e-3
"""Two knots closer than this on the tasks at hand do not tell where between them the model is. The publication divides
by such gaps, or by negative ones, and gets capabilities of 1e5 that take a hundred steps to forget."""
EPSILON = 1e-6


class References:
    """The path of N tasks."""

    def __init__(self, features: NDArray[np.float64]) -> None:
        num_tasks, num_columns = features.shape
        order = np.argsort(features.mean(axis=0), kind="stable")
        knots: list[Any] = [np.ascontiguousarray(features[:, column]) for column in order]
        if num_columns < 2:
            knots = [np.zeros(num_tasks), *knots, np.ones(num_tasks)]
        self._knots = knots

    def locate(self, index_J: NDArray[np.int64], mean_pass_rate: float) -> float | None:
        """The capability whose mean on these tasks is the one seen; None where the knots are too close to tell."""
        mean_K = np.maximum.accumulate([knot[index_J].mean() for knot in self._knots])
        segment = int(np.clip(np.searchsorted(mean_K, mean_pass_rate, side="right") - 1, 0, len(mean_K) - 2))
        gap = mean_K[segment + 1] - mean_K[segment]
        if gap < MIN_GAP:
            return None
        return float(segment + (mean_pass_rate - mean_K[segment]) / (gap + EPSILON))

    def predict(self, capability: float) -> NDArray[np.float64]:
        """The pass rate of every task at that capability, as a new array."""
        segment = int(np.clip(np.floor(capability), 0, len(self._knots) - 2))
        predicted_N = self._knots[segment + 1] - self._knots[segment]
        predicted_N *= capability - segment
        predicted_N += self._knots[segment]
        return np.clip(predicted_N, 0.0, 1.0, out=predicted_N)
