"""Runs the agent once on each task with a model; what failed is counted, never scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.group import GroupRequest
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelProvider
from tunesmith.rollout.workers.group_runner import run_groups
from tunesmith.types import Group, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits and seed of all runs of one comparison."""

    max_concurrency: int
    timeout_s: float
    """Time limit of a workflow and its judge."""
    max_failure_rate: float
    """Share of failed runs above which a candidate cannot be chosen."""
    seed: int


async def run_agent(
    tasks: Sequence[Task],
    *,
    agent: Agent,
    model: ModelProvider,
    limits: RunLimits,
) -> list[Trajectory]:
    """One trajectory per task, in their order; a task has the same seed in every call."""
    requests = [GroupRequest(number=task.index, task=task, size=1, seed=(limits.seed, 0, task.index)) for task in tasks]
    groups = await run_groups(requests, agent=agent, model=model, max_concurrency=limits.max_concurrency)
    return [group.trajectories[0] for group in groups]


def count_failures(trajectories: Sequence[Trajectory]) -> int:
    return sum(each.failure is not None for each in trajectories)


def has_too_many_failures(trajectories: Sequence[Trajectory], limits: RunLimits) -> bool:
    """Whether nothing was scored, or more runs failed than the limits allow."""
    num_failures = count_failures(trajectories)
    return num_failures == len(trajectories) or num_failures / len(trajectories) > limits.max_failure_rate


def describe_failures(trajectories: Sequence[Trajectory]) -> list[str]:
    """The most frequent causes, one line each."""
    return list_causes([Group(task=each.task, trajectories=(each,)) for each in trajectories])
