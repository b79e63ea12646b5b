"""Runs the agent once on each task with a model; what failed is counted, never scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import build_evaluator
from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.group import GroupRequest
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelProvider
from tunesmith.rollout.statistics import describe_failures
from tunesmith.types import Engine, Group, Task, Trajectory


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
    engine: Engine | None,
    limits: RunLimits,
) -> list[Trajectory]:
    """One trajectory per task, in their order; a task has the same seed in every call. `engine`: the model's, if it is
    in this process."""
    requests = [GroupRequest(number=task.index, task=task, size=1, seed=(limits.seed, 0, task.index)) for task in tasks]
    actors = Actors(engine=engine, model=model, agent=agent, max_concurrency=limits.max_concurrency)
    async with build_evaluator(actors) as dispatcher:
        groups = await dispatcher.evaluate(requests)
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
