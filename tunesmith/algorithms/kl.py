"""Estimators of the KL divergence between two policies from sampled tokens, and its coefficient.

For tokens sampled from policy p (`logprobs_N`) and another policy q, all but k2 and abs are unbiased estimates of
KL(p || q) (Schulman, 2020, "Approximating KL divergence"); k2 is its second-order approximation. As a loss, with tokens
from p: the expected gradient of k2 is that of KL(p || q), that of k3 is the gradient of KL(q || p), and that of k1 is
zero, so k1 is for monitoring only. corrected_k3 is k3 times the ratio of p and the sampling policy: its value and
gradient are those of KL(p || q) for any sampling policy, up to the clip of the ratio. abs is |log p - log q|; its
gradient has the same size at every token, but where the two differ by rounding alone, so that its sign would be
random, abs is 0.

Axes: N sampled tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, so that no token overflows the loss."""
MAX_CORRECTION = 2.0
"""corrected_k3 clips the ratio of policy and sampling policy to this."""
ABS_TOLERANCE = 100
"""abs takes log-ratios of up to this many times the dtype's epsilon for rounding: 1.2e-5 nats in float32, in which
16-bit models are scored too, and 2.2e-14 in float64."""
MAX_ADAPTATION = 0.2
"""Bound of the relative error in `adapt_kl_coef`."""

KlEstimator = Literal["k1", "k2", "k3", "abs", "corrected_k3"]


def compute_kl(
    logprobs_N: Tensor, other_logprobs_N: Tensor, *, estimator: KlEstimator, sampler_logprobs_N: Tensor | None = None
) -> Tensor:
    """Per-token estimates [N] of KL(policy || other); k3 is never negative, rounding included.

    corrected_k3 (DeepSeek-AI, 2025, "DeepSeek-V3.2", section 3.1) needs the logprobs of the sampling policy, also where
    the ratio in the loss is against the proximal policy.
    """
    log_ratio_N = logprobs_N - other_logprobs_N
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    if estimator == "abs":
        distance_N = log_ratio_N.abs()
        return distance_N.masked_fill(distance_N <= ABS_TOLERANCE * torch.finfo(distance_N.dtype).eps, 0.0)
    log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3_N = (torch.expm1(-log_ratio_N) + log_ratio_N).clamp(min=0)
    if estimator == "k3":
        return k3_N
    assert sampler_logprobs_N is not None
    return (logprobs_N - sampler_logprobs_N).clamp(max=MAX_LOG_RATIO).exp().clamp(max=MAX_CORRECTION) * k3_N


def adapt_kl_coef(kl_coef: float, *, kl: float, target: float, num_trajectories: int, horizon: int) -> float:
    """Next KL coefficient (Ziegler et al., 2019, section 2.2): higher where the KL is above its target, else lower.

    An update of more than `horizon` trajectories counts as one of `horizon`: the coefficient would become negative.
    """
    error = min(max(kl / target - 1, -MAX_ADAPTATION), MAX_ADAPTATION)
    return kl_coef * (1 + error * min(num_trajectories / horizon, 1.0))
