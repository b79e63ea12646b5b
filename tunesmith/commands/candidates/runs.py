"""Runs the agent once on each task with a model; what failed is counted, never scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.group import GroupRequest
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelProvider
from tunesmith.rollout.statistics import describe_failures
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
    """One trajectory per task, in their order; a task has the same seed in every call.

    This is the runner of the dispatcher's workers without a dispatcher: these would resume and pause the model's
    engine, but a candidate may have none in this process, or share it with the model that proposes prompts.
    """
    requests = [GroupRequest(number=task.index, task=task, size=1, seed=(limits.seed, 0, task.index)) for task in tasks]
    groups = await run_groups(requests, agent=agent, model=model, max_concurrency=limits.max_concurrency)
    return [group.trajectories[0] for group in groups]


def count_failures(trajectories: Sequence[Trajectory]) -> int:
    return sum(each.failure is not None for each in trajectories)


def list_run_causes(trajectories: Sequence[Trajectory]) -> list[str]:
    """The most frequent causes of failures, one line each."""
    return list_causes(to_groups(trajectories))


def find_problem(trajectories: Sequence[Trajectory], limits: RunLimits) -> str | None:
    """What is wrong if more runs failed than the limits allow; None if not."""
    return describe_failures(to_groups(trajectories), limits.max_failure_rate)


def to_groups(trajectories: Sequence[Trajectory]) -> list[Group]:
    return [Group(task=each.task, trajectories=(each,)) for each in trajectories]
