"""AEPO's update (Dong et al., 2025, "Agentic entropy-balanced policy optimization", arXiv:2510.14545, section 4.2).

Uncertain tokens have larger advantages, and above the upper clip they keep their gradient. Entropies come from the
scoring pass; their statistics are over all sampled tokens of the update.

Axes: E trained tokens of one update, N sampled tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from pydantic import NonNegativeFloat

from tunesmith.algorithms.losses.clipped import DualClip, Share, clamp_log_ratio, compute_ppo_clip_losses
from tunesmith.algorithms.scores import TokenInputs, TokenLosses, TokenScores
from tunesmith.algorithms.token_selection import ENTROPY_TOLERANCE


def compute_aepo_terms(tokens: TokenInputs, *, entropy_advantage_coef: NonNegativeFloat = 0.2) -> TokenInputs:
    """A (1 + coef z), z the entropy of the token in standard deviations from the mean; selects tokens above the mean.

    The factor is at least 0, so that no advantage changes its sign. Metric: `entropy_selected_frac`, the share of
    tokens above the mean.
    """
    num_tokens = len(tokens.advantages_E)
    if num_tokens == 0:
        return replace(tokens, is_selected_E=np.zeros(0, dtype=bool))
    assert tokens.entropies_E is not None
    mean, std = tokens.entropies_E.mean(), tokens.entropies_E.std()
    centered_E = tokens.entropies_E - mean
    z_E = centered_E / std if std > ENTROPY_TOLERANCE else np.zeros(num_tokens)
    is_selected_E = centered_E > ENTROPY_TOLERANCE
    return replace(
        tokens,
        advantages_E=tokens.advantages_E * np.maximum(1 + entropy_advantage_coef * z_E, 0.0),
        is_selected_E=is_selected_E,
        metrics={"train/entropy_selected_frac": float(is_selected_E.mean())},
    )


def compute_aepo_losses(
    scores: TokenScores,
    *,
    clip_range_low: Share = 0.2,
    clip_range_high: NonNegativeFloat = 0.2,
    clip_ratio_c: DualClip = 3.0,
) -> TokenLosses:
    """PPO's clip, where selected tokens above the upper clip keep the gradient of (1 + clip_range_high) A log p.

    Their value is that of the clip: the bound (1 + eps) becomes (1 + eps) / sg(r) r. Metric: `entropy_kept_frac`, the
    share of tokens whose gradient this keeps.
    """
    assert scores.is_selected_N is not None
    clipped = compute_ppo_clip_losses(
        scores, clip_range_low=clip_range_low, clip_range_high=clip_range_high, clip_ratio_c=clip_ratio_c
    )
    ratio_N = clamp_log_ratio(scores.logprobs_N - scores.old_logprobs_N).exp()
    bounded_N = -scores.advantages_N * (1 + clip_range_high) / ratio_N.detach() * ratio_N
    is_kept_N = (scores.is_selected_N > 0) & (scores.advantages_N > 0) & (ratio_N > 1 + clip_range_high)
    return TokenLosses(
        losses_N=torch.where(is_kept_N, bounded_N, clipped.losses_N),
        metrics={**clipped.metrics, "entropy_kept_frac": is_kept_N.to(ratio_N.dtype)},
    )
