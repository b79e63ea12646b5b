"""What is kept of each run of an evaluation, and the scores of tasks that come of it.

An attempt is one run in numbers and words, without its tokens; it goes to JSON and back, so that an evaluation of
several models that is killed goes on where it was. A task's score is the mean over its attempts, and None where none
of them has that number: a failed attempt has a size and no reward.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunesmith.chat.renderer import Renderer
from tunesmith.errors import ConfigError
from tunesmith.pipeline.eval.statistics import compute_pass_at_k, list_powers
from tunesmith.types import Group, StopReason, Trajectory

CUT_SHORT: frozenset[StopReason] = frozenset({"length", "context", "deadline"})
"""Stop reasons of a turn that did not end by itself."""
REWARD = "reward"
SIZES = ("sampled_tokens", "tool_calls", "turns", "truncated")
"""What is known of every attempt, also of one that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of the agent on a task."""

    reward: float | None
    metrics: Mapping[str, float]
    """What the workflow and the judge reported."""
    failure: str | None
    response: str
    sampled_tokens: int
    tool_calls: int
    """Well-formed calls that the model wrote."""
    turns: int
    truncated: bool
    """Whether a turn was cut short by max_tokens, the context or a deadline."""

    def find(self, name: str) -> float | None:
        """A number by its name in tables; None when this attempt has no such number."""
        if name == REWARD:
            return self.reward
        if name in SIZES:
            return float(getattr(self, name))
        return None if self.failure is not None else self.metrics.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptedTask:
    """A task and its attempts."""

    task_id: str
    attempts: tuple[Attempt, ...]

    def score(self, name: str) -> float | None:
        """The mean of a number over the attempts that have it."""
        values = [value for attempt in self.attempts if (value := attempt.find(name)) is not None]
        return statistics.fmean(values) if values else None


def read_attempts(groups: Sequence[Group], renderer: Renderer) -> list[AttemptedTask]:
    """The attempts of an evaluation's groups."""
    return [
        AttemptedTask(
            task_id=group.task.task_id, attempts=tuple(read_attempt(each, renderer) for each in group.trajectories)
        )
        for group in groups
    ]


def read_attempt(trajectory: Trajectory, renderer: Renderer) -> Attempt:
    return Attempt(
        reward=trajectory.reward,
        metrics={name: float(value) for name, value in trajectory.metrics.items()},
        failure=None if trajectory.failure is None else f"{trajectory.failure.where}: {trajectory.failure.message}",
        response=trajectory.response_text,
        sampled_tokens=sum(len(turn.sampled_ids) for turn in trajectory.turns),
        tool_calls=count_tool_calls(trajectory, renderer),
        turns=len(trajectory.turns),
        truncated=any(turn.stop_reason in CUT_SHORT for turn in trajectory.turns),
    )


def count_tool_calls(trajectory: Trajectory, renderer: Renderer) -> int:
    """Calls in what was sampled, as the endpoint reads them."""
    num_calls = 0
    for turn in trajectory.turns:
        parser = renderer.build_parser(turn.prompt_ids, new_call_id=lambda: "call", has_tools=True)
        deltas = (parser.feed(renderer.decode(turn.sampled_ids)), parser.finish())
        num_calls += sum(len(delta.tool_calls) for delta in deltas)
    return num_calls


def save_attempts(tasks: Sequence[AttemptedTask]) -> list[dict[str, Any]]:
    """As plain values."""
    return [asdict(task) for task in tasks]


def load_attempts(values: Sequence[Mapping[str, Any]]) -> list[AttemptedTask]:
    """Back from plain values."""
    return [
        AttemptedTask(task_id=each["task_id"], attempts=tuple(Attempt(**attempt) for attempt in each["attempts"]))
        for each in values
    ]


def list_reported(tasks: Sequence[AttemptedTask]) -> list[str]:
    """Names of what workflows and judges reported, in the order in which they were first seen."""
    names = {name: None for task in tasks for attempt in task.attempts for name in attempt.metrics}
    return [name for name in names if name not in (REWARD, *SIZES)]


def find_outcomes(tasks: Sequence[AttemptedTask], outcome_key: str | None) -> list[list[float]]:
    """For each task the outcomes of its scored attempts: a reported metric, or the reward."""
    outcomes = [[each.find(outcome_key or REWARD) for each in task.attempts if each.failure is None] for task in tasks]
    if any(outcome is None for of_task in outcomes for outcome in of_task):
        raise ConfigError(
            f"outcome_key={outcome_key!r} is not reported by every run; reported are "
            f"{', '.join(list_reported(tasks)) or 'no metrics'}"
        )
    return [[outcome for outcome in of_task if outcome is not None] for of_task in outcomes]


def compute_pass_curve(outcomes: Sequence[Sequence[float]]) -> dict[int, list[float]]:
    """k -> pass@k of each task with k scored runs; empty where runs are single or an outcome is neither 0 nor 1."""
    num_samples = max((len(of_task) for of_task in outcomes), default=0)
    if num_samples < 2 or not all(outcome in (0.0, 1.0) for of_task in outcomes for outcome in of_task):
        return {}
    return {
        k: [
            compute_pass_at_k(num_samples=len(of_task), num_passed=round(sum(of_task)), k=k)
            for of_task in outcomes
            if len(of_task) >= k
        ]
        for k in list_powers(num_samples)
    }
