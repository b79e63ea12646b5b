"""Losses of single tokens; how they are weighed in the batch is `aggregate.py`'s business.

A loss function takes the scores of N sampled tokens and returns one loss per token, so that the gradient cannot depend
on which tokens were computed together. Gradients flow through `logprobs_N` alone.

Axes: N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, so that one token cannot overflow the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a loss may know of the tokens it is given."""

    logprobs_N: Tensor
    """Under the policy that is trained."""
    old_logprobs_N: Tensor
    """Under the policy that sampled them, as the sampler recorded them."""
    advantages_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """One loss per token, and per-token quantities whose mean over the batch is worth watching."""

    losses_N: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def compute_ppo_clip_losses(
    scores: TokenScores,
    *,
    clip_range_low: Annotated[float, Field(ge=0, le=1)] = 0.2,
    clip_range_high: NonNegativeFloat = 0.2,
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0,
) -> TokenLosses:
    """Clipped surrogate (Schulman et al., 2017, eq. 7) with the dual clip for A < 0 (Ye et al., 2020, eq. 5).

    Metrics: `clip_frac`, the share of tokens whose gradient the clip stopped; `clip_frac_lower`, the share that the
    dual clip stopped; `ppo_kl`, the mean of old minus new logprob.
    """
    advantages_N = scores.advantages_N
    log_ratio_N = (scores.logprobs_N - scores.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
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


def compute_sft_losses(scores: TokenScores) -> TokenLosses:
    """Cross entropy of the given tokens; advantages are not read."""
    return TokenLosses(losses_N=-scores.logprobs_N)
