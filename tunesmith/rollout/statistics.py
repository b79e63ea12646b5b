"""Metrics of groups, and the check that not too many rollouts failed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from tunesmith.errors import RolloutError
from tunesmith.rollout.failures import list_causes
from tunesmith.types import TRUNCATED, Failure, FailureWhere, Group, StopReason, Trajectory


def compute_baseline_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward of baseline rollouts, and the number of failed baseline rollouts."""
    rewards = [group.baseline_reward for group in groups if group.baseline_reward is not None]
    metrics = {"rollout/num_failed_baselines": float(len(groups) - len(rewards))}
    if rewards:
        metrics["rollout/baseline_reward_mean"] = statistics.fmean(rewards)
    return metrics


def check_failures(groups: Sequence[Group], max_failure_rate: float) -> None:
    """Raise a RolloutError with the most frequent causes if the failure rate exceeds `max_failure_rate`."""
    failures = [trajectory.failure for group in groups for trajectory in group.trajectories]
    if (problem := describe_failures(failures, max_failure_rate)) is not None:
        raise RolloutError(problem)


def describe_failures(failures: Sequence[Failure | None], max_failure_rate: float) -> str | None:
    """What is wrong if the failure rate of rollouts exceeds `max_failure_rate`, with the most frequent causes; None if
    not. `failures`: of each rollout, None for one that did not fail."""
    num_failed = len(failures) - failures.count(None)
    if not failures or num_failed / len(failures) <= max_failure_rate:
        return None
    return (
        f"{num_failed} of {len(failures)} rollouts failed, more than max_failure_rate={max_failure_rate:g} allows:\n  "
        + "\n  ".join(list_causes(failures))
    )


def compute_rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, failures, turns, tokens, stop reasons, and the metrics that workflows and judges return.

    Returned metrics are named `rollout/<metric>/mean`, `/max`, `/min` and `/count`; built-in ones have no second slash.
    Rewards and returned metrics are over scored trajectories, tokens and turns over all.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    metrics = _compute_rewards([t.reward for t in trajectories if t.reward is not None])
    metrics |= _compute_failures(trajectories) | _compute_sizes(trajectories)
    metrics |= _compute_reported(trajectories)
    named = {f"rollout/{name}": value for name, value in metrics.items()}
    if trajectories:
        named["perf/trajectory_s_mean"] = statistics.fmean(t.duration_s for t in trajectories)
        named["perf/trajectory_s_max"] = max(t.duration_s for t in trajectories)
    return named


def _compute_rewards(rewards: Sequence[float]) -> dict[str, float]:
    if not rewards:
        return {}
    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
    }


def _compute_failures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    places = Counter(t.failure.where for t in trajectories if t.failure is not None)
    metrics = {f"num_failed_{where}": float(places[where]) for where in get_args(FailureWhere)}
    metrics["num_trajectories"] = float(len(trajectories))
    metrics["num_failed"] = float(places.total())
    return metrics


def _compute_sizes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    reasons = Counter(turn.stop_reason for turn in turns)
    num_sampled = [trajectory.num_sampled_tokens for trajectory in trajectories]
    metrics = {f"num_stop_{reason}": float(reasons[reason]) for reason in get_args(StopReason)}
    metrics["num_turns"] = float(len(turns))
    metrics["num_sampled_tokens"] = float(sum(num_sampled))
    metrics["num_prompt_tokens"] = float(sum(len(turn.prompt_ids) for turn in turns))
    if trajectories:
        lasts = [trajectory.turns[-1] for trajectory in trajectories if trajectory.turns]
        metrics["num_truncated"] = float(sum(turn.stop_reason in TRUNCATED for turn in lasts))
        metrics["turns_mean"] = len(turns) / len(trajectories)
        metrics["sampled_tokens_mean"] = statistics.fmean(num_sampled)
        metrics["sampled_tokens_max"] = float(max(num_sampled))
    if turns:
        metrics["sampled_tokens_per_turn_mean"] = sum(num_sampled) / len(turns)
        metrics["prompt_tokens_per_turn_mean"] = metrics["num_prompt_tokens"] / len(turns)
        metrics["sampled_tokens_per_turn_max"] = float(max(len(turn.sampled_ids) for turn in turns))
        metrics["context_tokens_max"] = float(max(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns))
    return metrics


def collect_reported(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The values of each metric that workflows and judges reported, of rollouts that did not fail."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items() if trajectory.failure is None else ():
            values.setdefault(name, []).append(value)
    return values


def _compute_reported(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, reported in collect_reported(trajectories).items():
        metrics |= {
            f"{name}/mean": statistics.fmean(reported),
            f"{name}/max": max(reported),
            f"{name}/min": min(reported),
            f"{name}/count": float(len(reported)),
        }
    return metrics
