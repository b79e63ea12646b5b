"""Scores of single rollouts and of tasks in an evaluation, without tokens, convertible to and from JSON.

A `SampleScore` describes one rollout of the agent; `TaskScores` holds all rollouts of one task. The value of a quantity
on a task is the mean over the rollouts that have it, or None if none has: a failed rollout has counts but no reward.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunesmith.chat.renderer import Renderer
from tunesmith.commands.eval.statistics import choose_pass_at_k, compute_pass_at_k
from tunesmith.errors import ConfigError
from tunesmith.types import TRUNCATED, Group, Task, Trajectory

CUT_OFF = TRUNCATED | {"deadline"}
"""Stop reasons of a turn that the model did not end itself."""
MAX_FIELD_CHARS = 2000
"""Longer text of a task's row is cut in the results of evaluations."""
REWARD = "reward"
SAMPLE_STATS = ("sampled_tokens", "tool_calls", "turns", "truncated")
"""Quantities that every rollout has, a failed one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScore:
    """One rollout of the agent on a task. The field names are keys of comparison.json."""

    reward: float | None
    metrics: Mapping[str, float]
    """Metrics reported by the workflow and the judge."""
    failure: str | None
    response: str
    sampled_tokens: int
    tool_calls: int
    """Tool calls that the workflow reports as its metric `tool_calls`, else well-formed calls in the sampled text."""
    turns: int
    truncated: bool
    """Whether max_tokens, the context or a deadline ended a turn."""

    def get(self, name: str) -> float | None:
        """A quantity by its name in the tables; None when this rollout does not have it."""
        if name == REWARD:
            return self.reward
        if name in SAMPLE_STATS:
            return float(getattr(self, name))
        return None if self.failure is not None else self.metrics.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """A task and the scores of its rollouts."""

    task_id: str
    samples: tuple[SampleScore, ...]
    row: Mapping[str, Any] | None = None
    """The task's row as JSON values; None in files that were written without it."""

    def compute_mean(self, name: str) -> float | None:
        """Mean of a quantity over the rollouts that have it."""
        values = [value for sample in self.samples if (value := sample.get(name)) is not None]
        return statistics.fmean(values) if values else None


def score_groups(groups: Sequence[Group], renderer: Renderer) -> list[TaskScores]:
    """One `TaskScores` for each group of an evaluation."""
    return [
        TaskScores(
            task_id=group.task.task_id,
            samples=tuple(score_trajectory(each, renderer) for each in group.trajectories),
            row=describe_row(group.task),
        )
        for group in groups
    ]


def describe_row(task: Task) -> dict[str, Any]:
    """The row of a task as JSON values, with long text cut."""
    row: dict[str, Any] = json.loads(json.dumps(dict(task.row), default=str))
    return {
        name: f"{value[:MAX_FIELD_CHARS]}..." if isinstance(value, str) and len(value) > MAX_FIELD_CHARS else value
        for name, value in row.items()
    }


def score_trajectory(trajectory: Trajectory, renderer: Renderer) -> SampleScore:
    return SampleScore(
        reward=trajectory.reward,
        metrics={name: float(value) for name, value in trajectory.metrics.items()},
        failure=None if trajectory.failure is None else f"{trajectory.failure.where}: {trajectory.failure.message}",
        response=trajectory.response_text,
        sampled_tokens=sum(len(turn.sampled_ids) for turn in trajectory.turns),
        tool_calls=count_tool_calls(trajectory, renderer),
        turns=len(trajectory.turns),
        truncated=any(turn.stop_reason in CUT_OFF for turn in trajectory.turns),
    )


def count_tool_calls(trajectory: Trajectory, renderer: Renderer) -> int:
    """Number of tool calls: recorded by the workflow, or found in the sampled text by the endpoint's parser."""
    if (recorded := trajectory.metrics.get("tool_calls")) is not None:
        return round(recorded)
    num_calls = 0
    for turn in trajectory.turns:
        parser = renderer.build_parser(turn.prompt_ids, new_call_id=lambda: "call", has_tools=True)
        deltas = (parser.feed(renderer.decode(turn.sampled_ids)), parser.finish())
        num_calls += sum(len(delta.tool_calls) for delta in deltas)
    return num_calls


def scores_to_json(tasks: Sequence[TaskScores]) -> list[dict[str, Any]]:
    """Scores as values that JSON can hold; the key of a task's samples is `attempts`."""
    return [
        {"task_id": task.task_id}
        | ({} if task.row is None else {"row": dict(task.row)})
        | {"attempts": [asdict(sample) for sample in task.samples]}
        for task in tasks
    ]


def scores_from_json(values: Sequence[Mapping[str, Any]]) -> list[TaskScores]:
    """The inverse of `scores_to_json`."""
    return [
        TaskScores(
            task_id=each["task_id"],
            samples=tuple(SampleScore(**sample) for sample in each["attempts"]),
            row=each.get("row"),
        )
        for each in values
    ]


def list_reported_metrics(tasks: Sequence[TaskScores]) -> list[str]:
    """Names of the metrics that workflows and judges reported, in order of first appearance."""
    names = {name: None for task in tasks for sample in task.samples for name in sample.metrics}
    return [name for name in names if name not in (REWARD, *SAMPLE_STATS)]


def collect_outcomes(tasks: Sequence[TaskScores], outcome_key: str | None) -> list[list[float]]:
    """Outcomes of the scored rollouts of each task: the reported metric `outcome_key`, or the reward."""
    outcomes = [[each.get(outcome_key or REWARD) for each in task.samples if each.failure is None] for task in tasks]
    if any(outcome is None for task_outcomes in outcomes for outcome in task_outcomes):
        raise ConfigError(
            f"outcome_key={outcome_key!r} is not reported by every rollout; reported are "
            f"{', '.join(list_reported_metrics(tasks)) or 'no metrics'}"
        )
    return [[outcome for outcome in task_outcomes if outcome is not None] for task_outcomes in outcomes]


def compute_pass_at_k_by_task(outcomes: Sequence[Sequence[float]]) -> dict[int, list[float]]:
    """Map k to pass@k of each task with at least k scored rollouts.

    Empty when no task has two scored rollouts, or when an outcome is neither 0 nor 1.
    """
    num_samples = max((len(task_outcomes) for task_outcomes in outcomes), default=0)
    if num_samples < 2 or not all(outcome in (0.0, 1.0) for task_outcomes in outcomes for outcome in task_outcomes):
        return {}
    return {
        k: [
            compute_pass_at_k(num_samples=len(task_outcomes), num_passed=round(sum(task_outcomes)), k=k)
            for task_outcomes in outcomes
            if len(task_outcomes) >= k
        ]
        for k in choose_pass_at_k(num_samples)
    }
