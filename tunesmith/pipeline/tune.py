"""A run from its config to its last checkpoint.

First everything that can be checked cheaply: functions, config, tasks, model files, the run folder. Then the model
loads and the steps go by: select, step, log, evaluate, commit. A step's files are written before the checkpoint that
commits it, so a run that is killed goes on from the last commit and makes the same numbers again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.algorithms.table import Algorithm, resolve_algorithm
from tunesmith.config import RunConfig
from tunesmith.engine.clock import run_lockstep
from tunesmith.errors import ConfigError
from tunesmith.experience.store import save_rollouts
from tunesmith.loop import StepResult, run_step
from tunesmith.model.checkpoint import load_checkpoint, remove_old_checkpoints, save_checkpoint
from tunesmith.model.load import load_model
from tunesmith.monitor.monitor import Monitor
from tunesmith.pipeline.evaluate import EvaluationResult
from tunesmith.pipeline.policy import BuildModel, check_auxiliary, check_policy
from tunesmith.pipeline.run_folder import RunFolder, open_run_folder
from tunesmith.pipeline.stage import Stage, collect_groups, evaluate_all, load_stage
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.storage import save_json
from tunesmith.tasks.load import load_tasks
from tunesmith.tasks.selector import TaskSelector
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import JudgeType, Task, WorkflowType


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What a finished run leaves."""

    folder: Path
    checkpoint: Path | None
    """The last checkpoint: a folder that transformers loads."""
    num_steps: int
    metrics: dict[str, float]
    """Of the last step."""
    evaluations: dict[str, EvaluationResult]
    """The last evaluation of each held-out set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is known before a model loads."""

    algorithm: Algorithm
    train_tasks: list[Task]
    eval_tasks: dict[str, list[Task]]
    total_steps: int


def run_tuning(
    config: RunConfig, *, workflow: WorkflowType, judge: JudgeType | None, build_model: BuildModel
) -> TuneResult:
    """Train; raises when the run fails."""
    check_workflow_function(workflow)
    if judge is not None:
        check_judge_function(judge)
    plan = build_plan(config)
    with open_run_folder(config) as folder:
        stage = load_stage(config, workflow=workflow, judge=judge, build_model=build_model)
        trainer = build_trainer(config, stage, plan)
        with Monitor(
            folder.paths.root,
            config.monitor,
            total_steps=plan.total_steps,
            committed_step=folder.committed_step,
        ) as monitor:
            return run_lockstep(train(config, plan, stage, trainer, folder, monitor))


def build_plan(config: RunConfig) -> Plan:
    """Check everything that needs no weights."""
    algorithm = resolve_algorithm(config.algorithm)
    if algorithm.is_supervised:
        raise ConfigError(f"algorithm.algorithm_type={algorithm.name!r} does not learn from rewards; choose grpo")
    if config.train_dataset is None:
        raise ConfigError("train_dataset is missing: give tune() a DatasetConfig, or set train_dataset.path")
    train_tasks = load_tasks(config.train_dataset, name="train")
    eval_tasks = {
        name: load_tasks(dataset, name=name)[: config.evaluation.max_tasks]
        for name, dataset in config.eval_datasets.items()
    }
    check_policy(config.model)
    for name, section in config.auxiliary_models.items():
        check_auxiliary(name, section)
    total_steps = compute_total_steps(config, num_tasks=len(train_tasks))
    return Plan(algorithm=algorithm, train_tasks=train_tasks, eval_tasks=eval_tasks, total_steps=total_steps)


def compute_total_steps(config: RunConfig, *, num_tasks: int) -> int:
    """`total_steps`, or the whole batches in `total_epochs` passes over the tasks."""
    if config.total_steps is not None:
        return config.total_steps
    total_steps = config.total_epochs * num_tasks // config.algorithm.batch_size
    if total_steps == 0:
        raise ConfigError(
            f"{config.total_epochs} epoch(s) of {num_tasks} tasks are less than one batch: lower "
            f"algorithm.batch_size={config.algorithm.batch_size} (batch_size), or set total_steps"
        )
    return total_steps


def build_trainer(config: RunConfig, stage: Stage, plan: Plan) -> Trainer:
    """The trainer of the stage's own weights, with a frozen copy of the starting model if KL needs one."""
    reference = None
    model = stage.policy.model
    if config.algorithm.kl_coef > 0:
        reference = load_model(
            config.model.path,
            dtype=model.dtype,
            device=model.device,
            trust_remote_code=config.model.trust_remote_code,
        ).requires_grad_(False)
    return Trainer(
        model,
        config.trainer,
        config.algorithm,
        max_model_len=config.model.max_model_len,
        num_total_steps=plan.total_steps,
        reference_model=reference,
    )


async def train(
    config: RunConfig, plan: Plan, stage: Stage, trainer: Trainer, folder: RunFolder, monitor: Monitor
) -> TuneResult:
    """All steps of a run, from its last commit or from the start."""
    selector = TaskSelector(len(plan.train_tasks), order="shuffle", seed=config.seed)
    first_step = restore(folder, stage, trainer, selector)
    evaluations: dict[str, EvaluationResult] = {}
    if first_step == 0 and config.evaluation.at_start:
        evaluations = await evaluate(config, plan, stage, folder, monitor, step=0)
    metrics: dict[str, float] = {}
    for step in range(first_step + 1, plan.total_steps + 1):
        tasks = [plan.train_tasks[index] for index in selector.select(config.algorithm.batch_size)]
        result = await run_one_step(config, plan, stage, trainer, monitor, tasks=tasks, step=step)
        metrics = result.metrics
        save_rollouts(folder.paths.rollouts(step), result.groups, result.advantages)
        monitor.log(step, "train", metrics)
        is_last = step == plan.total_steps
        if is_last or is_due(step, config.evaluation.interval_steps):
            evaluations = await evaluate(config, plan, stage, folder, monitor, step=step) or evaluations
        if is_last or is_due(step, config.save_interval_steps):
            commit(config, stage, trainer, selector, folder, step=step)
    checkpoint = folder.paths.checkpoint(plan.total_steps)
    return TuneResult(
        folder=folder.paths.root,
        checkpoint=checkpoint if checkpoint.exists() else folder.checkpoint,
        num_steps=max(plan.total_steps, first_step),
        metrics=metrics,
        evaluations=evaluations,
    )


async def run_one_step(
    config: RunConfig, plan: Plan, stage: Stage, trainer: Trainer, monitor: Monitor, *, tasks: Sequence[Task], step: int
) -> StepResult:
    """Bind the step's seed and place, and run it. Policy version v is what v steps made."""
    started = time.perf_counter()

    async def collect(chosen: Sequence[Task]) -> Any:
        return await collect_groups(
            stage, chosen, group_size=config.algorithm.group_size, seed=config.seed, step=step, monitor=monitor
        )

    result = await run_step(
        tasks=tasks,
        policy_version=step - 1,
        engine=stage.policy.engine,
        collect=collect,
        algorithm=plan.algorithm,
        trainer=trainer,
        max_failure_rate=config.rollout.max_failure_rate,
    )
    result.metrics.update(stage.policy.service.recorder.compute_stats())
    result.metrics["perf/step_s"] = time.perf_counter() - started
    return result


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
    return results


def is_due(step: int, interval_steps: int) -> bool:
    return interval_steps > 0 and step % interval_steps == 0


def restore(folder: RunFolder, stage: Stage, trainer: Trainer, selector: TaskSelector) -> int:
    """Bring everything back to the last commit; return its step, 0 without one."""
    if folder.checkpoint is None:
        return 0
    state = load_checkpoint(folder.checkpoint, stage.policy.model)
    trainer.load_state_dict(state.trainer_state)
    selector.load_state_dict(state.run_state["selector"])
    return int(state.run_state["step"])


def commit(
    config: RunConfig, stage: Stage, trainer: Trainer, selector: TaskSelector, folder: RunFolder, *, step: int
) -> None:
    """Write the step's checkpoint; from here on the run never goes back behind it."""
    save_checkpoint(
        folder.paths.checkpoint(step),
        stage.policy.model,
        stage.policy.tokenizer,
        trainer_state=trainer.state_dict(),
        run_state={"step": step, "selector": selector.state_dict()},
    )
    if config.keep_checkpoints is not None:
        remove_old_checkpoints(folder.paths.root, num_kept=config.keep_checkpoints)
