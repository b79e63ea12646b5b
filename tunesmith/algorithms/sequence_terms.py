"""Terms that depend on whole sequences or on the whole update: sequence ratios, masks, a KL in the reward.

Axes: E trained tokens of one update, Q sequences. M tokens that a clip could stop. d is the log-ratio of policy
and old policy at a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from tunesmith.algorithms.corrections import compute_ratios
from tunesmith.algorithms.scores import TokenInputs, mean_sequences, sum_sequences


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
        tokens.advantages_E > 0,
        np.minimum(log_ratio_E, clip_range_high),
        np.maximum(log_ratio_E, -clip_range_low),
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
    metrics = {"train/vespo_weight": float(correction_E.mean())} if correction_E.size else {}
    return replace(tokens, correction_E=correction_E, metrics=metrics)


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
    masked_frac = float((correction_E == 0).mean()) if len(correction_E) else 0.0
    return replace(tokens, correction_E=correction_E, metrics={"train/m2po_masked_frac": masked_frac})


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
    metrics = {"train/reward_kl": float(kl_Q.mean()) if len(kl_Q) else 0.0}
    return replace(tokens, advantages_E=advantages_E, metrics=metrics)
