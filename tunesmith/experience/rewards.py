"""Rewards of agents with tools, as pure functions of recorded numbers: answers, tool calls, tokens, format.

The efficiency reward compares the rollouts of one task: fewer tool calls and fewer tokens than the group's mean raise
the reward of a right answer, a wrong one gains nothing from being short (ET-Agent, arXiv:2601.06860). ARPO's reward
pays a bonus for a right answer that used every tool (arXiv:2507.19849). Rollouts without a reward are not passed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What the rewards need to know of one scored rollout."""

    correctness: float
    """0 for a wrong answer, 1 for a right one, or a score in between such as F1."""
    num_calls: float
    """Tool calls."""
    num_tokens: int
    """Sampled tokens; tool results are not sampled."""
    is_valid: bool = True
    """Whether the format is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyReward:
    """The efficiency reward of one rollout, and its factors."""

    reward: float
    tool_factor: float
    length_factor: float


def compute_sigma_scale(*, step: int, total_steps: int) -> float:
    """Linear decay over a run: 1 at step 1, 0 at the last step, `max(0, (T - t) / (T - 1))`; 1 in a run of one step."""
    return 1.0 if total_steps <= 1 else max(0.0, (total_steps - step) / (total_steps - 1))


def compute_factor(excess: float, *, sigma: float) -> float:
    """`2 / (1 + exp(sigma * excess))`: 1 for the average rollout, up to 2 below and down to 0 above it."""
    return 1.0 - math.tanh(sigma * excess / 2)  # the same function, which does not overflow


def compute_efficiency_rewards(
    group: Sequence[ToolOutcome], *, sigma_tool: float, sigma_length: float, format_penalty: float = 1.0
) -> list[EfficiencyReward]:
    """`correctness * tool factor * length factor`, minus `format_penalty` if the format is wrong.

    Tool calls are compared with the group's mean; lengths are standardized in the group by mean and population standard
    deviation, which are 0 for equal lengths.
    """
    if not group:
        return []
    calls, lengths = [each.num_calls for each in group], [each.num_tokens for each in group]
    mean_calls, mean_length = fmean(calls), fmean(lengths)
    std_length = pstdev(lengths) if len(set(lengths)) > 1 else 0.0
    rewards = []
    for each in group:
        tool_factor = compute_factor(each.num_calls - mean_calls, sigma=sigma_tool)
        z_score = (each.num_tokens - mean_length) / std_length if std_length else 0.0
        length_factor = compute_factor(z_score, sigma=sigma_length)
        reward = each.correctness * tool_factor * length_factor - (0.0 if each.is_valid else format_penalty)
        rewards.append(EfficiencyReward(reward=reward, tool_factor=tool_factor, length_factor=length_factor))
    return rewards


def compute_arpo_reward(*, correctness: float, is_valid: bool, has_used_all_tools: bool, bonus: float = 0.1) -> float:
    """-1 for a wrong format, 0 for a wrong answer, else the correctness, plus `bonus` if every tool was used."""
    if not is_valid:
        return -1.0
    return correctness + bonus if correctness > 0 and has_used_all_tools else correctness
