"""Estimators of the KL divergence between two policies from sampled tokens.

With tokens sampled from `logprobs_N`'s policy p and another policy q, each estimates KL(p || q) (Schulman, 2020,
"Approximating KL divergence"). As a loss they differ: the gradient of k2 is that of the KL when tokens come from p;
k3's is that of the reverse KL, KL(q || p); k1's is zero in expectation, so k1 is for watching.

Axes: N sampled tokens.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""k3 clamps log-ratios to this, so that one token cannot overflow it."""

KlEstimator = Literal["k1", "k2", "k3"]


def compute_kl(logprobs_N: Tensor, other_logprobs_N: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Per-token estimates [N] of KL(policy || other)."""
    log_ratio_N = logprobs_N - other_logprobs_N
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-log_ratio_N).exp() - 1 + log_ratio_N
