"""Importance weights and masks between the policy that sampled a token and the policy at the start of the step.

The latter is the *proximal* policy (Hilton et al., 2022, "Batch size-invariance for policy optimization", section 3).
The two differ for replayed groups of earlier steps, and where sampler and trainer round differently. Truncated weights
bound the variance at the price of a bias (Ionides, 2008); the ratio in the loss is then that of the policy and the
proximal policy. A mask removes tokens whose ratio is out of bounds and leaves the ratio in the loss as it is.

Axes: E trained tokens of one update, Q sequences.
"""

from __future__ import annotations

import numpy as np

from tunesmith.algorithms.scores import TokenInputs, mean_sequences, sum_sequences
from tunesmith.config import CorrectionSection, MaskSection
from tunesmith.metric import Mean

MAX_LOG_RATIO = 20.0


def compute_correction_weights(
    tokens: TokenInputs, section: CorrectionSection, *, is_weighted: bool
) -> tuple[np.ndarray, dict[str, float]]:
    """Factors [E] of the tokens' policy loss, from the logprobs under the proximal policy and the sampler, and metrics.

    The advantages of the tokens must be those of the loss, after `compute_terms`.
    With `is_weighted`, importance weights truncated at `section.cap`: per token (Yao et al., 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"), or the product over the sequence. `section.floor` bounds
    them from below, which biases them further but never drops a token. `section.mask` sets the factor to 0 out of its
    bounds: per token (Zhao et al., 2025, "Small leak can sink a great ship", IcePop), or per
    sequence by product or geometric mean. For `negative_sequence_delta` see `find_off_policy_tokens`. Expert tokens
    have factor 1 and are in no metric.
    """
    assert tokens.proximal_logprobs_E is not None and tokens.sampler_logprobs_E is not None
    is_sampled_E = tokens.find_sampled()
    log_ratio_E = np.where(is_sampled_E, tokens.proximal_logprobs_E - tokens.sampler_logprobs_E, 0.0)
    weights_E = np.ones(len(log_ratio_E))
    metrics: dict[str, float] = {}
    num_sampled = int(is_sampled_E.sum())

    def average(values_E: np.ndarray) -> Mean:
        return Mean(float(values_E[is_sampled_E].sum()), over=num_sampled)

    if is_weighted:
        ratio_E = compute_ratios(log_ratio_E, tokens, level="sequence" if section.importance == "sequence" else "token")
        weights_E = ratio_E.clip(section.floor, section.cap)
        if num_sampled:
            metrics["correction/mean_weight"] = average(weights_E)
            metrics["correction/truncated_frac"] = average(ratio_E > section.cap)
            if section.floor > 0:
                metrics["correction/raised_frac"] = average(ratio_E < section.floor)
    is_kept_E = np.ones(len(log_ratio_E), dtype=bool)
    if section.mask is not None:
        is_kept_E &= _find_within_bounds(log_ratio_E, tokens, section.mask)
    if section.negative_sequence_delta is not None:
        is_kept_E &= ~find_off_policy_tokens(tokens, delta=section.negative_sequence_delta)
    if num_sampled and (section.mask is not None or section.negative_sequence_delta is not None):
        metrics["correction/masked_frac"] = average(~is_kept_E)
    return np.where(is_sampled_E, weights_E * is_kept_E, 1.0), metrics


def compute_ratios(log_ratio_E: np.ndarray, tokens: TokenInputs, *, level: str) -> np.ndarray:
    """Ratios [E] at `level`: of the token, the product over its sequence, or the geometric mean over its sequence."""
    if level == "sequence":
        log_ratio_E = sum_sequences(log_ratio_E, tokens)[tokens.sequence_E]
    elif level == "geometric":
        log_ratio_E = mean_sequences(log_ratio_E, tokens)[tokens.sequence_E]
    else:
        assert level == "token", level
    return np.exp(log_ratio_E.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def find_off_policy_tokens(tokens: TokenInputs, *, delta: float) -> np.ndarray:
    """True [E] for tokens of sequences of negative mean advantage that are off-policy by more than `delta`.

    The distance is the mean of log sampler - log policy over the sequence (DeepSeek-AI, 2025, "DeepSeek-V3.2", section
    3.1, off-policy sequence masking). There the tokens of a sequence have one advantage; where they differ, the sign is
    that of their mean, so a sequence is masked as a whole.
    """
    assert tokens.logprobs_E is not None and tokens.sampler_logprobs_E is not None
    distance_Q = mean_sequences(tokens.sampler_logprobs_E - tokens.logprobs_E, tokens)
    return ((mean_sequences(tokens.advantages_E, tokens) < 0) & (distance_Q > delta))[tokens.sequence_E]


def _find_within_bounds(log_ratio_E: np.ndarray, tokens: TokenInputs, mask: MaskSection) -> np.ndarray:
    ratio_E = compute_ratios(log_ratio_E, tokens, level=mask.level)
    return (ratio_E >= mask.low) & (ratio_E <= mask.high)
