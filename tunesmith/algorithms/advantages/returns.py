"""Per-token advantages: returns, GAE and whitening of the reward of a rollout, and on-policy distillation.

Each sampled token is one step of an episode. Tokens that the policy did not sample are no steps, so a long tool result
is not discounted. The reward is that of the rollout's last sampled token; branches of a rollout follow each other in
the order of its samples. `tokens.advantages_E` holds the raw reward of the rollout at every token.

Distillation does not read rewards. Both of its divergences are between the next-token distributions of teacher and
policy, at the contexts that the policy sampled. Each advantage multiplies the gradient of the token's logprob such that
the policy gradient of the divergence at a token is unbiased.

Axes: E trained tokens of one update, ordered by sequence then time. s is the policy's logprob of the token as sampled,
t is the teacher's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from tunesmith.algorithms.scores import TokenInputs, average
from tunesmith.types import are_equal

WHITENING_EPSILON = 1e-8
Discount = Annotated[float, Field(ge=0, le=1)]


def compute_ppo_terms(
    tokens: TokenInputs, *, gamma: Discount = 1.0, lam: Discount = 1.0, reward_kl_coef: NonNegativeFloat = 0.0
) -> TokenInputs:
    """Whitened GAE advantages, and the returns as targets of the critic (Schulman et al., 2016, eq. 16; 2017, eq. 11).

    Returns are advantage plus value before whitening. `reward_kl_coef` times the k1 estimate of the KL to the reference
    is subtracted from each token's reward (Ouyang et al., 2022, eq. 2). With gamma = lam = 1 the advantage before
    whitening is the return minus the value.
    """
    assert tokens.values_E is not None
    rewards_E = compute_token_rewards(tokens, reward_kl_coef=reward_kl_coef)
    advantages_E = compute_gae(rewards_E, tokens.values_E, tokens.sequence_E, gamma=gamma, lam=lam)
    returns_E = advantages_E + tokens.values_E
    metrics = {
        "critic/value_mean": average(tokens.values_E),
        "critic/return_mean": average(returns_E),
        "critic/explained_variance": compute_explained_variance(tokens.values_E, returns_E),
    }
    return replace(tokens, advantages_E=whiten(advantages_E), returns_E=returns_E, metrics=metrics)


def compute_reinforce_plus_plus_terms(
    tokens: TokenInputs, *, gamma: Discount = 1.0, reward_kl_coef: NonNegativeFloat = 0.0
) -> TokenInputs:
    """Returns, whitened over all tokens of the update (Hu, 2025, "REINFORCE++").

    `reward_kl_coef` times the k1 estimate of the KL to the reference is subtracted from each token's reward. At gamma 1
    without it, the return of every token of a rollout is the rollout's reward.
    """
    rewards_E = compute_token_rewards(tokens, reward_kl_coef=reward_kl_coef)
    returns_E = compute_returns(rewards_E, tokens.sequence_E, gamma=gamma)
    metrics = {"algorithm/return_mean": average(returns_E)}
    return replace(tokens, advantages_E=whiten(returns_E), metrics=metrics)


def compute_token_rewards(tokens: TokenInputs, *, reward_kl_coef: float) -> np.ndarray:
    """Rewards [E]: the rollout's reward at its last token, minus `reward_kl_coef` (old - reference) at every token."""
    rewards_E = np.where(find_last(tokens.sequence_E), tokens.advantages_E, 0.0)
    if reward_kl_coef == 0:
        return rewards_E
    assert tokens.reference_logprobs_E is not None
    return rewards_E - reward_kl_coef * (tokens.old_logprobs_E - tokens.reference_logprobs_E)


def compute_gae(
    rewards_E: np.ndarray, values_E: np.ndarray, sequence_E: np.ndarray, *, gamma: float, lam: float
) -> np.ndarray:
    """A_t = d_t + gamma lam A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t; A and V are 0 after the last token."""
    next_values_E = np.where(find_last(sequence_E), 0.0, np.append(values_E[1:], 0.0)[: len(values_E)])
    return compute_returns(rewards_E + gamma * next_values_E - values_E, sequence_E, gamma=gamma * lam)


def compute_returns(rewards_E: np.ndarray, sequence_E: np.ndarray, *, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_{t+1} within each sequence."""
    returns_E = np.zeros(len(rewards_E))
    following = 0.0
    steps = zip(rewards_E.tolist(), find_last(sequence_E).tolist(), strict=True)
    for index, (reward, is_last) in reversed(list(enumerate(steps))):
        following = reward if is_last else reward + gamma * following
        returns_E[index] = following
    return returns_E


def whiten(values_E: np.ndarray) -> np.ndarray:
    """Mean 0 and variance 1 (ddof 1) over all tokens; equal values, and a single one, become 0."""
    if are_equal(values_E.tolist()):  # their mean is rounded, and AdamW makes a step for an advantage of any size
        return np.zeros(len(values_E))
    return (values_E - values_E.mean()) / np.sqrt(values_E.var(ddof=1) + WHITENING_EPSILON)


def find_last(sequence_E: np.ndarray) -> np.ndarray:
    """True [E] at the last token of each sequence; the tokens of a sequence are contiguous."""
    return np.diff(sequence_E, append=-1) != 0


def compute_explained_variance(values_E: np.ndarray, returns_E: np.ndarray) -> float:
    """1 - Var(return - value) / Var(return): 1 for exact values, 0 for a constant; 0 if the returns do not vary."""
    if are_equal(returns_E.tolist()):  # but for rounding: a return is advantage plus value
        return 0.0
    return 1.0 - float((returns_E - values_E).var() / returns_E.var())


def compute_distillation_terms(tokens: TokenInputs, *, kl_coef: PositiveFloat = 1.0) -> TokenInputs:
    """kl_coef (t - s): minimizes the reverse KL(policy || teacher) (Agarwal et al., 2024, on-policy distillation)."""
    return compute_jsd_terms(tokens, kl_coef=kl_coef, beta=1.0)


def compute_jsd_terms(
    tokens: TokenInputs, *, kl_coef: PositiveFloat = 1.0, beta: Annotated[float, Field(gt=0, le=1)] = 0.5
) -> TokenInputs:
    """kl_coef (log(beta e^t + (1 - beta) e^s) - s): minimizes a generalized Jensen-Shannon divergence.

    With T and S the distributions and M = beta T + (1 - beta) S, Agarwal et al. (2024, eq. 1) define
    JSD_beta = beta KL(T || M) + (1 - beta) KL(S || M). Its derivative by S's probability of a token is
    (1 - beta) log(S / M), so minus that, at sampled tokens, is the exact gradient over the whole vocabulary in
    expectation. The factor 1 - beta is left out: at beta = 1 this is the reverse KL of `compute_distillation_terms`.
    The advantage is positive exactly where the teacher's probability of the token is above the policy's.
    """
    assert tokens.teacher_logprobs_E is not None
    teacher_E, student_E = tokens.teacher_logprobs_E, tokens.old_logprobs_E
    log_policy_weight = math.log1p(-beta) if beta < 1 else -math.inf
    mixture_E = np.logaddexp(math.log(beta) + teacher_E, log_policy_weight + student_E)
    metrics = {"distillation/reverse_kl": average(student_E - teacher_E)}
    return replace(tokens, advantages_E=kl_coef * (mixture_E - student_E), metrics=metrics)
