"""Importance weights between the policy that sampled a token and the one that a step begins with.

They differ when groups of earlier steps are trained again, or when the sampler computes in other numbers than the
trainer. Weights are truncated, which bounds the variance at the price of a bias (Ionides, 2008); the algorithm's own
ratio is then that of the policy and the step's first policy (Hilton et al., 2022, "Batch size-invariance for policy
optimization", section 3). Or out-of-bounds tokens are masked, which leaves the algorithm's ratio as it is.

Axes: E trained tokens of one update, Q sequences.
"""

from __future__ import annotations

import numpy as np

from tunesmith.algorithms.scores import BatchScores, mean_sequences, sum_sequences
from tunesmith.config import CorrectionSection, MaskSection

MAX_LOG_RATIO = 20.0


def compute_correction_weights(
    scores: BatchScores,
    sampler_logprobs_E: np.ndarray,
    section: CorrectionSection,
    *,
    first_logprobs_E: np.ndarray,
    is_weighted: bool,
) -> tuple[np.ndarray, dict[str, float]]:
    """What each token's policy loss is multiplied with, from what the step's first policy and the sampler say of it.

    `is_weighted` truncates importance weights to `section.cap`: token by token (Yao et al., 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"), or the product over the sequence. Then what is out of the
    bounds of `section.mask` is 0: tokens (Zhao et al., 2025, "Small leak can sink a great ship", IcePop), or sequences
    by product or geometric mean. `negative_sequence_delta` goes to `find_strayed`. What experts gave has weight 1, and
    metrics are of what the policy sampled.
    """
    is_own_E = ~scores.is_expert_Q[scores.sequence_E]
    log_ratio_E = np.where(is_own_E, first_logprobs_E - sampler_logprobs_E, 0.0)
    weights_E, metrics = np.ones(len(log_ratio_E)), {}
    if is_weighted:
        ratio_E = compute_ratios(log_ratio_E, scores, level="sequence" if section.importance == "sequence" else "token")
        weights_E = np.minimum(ratio_E, section.cap)
        if is_own_E.any():
            metrics["correction/mean_weight"] = float(weights_E[is_own_E].mean())
            metrics["correction/truncated_frac"] = float((ratio_E[is_own_E] > section.cap).mean())
    is_kept_E = np.ones(len(log_ratio_E), dtype=bool)
    if section.mask is not None:
        is_kept_E &= _find_kept(log_ratio_E, scores, section.mask)
    if section.negative_sequence_delta is not None:
        is_kept_E &= ~find_strayed(scores, sampler_logprobs_E, delta=section.negative_sequence_delta)
    if is_own_E.any() and (section.mask is not None or section.negative_sequence_delta is not None):
        metrics["correction/masked_frac"] = float(1 - is_kept_E[is_own_E].mean())
    return np.where(is_own_E, weights_E * is_kept_E, 1.0), metrics


def compute_ratios(log_ratio_E: np.ndarray, scores: BatchScores, *, level: str) -> np.ndarray:
    """Importance weights [E]: of the token, the product over its sequence, or that product's geometric mean."""
    if level == "sequence":
        log_ratio_E = sum_sequences(log_ratio_E, scores)[scores.sequence_E]
    elif level == "geometric":
        log_ratio_E = mean_sequences(log_ratio_E, scores)[scores.sequence_E]
    else:
        assert level == "token", level
    return np.exp(log_ratio_E.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def find_strayed(scores: BatchScores, sampler_logprobs_E: np.ndarray, *, delta: float) -> np.ndarray:
    """True [E] where a token of negative advantage is in a sequence that the policy has strayed from.

    That is, where the mean of log sampler - log policy over the sequence is above `delta` (DeepSeek-AI, 2025,
    "DeepSeek-V3.2", section 3.1, off-policy sequence masking).
    """
    assert scores.logprobs_E is not None
    distance_Q = mean_sequences(sampler_logprobs_E - scores.logprobs_E, scores)
    return (scores.advantages_E < 0) & (distance_Q[scores.sequence_E] > delta)


def _find_kept(log_ratio_E: np.ndarray, scores: BatchScores, mask: MaskSection) -> np.ndarray:
    ratio_E = compute_ratios(log_ratio_E, scores, level=mask.level)
    return (ratio_E >= mask.low) & (ratio_E <= mask.high)
