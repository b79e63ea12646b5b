"""Per-token losses of the policy gradient and of imitation.

A loss function takes `TokenScores` of N tokens and returns one loss per token, which depends on that token alone, so
the gradient does not depend on how tokens are batched. Gradients flow through `logprobs_N` only. Aggregation over the
batch is in `scores.py`.

DPPO (Qi et al., 2026, "Rethinking the trust region in LLM reinforcement learning"): PPO clips by the ratio r of the
sampled token, which is large for improbable tokens even if the distribution hardly changes. DPPO masks by a divergence
D of the distributions of policy and sampling policy: a token with A > 0 and r > 1, or A < 0 and r < 1, has no gradient
where D is above its limit (eq. 12). The *binary* approximation compares the probabilities of the sampled token and of
all others together; it is a lower bound of the divergence over the vocabulary.

AEPO (Dong et al., 2025, "Agentic entropy-balanced policy optimization", arXiv:2510.14545, section 4.2): uncertain
tokens have larger advantages, and above the upper clip they keep their gradient. Entropies come from the scoring pass;
their statistics are over all sampled tokens of the update.

With expert demonstrations in the update, the loss is (1 - mu) times the policy loss of sampled tokens plus mu times the
imitation loss of expert tokens. The two are aggregated separately, so the number of demonstrations does not change
their weight.

Axes: E trained tokens of one update, N sampled tokens. r is the ratio of policy and old policy at a token, p and q are
its probabilities under the two, d = log r, A the advantage, sg the identity without gradient.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from tunesmith.algorithms.kl import MAX_LOG_RATIO
from tunesmith.algorithms.scores import TokenInputs, TokenLosses, TokenScores, average
from tunesmith.algorithms.sequence_terms import ENTROPY_TOLERANCE
from tunesmith.errors import ConfigError
from tunesmith.metric import Count

Share = Annotated[float, Field(ge=0, le=1)]
DualClip = Annotated[float, Field(gt=1)]


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


def compute_dppo_tv_losses(
    scores: TokenScores,
    *,
    delta_low: Share = 0.2,
    delta_high: Share = 0.2,
    ratio_cap: PositiveFloat | None = None,
    regularizer_coef: NonNegativeFloat = 0.0,
) -> TokenLosses:
    """-A r, masked where D = |p - q| is above its limit (eqs. 12, 13): `delta_high` for A > 0, `delta_low` for A < 0.

    `ratio_cap` truncates r as a weight (eq. 23); the paper's large runs use 5, verl 20. `regularizer_coef` adds coef
    d^2 at every token. prime-rl's default is this loss with coef 1e-3 and token-mean. Metric: `clip_frac`, the share of
    masked tokens.
    """
    divergence_N = (scores.logprobs_N.detach().exp() - scores.old_logprobs_N.exp()).abs()
    return _mask_losses(scores, divergence_N, delta_low, delta_high, ratio_cap, regularizer_coef)


def compute_dppo_kl_losses(
    scores: TokenScores,
    *,
    delta_low: NonNegativeFloat = 0.05,
    delta_high: NonNegativeFloat = 0.05,
    ratio_cap: PositiveFloat | None = None,
    regularizer_coef: NonNegativeFloat = 0.0,
) -> TokenLosses:
    """As `compute_dppo_tv_losses` with D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (eq. 14)."""
    logprobs_N, old_logprobs_N = scores.logprobs_N.detach(), scores.old_logprobs_N
    rest_N, old_rest_N = _compute_complement(logprobs_N), _compute_complement(old_logprobs_N)
    divergence_N = old_logprobs_N.exp() * (old_logprobs_N - logprobs_N) + old_rest_N * (old_rest_N / rest_N).log()
    return _mask_losses(scores, divergence_N, delta_low, delta_high, ratio_cap, regularizer_coef)


def _compute_complement(logprobs_N: Tensor) -> Tensor:
    """1 - p, accurate for p near 1 and positive."""
    return (-torch.expm1(logprobs_N)).clamp(min=torch.finfo(logprobs_N.dtype).eps ** 2)


def _mask_losses(
    scores: TokenScores,
    divergence_N: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float | None,
    regularizer_coef: float,
) -> TokenLosses:
    log_ratio_N = clamp_log_ratio(scores.logprobs_N - scores.old_logprobs_N)
    moved_N = log_ratio_N.detach()
    is_masked_N = (scores.advantages_N > 0) & (moved_N > 0) & (divergence_N > delta_high)
    is_masked_N |= (scores.advantages_N < 0) & (moved_N < 0) & (divergence_N > delta_low)
    ratio_N = moved_N.exp() if ratio_cap is None else moved_N.exp().clamp(max=ratio_cap)
    weights_N = ratio_N.masked_fill(is_masked_N, 0.0)
    losses_N = -scores.advantages_N * weights_N * (scores.logprobs_N - scores.logprobs_N.detach()).exp()
    if regularizer_coef > 0:
        losses_N = losses_N + regularizer_coef * log_ratio_N.square()
    return TokenLosses(losses_N=losses_N, metrics={"clip_frac": is_masked_N.to(log_ratio_N.dtype)})


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
        metrics={"train/entropy_selected_frac": average(is_selected_E)},
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
    tau_N = torch.full_like(ratio_N, tau_neg).masked_fill(scores.advantages_N > 0, tau_pos)
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


def compute_mix_terms(tokens: TokenInputs, *, mu: Share = 0.1) -> TokenInputs:
    """Constant weight mu for expert tokens and 1 - mu for sampled tokens (Zhang et al., 2025, CHORD)."""
    is_expert_E = ~tokens.find_sampled()
    metrics = {
        "expert/mu": mu,
        "expert/num_sequences": Count(len(np.unique(tokens.sequence_E[is_expert_E]))),
        "expert/num_tokens": Count(is_expert_E.sum()),
    }
    return replace(tokens, correction_E=np.where(is_expert_E, mu, 1 - mu), metrics=metrics)


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
    return compute_mix_terms(tokens, mu=mu)


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
    return _mix_losses(scores, compute_sft_losses(scores), clip_range_low, clip_range_high, clip_ratio_c)


def compute_chord_losses(
    scores: TokenScores,
    *,
    clip_range_low: Share = 0.2,
    clip_range_high: NonNegativeFloat = 0.2,
    clip_ratio_c: DualClip = 3.0,
) -> TokenLosses:
    """As `compute_mix_losses` with the losses of `compute_sft_phi_losses` for expert tokens: CHORD-phi.

    Very probable and very improbable tokens get small weights, so that imitation does not undo what the policy has
    learned.
    """
    return _mix_losses(scores, compute_sft_phi_losses(scores), clip_range_low, clip_range_high, clip_ratio_c)


def _mix_losses(
    scores: TokenScores, imitation: TokenLosses, clip_range_low: float, clip_range_high: float, clip_ratio_c: float
) -> TokenLosses:
    """Metrics are 0 at expert tokens."""
    own = compute_ppo_clip_losses(
        scores, clip_range_low=clip_range_low, clip_range_high=clip_range_high, clip_ratio_c=clip_ratio_c
    )
    if scores.is_expert_N is None:
        return own
    is_expert_N = scores.is_expert_N.bool()
    losses_N = torch.where(is_expert_N, imitation.losses_N, own.losses_N)
    metrics = {name: values.masked_fill(is_expert_N, 0.0) for name, values in own.metrics.items()}
    return TokenLosses(losses_N=losses_N, metrics=metrics)
