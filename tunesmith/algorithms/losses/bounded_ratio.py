"""Losses that bound the ratio of policy and old policy in other ways than PPO's clip.

Axes: N sampled tokens. r is the ratio at a token, d = log r, A the advantage, sg the identity without gradient.
"""

from __future__ import annotations

import math

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from tunesmith.algorithms.losses.clipped import Share, clamp_log_ratio
from tunesmith.algorithms.scores import TokenLosses, TokenScores
from tunesmith.errors import ConfigError


def compute_cispo_losses(
    scores: TokenScores,
    *,
    clip_range_low: Share = 1.0,
    clip_range_high: NonNegativeFloat = 0.28,
    enable_mask_clip: bool = False,
    mask_clip_range_low: Share = 1.0,
    mask_clip_range_high: NonNegativeFloat = 0.28,
) -> TokenLosses:
    """-A sg(clip(r, 1 - low, 1 + high)) log p: clips the weight, drops no gradient (MiniMax, 2025, eqs. 4, 5).

    `enable_mask_clip` also masks tokens that PPO's clip would stop, with the mask_clip_range limits (eq. 7).
    Metric: `clip_frac`, the share of tokens whose weight was clipped.
    """
    if not enable_mask_clip and (mask_clip_range_low, mask_clip_range_high) != (1.0, 0.28):
        raise ConfigError("mask_clip_range_low and mask_clip_range_high have no effect without enable_mask_clip")
    ratio_N = clamp_log_ratio(scores.logprobs_N.detach() - scores.old_logprobs_N).exp()
    weights_N = ratio_N.clamp(1 - clip_range_low, 1 + clip_range_high)
    metrics = {"clip_frac": (weights_N != ratio_N).to(ratio_N.dtype)}
    if enable_mask_clip:
        is_positive_N = scores.advantages_N > 0
        is_stopped_N = torch.where(
            is_positive_N,
            ratio_N > 1 + mask_clip_range_high,
            (ratio_N < 1 - mask_clip_range_low) & (scores.advantages_N < 0),
        )
        weights_N = weights_N.masked_fill(is_stopped_N, 0.0)
    return TokenLosses(losses_N=-scores.advantages_N * weights_N * scores.logprobs_N, metrics=metrics)


def compute_gspo_losses(
    scores: TokenScores, *, clip_range_low: Share = 3e-4, clip_range_high: NonNegativeFloat = 4e-4
) -> TokenLosses:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) with s the geometric mean of the ratios of the sequence.

    GSPO-token (Zheng et al., 2025, eqs. 13 to 15): s = sg(s) p / sg(p) at each token, so whole sequences are clipped,
    and advantages may differ per token. A sequence is a trajectory. Metric: `clip_frac`, the share of clipped tokens.
    """
    ratio_N = compute_sequence_ratios(scores)
    plain_N = -scores.advantages_N * ratio_N
    clipped_N = -scores.advantages_N * ratio_N.clamp(1 - clip_range_low, 1 + clip_range_high)
    metrics = {"clip_frac": (clipped_N > plain_N).to(ratio_N.dtype)}
    return TokenLosses(losses_N=torch.maximum(plain_N, clipped_N), metrics=metrics)


def compute_gmpo_losses(scores: TokenScores) -> TokenLosses:
    """-A s with s the geometric mean over the sequence of ratios that are clipped token by token.

    Zhao et al. (2025), "Geometric-mean policy optimization"; the limits are those of `compute_gmpo_terms`. A
    clipped token has no gradient of its own but keeps its part in s. A sequence is a trajectory. Metric: `clip_frac`,
    the share of clipped tokens.
    """
    assert scores.sequence_log_ratios_N is not None and scores.is_selected_N is not None
    is_clipped_N = scores.is_selected_N > 0
    own_N = (scores.logprobs_N - scores.logprobs_N.detach()).masked_fill(is_clipped_N, 0.0)
    ratio_N = clamp_log_ratio(own_N + scores.sequence_log_ratios_N).exp()
    metrics = {"clip_frac": is_clipped_N.to(ratio_N.dtype)}
    return TokenLosses(losses_N=-scores.advantages_N * ratio_N, metrics=metrics)


def compute_sapo_losses(
    scores: TokenScores, *, tau_pos: PositiveFloat = 1.0, tau_neg: PositiveFloat = 1.05
) -> TokenLosses:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate instead of a clip (Gao et al., 2025, SAPO, eqs. 5 and 6).

    At r = 1 the gradient is the policy gradient; it decays as r moves away from 1. tau is `tau_pos` for A > 0, else
    `tau_neg`: with the defaults it decays faster for A <= 0.
    """
    ratio_N = clamp_log_ratio(scores.logprobs_N - scores.old_logprobs_N).exp()
    tau_N = torch.where(scores.advantages_N > 0, tau_pos, tau_neg)
    return TokenLosses(losses_N=-scores.advantages_N * 4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1)))


def compute_sppo_losses(scores: TokenScores, *, epsilon: PositiveFloat = 0.3) -> TokenLosses:
    """-A log clip(r, 1 / (1 + epsilon), 1 + epsilon): softmax PPO (Vaswani et al., 2022, section 4.2).

    The gradient is that of A log p within the bounds and 0 outside. Metric: `clip_frac`, the share outside.
    """
    bound = math.log1p(epsilon)
    log_ratio_N = scores.logprobs_N - scores.old_logprobs_N
    metrics = {"clip_frac": (log_ratio_N.detach().abs() > bound).to(log_ratio_N.dtype)}
    return TokenLosses(losses_N=-scores.advantages_N * log_ratio_N.clamp(-bound, bound), metrics=metrics)


def compute_sequence_ratios(scores: TokenScores) -> Tensor:
    """Geometric mean of the ratios over each token's sequence, with the gradient of the token's own logprob."""
    assert scores.sequence_log_ratios_N is not None
    own_N = scores.logprobs_N - scores.logprobs_N.detach()
    return clamp_log_ratio(own_N + scores.sequence_log_ratios_N).exp()
