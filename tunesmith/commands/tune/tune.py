"""A training run, from its config to its last checkpoint.

Checks that need no weights come first. Then the models load, and each step is run, saved, logged, evaluated and
committed. A stage of a pipeline is such a run in the folder of the stage.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from tunesmith.algorithms.algorithm import load_algorithm
from tunesmith.cluster.process_group import RankRoles, open_ranks, split_ranks
from tunesmith.cluster.rank_info import find_rank_info
from tunesmith.cluster.ranks import Ranks
from tunesmith.commands.eval.results import EvaluationResult, evaluate_all
from tunesmith.commands.stage import ChooseModel, StageResult, check_run, describe_device, describe_run
from tunesmith.commands.tune.checkpoints import (
    count_checkpoint_bytes,
    merge_steps,
    restore,
    restore_models,
    save_tokenizer,
    save_unfinished,
)
from tunesmith.commands.tune.learning_check import UpdateLog, check_reply_fits
from tunesmith.commands.tune.plan import RunPlan, build_plan, count_refilled, describe_overlaps, describe_repetition
from tunesmith.commands.tune.ranks import (
    Rank,
    RunEnd,
    Server,
    follow,
    join_ranks,
    lead,
    work_while_serving,
)
from tunesmith.commands.tune.run_control import RunControl
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.event_loop.signal_handlers import StopAfterStep
from tunesmith.errors import ConfigError, TunesmithError
from tunesmith.experience.batch import BatchSize
from tunesmith.experience.store import save_rollouts
from tunesmith.http_server import check_port
from tunesmith.loop import StepParts, StepResult, run_step
from tunesmith.model.checkpoint import remove_old_checkpoints, save_checkpoint
from tunesmith.model.load import resolve_device
from tunesmith.model.torch_modes import default_modes
from tunesmith.monitor.monitor import Monitor
from tunesmith.monitor.tracker import check_trackers
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import describe_requeued
from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.signature import check_workflow_branches
from tunesmith.runs.load_function import CustomComponents, load_functions
from tunesmith.runs.memory import fit_run
from tunesmith.runs.placement import place_config
from tunesmith.runs.policy import BuildModel, Policy, load_actors
from tunesmith.runs.record import RunRecord
from tunesmith.runs.result import TrainingResult, require_path
from tunesmith.runs.run_folder import RunFolder, describe_interruption, open_run_folder, set_learning_rate
from tunesmith.runs.workspace import recorded_error
from tunesmith.storage import check_free_space, remove_tree, save_json
from tunesmith.trainer.sharding.sharded_model import find_sharding, gather_state
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
        if self.best_checkpoint is not None:
            facts["best model"] = str(self.best_checkpoint)
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
    config = set_learning_rate(config)
    if config.rollout.branching is not None:
        check_workflow_branches(workflow)
    place = find_rank_info()
    own_config = place_config(config, place, num_gpus=torch.cuda.device_count())
    check_port(own_config.rollout.http_port, knob="rollout.http_port")
    device = resolve_device(own_config.model.device)
    plan = build_plan(own_config, custom) if place.is_first else None
    opened = open_ranks(place, device=device, timeout_s=config.cluster.timeout_s)
    with default_modes(), opened as ranks, ExitStack() as stack:
        roles = split_ranks(ranks, num_samplers=config.cluster.sampling_ranks, timeout_s=config.cluster.timeout_s)

        def load() -> tuple[Policy, Actors]:
            policy, actors = load_actors(
                own_config,
                workflow=workflow,
                judge=judge,
                build_model=build_model,
                ranks=Ranks() if roles.is_sampler else roles.trainers,
                has_rollouts=roles.is_sampler or not roles.samplers,
                has_trainer=not roles.is_sampler,
            )
            stack.callback(policy.close)
            return policy, actors

        if plan is None:
            return run_follower(own_config, load, roles, custom, server)
        with (
            open_run_folder(config, sources=plan.sources) as folder,
            Monitor(
                folder.paths.root,
                config.monitor,
                total_steps=plan.total_steps,
                committed_step=folder.committed_step,
                run_settings=config.model_dump(mode="json"),
            ) as monitor,
        ):
            return run_leader(own_config, plan, load, roles, folder, monitor, server)


def run_leader(
    config: RunConfig,
    plan: RunPlan,
    load: LoadActors,
    roles: RankRoles,
    folder: RunFolder,
    monitor: Monitor,
    server: Server | None,
) -> TuneResult:
    """Train on the first rank, which leads the others, or on the only one."""
    roles.world.broadcast_object(
        RunStart(
            checkpoint=folder.checkpoint,
            total_steps=plan.total_steps,
            reads_tokens=bool(plan.operators) or plan.algorithm.reads_tokens,
        )
    )
    policy, actors = load()
    check_reply_fits(
        policy.service.recorder.renderer,
        max_model_len=config.model.max_model_len,
        kv_cache_tokens=config.engine.kv_cache_tokens,
    )
    config, memory = fit_run(config, plan.algorithm, policy.model)
    rank, server_links = join_ranks(config, roles, policy, actors, server)
    for line in describe_run(policy.model, config.model, folder.paths.root, memory):
        monitor.show_line(line)
    parts = build_parts(rank, plan)
    save_tokenizer(policy, folder.paths)
    early_stopping, keep_best = config.early_stopping, config.keep_best
    control = RunControl(early_stopping, keep_best, plan.callbacks, folder.paths, total_steps=plan.total_steps)
    training = Training(rank=rank, plan=plan, parts=parts, folder=folder, monitor=monitor, control=control)
    leading = partial(lead, training.run, parts.dispatcher, rank.links, monitor.show_line)
    try:
        serving = work_while_serving(leading, server, policy.service, server_links, show_line=monitor.show_line)
        result: TuneResult = run_lockstep(serving, config.rollout).take_result()
        return result
    except (KeyboardInterrupt, SystemExit):
        monitor.show_line(describe_interruption(config, folder.paths.root, total_steps=plan.total_steps))
        raise
    finally:
        rank.thread.close()


def run_follower(
    config: RunConfig, load: LoadActors, roles: RankRoles, custom: CustomComponents, server: Server | None
) -> TuneResult:
    """Do this rank's part of every step, rollouts or training or both; returns the result of the first rank."""
    place = find_rank_info()
    algorithm = load_algorithm(config.algorithm, custom.load)
    start: RunStart = roles.world.broadcast_object()
    policy, actors = load()
    config, _ = fit_run(config, algorithm, policy.model)
    rank, server_links = join_ranks(config, roles, policy, actors, server)
    trainer, worker, rank_trainer = None, None, None
    if not roles.is_sampler:
        trainer = rank.build_trainer(algorithm, total_steps=start.total_steps)
    if roles.is_sampler or not (roles.samplers or config.cluster.has_sharded_weights):
        worker = rank.build_served_worker(sends_tokens=start.reads_tokens)
    if trainer is not None:
        rank_trainer = rank.join_trainer(trainer, worker)

    async def do_parts() -> RunEnd:
        # together with the first rank, which has its server then
        if trainer is not None and start.checkpoint is not None:
            restore_models(start.checkpoint, policy, trainer)
        # a signal to the first rank's host reaches this rank too, and the first rank decides when the run ends
        with StopAfterStep() if place.rank == place.local_rank else nullcontext():
            return await follow(rank, worker, rank_trainer)

    serving = work_while_serving(do_parts, server, policy.service, server_links, rank=roles.world.rank)
    result: TuneResult = run_lockstep(serving, config.rollout).take_result()
    return result


def build_parts(rank: Rank, plan: RunPlan) -> StepParts:
    """What every step of the run works with: the dispatcher, the trainer of the policy's own weights, the data."""
    algorithm, experience = rank.config.algorithm, rank.config.experience
    trainer = rank.build_trainer(plan.algorithm, total_steps=plan.total_steps)
    return StepParts(
        tasks=plan.feed,
        dispatcher=rank.build_dispatcher(
            plan.feed, total_steps=plan.total_steps, has_baselines="baselines" in plan.algorithm.needs
        ),
        operators=plan.operators,
        algorithm=plan.algorithm,
        trainer=rank.join_trainer(trainer),
        replay=plan.replay,
        experts=plan.experts,
        size=BatchSize(
            num_groups=algorithm.batch_size,
            max_tasks=count_refilled(experience.refill_budget, batch_size=algorithm.batch_size),
        ),
        total_steps=plan.total_steps,
        max_failure_rate=rank.config.rollout.max_failure_rate,
        outcome_key=experience.outcome_key,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All steps of a run, on its first rank."""

    rank: Rank
    plan: RunPlan
    parts: StepParts
    folder: RunFolder
    monitor: Monitor
    control: RunControl

    async def run(self) -> RunEnd:
        """Run all remaining steps, from the last checkpoint or the beginning; a signal ends the run after a step."""
        control = self.control
        first_step, timed_steps = restore(self.folder, self.rank.policy, self.parts)
        self.show_notes(first_step)
        control.replay(committed_step=first_step)
        if first_step:  # first what a killed run has not tidied up, as the next checkpoint may need the space
            self.tidy_up(first_step, [step for step in timed_steps if step != first_step])
        rank = self.rank
        num_bytes = count_checkpoint_bytes(rank.policy, self.parts.trainer.trainer, rank.roles.trainers)
        check_free_space(self.folder.paths.root, num_bytes)
        evaluations: dict[str, EvaluationResult] = {}
        if first_step == 0 and rank.config.evaluation.at_start:
            with recorded_error(self.folder.paths, 0):
                evaluations = await self.evaluate(0)
                control.raise_error()
        with StopAfterStep() as stop:
            result = await self.run_steps(first_step, timed_steps, evaluations, stop)
            return RunEnd(result=result, signal_number=stop.signal_number)

    async def run_steps(
        self,
        first_step: int,
        timed_steps: Sequence[int],
        evaluations: dict[str, EvaluationResult],
        stop: StopAfterStep,
    ) -> TuneResult:
        """Run the steps after `first_step`; `evaluations` are those before it. The first checkpoint replaces those of
        `timed_steps`."""
        config, control, monitor, trainer = self.rank.config, self.control, self.monitor, self.parts.trainer.trainer
        step = first_step
        metrics: dict[str, float] = {}
        updates, checksum = UpdateLog(monitor.show_line, config.trainer), trainer.compute_checksum()
        saved_at, max_age_s, is_interrupted = time.monotonic(), config.save_interval_s or math.inf, False
        while step < self.plan.total_steps and control.stop is None and not is_interrupted:
            step += 1
            with recorded_error(self.folder.paths, step):
                result = await self.run_saved_step(step)
                metrics = result.metrics
                updates.add(step, metrics, result.batch.collected)
                monitor.log(step, "train", metrics)
                self.show_failures(result.batch.collected)
                await control.end_step(step, result)
                if control.is_last(step) or is_due(step, config.evaluation.interval_steps):
                    evaluations = await self.evaluate(step) or evaluations
                is_interrupted = stop.signal_number is not None
                is_kept = control.is_saved(step) or is_due(step, config.save_interval_steps) or is_interrupted
                if is_kept or time.monotonic() - saved_at >= max_age_s:
                    await self.save(step, replaced_steps=timed_steps, is_timed=not is_kept)
                    saved_at, timed_steps = time.monotonic(), [] if is_kept else [step]
                control.raise_error()
        updates.close(has_new_weights=trainer.compute_checksum() != checksum)
        if (ending := control.save_ending(step, first_step=first_step)) is not None:
            monitor.show_line(ending)
        paths, checkpoint = self.folder.paths, self.folder.paths.checkpoint(step)
        return TuneResult(
            folder=paths.root,
            checkpoint=checkpoint if checkpoint.exists() else self.folder.checkpoint,
            num_steps=step,
            has_learned=updates.has_changed_weights,
            metrics=metrics,
            evaluations=evaluations,
            best_checkpoint=None if control.best is None else paths.checkpoint(control.best.step),
            stop_reason=control.find_stop_reason(step),
        )

    def show_notes(self, first_step: int) -> None:
        """Print what the user should know before the first step."""
        plan, batch_size, archive = self.plan, self.rank.config.algorithm.batch_size, self.folder.archive
        notes = [
            describe_repetition(num_tasks=len(plan.feed.tasks), batch_size=batch_size),
            *describe_overlaps(plan.feed.tasks, plan.eval_tasks),
            None
            if archive is None
            else f"resumed from step {first_step}; files of later steps were moved to {archive}",
            describe_requeued(plan.feed),
            *(f"{name} {number:g}" for name, number in plan.task_counts.items()),
        ]
        for note in notes:
            if note is not None:
                self.monitor.show_line(note)

    async def run_saved_step(self, step: int) -> StepResult:
        """Run a step and save its rollouts and selection; rollouts of a step that fails are saved too."""
        paths, progress = self.folder.paths, RolloutProgress(show=self.monitor.show_status)
        path = paths.rollouts(step)
        try:
            result = await run_step(self.parts, step=step, progress=progress, record=partial(save_rollouts, path))
        except TunesmithError:
            save_unfinished(path, progress.finished)
            raise
        self.parts.tasks.save_selection(paths.selection(step))
        return result

    async def evaluate(self, step: int) -> dict[str, EvaluationResult]:
        """Evaluate every held-out set; save and log the results."""
        config, dispatcher, eval_tasks = self.rank.config, self.parts.dispatcher, self.plan.eval_tasks
        if not eval_tasks:
            return {}
        started = time.perf_counter()
        results = await evaluate_all(config, dispatcher, eval_tasks, policy_version=step, show=self.monitor.show_status)
        save_json(self.folder.paths.evaluation(step), {name: result.to_json() for name, result in results.items()})
        merged: dict[str, float] = {}
        for result in results.values():
            merged |= result.to_metrics()
        merged["perf/evaluation_s"] = time.perf_counter() - started
        self.monitor.log(step, "eval", merged)
        self.show_failures([group for result in results.values() for group in result.groups])
        await self.control.end_evaluation(step, results, merged)
        return results

    async def save(self, step: int, *, replaced_steps: Sequence[int], is_timed: bool) -> None:
        """Commit the step with a checkpoint, for which all ranks that train gather their parts; it replaces those of
        `replaced_steps`, which were saved for their time alone, as this one is if it `is_timed`."""
        run_state = {
            "step": step,
            "selector": self.parts.tasks.selector.state_dict(),
            "replay": self.parts.replay.state_dict(),
            "timed_steps": [*replaced_steps, step] if is_timed else [*replaced_steps],
            **self.parts.dispatcher.state_dict(),
        }
        self.monitor.show_status("saving")
        await self.parts.trainer.save(partial(self.commit, run_state, replaced_steps))
        self.monitor.show_status("")
        await self.control.end_checkpoint(step)

    def commit(self, run_state: Mapping[str, Any], replaced_steps: Sequence[int]) -> None:
        """Save a checkpoint, then tidy up."""
        model, step = self.rank.policy.model, run_state["step"]
        save_checkpoint(
            self.folder.paths.checkpoint(step),
            model,
            self.rank.policy.tokenizer,
            weights=None if find_sharding(model) is None else gather_state(model),
            trainer_state=self.parts.trainer.trainer.state_dict(),
            run_state=run_state,
        )
        self.tidy_up(step, replaced_steps)

    def tidy_up(self, step: int, replaced_steps: Sequence[int]) -> None:
        """After the checkpoint of `step`: merge files of committed steps, and remove the checkpoints of
        `replaced_steps` and all but `keep_checkpoints`; the best one stays."""
        paths, num_kept = self.folder.paths, self.rank.config.keep_checkpoints
        save_json(paths.last_commit, {"step": step})
        merge_steps(paths, committed_step=step, steps_per_file=self.rank.config.steps_per_file)
        self.control.save_best()
        best_step = None if self.control.best is None else self.control.best.step
        for each in replaced_steps:
            if each != best_step and paths.checkpoint(each).is_dir():
                remove_tree(paths.checkpoint(each))
        if num_kept is not None:
            remove_old_checkpoints(paths.root, num_kept=num_kept, best_step=best_step)

    def show_failures(self, groups: Sequence[Group]) -> None:
        """Print the first failure of each kind."""
        for cause in list_causes(run.failure for group in groups for run in group.trajectories):
            self.monitor.show_line(f"  failed: {cause}")


def is_due(step: int, interval_steps: int) -> bool:
    return interval_steps > 0 and step % interval_steps == 0


def check_stage(config: RunConfig) -> None:
    check_run(config, models=[config.model.path])
    check_trackers(config.monitor.trackers)


def run_stage(config: RunConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Train in the folder `out_dir`, or resume there."""
    location = {
        "checkpoint_root_dir": str(out_dir.parent.parent),
        "project": out_dir.parent.name,
        "name": out_dir.name,
        "continue_from_checkpoint": True,
    }
    config = config.model_copy(update=location)
    workflow, judge = load_functions(config)
    result = run_tuning(config, workflow=workflow, judge=judge, build_model=choose_model(config))
    if result.checkpoint is None:
        raise ConfigError(f"the run ended before its first step, so it has no model: {result.stop_reason}")
    return StageResult(
        model=result.checkpoint,
        device=describe_device(config.model.device, config.num_cpu_threads),
        **describe_training(RunRecord(result.folder)),
    )


def describe_training(run: RunRecord) -> dict[str, Any]:
    """Sampled tokens and figures of all steps of a run."""

    def list_values(name: str) -> list[float]:
        series = run.metrics.get(name, "train")
        return [] if series is None else series.finite.values.tolist()

    rewards = list_values("rollout/reward_mean")
    figures: dict[str, Any] = {"steps": len(run.metrics.train_steps)}
    if rewards:
        tenth = max(1, len(rewards) // 10)
        figures["mean reward of the first tenth of the steps"] = sum(rewards[:tenth]) / tenth
        figures["mean reward of the last tenth of the steps"] = sum(rewards[-tenth:]) / tenth
    for name, key in (("seconds of rollouts", "perf/rollout_s"), ("seconds of training", "perf/train_s")):
        figures[name] = sum(list_values(key))
    figures["failed rollouts"] = int(sum(list_values("rollout/num_failed")))
    figures["largest mismatch of sampler and trainer (KL)"] = max([0.0, *list_values("mismatch/kl")])
    return {"tokens": int(sum(list_values("rollout/num_sampled_tokens"))), "figures": figures}
