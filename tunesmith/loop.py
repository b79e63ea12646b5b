"""One training step, on one screen.

    select tasks -> run agents -> operators -> advantages -> samples -> new weights -> feedback to the selector

Sampler and trainer hold the same parameters. Policy version v is the weights after v steps: tokens sampled between
`resume(v)` and `pause()` have version v, and the trainer changes the weights only after `pause()`. With
`rollout.max_staleness` rollouts stay in flight over several steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tunesmith.algorithms.algorithm import Algorithm, compute_group_advantages, has_advantage
from tunesmith.experience.batch import Batch, BatchSize
from tunesmith.experience.expert_feed import ExpertFeed
from tunesmith.experience.outcomes import compute_pass_rates
from tunesmith.experience.replay import ReplayBuffer
from tunesmith.experience.staleness import compute_staleness
from tunesmith.experience.table import BoundOperator, apply_operators
from tunesmith.rollout.actors import Actors, RolloutProgress, run_tasks
from tunesmith.rollout.branching.tree import Branching
from tunesmith.rollout.groups import compute_baseline_metrics, compute_rollout_metrics
from tunesmith.rollout.in_flight.in_flight_groups import InFlightGroups
from tunesmith.rollout.seeds import derive_round_seed
from tunesmith.shared_step import check_step_failures, take_groups, train_groups
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Group, RunAdvantage, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Everything a step works with; built once for a run."""

    tasks: TaskFeed
    actors: Actors
    operators: Sequence[BoundOperator] = ()
    algorithm: Algorithm
    trainer: Trainer
    replay: ReplayBuffer
    experts: ExpertFeed | None = None
    """Demonstrations trained in addition to the policy's own samples."""
    size: BatchSize
    group_size: int
    total_steps: int = 1
    """Steps of the run, for operators that follow a schedule."""
    seed: int
    max_failure_rate: float
    outcome_key: str | None = None
    """The metric that pass rates are computed from; None takes the reward."""
    baseline_sampling: Sampling | None = None
    """Sampling of one more rollout of each task, whose reward is the group's baseline; None makes no such rollout."""
    branching: Branching | None = None
    """How rollouts branch; None runs all of them from the task."""
    in_flight: InFlightGroups | None = None
    """Rollouts that continue while the weights change; None: a step waits for all of its rollouts."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the tokens of other ranks' groups are read before the update."""
        return bool(self.operators) or self.algorithm.reads_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The experience and the metrics of one step."""

    batch: Batch
    advantages: list[list[RunAdvantage]]
    """Of the groups in `batch.groups`; None does not train."""
    metrics: dict[str, float]


SaveBatch = Callable[[Batch, list[list[RunAdvantage]]], None]
"""Saves the groups of a step with the advantages of those that train, while the device computes the update."""


async def run_step(
    parts: StepParts, *, step: int, progress: RolloutProgress | None = None, save: SaveBatch | None = None
) -> StepResult:
    """Make step 1, 2, ...: sample with policy version `step - 1`, make one update, report pass rates."""
    started, policy_version, sampler = time.perf_counter(), step - 1, parts.in_flight or parts.actors.engine
    batch, progress = Batch(size=parts.size), progress or RolloutProgress()
    sampler.resume(policy_version)
    while batch.num_missing:
        groups = await run_round(parts, batch, step=step, progress=progress)
        kept, operator_metrics = apply_operators(groups, parts.operators, step=step, total_steps=parts.total_steps)
        batch.add_round(
            groups, kept, operator_metrics, has_advantage=[has_advantage(parts.algorithm, each) for each in kept]
        )
    sampler.pause()
    check_step_failures(parts.actors, batch, progress, max_failure_rate=parts.max_failure_rate)
    sampled = time.perf_counter()

    replayed = parts.replay.sample(policy_version=policy_version)
    groups = [*batch.groups, *replayed]
    advantages, advantage_metrics = compute_group_advantages(parts.algorithm, groups)
    has_hard_credit = parts.branching is not None and parts.branching.section.credit == "hard"
    experts = [] if parts.experts is None else parts.experts.select(step)
    train = partial(
        train_groups,
        parts.actors,
        parts.trainer,
        groups,
        advantages,
        experts,
        policy_version=policy_version,
        has_hard_credit=has_hard_credit,
        beside=[partial(finish_batch, parts, batch, advantages, progress, save)],
    )
    in_flight = parts.in_flight
    train_metrics = train() if in_flight is None else await in_flight.train(train, policy_version=step)
    trained = time.perf_counter()

    metrics = compute_rollout_metrics(batch.collected) | parts.actors.compute_engine_stats() | batch.compute_metrics()
    metrics |= advantage_metrics | train_metrics
    metrics["experience/num_replayed_groups"] = float(len(replayed))
    metrics["perf/rollout_s"] = sampled - started
    metrics["perf/train_s"] = trained - sampled
    metrics |= {} if parts.branching is None else parts.branching.stats.compute()
    if in_flight is not None:
        metrics |= compute_staleness(groups, advantages, policy_version=policy_version) | in_flight.compute_metrics()
    sampling_s = (sampled if parts.actors.remote is None else trained) - started  # other ranks go on during the update
    metrics["perf/sampled_tokens_per_s"] = count_sampled(metrics, has_older=in_flight is not None) / sampling_s
    metrics |= parts.tasks.give_feedback(compute_pass_rates(batch.collected, parts.outcome_key), batch.collected)
    if parts.baseline_sampling is not None:
        metrics |= compute_baseline_metrics(batch.collected)
    parts.replay.add(
        *batch.with_advantage,
        step=step,
        policy_version=policy_version,
        has_older_tokens=parts.in_flight is not None,
    )
    metrics |= parts.actors.compute_recorder_stats() | parts.trainer.take_times()
    metrics["perf/step_s"] = time.perf_counter() - started
    return StepResult(batch=batch, advantages=advantages[: len(batch.groups)], metrics=metrics)


def count_sampled(metrics: dict[str, float], *, has_older: bool) -> float:
    """Tokens sampled in a step; `has_older`: those of its groups may have been sampled in earlier ones."""
    if has_older:
        return metrics["engine/num_sampled_tokens"]
    return metrics["rollout/num_sampled_tokens"] - metrics.get("rollout/num_inherited_tokens", 0.0)


def finish_batch(
    parts: StepParts,
    batch: Batch,
    advantages: list[list[RunAdvantage]],
    progress: RolloutProgress,
    save: SaveBatch | None,
) -> None:
    """Complete the batch with the tokens of other ranks' groups, and save it."""
    take_groups(parts.actors, batch, progress)
    if save is not None:
        save(batch, advantages[: len(batch.groups)])


async def run_round(parts: StepParts, batch: Batch, *, step: int, progress: RolloutProgress) -> list[Group]:
    """Run the tasks that the batch lacks, or take as many groups from those in flight."""
    if parts.in_flight is not None:
        return await parts.in_flight.take(batch.num_missing, step=step, progress=progress)
    return await run_tasks(
        parts.actors,
        parts.tasks.select(batch.num_missing),
        group_size=parts.group_size,
        seed=derive_round_seed(parts.seed, batch.num_rounds),
        step=step,
        baseline_sampling=parts.baseline_sampling,
        progress=progress,
        branching=parts.branching,
        has_tokens=parts.needs_tokens,
    )
