"""Operators that replace rewards by those of agents with tools, computed from what the rollouts recorded.

Correctness is the metric `outcome_key` or the reward, tool calls are the sum of the metrics `tool_keys`, and the format
is right if the metric `format_key` is 1. Tokens are counted in the recorded turns: those that the policy sampled.
Failed rollouts have no reward and are excluded from the statistics of their group. A rollout without one of the
metrics is an error: an unknown count is not 0.

The efficiency reward compares the rollouts of one task: fewer tool calls and fewer tokens than the group's mean raise
the reward of a right answer, a wrong one gains nothing from being short (ET-Agent, arXiv:2601.06860). ARPO's reward
pays a bonus for a right answer that used every tool (arXiv:2507.19849).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from tunesmith.errors import ConfigError
from tunesmith.experience.outcomes import compute_outcome, read_metric
from tunesmith.metric import Count, Mean
from tunesmith.types import Group, Trajectory

Sigma = NonNegativeFloat | Annotated[list[NonNegativeFloat], Field(min_length=1)]
"""One sigma, or one for each curriculum round."""
ToolKeys = Annotated[list[str], Field(min_length=1)]
TOOL_KNOB, FORMAT_KNOB = (f"{key} of the operator in experience.operators" for key in ("tool_keys", "format_key"))


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


def efficiency_reward(
    groups: Sequence[Group],
    *,
    step: int,
    total_steps: int,
    sigma_tool: Sigma = 0.1,
    sigma_length: Sigma = 0.1,
    curriculum_round: PositiveInt = 1,
    decay: Literal["linear", "none"] = "linear",
    outcome_key: str | None = None,
    tool_keys: ToolKeys = ["tool_calls"],  # noqa: B006 - bound arguments are never modified
    format_key: str | None = None,
    format_penalty: NonNegativeFloat = 1.0,
) -> tuple[list[Group], dict[str, float]]:
    """Replace rewards by correctness * tool factor * length factor, minus `format_penalty` for a wrong format."""
    scale = 1.0 if decay == "none" else compute_sigma_scale(step=step, total_steps=total_steps)
    sigmas = {
        "sigma_tool": scale * choose_sigma("sigma_tool", sigma_tool, curriculum_round),
        "sigma_length": scale * choose_sigma("sigma_length", sigma_length, curriculum_round),
    }
    changed, outcomes, rewards = [], [], []
    for group in groups:
        found = [
            read_outcome(run, outcome_key=outcome_key, tool_keys=tool_keys, format_key=format_key)
            for run in group.scored
        ]
        computed = compute_efficiency_rewards(found, **sigmas, format_penalty=format_penalty)
        changed.append(replace_rewards(group, [each.reward for each in computed]))
        outcomes += found
        rewards += computed
    metrics: dict[str, float] = dict(sigmas)
    if outcomes:
        metrics |= summarize_outcomes(outcomes)
        metrics["tool_factor_mean"] = average([each.tool_factor for each in rewards])
        metrics["length_factor_mean"] = average([each.length_factor for each in rewards])
    return changed, metrics


def arpo_reward(
    groups: Sequence[Group],
    *,
    tool_keys: ToolKeys,
    outcome_key: str | None = None,
    format_key: str | None = None,
    bonus: NonNegativeFloat = 0.1,
) -> tuple[list[Group], dict[str, float]]:
    """Replace rewards by ARPO's: -1 for a wrong format, else correctness, plus `bonus` if every tool was used."""
    outcomes, num_bonuses = [], 0

    def compute_reward(run: Trajectory) -> float:
        nonlocal num_bonuses
        outcome = read_outcome(run, outcome_key=outcome_key, tool_keys=tool_keys, format_key=format_key)
        outcomes.append(outcome)
        has_used_all = all(run.metrics[key] > 0 for key in tool_keys)
        num_bonuses += has_used_all and outcome.is_valid and outcome.correctness > 0
        return compute_arpo_reward(
            correctness=outcome.correctness, is_valid=outcome.is_valid, has_used_all_tools=has_used_all, bonus=bonus
        )

    changed = [replace_rewards(group, list(map(compute_reward, group.scored))) for group in groups]
    metrics = summarize_outcomes(outcomes) if outcomes else {}
    return changed, metrics | {"num_bonuses": Count(num_bonuses)}


def check_rounds(args: Mapping[str, Any]) -> None:
    """Refuse arguments of `efficiency_reward` without a sigma for the round."""
    for name in ("sigma_tool", "sigma_length"):
        choose_sigma(name, args.get(name, 0.0), args.get("curriculum_round", 1))


def choose_sigma(name: str, sigma: float | list[float], curriculum_round: int) -> float:
    """The sigma of the round."""
    if not isinstance(sigma, list):
        return sigma
    if curriculum_round > len(sigma):
        raise ConfigError(
            f"curriculum_round={curriculum_round}, but {name} lists the sigmas of {len(sigma)} rounds: add one, or set "
            "one number for every round"
        )
    return sigma[curriculum_round - 1]


def read_outcome(
    run: Trajectory, *, outcome_key: str | None, tool_keys: Sequence[str], format_key: str | None
) -> ToolOutcome:
    """The recorded numbers of a scored rollout."""
    correctness = compute_outcome(run, outcome_key)
    if not correctness >= 0:
        source = "the judge's reward" if outcome_key is None else f"the metric {outcome_key!r}"
        raise ConfigError(
            f"the correctness of rollout {run.run_index} of task {run.task.task_id} is {correctness:g}, from {source}: "
            "it must be 0 or more; set outcome_key to a metric that measures it"
        )
    return ToolOutcome(
        correctness=correctness,
        num_calls=sum(read_metric(run, key, knob=TOOL_KNOB) for key in tool_keys),
        num_tokens=sum(len(turn.sampled_ids) for turn in run.turns),
        is_valid=format_key is None or read_metric(run, format_key, knob=FORMAT_KNOB) >= 1,
    )


def replace_rewards(group: Group, rewards: Sequence[float]) -> Group:
    """The group with new rewards of its scored rollouts, in order."""
    remaining = iter(rewards)
    runs = (run if run.reward is None else replace(run, reward=next(remaining)) for run in group.trajectories)
    return replace(group, trajectories=tuple(runs))


def summarize_outcomes(outcomes: Sequence[ToolOutcome]) -> dict[str, float]:
    """Metrics: mean correctness and tool calls, correctness per tool call, and rollouts of wrong format."""
    return {
        "correctness_mean": average([each.correctness for each in outcomes]),
        "tool_calls_mean": average([each.num_calls for each in outcomes]),
        "efficiency": average([each.correctness / max(each.num_calls, 1.0) for each in outcomes]),
        "num_invalid_formats": Count(sum(not each.is_valid for each in outcomes)),
    }


def average(values: Sequence[float]) -> Mean:
    return Mean(math.fsum(values), over=len(values))


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
