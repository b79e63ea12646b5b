"""One training step, on one screen.

    tasks -> trajectories -> groups -> advantages -> samples -> new policy version

Sampler and trainer hold the same parameters, so a version is a promise about time, not a copy: everything sampled
between `resume(version)` and `pause()` comes from that version, and the trainer changes the weights in between.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tunesmith.algorithms.table import Algorithm, compute_group_advantages
from tunesmith.experience.samples import build_samples
from tunesmith.rollout.groups import check_failures, compute_rollout_metrics
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Engine, Group, Task

Collect = Callable[[Sequence[Task]], Awaitable[list[Group]]]
"""Runs the workflow and the judge on tasks, `group_size` times each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step leaves behind: its experience and its numbers."""

    groups: list[Group]
    advantages: list[list[float | None]]
    metrics: dict[str, float]


async def run_step(
    *,
    tasks: Sequence[Task],
    policy_version: int,
    engine: Engine,
    collect: Collect,
    algorithm: Algorithm,
    trainer: Trainer,
    max_failure_rate: float,
) -> StepResult:
    """Sample groups with `policy_version`, turn rewards into advantages, make one update."""
    started = time.perf_counter()
    engine.resume(policy_version)
    groups = await collect(tasks)
    engine.pause()
    check_failures(groups, max_failure_rate=max_failure_rate)
    sampled = time.perf_counter()

    advantages, advantage_metrics = compute_group_advantages(algorithm, groups)
    samples, sample_metrics = build_samples(groups, advantages)
    train_metrics = trainer.step(samples)
    trained = time.perf_counter()

    metrics = compute_rollout_metrics(groups) | engine.compute_stats()
    metrics |= advantage_metrics | sample_metrics | train_metrics
    metrics["perf/rollout_s"] = sampled - started
    metrics["perf/train_s"] = trained - sampled
    metrics["perf/sampled_tokens_per_s"] = metrics["rollout/num_sampled_tokens"] / (sampled - started)
    return StepResult(groups=groups, advantages=advantages, metrics=metrics)
