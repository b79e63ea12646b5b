"""Reinforcement learning and imitation of expert demonstrations in one update.

The loss is (1 - mu) times the policy loss of sampled tokens plus mu times the imitation loss of expert tokens. The two
are aggregated separately, so the number of demonstrations does not change their weight.

Axes: E trained tokens of one update, N tokens of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import Tensor

from tunesmith.algorithms.losses.clipped import DualClip, Share, compute_ppo_clip_losses
from tunesmith.algorithms.scores import TokenInputs, TokenLosses, TokenScores
from tunesmith.errors import ConfigError
from tunesmith.metric import Count


def compute_mix_terms(tokens: TokenInputs, *, mu: Share = 0.1) -> TokenInputs:
    """Constant weight mu for expert tokens and 1 - mu for sampled tokens (Zhang et al., 2025, CHORD)."""
    return _build_mixture_terms(tokens, mu)


def compute_chord_terms(
    tokens: TokenInputs,
    *,
    mu_peak: Share = 0.1,
    mu_valley: Share = 0.1,
    mu_warmup_steps: NonNegativeInt = 0,
    mu_decay_steps: NonNegativeInt = 0,
) -> TokenInputs:
    """As `compute_mix_terms` with mu from `compute_mu` (Zhang et al., 2025, CHORD).

    The defaults are those of CHORD-phi: a constant 0.1. CHORD-mu decays from 0.9 to 0.05.
    """
    if mu_decay_steps == 0 and mu_valley not in (0.1, mu_peak):
        raise ConfigError(
            f"mu_valley={mu_valley:g} has no effect with mu_decay_steps=0, where mu stays at mu_peak={mu_peak:g}: set "
            "mu_decay_steps, or leave mu_valley out"
        )
    mu = compute_mu(
        tokens.step, peak=mu_peak, valley=mu_valley, num_warmup_steps=mu_warmup_steps, num_decay_steps=mu_decay_steps
    )
    return _build_mixture_terms(tokens, mu)


def compute_mu(step: int, *, peak: float, valley: float, num_warmup_steps: int, num_decay_steps: int) -> float:
    """Imitation weight at step 0, 1, ...: linear warm-up from 0 to `peak`, cosine decay to `valley`, then constant.

    With `num_decay_steps` 0 it stays at `peak`.
    """
    if step < num_warmup_steps:
        return peak * step / num_warmup_steps
    if num_decay_steps == 0:
        return peak
    progress = min((step - num_warmup_steps) / num_decay_steps, 1.0)
    return valley + (peak - valley) * (1 + math.cos(math.pi * progress)) / 2


def compute_mix_losses(
    scores: TokenScores,
    *,
    clip_range_low: Share = 0.2,
    clip_range_high: NonNegativeFloat = 0.2,
    clip_ratio_c: DualClip = 3.0,
) -> TokenLosses:
    """PPO's clipped loss for sampled tokens, cross entropy for expert tokens."""
    return _mix_losses(scores, torch.ones_like(scores.logprobs_N), clip_range_low, clip_range_high, clip_ratio_c)


def compute_chord_losses(
    scores: TokenScores,
    *,
    clip_range_low: Share = 0.2,
    clip_range_high: NonNegativeFloat = 0.2,
    clip_ratio_c: DualClip = 3.0,
) -> TokenLosses:
    """As `compute_mix_losses` with each expert token's cross entropy times p (1 - p) (Zhang et al., 2025, CHORD-phi).

    p is the policy's probability of the token, without gradient. Very probable and very improbable tokens get small
    weights, so that imitation does not undo what the policy has learned.
    """
    probabilities_N = scores.logprobs_N.detach().exp()
    phi_N = probabilities_N * (1 - probabilities_N)
    return _mix_losses(scores, phi_N, clip_range_low, clip_range_high, clip_ratio_c)


def _build_mixture_terms(tokens: TokenInputs, mu: float) -> TokenInputs:
    is_expert_E = ~tokens.find_sampled()
    metrics = {
        "expert/mu": mu,
        "expert/num_sequences": Count(len(np.unique(tokens.sequence_E[is_expert_E]))),
        "expert/num_tokens": Count(is_expert_E.sum()),
    }
    return replace(tokens, correction_E=np.where(is_expert_E, mu, 1 - mu), metrics=metrics)


def _mix_losses(
    scores: TokenScores, imitation_weights_N: Tensor, clip_range_low: float, clip_range_high: float, clip_ratio_c: float
) -> TokenLosses:
    """Metrics are 0 at expert tokens."""
    own = compute_ppo_clip_losses(
        scores, clip_range_low=clip_range_low, clip_range_high=clip_range_high, clip_ratio_c=clip_ratio_c
    )
    if scores.is_expert_N is None:
        return own
    is_expert_N = scores.is_expert_N.bool()
    losses_N = torch.where(is_expert_N, -imitation_weights_N * scores.logprobs_N, own.losses_N)
    metrics = {name: values.masked_fill(is_expert_N, 0.0) for name, values in own.metrics.items()}
    return TokenLosses(losses_N=losses_N, metrics=metrics)
