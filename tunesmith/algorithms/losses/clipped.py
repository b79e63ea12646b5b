"""PPO's clipped loss and the losses of supervised fine-tuning.

A loss function takes `TokenScores` of N tokens and returns one loss per token, which depends on that token alone, so
the gradient does not depend on how tokens are batched. Gradients flow through `logprobs_N` only. Aggregation over the
batch is in `aggregation.py`.

Axes: N sampled tokens.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from tunesmith.algorithms.scores import TokenLosses, TokenScores

Share = Annotated[float, Field(ge=0, le=1)]
DualClip = Annotated[float, Field(gt=1)]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, so that no token overflows the loss."""


def compute_ppo_clip_losses(
    scores: TokenScores,
    *,
    clip_range_low: Share = 0.2,
    clip_range_high: NonNegativeFloat = 0.2,
    clip_ratio_c: DualClip = 3.0,
    fallback_to_policy_gradient: bool = False,
) -> TokenLosses:
    """Clipped surrogate (Schulman et al., 2017, eq. 7) with the dual clip for A < 0 (Ye et al., 2020, eq. 5).

    A wider `clip_range_high` allows larger increases of improbable tokens (Yu et al., 2025, DAPO, section 3.1).
    `fallback_to_policy_gradient` uses the current policy as the old one: the ratio is 1 and the gradient is that of
    REINFORCE. Metrics: `clip_frac`, the share of tokens whose gradient the clip stopped; `clip_frac_lower`, the share
    that the dual clip stopped; `ppo_kl`, the mean of old minus new logprob.
    """
    advantages_N = scores.advantages_N
    old_logprobs_N = scores.logprobs_N.detach() if fallback_to_policy_gradient else scores.old_logprobs_N
    log_ratio_N = clamp_log_ratio(scores.logprobs_N - old_logprobs_N)
    ratio_N = log_ratio_N.exp()
    plain_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - clip_range_low, 1 + clip_range_high)
    upper_N = torch.maximum(plain_N, clipped_N)
    bound_N = -advantages_N * clip_ratio_c
    is_negative_N = advantages_N < 0
    metrics = {
        "clip_frac": (clipped_N > plain_N).to(upper_N.dtype),
        "clip_frac_lower": ((upper_N > bound_N) & is_negative_N).to(upper_N.dtype),
        "ppo_kl": -log_ratio_N.detach(),
    }
    return TokenLosses(losses_N=torch.where(is_negative_N, torch.minimum(upper_N, bound_N), upper_N), metrics=metrics)


def clamp_log_ratio(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_sft_losses(scores: TokenScores) -> TokenLosses:
    """-log p: cross entropy; advantages are not read."""
    return TokenLosses(losses_N=-scores.logprobs_N)


def compute_sft_is_losses(scores: TokenScores) -> TokenLosses:
    """-sg(p) log p: cross entropy weighted by the policy's probability of the token.

    The weight cancels the factor 1 / p in the gradient of cross entropy, which makes improbable tokens dominate (Wu et
    al., 2025, "On the generalization of SFT", dynamic fine-tuning, eq. 9).
    """
    return TokenLosses(losses_N=-scores.logprobs_N.detach().exp() * scores.logprobs_N)


def compute_sft_phi_losses(scores: TokenScores) -> TokenLosses:
    """-sg(p (1 - p)) log p: cross entropy with small weights for very probable and very improbable tokens.

    The weight phi of CHORD (Zhang et al., 2025, "On-policy RL meets off-policy experts", section 4.2).
    """
    probabilities_N = scores.logprobs_N.detach().exp()
    return TokenLosses(losses_N=-probabilities_N * (1 - probabilities_N) * scores.logprobs_N)
