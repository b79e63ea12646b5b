"""Per-token advantages from the reward of a rollout: returns, GAE, whitening.

Each sampled token is one step of an episode. Tokens that the policy did not sample are no steps, so a long tool result
is not discounted. The reward is that of the rollout's last sampled token; branches of a rollout follow each other in
the order of its samples. `tokens.advantages_E` holds the raw reward of the rollout at every token.

Axes: E trained tokens of one update, ordered by sequence then time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat

from tunesmith.algorithms.scores import TokenInputs

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
        "critic/value_mean": _compute_mean(tokens.values_E),
        "critic/return_mean": _compute_mean(returns_E),
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
    metrics = {"algorithm/return_mean": _compute_mean(returns_E)}
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
    """Mean 0 and variance 1 (ddof 1) over all tokens; a single token becomes 0."""
    if len(values_E) < 2:
        return np.zeros(len(values_E))
    return (values_E - values_E.mean()) / np.sqrt(values_E.var(ddof=1) + WHITENING_EPSILON)


def find_last(sequence_E: np.ndarray) -> np.ndarray:
    """True [E] at the last token of each sequence; the tokens of a sequence are contiguous."""
    if len(sequence_E) == 0:
        return np.zeros(0, dtype=bool)
    return np.append(sequence_E[1:] != sequence_E[:-1], True)


def compute_explained_variance(values_E: np.ndarray, returns_E: np.ndarray) -> float:
    """1 - Var(return - value) / Var(return): 1 for exact values, 0 for a constant; 0 if the returns do not vary."""
    if len(returns_E) == 0 or (variance := float(returns_E.var())) == 0:
        return 0.0
    return 1.0 - float((returns_E - values_E).var()) / variance


def _compute_mean(values_E: np.ndarray) -> float:
    return float(values_E.mean()) if len(values_E) else 0.0
