"""Operators that replace rewards by those of agents with tools, computed from what the rollouts recorded.

Correctness is the metric `outcome_key` or the reward, tool calls are the sum of the metrics `tool_keys`, and the format
is right if the metric `format_key` is 1. Tokens are counted in the recorded turns: those that the policy sampled.
Failed rollouts have no reward and are excluded from the statistics of their group. A rollout without one of the
metrics is an error: an unknown count is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from tunesmith.errors import ConfigError
from tunesmith.experience.outcomes import compute_outcome, read_metric
from tunesmith.experience.rewards import (
    ToolOutcome,
    compute_arpo_reward,
    compute_efficiency_rewards,
    compute_sigma_scale,
)
from tunesmith.metric import Count, Mean
from tunesmith.types import Group, Trajectory

Sigma = NonNegativeFloat | Annotated[list[NonNegativeFloat], Field(min_length=1)]
"""One sigma, or one for each curriculum round."""
ToolKeys = Annotated[list[str], Field(min_length=1)]
TOOL_KNOB, FORMAT_KNOB = (f"{key} of the operator in experience.operators" for key in ("tool_keys", "format_key"))


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
