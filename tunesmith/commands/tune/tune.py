"""A training run, from its config to its last checkpoint.

Checks that need no weights come first. Then the models load, and each step is run, saved, logged, evaluated and
committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.cluster.links import NO_LINKS, Links
from tunesmith.cluster.process_group import RankRoles, open_ranks, split_ranks
from tunesmith.cluster.rank_info import find_rank_info
from tunesmith.cluster.work_thread import NoThread, WorkThread
from tunesmith.commands.eval.results import EvaluationResult, evaluate_all
from tunesmith.commands.tune.checkpoints import (
    StepRollouts,
    commit,
    count_checkpoint_bytes,
    restore,
    restore_models,
    save_error,
)
from tunesmith.commands.tune.learning_check import UpdateLog, check_reply_fits
from tunesmith.commands.tune.load_tasks import CustomComponents
from tunesmith.commands.tune.plan import RunPlan, build_plan, describe_overlaps, describe_repetition, load_own_functions
from tunesmith.commands.tune.ranks import (
    build_dispatcher,
    build_rank_trainer,
    build_served_worker,
    build_thread,
    build_trainer,
    connect_ranks,
    follow,
    lead,
)
from tunesmith.commands.tune.run_control import RunControl
from tunesmith.commands.tune.server import Server, bind_actors, work_while_serving
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import ConfigError, TunesmithError
from tunesmith.experience.batch import BatchSize
from tunesmith.http_server import check_port
from tunesmith.loop import StepParts, StepResult, run_step
from tunesmith.model.load import resolve_device
from tunesmith.model.torch_modes import default_modes
from tunesmith.monitor.monitor import Monitor
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import describe_requeued
from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.signature import check_judge_function, check_workflow_branches, check_workflow_function
from tunesmith.runs.placement import place_config
from tunesmith.runs.policy import BuildModel, Policy, load_actors
from tunesmith.runs.result import TrainingResult, require_path
from tunesmith.runs.run_folder import RunFolder, describe_interruption, open_run_folder
from tunesmith.storage import check_free_space, save_json
from tunesmith.types import Group, JudgeType, WorkflowType


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TuneResult(TrainingResult):
    """Result of a finished run. What it prints omits `metrics` and the trajectories of evaluations."""

    curve: ClassVar[str] = "rollout/reward_mean"

    folder: Path
    checkpoint: Path | None
    """The last checkpoint: a folder that transformers can load."""
    num_steps: int
    has_learned: bool
    """Whether any step of this call changed the weights; also True if no steps were left to run."""
    metrics: dict[str, float]
    """Metrics of the last step."""
    evaluations: dict[str, EvaluationResult]
    """The last evaluation of each held-out set."""
    best_checkpoint: Path | None = None
    """The checkpoint with the best evaluation; None without `keep_best`."""
    stop_reason: str | None = None
    """Why the run ended before its last step; None if it did not."""

    @property
    def run_folder(self) -> Path:
        return self.folder

    @property
    def model_path(self) -> str:
        return require_path(self.checkpoint)

    def list_facts(self) -> dict[str, str]:
        rewards = [value for _, value in self.history.collect_points(self.curve)]
        facts = {"folder": str(self.folder), "model": str(self.checkpoint), "steps": str(self.num_steps)}
        if rewards:
            first = f"{rewards[0]:.4g} in the first step, " if len(rewards) > 1 else ""
            facts["reward"] = f"{first}{rewards[-1]:.4g} in the last step"
        for name, result in self.evaluations.items():
            facts[f"eval {name}"] = result.describe()
        if not self.has_learned:
            facts["note"] = "no step changed the weights"
        return facts


LoadActors = Callable[[], tuple[Policy, Actors]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What the first rank tells the others before models load."""

    checkpoint: Path | None
    """The checkpoint that the run resumes from."""
    total_steps: int
    reads_tokens: bool
    """Whether the first rank reads the tokens of groups before the update."""


def run_tuning(
    config: RunConfig,
    *,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    custom: CustomComponents = CustomComponents(),
    server: Server | None = None,
) -> TuneResult:
    """Train; raises if the run fails. `server` runs from the first step to the last.

    On several ranks each calls this, and all return the same result.
    """
    if config.serve is not None and server is None:
        raise ConfigError("serve has no effect without workers: run the file with `tunesmith serve`, or remove it")
    check_workflow_function(workflow, allows_sync=True)
    if judge is not None:
        check_judge_function(judge)
    if config.rollout.branching is not None:
        check_workflow_branches(workflow)
    place = find_rank_info()
    own_config = place_config(config, place, num_gpus=torch.cuda.device_count())
    check_port(own_config.rollout.http_port, knob="rollout.http_port")
    device = resolve_device(own_config.model.device)
    plan = build_plan(own_config, custom) if place.is_first else None
    with default_modes(), open_ranks(place, device=device, timeout_s=config.cluster.timeout_s) as ranks:
        roles = split_ranks(ranks, num_samplers=config.cluster.sampling_ranks, timeout_s=config.cluster.timeout_s)
        load = partial(load_actors, own_config, workflow=workflow, judge=judge, build_model=build_model)
        if roles.is_sampler:
            return run_sampler(own_config, partial(load, has_trainer=False), roles)
        load = partial(load, ranks=roles.trainers, has_rollouts=not roles.samplers)
        if plan is None:
            return run_follower(own_config, load, roles, custom, server)
        return run_leader(config, plan, load, roles, server)


def run_leader(
    config: RunConfig, plan: RunPlan, load: LoadActors, roles: RankRoles, server: Server | None = None
) -> TuneResult:
    """Train on the first rank, which leads the others, or on the only one."""
    with (
        open_run_folder(config) as folder,
        Monitor(
            folder.paths.root,
            config.monitor,
            total_steps=plan.total_steps,
            committed_step=folder.committed_step,
            run_settings=config.model_dump(mode="json"),
        ) as monitor,
    ):
        roles.world.broadcast_object(
            RunStart(
                checkpoint=folder.checkpoint,
                total_steps=plan.total_steps,
                reads_tokens=bool(plan.operators) or plan.algorithm.reads_tokens,
            )
        )
        policy, actors = load()
        actors = bind_actors(actors, server)
        check_reply_fits(
            policy.service.recorder.renderer,
            max_model_len=config.model.max_model_len,
            kv_cache_tokens=config.engine.kv_cache_tokens,
        )
        thread = build_thread(config, policy)
        links = connect_ranks(config, roles)
        server_links = NO_LINKS if server is None else connect_ranks(config, roles)
        parts = build_parts(config, plan, policy, actors, roles, links, thread)
        check_free_space(folder.paths.root, count_checkpoint_bytes(policy, parts.trainer.trainer, roles.trainers))
        training = partial(train, config, plan, policy, parts, folder, monitor)
        leading = partial(lead, training, parts.dispatcher, links, monitor.show_line)
        try:
            serving = work_while_serving(leading, server, policy.service, server_links, show_line=monitor.show_line)
            return run_lockstep(serving, config.rollout)
        except (KeyboardInterrupt, SystemExit):
            monitor.show_line(describe_interruption(config, folder.paths.root))
            raise
        finally:
            policy.close()
            thread.close()


def run_follower(
    config: RunConfig, load: LoadActors, roles: RankRoles, custom: CustomComponents, server: Server | None = None
) -> TuneResult:
    """Run and train this rank's share of every step; returns the result of the first rank."""
    functions = load_own_functions(config.algorithm, custom.functions)
    algorithm = resolve_algorithm(config.algorithm, own=functions)
    start: RunStart = roles.world.broadcast_object()
    policy, actors = load()
    actors, thread, links = bind_actors(actors, server), build_thread(config, policy), connect_ranks(config, roles)
    server_links = NO_LINKS if server is None else connect_ranks(config, roles)
    trainer = build_trainer(config, algorithm, functions, policy, roles.trainers, total_steps=start.total_steps)
    worker = None
    if not roles.samplers and not config.cluster.has_sharded_weights:
        worker = build_served_worker(config, policy, actors, roles, links, thread, sends_tokens=start.reads_tokens)
    rank_trainer = build_rank_trainer(config, trainer, roles.trainers, links, thread, worker)

    async def train_parts() -> TuneResult:
        if start.checkpoint is not None:  # together with the first rank, which has its server then
            restore_models(start.checkpoint, policy, trainer)
        result: TuneResult = await follow(links, worker, rank_trainer, thread)
        return result

    try:
        serving = work_while_serving(train_parts, server, policy.service, server_links, rank=roles.world.rank)
        return run_lockstep(serving, config.rollout)
    finally:
        policy.close()


def run_sampler(config: RunConfig, load: LoadActors, roles: RankRoles) -> TuneResult:
    """Sample on a rank that does not train; returns the result of the first rank."""
    roles.world.broadcast_object()
    policy, actors = load()
    thread, links = build_thread(config, policy), connect_ranks(config, roles)
    worker = build_served_worker(config, policy, actors, roles, links, thread, sends_tokens=True)
    try:
        result: TuneResult = run_lockstep(follow(links, worker, None, thread), config.rollout)
    finally:
        policy.close()
    return result


def build_parts(
    config: RunConfig,
    plan: RunPlan,
    policy: Policy,
    actors: Actors,
    roles: RankRoles,
    links: Links,
    thread: WorkThread | NoThread,
) -> StepParts:
    """What every step of the run works with: the dispatcher, the trainer of the policy's own weights, the data."""
    ranks, batch_size = roles.trainers, config.algorithm.batch_size
    trainer = build_trainer(config, plan.algorithm, plan.functions, policy, ranks, total_steps=plan.total_steps)
    return StepParts(
        tasks=plan.feed,
        dispatcher=build_dispatcher(
            config,
            plan.feed,
            policy,
            actors,
            roles,
            links,
            thread,
            total_steps=plan.total_steps,
            has_baselines="baselines" in plan.algorithm.needs,
        ),
        operators=plan.operators,
        algorithm=plan.algorithm,
        trainer=build_rank_trainer(config, trainer, ranks, links, thread),
        replay=plan.replay,
        experts=plan.experts,
        size=BatchSize(num_groups=batch_size, max_tasks=int(config.experience.refill_budget * batch_size)),
        total_steps=plan.total_steps,
        max_failure_rate=config.rollout.max_failure_rate,
        outcome_key=config.experience.outcome_key,
    )


async def train(
    config: RunConfig, plan: RunPlan, policy: Policy, parts: StepParts, folder: RunFolder, monitor: Monitor
) -> TuneResult:
    """Run all remaining steps, from the last checkpoint or from the beginning."""
    first_step = step = restore(folder, policy, parts)
    show_notes(config, plan, folder, monitor, first_step=first_step)
    control = RunControl(config, plan.callbacks, folder.paths, total_steps=plan.total_steps)
    control.replay(committed_step=first_step)
    evaluations: dict[str, EvaluationResult] = {}
    if first_step == 0 and config.evaluation.at_start:
        evaluations = await evaluate(config, plan, parts, folder, monitor, control, step=0)
        control.raise_error()
    metrics: dict[str, float] = {}
    updates, checksum = UpdateLog(monitor.show_line, config.trainer), parts.trainer.trainer.compute_checksum()
    while step < plan.total_steps and control.stop is None:
        step += 1
        result = await run_saved_step(parts, folder, monitor, step=step)
        metrics = result.metrics
        updates.add(step, metrics, result.batch.collected)
        monitor.log(step, "train", metrics)
        show_failures(monitor, result.batch.collected)
        await control.end_step(step, result)
        if control.is_last(step) or is_due(step, config.evaluation.interval_steps):
            found = await evaluate(config, plan, parts, folder, monitor, control, step=step)
            evaluations = found or evaluations
        if control.is_saved(step) or is_due(step, config.save_interval_steps):
            in_flight = parts.dispatcher.state_dict()
            saving = partial(commit, config, policy, parts, folder, control, step=step, in_flight=in_flight)
            await parts.trainer.save(saving)
            await control.end_checkpoint(step)
        control.raise_error()
    updates.close(has_new_weights=parts.trainer.trainer.compute_checksum() != checksum)
    if (ending := control.save_ending(step, first_step=first_step)) is not None:
        monitor.show_line(ending)
    checkpoint = folder.paths.checkpoint(step)
    return TuneResult(
        folder=folder.paths.root,
        checkpoint=checkpoint if checkpoint.exists() else folder.checkpoint,
        num_steps=step,
        has_learned=updates.has_changed_weights,
        metrics=metrics,
        evaluations=evaluations,
        best_checkpoint=None if control.best is None else folder.paths.checkpoint(control.best.step),
        stop_reason=control.find_stop_reason(step),
    )


def show_notes(config: RunConfig, plan: RunPlan, folder: RunFolder, monitor: Monitor, *, first_step: int) -> None:
    """Print what the user should know before the first step."""
    if (repetition := describe_repetition(config, num_tasks=len(plan.feed.tasks))) is not None:
        monitor.show_line(repetition)
    for overlap in describe_overlaps(plan.feed.tasks, plan.eval_tasks):
        monitor.show_line(overlap)
    if folder.archive is not None:
        monitor.show_line(f"resumed from step {first_step}; files of later steps were moved to {folder.archive}")
    if (requeued := describe_requeued(plan.feed)) is not None:
        monitor.show_line(requeued)
    for name, number in plan.task_counts.items():
        monitor.show_line(f"{name} {number:g}")


async def run_saved_step(parts: StepParts, folder: RunFolder, monitor: Monitor, *, step: int) -> StepResult:
    """Run a step and save its rollouts and selection; rollouts of a step that fails are saved too."""
    progress, rollouts = RolloutProgress(status=monitor), StepRollouts(folder.paths.rollouts(step))
    try:
        result = await run_step(parts, step=step, progress=progress, record=rollouts)
    except TunesmithError as error:
        rollouts.save_unfinished(progress.finished)
        save_error(folder.paths, error, step=step)
        raise
    parts.tasks.save_selection(folder.paths.selection(step))
    return result


def show_failures(monitor: Monitor, groups: Sequence[Group]) -> None:
    """Print the first failure of each kind."""
    for cause in list_causes(groups):
        monitor.show_line(f"  failed: {cause}")


async def evaluate(
    config: RunConfig,
    plan: RunPlan,
    parts: StepParts,
    folder: RunFolder,
    monitor: Monitor,
    control: RunControl,
    *,
    step: int,
) -> dict[str, EvaluationResult]:
    """Evaluate every held-out set; save and log the results."""
    if not plan.eval_tasks:
        return {}
    started = time.perf_counter()
    results = await evaluate_all(config, parts.dispatcher, plan.eval_tasks, policy_version=step, status=monitor)
    save_json(folder.paths.evaluation(step), {name: result.to_json() for name, result in results.items()})
    merged: dict[str, float] = {}
    for result in results.values():
        merged |= result.to_metrics()
    merged["perf/evaluation_s"] = time.perf_counter() - started
    monitor.log(step, "eval", merged)
    show_failures(monitor, [group for result in results.values() for group in result.groups])
    await control.end_evaluation(step, results, merged)
    return results


def is_due(step: int, interval_steps: int) -> bool:
    return interval_steps > 0 and step % interval_steps == 0
