"""Estimators of the KL divergence between two policies from sampled tokens, and its coefficient.

With tokens sampled from `logprobs_N`'s policy p and another policy q, each but abs estimates KL(p || q) (Schulman,
2020, "Approximating KL divergence"). As a loss they differ: the gradient of k2 is that of the KL when tokens come from
p; k3's is that of the reverse KL, KL(q || p); k1's is zero in expectation, so k1 is for watching. corrected_k3 is k3
times the ratio of p and the policy that sampled: value and gradient are those of the KL whoever sampled, up to a clip.
abs is the size of the log-ratio; its gradient pushes every token alike towards q.

Axes: N sampled tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""k3 clamps log-ratios to this, so that one token cannot overflow it."""
MAX_CORRECTION = 2.0
"""corrected_k3 clips the ratio of policy and sampler to this."""
MAX_ADAPTATION = 0.2
"""Most that the relative distance from the target counts."""

KlEstimator = Literal["k1", "k2", "k3", "abs", "corrected_k3"]


def compute_kl(
    logprobs_N: Tensor, other_logprobs_N: Tensor, *, estimator: KlEstimator, sampler_logprobs_N: Tensor | None = None
) -> Tensor:
    """Per-token estimates [N] of KL(policy || other); k3 is never negative, whatever was rounded.

    corrected_k3 (DeepSeek-AI, 2025, "DeepSeek-V3.2", section 3.1) needs the logprobs of the policy that sampled, also
    where losses compare with another policy.
    """
    log_ratio_N = logprobs_N - other_logprobs_N
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    if estimator == "abs":
        return log_ratio_N.abs()
    log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3_N = (torch.expm1(-log_ratio_N) + log_ratio_N).clamp(min=0)
    if estimator == "k3":
        return k3_N
    assert sampler_logprobs_N is not None
    return (logprobs_N - sampler_logprobs_N).clamp(max=MAX_LOG_RATIO).exp().clamp(max=MAX_CORRECTION) * k3_N


def adapt_kl_coef(kl_coef: float, *, kl: float, target: float, num_trajectories: int, horizon: int) -> float:
    """The next coefficient (Ziegler et al., 2019, section 2.2): up where the KL is above its target, else down."""
    error = min(max(kl / target - 1, -MAX_ADAPTATION), MAX_ADAPTATION)
    return kl_coef * (1 + error * num_trajectories / horizon)
