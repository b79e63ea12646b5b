"""Evaluations of a policy on held-out tasks, and their results as metrics and as `eval/step_N.json`.

A task's score is the mean reward of its rollouts; the interval is a bootstrap over tasks. A failed rollout has no
reward: it is excluded from the mean and counted.

The measures of a tool agent's behavior (ET-Agent, arXiv:2601.06860, section 4) each relate the correctness P of a
rollout to what it cost: tool calls (efficiency), failed tool calls (successful execution) or sampled tokens (reasoning
length). The measure of a task set is the mean over its rollouts; a wrong answer has the value 0 in each. Failed
rollouts have no value. `evaluation.behavior` adds the measures to the metrics of held-out rollouts, so that tables give
them intervals and paired tests.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunesmith.commands.eval.sample_scores import (
    Interval,
    compute_bootstrap_interval,
    compute_pass_at_k_by_task,
    describe_row,
)
from tunesmith.config import BehaviorSection, RunConfig
from tunesmith.errors import ConfigError
from tunesmith.rollout.dispatcher import Dispatcher
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.progress import RolloutProgress, Show, show_nothing
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.statistics import collect_reported
from tunesmith.runs.policy import build_sampling
from tunesmith.types import Group, Task, Trajectory, compute_outcome, read_metric

MEASURES = ("efficiency", "successful_execution", "reasoning_length")
TOKENS = 1000
"""Reasoning length is correctness per this many tokens."""


def measure_behavior(run: Trajectory, section: BehaviorSection, *, outcome_key: str | None) -> dict[str, float]:
    """The measures of a scored rollout by name: correctness per tool call, per failed call and per 1000 sampled tokens.

    A rollout without calls has efficiency P. One failed call costs nothing, two cost half. Without tokens there is no
    reasoning length, which is higher for shorter reasoning.
    """

    def add_up(knob: str) -> float:
        return sum(read_metric(run, key, knob=f"evaluation.behavior.{knob}") for key in getattr(section, knob))

    correctness, num_tokens = compute_outcome(run, outcome_key), run.num_sampled_tokens
    measures = {
        "efficiency": correctness / (add_up("tool_keys") or 1.0),
        "successful_execution": correctness / max(add_up("error_keys"), 1.0),
    }
    return measures | ({"reasoning_length": TOKENS * correctness / num_tokens} if num_tokens else {})


def add_behavior(groups: Sequence[Group], section: BehaviorSection | None, *, outcome_key: str | None) -> list[Group]:
    """The groups with the measures among the metrics of their scored rollouts; unchanged without a section."""
    if section is None:
        return list(groups)

    def add(run: Trajectory) -> Trajectory:
        if run.reward is None:
            return run
        measures = measure_behavior(run, section, outcome_key=outcome_key)
        taken = measures.keys() & run.metrics.keys()
        if taken:
            raise ConfigError(
                f"workflow or judge report the metric {min(taken)!r}, which evaluation.behavior measures too: rename "
                "it, or remove evaluation.behavior"
            )
        return replace(run, metrics={**run.metrics, **measures})

    return [group.map(add) for group in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Scores of one task set under one policy version."""

    name: str
    policy_version: int
    groups: list[Group] = field(repr=False)
    mean: float | None
    """Mean over tasks of the mean reward of a task's rollouts; None when every rollout failed."""
    interval: Interval | None
    """95 % bootstrap interval of the mean over tasks."""
    num_failures: int
    metric_means: dict[str, float]
    """Means over rollouts of the metrics that workflow and judge reported."""
    pass_at_k: Mapping[int, float]
    """k -> mean over tasks of the probability that at least one of k rollouts has outcome 1. Empty unless tasks have
    several rollouts and every outcome is 0 or 1."""

    def describe(self) -> str:
        """The mean reward with its interval, in one line."""
        if self.mean is None or self.interval is None:
            return f"no reward: all {self.num_failures} rollouts failed"
        low, high = self.interval
        failures = f", {self.num_failures} rollouts failed" if self.num_failures else ""
        return f"reward {self.mean:.4g} ({low:.4g} to {high:.4g}) on {len(self.groups)} tasks{failures}"

    def to_metrics(self) -> dict[str, float]:
        prefix = f"eval/{self.name}"
        metrics = {f"{prefix}/num_tasks": float(len(self.groups)), f"{prefix}/num_failures": float(self.num_failures)}
        if self.mean is not None and self.interval is not None:
            low, high = self.interval
            metrics |= {f"{prefix}/reward": self.mean, f"{prefix}/reward_low": low, f"{prefix}/reward_high": high}
        metrics |= {f"{prefix}/pass@{k}": value for k, value in self.pass_at_k.items()}
        return metrics | {f"{prefix}/{key}": value for key, value in self.metric_means.items()}

    def to_json(self) -> dict[str, Any]:
        """Summary and one record per task, as written to `eval/step_N.json`."""
        tasks = [
            {
                "task_id": group.task.task_id,
                "row": describe_row(group.task),
                "rewards": [trajectory.reward for trajectory in group.trajectories],
                "failures": [t.failure.message for t in group.trajectories if t.failure is not None],
                "responses": [trajectory.response_text for trajectory in group.trajectories],
                "num_sampled_tokens": [trajectory.num_sampled_tokens for trajectory in group.trajectories],
            }
            for group in self.groups
        ]
        return {
            "name": self.name,
            "policy_version": self.policy_version,
            "mean": self.mean,
            "interval_95": self.interval,
            "num_failures": self.num_failures,
            "metrics": self.metric_means,
            "pass_at_k": dict(self.pass_at_k),
            "tasks": tasks,
        }


def compute_evaluation(
    name: str, groups: Sequence[Group], *, policy_version: int, seed: int = 0, outcome_key: str | None = None
) -> EvaluationResult:
    """Summarize the groups of one task set; `outcome_key` is the metric that is 1 for a passed rollout."""
    scores = [statistics.fmean(t.reward for t in g.scored if t.reward is not None) for g in groups if g.scored]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    outcomes = [[compute_outcome(trajectory, outcome_key) for trajectory in group.scored] for group in groups]
    return EvaluationResult(
        name=name,
        policy_version=policy_version,
        groups=list(groups),
        mean=statistics.fmean(scores) if scores else None,
        interval=compute_bootstrap_interval(scores, seed=seed) if scores else None,
        num_failures=sum(trajectory.failure is not None for trajectory in trajectories),
        metric_means={key: statistics.fmean(values) for key, values in collect_reported(trajectories).items()},
        pass_at_k={k: statistics.fmean(values) for k, values in compute_pass_at_k_by_task(outcomes).items()},
    )


async def evaluate_all(
    config: RunConfig,
    dispatcher: Dispatcher,
    eval_tasks: Mapping[str, Sequence[Task]],
    *,
    policy_version: int,
    show: Show = show_nothing,
) -> dict[str, EvaluationResult]:
    """Evaluate every held-out set. Seeds do not depend on the step, so all evaluations of a run use the same seeds."""
    results = {}
    for name, tasks in eval_tasks.items():
        groups = await run_held_out(config, dispatcher, name, tasks, policy_version=policy_version, show=show)
        results[name] = compute_evaluation(
            name, groups, policy_version=policy_version, seed=config.seed, outcome_key=config.experience.outcome_key
        )
    return results


async def run_held_out(
    config: RunConfig,
    dispatcher: Dispatcher,
    name: str,
    tasks: Sequence[Task],
    *,
    policy_version: int,
    max_failure_rate: float = 1.0,
    show: Show = show_nothing,
) -> list[Group]:
    requests = build_requests(
        tasks,
        size=config.evaluation.num_samples,
        seed=derive_seed(config.seed, "evaluation", name),
        sampling=build_sampling(config.model, temperature=config.evaluation.temperature),
    )
    groups = await dispatcher.evaluate(
        requests,
        policy_version=policy_version,
        max_failure_rate=max_failure_rate,
        progress=RolloutProgress(show=show, name=f"evaluation rollouts of {name}"),
    )
    return add_behavior(groups, config.evaluation.behavior, outcome_key=config.experience.outcome_key)
