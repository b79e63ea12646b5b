"""Losses of the form -A w log p: the policy gradient with different weights w.

Axes: N sampled tokens. r is the ratio of policy and old policy, d = log r, A the advantage, sg the identity without
gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from tunesmith.algorithms.losses.bounded_ratio import compute_sequence_ratios
from tunesmith.algorithms.losses.clipped import Share, clamp_log_ratio
from tunesmith.algorithms.scores import TokenLosses, TokenScores
from tunesmith.errors import ConfigError


def compute_reinforce_losses(scores: TokenScores, *, ratio_cap: PositiveFloat | None = 2.0) -> TokenLosses:
    """-A sg(min(r, ratio_cap)) log p: the policy gradient (Williams, 1992), its importance weights truncated.

    On-policy, r is 1. `ratio_cap=None` uses no importance weights.
    """
    losses_N = -scores.advantages_N * scores.logprobs_N
    if ratio_cap is not None:
        ratio_N = clamp_log_ratio(scores.logprobs_N.detach() - scores.old_logprobs_N).exp()
        losses_N = ratio_N.clamp(max=ratio_cap) * losses_N
    return TokenLosses(losses_N=losses_N)


def compute_importance_sampling_losses(scores: TokenScores) -> TokenLosses:
    """-A r: the off-policy surrogate of the policy gradient, unbounded except for the clamp of d."""
    return TokenLosses(losses_N=-scores.advantages_N * clamp_log_ratio(scores.logprobs_N - scores.old_logprobs_N).exp())


def compute_kl_cov_losses(scores: TokenScores, *, penalty_coef: NonNegativeFloat = 1.0) -> TokenLosses:
    """-A r, plus coef |d| at the tokens that `compute_kl_cov_terms` selects (Cui et al., 2025, KL-Cov, eq. 14).

    |d| is the estimate of KL(old, policy) of the paper's listing 1; it has no gradient at d = 0. Metric: `kl_cov_frac`,
    the share of penalized tokens.
    """
    assert scores.is_selected_N is not None
    log_ratio_N = clamp_log_ratio(scores.logprobs_N - scores.old_logprobs_N)
    losses_N = -scores.advantages_N * log_ratio_N.exp() + penalty_coef * scores.is_selected_N * log_ratio_N.abs()
    return TokenLosses(losses_N=losses_N, metrics={"kl_cov_frac": scores.is_selected_N})


def compute_opmd_losses(scores: TokenScores, *, tau: NonNegativeFloat = 1.0) -> TokenLosses:
    """-A log p / (1 + tau): online policy mirror descent, with its regularizer as a factor of the step.

    Yao et al. (2025), "Group-relative REINFORCE is secretly an off-policy algorithm", section 4.1: no importance
    weights for any sampling policy. A larger tau keeps the policy closer to the sampling policy.
    """
    return TokenLosses(losses_N=-scores.advantages_N * scores.logprobs_N / (1 + tau))


def compute_rec_losses(
    scores: TokenScores,
    *,
    epsilon_low: Share = 0.2,
    epsilon_high: NonNegativeFloat = 0.2,
    epsilon_low_prime: Share = 0.6,
    epsilon_high_prime: NonNegativeFloat = 2.0,
    clip_mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"] = "none",
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none",
    temp: PositiveFloat = 1.0,
    regularizer: Literal["none", "k2", "forward-kl"] = "none",
    regularizer_coef: NonNegativeFloat = 0.0,
) -> TokenLosses:
    """-A w log p where the ratio is within bounds: REINFORCE with clipping (Yao et al., 2025, section 4, REC and RED).

    `clip_mode` selects the trained tokens: `one-side`, A >= 0 and r <= 1 + high or A <= 0 and r >= 1 - low; `two-side`,
    1 - low <= r <= 1 + high; `ring`, two-side or A >= 0 and r <= 1 - low' or A <= 0 and r >= 1 + high';
    `gspo-one-side`, one-side by the sequence's ratio. `weight` w is 1, sg(r), the sequence's ratio, or exp(A / temp),
    A / temp limited to 20 (RED-Weight). The regularizer adds coef d^2 or -coef log p. Metric: `clip_frac`, the share of
    masked tokens.
    """
    if clip_mode == "none" and (epsilon_low, epsilon_high) != (0.2, 0.2):
        raise ConfigError("epsilon_low and epsilon_high have no effect with clip_mode='none'")
    if clip_mode != "ring" and (epsilon_low_prime, epsilon_high_prime) != (0.6, 2.0):
        raise ConfigError("epsilon_low_prime and epsilon_high_prime have no effect unless clip_mode='ring'")
    if weight != "advantage" and temp != 1.0:
        raise ConfigError(f"temp={temp:g} has no effect unless weight='advantage'")
    if (regularizer == "none") != (regularizer_coef == 0):
        raise ConfigError(
            f"regularizer={regularizer!r} with regularizer_coef={regularizer_coef:g}: set both, or neither"
        )
    log_ratio_N = clamp_log_ratio(scores.logprobs_N - scores.old_logprobs_N)
    ratio_N = log_ratio_N.detach().exp()
    is_kept_N = torch.ones_like(ratio_N, dtype=torch.bool)
    if clip_mode != "none":
        compared_N = compute_sequence_ratios(scores).detach() if clip_mode == "gspo-one-side" else ratio_N
        low_N, high_N = compared_N >= 1 - epsilon_low, compared_N <= 1 + epsilon_high
        is_gain_N, is_loss_N = scores.advantages_N >= 0, scores.advantages_N <= 0
        is_kept_N = low_N & high_N if clip_mode in ("two-side", "ring") else is_gain_N & high_N | is_loss_N & low_N
        if clip_mode == "ring":
            is_kept_N |= is_gain_N & (compared_N <= 1 - epsilon_low_prime)
            is_kept_N |= is_loss_N & (compared_N >= 1 + epsilon_high_prime)
    losses_N = (
        -scores.advantages_N * _compute_rec_weights(scores, ratio_N, weight, temp) * scores.logprobs_N * is_kept_N
    )
    if regularizer == "k2":
        losses_N = losses_N + regularizer_coef * log_ratio_N.square()
    elif regularizer == "forward-kl":
        losses_N = losses_N - regularizer_coef * scores.logprobs_N
    return TokenLosses(losses_N=losses_N, metrics={"clip_frac": (~is_kept_N).to(ratio_N.dtype)})


def _compute_rec_weights(scores: TokenScores, ratio_N: Tensor, weight: str, temp: float) -> Tensor:
    if weight == "importance_sampling":
        return ratio_N
    if weight == "gspo_importance_sampling":
        return compute_sequence_ratios(scores).detach()
    if weight == "advantage":
        return clamp_log_ratio(scores.advantages_N / temp).exp()
    return torch.ones_like(ratio_N)
