"""Predict pass rates of untried tasks from the pass rates of reference models.

A task's predicted pass rate is a piecewise linear function of the trained model's capability c. The reference models,
from weakest to strongest, are its knots at c = 0, 1, ... Two columns w and s give the line w + c (s - w) of BOTS (Shen
et al., 2025, arXiv:2510.26374, section 4). One column is put between knots of 0 and 1 ("solves nothing" and "solves
everything"); without columns these two are the only knots, and c is the pass rate itself. As in the paper c is
unbounded, because a model may become weaker or stronger than its references: the first and the last segment are
extrapolated, and only predicted pass rates are clipped.

Axes: N tasks, J tasks with feedback, K knots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_GAP = 1e-3
"""Minimum difference of the mean pass rates of two knots on the given tasks; below it the capability is not estimated.
The paper divides by such differences, or by negative ones, and gets capabilities of 1e5 that take a hundred steps to
decay."""
EPSILON = 1e-6


class ReferencePassRates:
    """Pass rates of N tasks at each knot, sorted by their mean."""

    def __init__(self, features: NDArray[np.float64]) -> None:
        num_tasks, num_columns = features.shape
        order = np.argsort(features.mean(axis=0), kind="stable")
        knots: list[Any] = [np.ascontiguousarray(features[:, column]) for column in order]
        if num_columns < 2:
            knots = [np.zeros(num_tasks), *knots, np.ones(num_tasks)]
        self._knots = knots

    def estimate_capability(self, index_J: NDArray[np.int64], mean_pass_rate: float) -> float | None:
        """The capability at which the mean on these tasks is `mean_pass_rate`; None if the knots are too close."""
        mean_K = np.maximum.accumulate([knot[index_J].mean() for knot in self._knots])
        segment = int(np.clip(np.searchsorted(mean_K, mean_pass_rate, side="right") - 1, 0, len(mean_K) - 2))
        gap = mean_K[segment + 1] - mean_K[segment]
        if gap < MIN_GAP:
            return None
        return float(segment + (mean_pass_rate - mean_K[segment]) / (gap + EPSILON))

    def predict(self, capability: float) -> NDArray[np.float64]:
        """The predicted pass rate of every task at a capability, as a new array."""
        segment = int(np.clip(np.floor(capability), 0, len(self._knots) - 2))
        predicted_N = self._knots[segment + 1] - self._knots[segment]
        predicted_N *= capability - segment
        predicted_N += self._knots[segment]
        return np.clip(predicted_N, 0.0, 1.0, out=predicted_N)
