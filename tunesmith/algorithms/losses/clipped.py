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
    """Under the policy that sampled them, or that the step began with; see `scores.BatchScores`."""
    advantages_N: Tensor
    sequence_log_ratios_N: Tensor | None = None
    """Mean log-ratio of policy and old policy over the token's sequence."""
    constants_N: Tensor | None = None
    """A part of the loss that no gradient flows through."""
    is_expert_N: Tensor | None = None
    """1 where the token was given by an expert; None where none was."""


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
    fallback_to_policy_gradient: bool = False,
) -> TokenLosses:
    """Clipped surrogate (Schulman et al., 2017, eq. 7) with the dual clip for A < 0 (Ye et al., 2020, eq. 5).

    A wider `clip_range_high` lets rare tokens grow (Yu et al., 2025, DAPO, section 3.1). `fallback_to_policy_gradient`
    takes the policy itself for the old one: the ratio is 1, and the gradient that of REINFORCE.
    Metrics: `clip_frac`, the share of tokens whose gradient the clip stopped; `clip_frac_lower`, the share that the
    dual clip stopped; `ppo_kl`, the mean of old minus new logprob.
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
    """Cross entropy of the given tokens; advantages are not read."""
    return TokenLosses(losses_N=-scores.logprobs_N)


def compute_sft_is_losses(scores: TokenScores) -> TokenLosses:
    """-sg(p) log p: cross entropy weighed by the policy's own probability of the token.

    It takes the inverse probability out of the gradient of cross entropy that makes improbable tokens dominate (Wu et
    al., 2025, "On the generalization of SFT", dynamic fine-tuning, eq. 9).
    """
    return TokenLosses(losses_N=-scores.logprobs_N.detach().exp() * scores.logprobs_N)


def compute_sft_phi_losses(scores: TokenScores) -> TokenLosses:
    """-sg(p (1 - p)) log p: what the policy knows already and what it finds absurd pull little.

    The weight phi of CHORD (Zhang et al., 2025, "On-policy RL meets off-policy experts", section 4.2).
    """
    probabilities_N = scores.logprobs_N.detach().exp()
    return TokenLosses(losses_N=-probabilities_N * (1 - probabilities_N) * scores.logprobs_N)
