"""Operators on groups, applied between judge and advantages: they filter rollouts, change rewards, or only count.

An operator is a function `(groups, **args) -> (groups, metrics)` that returns one group per input group, in order, with
fewer or changed trajectories; a group without trajectories does not train. The keyword-only parameters `step` and
`total_steps`, if they have no default, are set by the run. A filtered rollout is excluded from the
statistics of its group. Rollouts on disk and the selector's feedback use the groups before the operators.
Metrics are those of one round of a batch: a plain float is averaged over the groups of all rounds; the types in
`tunesmith.metric` define other ways to combine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat
from typing_extensions import TypedDict

from tunesmith.experience.outcomes import compute_outcome, compute_pass_rates
from tunesmith.metric import Count, Max, Mean, Min
from tunesmith.types import TRUNCATED, Group, Trajectory, are_equal, is_above

Operator = Callable[..., tuple[list[Group], dict[str, float]]]

STRICT_MARGIN = 1 / 16
STRICT_EPSILON = 1e-3


class Shaping(TypedDict):
    """One reward shaping term: `reward <op_type> weight * metric`."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    stats_key: str
    op_type: Literal["ADD", "SUB", "MUL", "DIV"]
    weight: float


def pass_rate_calculator(
    groups: Sequence[Group], *, outcome_key: str | None = None
) -> tuple[list[Group], dict[str, float]]:
    """Measure the share of tasks that are neither solved nor failed by all their rollouts; groups are unchanged."""
    rates = [rate for rate in compute_pass_rates(groups, outcome_key) if rate is not None]
    if not rates:
        return list(groups), {}
    low, high = STRICT_MARGIN + STRICT_EPSILON, 1 - STRICT_MARGIN - STRICT_EPSILON
    return list(groups), {
        "pass_rate_mean": fmean(rates),
        "valid_ratio": fmean(0 < rate < 1 for rate in rates),
        "strict_valid_ratio": fmean(low < rate < high for rate in rates),
        "below_1_ratio": fmean(rate < 1 for rate in rates),
        "above_0_ratio": fmean(rate > 0 for rate in rates),
        "below_15_16_ratio": fmean(rate < high for rate in rates),
        "above_1_16_ratio": fmean(rate > low for rate in rates),
    }


def reward_filter(groups: Sequence[Group], *, threshold: float = 0.0) -> tuple[list[Group], dict[str, float]]:
    """Keep rollouts whose reward is at least `threshold`."""
    return _keep_runs(groups, lambda run: run.reward is not None and run.reward >= threshold)


def invalid_reward_filter(groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
    """Keep rollouts with a finite reward: failures and rewards that shaping made infinite are dropped."""
    return _keep_runs(groups, lambda run: run.reward is not None and math.isfinite(run.reward))


def reward_std_filter(
    groups: Sequence[Group], *, threshold: NonNegativeFloat = 0.0
) -> tuple[list[Group], dict[str, float]]:
    """Keep groups of two or more scored rollouts whose reward standard deviation (population) exceeds `threshold`."""

    def has_spread(group: Group) -> bool:
        rewards = [run.reward for run in group.scored if run.reward is not None]
        return not are_equal(rewards) and pstdev(rewards) > threshold

    return _keep_groups(groups, has_spread)


def outcome_gate(
    groups: Sequence[Group], *, outcome_key: str | None = None, tolerance: NonNegativeFloat = 0.0
) -> tuple[list[Group], dict[str, float]]:
    """Keep groups whose outcomes differ by more than `tolerance`; with equal outcomes only shaping noise would train.

    A group with one scored rollout cannot be compared and is kept.
    """

    def differs(group: Group) -> bool:
        outcomes = [compute_outcome(run, outcome_key) for run in group.scored]
        return len(outcomes) == 1 or (len(outcomes) > 1 and is_above(max(outcomes), min(outcomes) + tolerance))

    return _keep_groups(groups, differs)


def dapo_dynamic_sampling(
    groups: Sequence[Group], *, metric_key: str | None = None, correct_threshold: float = 0.0
) -> tuple[list[Group], dict[str, float]]:
    """Keep groups in which some rollouts are correct and some are not (Yu et al., 2025, eq. 11).

    A rollout is correct when its metric `metric_key` (default `accuracy`), or its reward when it does not report that
    metric, exceeds the threshold. With `experience.refill_budget` above 1, other tasks replace the dropped groups.
    """
    key = "accuracy" if metric_key is None else metric_key

    def is_correct(run: Trajectory) -> bool:
        value = run.metrics.get(key, run.reward)
        return value is not None and is_above(value, correct_threshold)

    return _keep_groups(groups, lambda group: len({is_correct(run) for run in group.scored}) == 2)


def mask_response_truncated(groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
    """Exclude turns truncated by `max_tokens` or by the context from training; their rollout's reward still counts."""
    num_masked = 0

    def mask(run: Trajectory) -> Trajectory:
        nonlocal num_masked
        num_masked += sum(turn.stop_reason in TRUNCATED for turn in run.turns)
        turns = (replace(turn, is_trained=False) if turn.stop_reason in TRUNCATED else turn for turn in run.turns)
        return replace(run, turns=tuple(turns))

    masked = [replace(group, trajectories=tuple(map(mask, group.trajectories))) for group in groups]
    return masked, {"num_masked_turns": Count(num_masked)}


def reward_shaping_mapper(
    groups: Sequence[Group], *, reward_shaping_configs: Annotated[list[Shaping], Field(min_length=1)]
) -> tuple[list[Group], dict[str, float]]:
    """Shape rewards with metrics that rollouts report.

    A term whose metric the rollout does not report, or that divides by zero, is skipped and counted.
    """
    differences: list[float] = []
    num_skipped = 0

    def shape(run: Trajectory) -> Trajectory:
        nonlocal num_skipped
        if run.reward is None:
            return run
        reward = run.reward
        for shaping in reward_shaping_configs:
            shaped = compute_shaped(reward, run.metrics.get(shaping["stats_key"]), shaping)
            num_skipped += shaped is None
            reward = reward if shaped is None else shaped
        differences.append(reward - run.reward)
        return replace(run, reward=reward)

    shaped = [replace(group, trajectories=tuple(map(shape, group.trajectories))) for group in groups]
    metrics: dict[str, float] = {"num_skipped": Count(num_skipped)}
    if differences:
        metrics |= {
            "reward_diff_mean": Mean(math.fsum(differences), over=len(differences)),
            "reward_diff_min": Min(min(differences)),
            "reward_diff_max": Max(max(differences)),
        }
    return shaped, metrics


def compute_shaped(reward: float, value: float | None, shaping: Shaping) -> float | None:
    """The reward after one shaping term, or None if the term cannot be applied."""
    if value is None:
        return None
    amount = shaping["weight"] * value
    match shaping["op_type"]:
        case "ADD":
            return reward + amount
        case "SUB":
            return reward - amount
        case "MUL":
            return reward * amount
        case "DIV":
            return None if amount == 0 else reward / amount


def _keep_runs(groups: Sequence[Group], is_kept: Callable[[Trajectory], bool]) -> tuple[list[Group], dict[str, float]]:
    kept = [replace(group, trajectories=tuple(filter(is_kept, group.trajectories))) for group in groups]
    num_runs, num_kept = (sum(len(group.trajectories) for group in each) for each in (groups, kept))
    return kept, {"num_filtered_runs": Count(num_runs - num_kept)}


def _keep_groups(groups: Sequence[Group], is_kept: Callable[[Group], bool]) -> tuple[list[Group], dict[str, float]]:
    kept = [group if is_kept(group) else replace(group, trajectories=()) for group in groups]
    num_groups, num_kept = (sum(bool(group.trajectories) for group in each) for each in (groups, kept))
    return kept, {"num_filtered_groups": Count(num_groups - num_kept)}
