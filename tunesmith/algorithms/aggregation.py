"""Loss aggregation: one weight per token, computed before the forward pass.

The loss of the batch is the sum of weight times token loss. Weights are computed from counts over the whole batch, so
the gradient does not depend on rows, chunks, ranks or padding. A sequence is a trajectory: its samples, branches
included, count as one, and only its sampled tokens count.

Axes: E trained tokens of the batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"]


def compute_token_weights(trajectory_E: np.ndarray, *, aggregation: Aggregation, norm_length: int) -> np.ndarray:
    """Weights [E] (float64) of tokens whose trajectories are `trajectory_E`.

    token-mean: the mean over tokens. seq-mean-token-sum: the mean over sequences of their sums. seq-mean-token-mean:
    the mean over sequences of their means. seq-mean-token-sum-norm: the mean over sequences of sum / `norm_length`, a
    constant (`algorithm.norm_length`), so that it does not depend on the longest answer of a batch (Liu et al., 2025,
    "Understanding R1-Zero-like training", section 3.2). sum: the sum, for losses that include their weights.
    """
    if trajectory_E.size == 0:
        return np.zeros(0)
    _, sequence_E, length_Q = np.unique(trajectory_E, return_inverse=True, return_counts=True)
    num_sequences = len(length_Q)
    if aggregation == "sum":
        return np.ones(len(trajectory_E))
    if aggregation == "token-mean":
        return np.full(len(trajectory_E), 1 / len(trajectory_E))
    if aggregation == "seq-mean-token-sum":
        return np.full(len(trajectory_E), 1 / num_sequences)
    if aggregation == "seq-mean-token-mean":
        return 1 / (num_sequences * length_Q[sequence_E])
    assert aggregation == "seq-mean-token-sum-norm", aggregation
    return np.full(len(trajectory_E), 1 / (num_sequences * norm_length))
