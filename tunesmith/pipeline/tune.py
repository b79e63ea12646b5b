"""A run from its config to its last checkpoint.

First everything that can be checked cheaply: functions, config, tasks, model files, the run folder. Then the model
loads and the steps go by: select, step, log, evaluate, commit. A step's files are written before the checkpoint that
commits it, so a run that is killed goes on from the last commit and makes the same numbers again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from tunesmith.algorithms.algorithm import Algorithm, resolve_algorithm
from tunesmith.config import RunConfig
from tunesmith.engine.clock import run_lockstep
from tunesmith.errors import ConfigError, StorageError, TunesmithError
from tunesmith.experience.batch import BatchSize
from tunesmith.experience.replay import ReplayBuffer
from tunesmith.experience.step_files import JSON_STEPS, StepFiles
from tunesmith.experience.store import ROLLOUT_STEPS, load_rollouts, save_rollouts
from tunesmith.experience.table import BoundOperator, build_operators
from tunesmith.loop import StepResult, run_step
from tunesmith.model.checkpoint import (
    estimate_checkpoint_bytes,
    find_last_checkpoint,
    load_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from tunesmith.model.load import load_section_tokenizer
from tunesmith.model.torch_modes import own_modes
from tunesmith.monitor.monitor import Monitor
from tunesmith.monitor.trackers import check_trackers
from tunesmith.pipeline.companions import check_companions, load_companions
from tunesmith.pipeline.evaluate import EvaluationResult
from tunesmith.pipeline.experts import ExpertFeed, build_experts
from tunesmith.pipeline.feed import OwnParts, TaskFeed, build_feed
from tunesmith.pipeline.learning import LearningLog, check_room, check_sampling_differs
from tunesmith.pipeline.load_function import load_part
from tunesmith.pipeline.policy import BuildModel, build_sampling, check_auxiliary, check_trained
from tunesmith.pipeline.resume_point import advise
from tunesmith.pipeline.run_folder import RunFolder, open_run_folder
from tunesmith.pipeline.stage import Stage, collect_groups, evaluate_all, load_stage
from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.groups import compute_baseline_metrics
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.storage import RunPaths, check_free_space, save_json
from tunesmith.tasks.load import load_tasks
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Group, JudgeType, Task, Trajectory, WorkflowType

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What a finished run leaves. Its repr is short: it leaves `metrics` and the runs of evaluations out."""

    folder: Path
    checkpoint: Path | None
    """The last checkpoint: a folder that transformers loads."""
    num_steps: int
    has_learned: bool
    """Whether any step of this call changed the weights; True too when there was none to make."""
    metrics: dict[str, float] = field(repr=False)
    """Of the last step."""
    evaluations: dict[str, EvaluationResult]
    """The last evaluation of each held-out set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is known before a model loads."""

    algorithm: Algorithm
    feed: TaskFeed
    task_counts: dict[str, float]
    """What operators on tasks counted."""
    operators: list[BoundOperator]
    replay: ReplayBuffer
    experts: ExpertFeed | None
    """Demonstrations that are trained beside the policy's own runs."""
    eval_tasks: dict[str, list[Task]]
    total_steps: int


def run_tuning(
    config: RunConfig,
    *,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    own: OwnParts = OwnParts(),
) -> TuneResult:
    """Train; raises when the run fails."""
    check_workflow_function(workflow)
    if judge is not None:
        check_judge_function(judge)
    plan = build_plan(config, own)
    with (
        own_modes(),
        open_run_folder(config) as folder,
        Monitor(
            folder.paths.root,
            config.monitor,
            total_steps=plan.total_steps,
            committed_step=folder.committed_step,
            run_settings=config.model_dump(mode="json"),
        ) as monitor,
    ):
        stage = load_stage(config, workflow=workflow, judge=judge, build_model=build_model)
        check_room(
            stage.policy.service.recorder.renderer,
            max_model_len=config.model.max_model_len,
            kv_cache_tokens=config.engine.kv_cache_tokens,
        )
        trainer = build_trainer(config, stage, plan)
        check_free_space(folder.paths.root, estimate_checkpoint_bytes(stage.policy.model, trainer.state_dict()))
        try:
            return run_lockstep(train(config, plan, stage, trainer, folder, monitor), config.rollout)
        except (KeyboardInterrupt, SystemExit):
            monitor.show_line(describe_interruption(config, folder))
            raise


def describe_interruption(config: RunConfig, folder: RunFolder) -> str:
    """What an interrupted run left, and how it goes on."""
    checkpoint = find_last_checkpoint(folder.paths.root)
    if checkpoint is None:
        return f"interrupted before the first checkpoint (save_interval_steps={config.save_interval_steps})"
    name = "" if config.name is not None else f", with name={folder.paths.root.name},"
    return (
        f"interrupted; the last checkpoint is {checkpoint}: the same command with --resume "
        f"(continue_from_checkpoint=true){name} goes on from there"
    )


def build_plan(config: RunConfig, own: OwnParts = OwnParts()) -> Plan:
    """Check everything that needs no weights."""
    algorithm = resolve_algorithm(config.algorithm)
    if algorithm.is_supervised:
        raise ConfigError(
            f"algorithm.algorithm_type={algorithm.name!r} does not learn from rewards; choose another, or use "
            "`tunesmith sft` on demonstrations and `tunesmith prefer` on preferences"
        )
    check_refill(config)
    check_sampling_differs(config, algorithm)
    operators = build_operators(
        config.experience, load=partial(load_part, knob="experience.operators"), own=own.operators
    )
    feed, counted = build_feed(config, own)
    eval_tasks = {
        name: load_tasks(dataset, name=name)[: config.evaluation.max_tasks]
        for name, dataset in config.eval_datasets.items()
    }
    check_trained(config.model, config.trainer)
    check_companions(algorithm, config.algorithm, config.model)
    check_trackers(config.monitor.trackers)
    for name, section in config.auxiliary_models.items():
        check_auxiliary(name, section)
    return Plan(
        algorithm=algorithm,
        feed=feed,
        task_counts=counted,
        operators=operators,
        replay=ReplayBuffer(config.experience.replay, seed=config.seed),
        experts=build_expert_feed(config),
        eval_tasks=eval_tasks,
        total_steps=compute_total_steps(config, num_tasks=len(feed.tasks)),
    )


def check_refill(config: RunConfig) -> None:
    """Refuse a budget for refills that allows not one task more than the batch."""
    budget, batch_size = config.experience.refill_budget, config.algorithm.batch_size
    if budget > 1 and int(budget * batch_size) == batch_size:
        raise ConfigError(
            f"experience.refill_budget={budget:g} allows no task beyond a batch of {batch_size}: raise it to "
            f"{1 + 1 / batch_size:.4g} or more"
        )


def build_expert_feed(config: RunConfig) -> ExpertFeed | None:
    """The demonstrations that the config names."""
    if config.algorithm.expert is None:
        return None
    return build_experts(
        config.algorithm.expert,
        load_section_tokenizer(config.model),
        enable_thinking=config.model.enable_thinking,
        split_special_tokens=config.model.split_special_tokens,
        max_model_len=config.model.max_model_len,
        num_runs=config.algorithm.batch_size * config.algorithm.group_size,
        seed=config.seed,
    )


def compute_total_steps(config: RunConfig, *, num_tasks: int) -> int:
    """`total_steps`, or the whole batches in `total_epochs` passes over the tasks, at least one."""
    if config.total_steps is not None:
        return config.total_steps
    return max(1, config.total_epochs * num_tasks // config.algorithm.batch_size)


def describe_repetition(config: RunConfig, *, num_tasks: int) -> str | None:
    """A note where a batch holds more tasks than there are, so that one step tries some of them several times."""
    batch_size = config.algorithm.batch_size
    if num_tasks >= batch_size:
        return None
    return (
        f"{num_tasks} training tasks are fewer than algorithm.batch_size={batch_size}: each step repeats tasks to fill "
        "its batch, every repetition a group of its own"
    )


def build_trainer(config: RunConfig, stage: Stage, plan: Plan) -> Trainer:
    """The trainer of the stage's own weights, with the models beside it that the algorithm needs."""
    companions = load_companions(plan.algorithm, config.algorithm, config.model, policy=stage.policy.model)
    return Trainer(
        stage.policy.model,
        config.trainer,
        config.algorithm,
        max_model_len=config.model.max_model_len,
        num_total_steps=plan.total_steps,
        reference_model=companions.reference,
        teacher_model=companions.teacher,
        critic_model=companions.critic,
    )


async def train(
    config: RunConfig, plan: Plan, stage: Stage, trainer: Trainer, folder: RunFolder, monitor: Monitor
) -> TuneResult:
    """All steps of a run, from its last commit or from the start."""
    first_step = restore(folder, stage, trainer, plan)
    if (repetition := describe_repetition(config, num_tasks=len(plan.feed.tasks))) is not None:
        monitor.show_line(repetition)
    if folder.old is not None:
        monitor.show_line(f"resumed from step {first_step}: what was made after it has been moved to {folder.old}")
    for name, number in plan.task_counts.items():
        monitor.show_line(f"{name} {number:g}")
    evaluations: dict[str, EvaluationResult] = {}
    if first_step == 0 and config.evaluation.at_start:
        evaluations = await evaluate(config, plan, stage, folder, monitor, step=0)
    metrics: dict[str, float] = {}
    learning = LearningLog(monitor.show_line)
    for step in range(first_step + 1, plan.total_steps + 1):
        finished: list[Trajectory] = []
        try:
            result = await run_one_step(config, plan, stage, trainer, monitor, step=step, finished=finished)
        except TunesmithError:
            save_unfinished(folder.paths.rollouts(step), finished)
            raise
        metrics = result.metrics
        save_rollouts(folder.paths.rollouts(step), result.batch.collected, result.batch.spread(result.advantages))
        plan.feed.save_selection(folder.paths.selection(step))
        learning.add(step, metrics, result.batch.collected)
        monitor.log(step, "train", metrics)
        show_causes(monitor, result.batch.collected)
        is_last = step == plan.total_steps
        if is_last or is_due(step, config.evaluation.interval_steps):
            evaluations = await evaluate(config, plan, stage, folder, monitor, step=step) or evaluations
        if is_last or is_due(step, config.save_interval_steps):
            commit(config, plan, stage, trainer, folder, step=step)
    learning.close()
    checkpoint = folder.paths.checkpoint(plan.total_steps)
    return TuneResult(
        folder=folder.paths.root,
        checkpoint=checkpoint if checkpoint.exists() else folder.checkpoint,
        num_steps=max(plan.total_steps, first_step),
        has_learned=learning.has_learned,
        metrics=metrics,
        evaluations=evaluations,
    )


async def run_one_step(
    config: RunConfig,
    plan: Plan,
    stage: Stage,
    trainer: Trainer,
    monitor: Monitor,
    *,
    step: int,
    finished: list[Trajectory],
) -> StepResult:
    """Bind the step's seeds and place, run it, and hand on what was learned. Policy version v is what v steps made.

    `finished` gets each trajectory as it ends.
    """
    started, batch_size = time.perf_counter(), config.algorithm.batch_size
    rounds = count()
    has_baselines = "baselines" in plan.algorithm.needs
    baseline_sampling = build_sampling(config.model, temperature=0.0) if has_baselines else None

    async def collect(chosen: Sequence[Task]) -> list[Group]:
        again = next(rounds)
        seed = derive_seed(config.seed, "refill", again) if again else config.seed
        return await collect_groups(
            stage,
            chosen,
            group_size=config.algorithm.group_size,
            seed=seed,
            step=step,
            monitor=monitor,
            baseline_sampling=baseline_sampling,
            finished=finished,
        )

    result = await run_step(
        size=BatchSize(num_groups=batch_size, max_tasks=int(config.experience.refill_budget * batch_size)),
        draw=plan.feed.draw,
        collect=collect,
        operators=plan.operators,
        replayed=plan.replay.draw(policy_version=step - 1),
        experts=[] if plan.experts is None else plan.experts.draw(step),
        policy_version=step - 1,
        engine=stage.policy.engine,
        algorithm=plan.algorithm,
        trainer=trainer,
        max_failure_rate=config.rollout.max_failure_rate,
    )
    result.metrics.update(plan.feed.give_feedback(result.batch.collected))
    if has_baselines:
        result.metrics.update(compute_baseline_metrics(result.batch.collected))
    plan.replay.add(*result.trained, step=step, policy_version=step - 1)
    result.metrics.update(stage.policy.service.recorder.compute_stats())
    result.metrics["perf/step_s"] = time.perf_counter() - started
    return result


def show_causes(monitor: Monitor, groups: Sequence[Group]) -> None:
    """Say why rollouts failed, the first of each kind."""
    for cause in list_causes(groups):
        monitor.show_line(f"  failed: {cause}")


def save_unfinished(path: Path, finished: Sequence[Trajectory]) -> None:
    """Keep the trajectories of a step that stops the run."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in finished:
        by_task.setdefault(trajectory.task.task_id, []).append(trajectory)
    if by_task:
        groups = [Group(task=runs[0].task, trajectories=tuple(runs)) for runs in by_task.values()]
        save_rollouts(path, groups)


async def evaluate(
    config: RunConfig, plan: Plan, stage: Stage, folder: RunFolder, monitor: Monitor, *, step: int
) -> dict[str, EvaluationResult]:
    """Try every held-out set; write and log what came of it."""
    if not plan.eval_tasks:
        return {}
    results = await evaluate_all(config, stage, plan.eval_tasks, policy_version=step, monitor=monitor)
    save_json(folder.paths.evaluation(step), {name: result.to_json() for name, result in results.items()})
    merged: dict[str, float] = {}
    for result in results.values():
        merged |= result.to_metrics()
    monitor.log(step, "eval", merged)
    show_causes(monitor, [group for result in results.values() for group in result.groups])
    return results


def is_due(step: int, interval_steps: int) -> bool:
    return interval_steps > 0 and step % interval_steps == 0


def restore(folder: RunFolder, stage: Stage, trainer: Trainer, plan: Plan) -> int:
    """Bring everything back to the last commit; return its step, 0 without one."""
    if folder.checkpoint is None:
        return 0
    try:
        state = load_checkpoint(folder.checkpoint, stage.policy.model)
    except StorageError as error:
        raise StorageError(f"{error}; {advise(folder.paths, before=folder.checkpoint)}") from error
    trainer.load_state_dict(state.trainer_state)
    plan.feed.selector.load_state_dict(state.run_state["selector"])
    plan.replay.load_state_dict(state.run_state["replay"], lambda step: load_rollouts(folder.paths.rollouts(step)))
    return int(state.run_state["step"])


def commit(config: RunConfig, plan: Plan, stage: Stage, trainer: Trainer, folder: RunFolder, *, step: int) -> None:
    """Write the step's checkpoint; from here on the run never goes back behind it, so files of steps are merged."""
    save_checkpoint(
        folder.paths.checkpoint(step),
        stage.policy.model,
        stage.policy.tokenizer,
        trainer_state=trainer.state_dict(),
        run_state={
            "step": step,
            "selector": plan.feed.selector.state_dict(),
            "replay": plan.replay.state_dict(),
        },
    )
    save_json(folder.paths.last_commit, {"step": step})
    merge_steps(folder.paths, committed_step=step, steps_per_file=config.steps_per_file)
    if config.keep_checkpoints is not None:
        remove_old_checkpoints(folder.paths.root, num_kept=config.keep_checkpoints)


def merge_steps(paths: RunPaths, *, committed_step: int, steps_per_file: int) -> None:
    """Bound the number of files; what cannot be read or written stays in files of single steps."""
    for any_step, form in ((paths.rollouts(0), ROLLOUT_STEPS), (paths.selection(0), JSON_STEPS)):
        try:
            StepFiles(any_step.parent, form).merge(committed_step=committed_step, steps_per_file=steps_per_file)
        except StorageError as error:
            logger.warning("steps are not merged into one file: %s", error)
