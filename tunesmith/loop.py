"""One training step, on one screen.

    tasks -> trajectories -> groups -> operators -> advantages -> samples -> new policy version

Sampler and trainer hold the same parameters, so a version is a promise about time, not a copy: everything sampled
between `resume(version)` and `pause()` comes from that version, and the trainer changes the weights in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tunesmith.algorithms.algorithm import Algorithm, compute_group_advantages, has_advantage
from tunesmith.experience.batch import Batch, BatchSize, Collect, Draw, gather_batch
from tunesmith.experience.samples import add_experts, build_samples
from tunesmith.experience.table import BoundOperator
from tunesmith.rollout.groups import check_failures, compute_rollout_metrics
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Engine, Group, RunAdvantage, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step leaves behind: its experience and its numbers."""

    batch: Batch
    advantages: list[list[RunAdvantage]]
    """Of `batch.groups`; None does not train."""
    metrics: dict[str, float]

    @property
    def trained(self) -> tuple[list[Group], list[int]]:
        """The groups whose rewards taught something, and their places among those collected."""
        rows = zip(self.batch.groups, self.batch.positions, self.batch.is_useful, strict=True)
        kept = [(group, place) for group, place, is_useful in rows if is_useful]
        return [group for group, _ in kept], [place for _, place in kept]


async def run_step(
    *,
    size: BatchSize,
    draw: Draw,
    collect: Collect,
    policy_version: int,
    engine: Engine,
    algorithm: Algorithm,
    trainer: Trainer,
    max_failure_rate: float,
    operators: Sequence[BoundOperator] = (),
    replayed: Sequence[Group] = (),
    experts: Sequence[Sample] = (),
) -> StepResult:
    """Sample groups with `policy_version`, turn rewards into advantages, make one update."""

    started = time.perf_counter()
    engine.resume(policy_version)
    teaches = partial(has_advantage, algorithm)
    batch = await gather_batch(size, draw=draw, collect=collect, operators=operators, teaches=teaches)
    engine.pause()
    check_failures(batch.collected, max_failure_rate=max_failure_rate)
    sampled = time.perf_counter()

    groups = [*batch.groups, *replayed]
    advantages, advantage_metrics = compute_group_advantages(algorithm, groups)
    samples, sample_metrics = build_samples(groups, advantages)
    train_metrics = trainer.step(add_experts(samples, experts), policy_version=policy_version)
    trained = time.perf_counter()

    metrics = compute_rollout_metrics(batch.collected) | engine.compute_stats() | batch.metrics
    metrics |= advantage_metrics | sample_metrics | train_metrics
    metrics["experience/num_replayed_groups"] = float(len(replayed))
    metrics["perf/rollout_s"] = sampled - started
    metrics["perf/train_s"] = trained - sampled
    metrics["perf/sampled_tokens_per_s"] = metrics["rollout/num_sampled_tokens"] / (sampled - started)
    return StepResult(batch=batch, advantages=advantages[: len(batch.groups)], metrics=metrics)
