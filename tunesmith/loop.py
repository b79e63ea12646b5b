"""One training step, on one screen, on one rank or the first of many.

    select tasks -> run agents -> operators -> advantages -> samples -> new weights -> feedback to the selector

Sampler and trainer hold the same parameters. Policy version v is the weights after v steps: step s samples with version
s - 1, and the trainer changes the weights only after `pause`. With `rollout.max_staleness` rollouts outlast a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tunesmith.algorithms.algorithm import Algorithm, compute_group_advantages, has_advantage
from tunesmith.experience.batch import Batch, BatchSize
from tunesmith.experience.finished_group import FinishedGroup
from tunesmith.experience.operators import compute_pass_rates
from tunesmith.experience.replay import ExpertFeed, ReplayBuffer
from tunesmith.experience.table import BoundOperator, apply_operators
from tunesmith.rollout.dispatcher import Dispatcher
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.tasks.selector import TaskFeed
from tunesmith.trainer.rank_trainer import RankTrainer, SaveRollouts, StepGroups
from tunesmith.types import RunAdvantage


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Everything a step works with; built once for a run."""

    tasks: TaskFeed
    dispatcher: Dispatcher
    operators: Sequence[BoundOperator] = ()
    algorithm: Algorithm
    trainer: RankTrainer
    replay: ReplayBuffer
    experts: ExpertFeed | None = None
    """Demonstrations trained in addition to the policy's own samples."""
    size: BatchSize
    total_steps: int = 1
    """Steps of the run, for operators that follow a schedule."""
    max_failure_rate: float
    outcome_key: str | None = None
    """The metric that pass rates are computed from; None takes the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The experience and the metrics of one step."""

    batch: Batch
    advantages: list[list[RunAdvantage]]
    """Of the groups in `batch.groups`; None does not train."""
    metrics: dict[str, float]


async def run_step(
    parts: StepParts, *, step: int, progress: RolloutProgress | None = None, record: SaveRollouts | None = None
) -> StepResult:
    """Make step 1, 2, ...: sample with policy version `step - 1`, make one update, report pass rates.

    `record` saves the rollouts while the device computes the update.
    """
    started, policy_version, dispatcher = time.perf_counter(), step - 1, parts.dispatcher
    batch, finished, progress = Batch(size=parts.size), list[FinishedGroup](), progress or RolloutProgress()
    while batch.num_missing:
        found = await dispatcher.collect(batch.num_missing, step=step, round_index=batch.num_rounds, progress=progress)
        groups = [each.group for each in found]
        kept, operator_metrics = apply_operators(groups, parts.operators, step=step, total_steps=parts.total_steps)
        useful = [has_advantage(parts.algorithm, group) for group in kept]
        batch.add_round(groups, kept, operator_metrics, has_advantage=useful)
        finished += found
    dispatcher.pause()
    await dispatcher.check_failures(batch, finished, progress, max_failure_rate=parts.max_failure_rate)
    sampled = time.perf_counter()

    progress.show("training")
    replayed = parts.replay.sample(policy_version=policy_version)
    advantages, advantage_metrics = compute_group_advantages(parts.algorithm, [*batch.groups, *replayed])
    experts = [] if parts.experts is None else parts.experts.select(step)
    trained_groups = StepGroups(
        batch=batch, finished=finished, replayed=replayed, advantages=advantages, experts=experts
    )
    train_metrics = await parts.trainer.step(
        trained_groups, policy_version=policy_version, times=dispatcher.take_times(), record=record
    )
    batch.drop_routes()
    progress.finished.clear()  # saved by now
    await dispatcher.publish(step)
    trained = time.perf_counter()

    metrics = await dispatcher.compute_metrics(batch.collected) | batch.compute_metrics()
    metrics |= advantage_metrics | train_metrics
    metrics |= dispatcher.compute_staleness(trained_groups.groups, advantages, policy_version=policy_version)
    metrics["experience/num_replayed_groups"] = float(len(replayed))
    metrics |= {"perf/rollout_s": sampled - started, "perf/train_s": trained - sampled}
    metrics |= dispatcher.compute_rate(metrics)
    metrics |= parts.tasks.give_feedback(compute_pass_rates(batch.collected, parts.outcome_key), batch.collected)
    parts.replay.add(
        *batch.with_advantage,
        step=step,
        policy_version=policy_version,
        has_older_tokens=dispatcher.max_staleness > 0,
    )
    metrics["perf/step_s"] = time.perf_counter() - started
    return StepResult(batch=batch, advantages=advantages[: len(batch.groups)], metrics=metrics)
