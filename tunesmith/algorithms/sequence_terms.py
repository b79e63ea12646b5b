"""Terms that depend on whole sequences or on the whole update: sequence ratios, masks, a KL in the reward.

Corrections are importance weights and masks between the policy that sampled a token and the policy at the start of the
step, the *proximal* policy (Hilton et al., 2022, "Batch size-invariance for policy optimization", section 3). The two
differ for replayed groups of earlier steps, and where sampler and trainer round differently. Truncated weights bound
the variance at the price of a bias (Ionides, 2008); the ratio in the loss is then that of the policy and the proximal
policy. A mask removes tokens whose ratio is out of bounds and leaves the ratio in the loss as it is.

Tokens are also selected by statistics over the whole update: covariance of logprob and advantage, or entropy. Tokens
are ordered by sequence, and ties are broken by that order, so a selection does not depend on rows, chunks or prefix
sharing.

Axes: E trained tokens of one update, Q sequences. M tokens that a clip could stop. d is the log-ratio of policy
and old policy at a token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from tunesmith.algorithms.kl import MAX_LOG_RATIO
from tunesmith.algorithms.scores import TokenInputs, average, mean_sequences, sum_sequences
from tunesmith.config import CorrectionSection
from tunesmith.errors import ConfigError
from tunesmith.types import REWARD_ATOL


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
    if is_weighted:
        ratio_E = compute_ratios(log_ratio_E, tokens, level="sequence" if section.importance == "sequence" else "token")
        weights_E = ratio_E.clip(section.floor, section.cap)
        if num_sampled:
            metrics["correction/mean_weight"] = average(weights_E[is_sampled_E])
            metrics["correction/truncated_frac"] = average(ratio_E[is_sampled_E] > section.cap)
            if section.floor > 0:
                metrics["correction/raised_frac"] = average(ratio_E[is_sampled_E] < section.floor)
    is_kept_E = np.ones(len(log_ratio_E), dtype=bool)
    if section.mask is not None:
        ratio_E = compute_ratios(log_ratio_E, tokens, level=section.mask.level)
        is_kept_E &= (ratio_E >= section.mask.low) & (ratio_E <= section.mask.high)
    if section.negative_sequence_delta is not None:
        is_kept_E &= ~find_off_policy_tokens(tokens, delta=section.negative_sequence_delta)
    if num_sampled and (section.mask is not None or section.negative_sequence_delta is not None):
        metrics["correction/masked_frac"] = average(~is_kept_E[is_sampled_E])
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
    is_negative_Q = mean_sequences(tokens.advantages_E, tokens) < -REWARD_ATOL  # a mean of 0 is rounded
    return (is_negative_Q & (distance_Q > delta))[tokens.sequence_E]


def compute_sequence_ratio_terms(tokens: TokenInputs) -> TokenInputs:
    """The mean of d over each sequence, if the scoring pass has scored the policy."""
    if tokens.logprobs_E is None:
        return tokens
    ratios_Q = mean_sequences(tokens.logprobs_E - tokens.old_logprobs_E, tokens)
    return replace(tokens, sequence_log_ratios_E=ratios_Q[tokens.sequence_E])


def compute_gmpo_terms(
    tokens: TokenInputs, *, clip_range_low: NonNegativeFloat = 0.4, clip_range_high: NonNegativeFloat = 0.4
) -> TokenInputs:
    """The mean over each sequence of d, clipped token by token, and which tokens are clipped (Zhao et al., 2025, GMPO).

    The limits are on d: at most `clip_range_high` where A > 0, else at least -`clip_range_low`. So the paper's range of
    ratios from e^-0.4 to e^0.4 is 0.4 and 0.4.
    """
    assert tokens.logprobs_E is not None
    log_ratio_E = tokens.logprobs_E - tokens.old_logprobs_E
    clipped_E = np.where(
        tokens.advantages_E > 0, np.minimum(log_ratio_E, clip_range_high), np.maximum(log_ratio_E, -clip_range_low)
    )
    return replace(
        tokens,
        sequence_log_ratios_E=mean_sequences(clipped_E, tokens)[tokens.sequence_E],
        is_selected_E=clipped_E != log_ratio_E,
    )


def compute_vespo_terms(
    tokens: TokenInputs,
    *,
    exponent_pos: PositiveFloat = 2.0,
    decay_pos: PositiveFloat = 3.0,
    exponent_neg: PositiveFloat = 3.0,
    decay_neg: PositiveFloat = 2.0,
) -> TokenInputs:
    """Weight W^exponent exp(decay (1 - W)), with W the product of the ratios over the sequence (Shen et al., 2026,
    "VESPO", eq. 20).

    The weight is 1 at W = 1 and falls on both sides; the exponent governs W < 1, the decay W > 1. The parameters are
    separate for A >= 0 and A < 0: with the defaults unlikely rollouts with A < 0 have the smaller weight. Metric:
    `vespo_weight`, the mean over tokens.
    """
    assert tokens.logprobs_E is not None
    ratio_E = compute_ratios(tokens.logprobs_E - tokens.old_logprobs_E, tokens, level="sequence")
    is_gain_E = tokens.advantages_E >= 0
    exponent_E = np.where(is_gain_E, exponent_pos, exponent_neg)
    decay_E = np.where(is_gain_E, decay_pos, decay_neg)
    correction_E = np.exp(exponent_E * np.log(ratio_E) + decay_E * (1 - ratio_E))
    return replace(tokens, correction_E=correction_E, metrics={"train/vespo_weight": average(correction_E)})


def compute_topr_terms(
    tokens: TokenInputs, *, advantage_threshold: float = 0.0, ratio_level: Literal["sequence", "token"] = "sequence"
) -> TokenInputs:
    """Weight 1 where A is above the threshold, else the ratio clipped to [0, 1] (Le Roux et al., 2025, TOPR, eq. 9).

    Positive rollouts are trained independent of their probability under the policy; negative rollouts only as long as
    the policy still produces them. The paper's ratio is that of the sequence, a product over its tokens; `token` uses
    the ratio of each token.
    """
    assert tokens.logprobs_E is not None
    ratio_E = compute_ratios(tokens.logprobs_E - tokens.old_logprobs_E, tokens, level=ratio_level)
    correction_E = np.where(tokens.advantages_E > advantage_threshold, 1.0, np.minimum(ratio_E, 1.0))
    return replace(tokens, correction_E=correction_E)


def compute_m2po_terms(tokens: TokenInputs, *, second_moment_cap: PositiveFloat = 0.04) -> TokenInputs:
    """Mask the tokens of largest |d| until the mean of d^2 over the others is at most the cap.

    Zheng et al. (2025), "Prosperity before collapse", M2PO. Only tokens that PPO's clip could stop are masked: A > 0
    and d > 0, or A < 0 and d < 0; the mean is over these. Meant for data many policy versions old, on which clipping
    each ratio would stop the informative tokens.
    """
    assert tokens.logprobs_E is not None
    log_ratio_E = tokens.logprobs_E - tokens.old_logprobs_E
    index_M = np.flatnonzero(tokens.advantages_E * log_ratio_E > 0)
    index_M = index_M[np.argsort(np.abs(log_ratio_E[index_M]), kind="stable")]
    second_moment_M = np.cumsum(log_ratio_E[index_M] ** 2) / np.arange(1, len(index_M) + 1)
    correction_E = np.ones(len(log_ratio_E))
    correction_E[index_M[second_moment_M > second_moment_cap]] = 0.0
    metrics = {"train/m2po_masked_frac": average(correction_E == 0)}
    return replace(tokens, correction_E=correction_E, metrics=metrics)


def compute_rloo_terms(tokens: TokenInputs, *, reward_kl_coef: NonNegativeFloat = 0.0) -> TokenInputs:
    """Leave-one-out advantages of rewards minus coef times the KL to the reference (Ahmadian et al., 2024, eq. 1).

    The KL of a rollout is the sum of old minus reference logprob over its tokens. The leave-one-out advantage is linear
    in the rewards, so the KL part is computed from the KLs alone and added. It compares the rollouts of the update
    only: dropped rollouts are excluded.
    """
    if reward_kl_coef == 0:
        return tokens
    assert tokens.reference_logprobs_E is not None
    kl_Q = sum_sequences(tokens.old_logprobs_E - tokens.reference_logprobs_E, tokens)
    _, group_Q, size_G = np.unique(tokens.find_groups(), return_inverse=True, return_counts=True)
    others_Q = np.maximum(size_G[group_Q] - 1, 1)
    mean_of_others_Q = (np.bincount(group_Q, weights=kl_Q)[group_Q] - kl_Q) / others_Q
    centered_Q = np.where(size_G[group_Q] > 1, kl_Q - mean_of_others_Q, 0.0)
    advantages_E = tokens.advantages_E - reward_kl_coef * centered_Q[tokens.sequence_E]
    return replace(tokens, advantages_E=advantages_E, metrics={"train/reward_kl": average(kl_Q)})


Fraction = Annotated[float, Field(gt=0, le=1)]
ENTROPY_TOLERANCE = 1e-5
"""Entropies (nats) this close to the threshold count as equal to it. The first tokens of the rollouts of a task have
one distribution, but their entropies are rounded differently unless they share a prefix."""


def compute_clip_cov_terms(
    tokens: TokenInputs,
    *,
    fraction: Fraction = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    seed: NonNegativeInt = 0,
) -> TokenInputs:
    """Mask floor(fraction E) random tokens among those whose covariance is within bounds (Clip-Cov).

    Cui et al. (2025), "The entropy mechanism of RL for reasoning language models", eqs. 11 and 12. Tokens of
    high covariance reduce the entropy most. The draw is seeded by `seed` and the step. An update of fewer than 1 /
    fraction tokens masks none. verl masks at least one token, and only tokens that PPO's clip does not stop.
    Metrics: `clip_cov_frac`, the share of masked tokens; `token_covariance`, the mean over tokens.
    """
    if covariance_low > covariance_high:
        raise ConfigError(
            f"covariance_low={covariance_low:g} in terms_args is above covariance_high={covariance_high:g}, so that no "
            "token is masked: swap them"
        )
    covariance_E = compute_token_covariances(tokens)
    candidates = np.flatnonzero((covariance_E >= covariance_low) & (covariance_E <= covariance_high))
    num_selected = _count(fraction, len(covariance_E))  # or all candidates, if they are fewer
    # Every token draws a number, whether it is a candidate or not: where rounding moves a token across a bound, the
    # others are masked as before.
    draws_E = np.random.default_rng((seed, tokens.step)).random(len(covariance_E))
    correction_E = np.ones(len(covariance_E))
    correction_E[candidates[np.argsort(draws_E[candidates], kind="stable")[:num_selected]]] = 0.0
    metrics = {"train/clip_cov_frac": average(correction_E == 0), "train/token_covariance": average(covariance_E)}
    return replace(tokens, correction_E=correction_E, metrics=metrics)


def compute_kl_cov_terms(tokens: TokenInputs, *, fraction: Fraction = 2e-3) -> TokenInputs:
    """Select the floor(fraction E) tokens of highest covariance (KL-Cov; Cui et al., 2025, eq. 13).

    Of tokens of equal covariance the earlier ones are selected. Of these, tokens that the policy itself has just
    sampled need no penalty: |d| has no gradient at 0, and that of its rounded value would be a sign by chance. verl
    sets the old logprobs of such an update to the policy's for the same effect. The paper uses a fraction of 2e-3 for
    7B and 2e-4 for 32B models. verl selects at least one token. Metric: `token_covariance`, the mean over tokens.
    """
    covariance_E = compute_token_covariances(tokens)
    order = np.argsort(-covariance_E, kind="stable")
    is_selected_E = np.zeros(len(covariance_E), dtype=bool)
    is_selected_E[order[: _count(fraction, len(covariance_E))]] = True
    if tokens.is_unmoved_E is not None:
        is_selected_E &= ~tokens.is_unmoved_E
    return replace(tokens, is_selected_E=is_selected_E, metrics={"train/token_covariance": average(covariance_E)})


def compute_token_covariances(tokens: TokenInputs) -> np.ndarray:
    """(log p - mean)(A - mean) [E], with means over the update (Cui et al., 2025, eq. 10).

    p is the policy's probability of the token. Their mean is the covariance of log p and A.
    """
    assert tokens.logprobs_E is not None
    if tokens.logprobs_E.size == 0:
        return np.zeros(0)
    return (tokens.logprobs_E - tokens.logprobs_E.mean()) * (tokens.advantages_E - tokens.advantages_E.mean())


def find_top_entropy_tokens(tokens: TokenInputs, *, fraction: float) -> tuple[np.ndarray, dict[str, float]]:
    """Factor [E] of the policy loss: 1 for the `fraction` of the sampled tokens of highest entropy, 0 for the others.

    Wang et al. (2025), "Beyond the 80/20 rule", eq. 6: tokens whose entropy is at least the ceil(fraction E)-th largest
    of the update, so that tokens of equal entropy are kept together. Expert tokens have factor 1 and no part in the
    threshold. Metrics: `entropy_threshold`, and `entropy_masked_frac`, the share of masked tokens.
    """
    kept_E = np.ones(len(tokens.advantages_E))
    is_sampled_E = tokens.find_sampled()
    num_sampled = int(is_sampled_E.sum())
    if fraction == 1 or num_sampled == 0:
        return kept_E, {}
    assert tokens.entropies_E is not None
    sampled_entropies = tokens.entropies_E[is_sampled_E]
    num_kept = max(math.ceil(round(fraction * num_sampled, 6)), 1)
    threshold = float(np.partition(sampled_entropies, num_sampled - num_kept)[num_sampled - num_kept])
    kept_E[is_sampled_E & (tokens.entropies_E < threshold - ENTROPY_TOLERANCE)] = 0.0
    return kept_E, {
        "train/entropy_threshold": threshold,
        "train/entropy_masked_frac": average(kept_E[is_sampled_E] == 0),
    }


def _count(fraction: float, num_tokens: int) -> int:
    """floor(fraction * num_tokens), with products rounded so that 0.29 of 100 tokens are 29."""
    return math.floor(round(fraction * num_tokens, 6))
