"""Runs all trajectories of a step in groups, and computes rollout metrics.

Trajectories start in a fixed order, at most `max_concurrency` at a time, and each has its own seed, so what they sample
does not depend on timing. Failed trajectories stay in their group without a reward; too many failures stop the run.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from tunesmith.errors import RolloutError
from tunesmith.rollout.branching.tree import Branching, build_trees
from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.recording.replay import RolloutRecord
from tunesmith.rollout.runner import Agent, run_trajectory
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import ModelProvider
from tunesmith.rollout.task_source import PlannedTasks, TaskSource, take_all
from tunesmith.rollout.watchdog import BLOCKED_LIMIT_S, watch_event_loop
from tunesmith.types import FailureWhere, Group, Sampling, StopReason, Task, Trajectory

OnProgress = Callable[[Trajectory], None]
"""Called with each finished trajectory."""


async def run_groups(
    tasks: Sequence[Task] | Mapping[int, Task],
    *,
    group_size: int,
    agent: Agent,
    model: ModelProvider,
    auxiliary_models: Mapping[str, ModelProvider] | None = None,
    seed: int,
    step: int,
    sampling: Sampling | None = None,
    max_concurrency: int,
    on_progress: OnProgress | None = None,
    branching: Branching | None = None,
    source: TaskSource | None = None,
) -> list[Group]:
    """Run the agent `group_size` times on each task that `source` hands out, None: all; groups in the order of taking.

    Seeds are derived from a task's position. With `branching`, rollouts of a group continue others from branch points.
    """
    source = PlannedTasks(range(len(tasks))) if source is None else source
    num_running: Counter[int] = Counter()
    slots = asyncio.Semaphore(max_concurrency)

    async def run_one(position: int, run_index: int, record: RolloutRecord | None = None) -> Trajectory:
        task = tasks[position]
        try:
            trajectory = await run_trajectory(
                task,
                run_index,
                agent=agent,
                model=model,
                auxiliary_models=auxiliary_models or {},
                seed=derive_seed(seed, step, position, task.task_id, run_index),
                order=(position, run_index),
                sampling=sampling,
                watchdog=watchdog,
                record=record,
            )
        finally:
            slots.release()
            num_running[position] -= 1
            if num_running[position] == 0:
                source.end_group()
        if on_progress is not None:
            on_progress(trajectory)
        return trajectory

    running: list[asyncio.Task[Any]] = []
    with watch_event_loop(agent.logger, limit_s=min(BLOCKED_LIMIT_S, agent.timeout_s / 4)) as watchdog:
        try:
            if branching is not None:
                tree_seed, positions = derive_seed(seed, step, "branching"), await take_all(source)
                build = partial(build_trees, branching, tasks, positions, group_size=group_size, seed=tree_seed)
                running += [asyncio.create_task(each.run()) for each in build(slots=slots, run=run_one)]
                return list(await asyncio.gather(*running))
            await start_tasks(source, running, num_running, group_size=group_size, slots=slots, run=run_one)
            trajectories = await asyncio.gather(*running)
        finally:
            await _cancel_all(running)
    return _form_groups([tasks[position] for position in source.taken], trajectories, group_size)


async def start_tasks(
    source: TaskSource,
    running: list[asyncio.Task[Any]],
    num_running: Counter[int],
    *,
    group_size: int,
    slots: asyncio.Semaphore,
    run: Callable[[int, int], Coroutine[Any, Any, Trajectory]],
) -> None:
    """Add the rollouts of the source's tasks to `running`, each as soon as a slot is free, which `run` releases."""
    await slots.acquire()
    while (position := await source.take()) is not None:
        num_running[position] = group_size
        for run_index in range(group_size):
            if run_index:
                await slots.acquire()
            running.append(asyncio.create_task(run(position, run_index)))
        await slots.acquire()
    slots.release()


def _form_groups(tasks: Sequence[Task], trajectories: Sequence[Trajectory], group_size: int) -> list[Group]:
    return [
        Group(task=task, trajectories=tuple(trajectories[position * group_size : (position + 1) * group_size]))
        for position, task in enumerate(tasks)
    ]


async def _cancel_all(running: Sequence[asyncio.Task[Any]]) -> None:
    pending = [each for each in running if not each.done()]
    for each in pending:
        each.cancel()
    if pending:
        await asyncio.wait(pending)


def attach_baselines(groups: Sequence[Group], baselines: Sequence[Group]) -> list[Group]:
    """Set each group's baseline reward from its task's single baseline rollout, which is not a member of the group."""
    return [
        replace(group, baseline_reward=baseline.trajectories[0].reward)
        for group, baseline in zip(groups, baselines, strict=True)
    ]


def compute_baseline_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward of baseline rollouts, and the number of failed baseline rollouts."""
    rewards = [group.baseline_reward for group in groups if group.baseline_reward is not None]
    metrics = {"rollout/num_failed_baselines": float(len(groups) - len(rewards))}
    if rewards:
        metrics["rollout/baseline_reward_mean"] = statistics.fmean(rewards)
    return metrics


def check_failures(groups: Sequence[Group], max_failure_rate: float) -> None:
    """Raise a RolloutError with the most frequent causes if the failure rate exceeds `max_failure_rate`."""
    failures = [t.failure for group in groups for t in group.trajectories if t.failure is not None]
    num_trajectories = sum(len(group.trajectories) for group in groups)
    if not num_trajectories or len(failures) / num_trajectories <= max_failure_rate:
        return
    raise RolloutError(
        f"{len(failures)} of {num_trajectories} rollouts failed, more than max_failure_rate={max_failure_rate:g} "
        f"allows:\n  " + "\n  ".join(list_causes(groups))
    )


def compute_rollout_metrics(groups: Sequence[Group], *, prefix: str = "rollout") -> dict[str, float]:
    """Rewards, failures, turns, tokens, stop reasons, and the metrics that workflows and judges return.

    Returned metrics are named `rollout/<metric>/mean`, `/max`, `/min` and `/count`; built-in ones have no second slash.
    Rewards and returned metrics are over scored trajectories, tokens and turns over all.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    metrics = _compute_rewards([t.reward for t in trajectories if t.reward is not None])
    metrics |= _compute_failures(trajectories) | _compute_sizes(trajectories)
    metrics |= _compute_reported([t.metrics for t in trajectories if t.failure is None])
    named = {f"{prefix}/{name}": value for name, value in metrics.items()}
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
    num_sampled = [sum(len(turn.sampled_ids) for turn in t.turns) for t in trajectories]
    metrics = {f"num_stop_{reason}": float(reasons[reason]) for reason in get_args(StopReason)}
    metrics["num_turns"] = float(len(turns))
    metrics["num_sampled_tokens"] = float(sum(num_sampled))
    metrics["num_prompt_tokens"] = float(sum(len(turn.prompt_ids) for turn in turns))
    if trajectories:
        metrics["num_truncated"] = float(sum(_is_truncated(t) for t in trajectories))
        metrics["turns_mean"] = len(turns) / len(trajectories)
        metrics["sampled_tokens_mean"] = statistics.fmean(num_sampled)
        metrics["sampled_tokens_max"] = float(max(num_sampled))
    if turns:
        metrics["sampled_tokens_per_turn_mean"] = sum(num_sampled) / len(turns)
        metrics["prompt_tokens_per_turn_mean"] = metrics["num_prompt_tokens"] / len(turns)
        metrics["sampled_tokens_per_turn_max"] = float(max(len(turn.sampled_ids) for turn in turns))
        metrics["context_tokens_max"] = float(max(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns))
    return metrics


def _is_truncated(trajectory: Trajectory) -> bool:
    """Whether the last turn ended at `max_tokens` or at the end of the context."""
    return bool(trajectory.turns) and trajectory.turns[-1].stop_reason in ("length", "context")


def _compute_reported(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.items():
            values.setdefault(name, []).append(value)
    metrics: dict[str, float] = {}
    for name, reported in values.items():
        metrics |= {
            f"{name}/mean": statistics.fmean(reported),
            f"{name}/max": max(reported),
            f"{name}/min": min(reported),
            f"{name}/count": float(len(reported)),
        }
    return metrics
