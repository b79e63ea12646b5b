"""Evaluation of several models on the same held-out tasks with the same sampling seeds.

Models are evaluated one after the other; each is loaded once and released before the next loads. With an output folder,
the result of each model on each set is written to `parts/` as soon as it is complete, so that a killed evaluation
resumes there. `comparison.json`, `comparison.md` and the optional plot replace `parts/` at the end.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tunesmith.commands.eval.comparison import (
    Comparison,
    EvalResult,
    ModelResult,
    check_plot,
    compare_results,
    compute_result,
    format_comparison,
    save_plot,
)
from tunesmith.commands.eval.results import run_held_out
from tunesmith.commands.eval.sample_scores import TaskScores, score_groups, scores_from_json, scores_to_json
from tunesmith.commands.eval.suites import apply_suite, load_suite_tasks
from tunesmith.commands.stage import TABLES, ChooseModel, StageResult, check_run, describe_device
from tunesmith.config import EvalConfig, RunConfig
from tunesmith.config.run import AGENTSCOPE_PROJECT
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import ConfigError, StorageError, errors_of
from tunesmith.judges.tir import describe_scorers
from tunesmith.model.load import check_section
from tunesmith.model.source.fingerprint import describe_weights
from tunesmith.monitor.console import ConsoleProgress, format_duration
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import build_evaluator
from tunesmith.runs.load_function import load_functions
from tunesmith.runs.policy import BuildModel, Policy, check_auxiliary, load_actors
from tunesmith.runs.tasks import load_run_tasks
from tunesmith.runs.trained_model import find_model_folder
from tunesmith.runs.workspace import Workspace, check_same, compute_digest, describe_rows
from tunesmith.storage import load_json, remove_leftovers, remove_tree, save_json, save_text
from tunesmith.types import Group, JudgeType, Task, WorkflowType

LABEL = re.compile(r"[^|\n]*[^|\s]")
JSON_FILE, TABLE_FILE, PLOT_FILE = "comparison.json", "comparison.md", "comparison.png"
PARTS = "parts"


def run_eval(
    config: RunConfig | EvalConfig,
    *,
    build_model: BuildModel,
    workflow: WorkflowType | None = None,
    judge: JudgeType | None = None,
    models: Mapping[str, str] | None = None,
    out: Path | None = None,
    has_plot: bool = False,
    suite: str | None = None,
) -> EvalResult:
    """Evaluate each model of `models` (label -> path) on each set in `eval_datasets`; write the results to `out`.

    A run file, an evaluation file or an `eval` stage describes the evaluation; arguments override it. Raises before any
    model loads when a function, a task set or a model is invalid or another process writes to `out`, and afterwards
    when more rollouts of a set fail than `rollout.max_failure_rate` allows.
    """
    if isinstance(config, EvalConfig):
        run, compared = config.to_run_config(), config.models
        has_plot, suite = has_plot or config.has_plot, suite or config.suite
    else:
        run, compared = config, {config.model.path: config.model.path}
    if suite is not None and judge is not None:
        raise ConfigError(f"suite={suite!r} has a judge of its own: leave out judge_func")
    run = apply_suite(run, suite)
    workflow, judge = load_functions(run, workflow, judge)
    models = {label: find_model(path) for label, path in (models or compared).items()}
    if not run.eval_datasets:
        raise ConfigError("eval_datasets is empty: name at least one held-out set, as in eval_datasets.test.path=...")
    for label in models:
        if not LABEL.fullmatch(label):
            raise ConfigError(f"the model label {label!r} must be one line of text without '|'")
    load_set = partial(load_run_tasks, run) if suite is None else load_suite_tasks
    sets: dict[str, list[Task]] = {}
    for name, dataset in run.eval_datasets.items():
        with errors_of(f"eval_datasets.{name}"):
            sets[name] = load_set(dataset, name=name)[: run.evaluation.max_tasks]
    for path in models.values():
        check_section(with_model_path(run, path).model)
    for name, section in run.auxiliary_models.items():
        check_auxiliary(f"auxiliary_models.{name}", section)
    if has_plot:
        check_plot()
        if out is None:
            raise ConfigError("a plot is written to the output folder: set --out")
    check_output_folder(out, models)
    results: dict[str, dict[str, ModelResult]] = {name: {} for name in sets}
    load = partial(load_actors, workflow=workflow, judge=judge, build_model=build_model)
    progress = ConsoleProgress(total_steps=len(models) * len(sets), has_progress=run.monitor.has_progress)
    with nullcontext() if out is None else Workspace(out), closing(progress):
        if out is not None:
            remove_leftovers(out, JSON_FILE, TABLE_FILE, PLOT_FILE, PARTS)
        for number, (label, path) in enumerate(models.items()):
            evaluated = evaluate_model(
                with_model_path(run, path), sets, load, out=out, label=label, progress=progress,
                num_done=number * len(sets),
            )  # fmt: skip
            release_memory()
            for name, (tasks, seconds) in evaluated.items():
                results[name][label] = compute_result(
                    label, path, tasks, seed=run.seed, seconds=seconds, outcome_key=run.experience.outcome_key
                )
        comparison = {
            name: compare_results(
                name,
                by_label,
                seed=run.seed,
                scorer="" if suite is None else describe_scorers(task.row for task in sets[name]),
            )
            for name, by_label in results.items()
        }
        if out is not None:
            save_comparison(out, comparison, has_plot=has_plot)
    return EvalResult(folder=out, sets=comparison)


def find_model(path: str) -> str:
    """The model of the run or stage in the folder `path`, or `path` itself (a hub id)."""
    folder = Path(path).expanduser()
    return str(find_model_folder(folder.absolute())) if folder.is_dir() else path


def with_model_path(config: RunConfig, path: str) -> RunConfig:
    """The config with another model. `lora` and, for another path, `base_path` are reset: they describe one model."""
    return config.model_copy(update={"model": config.model.with_path(path).model_copy(update={"lora": None})})


def evaluate_model(
    config: RunConfig,
    sets: Mapping[str, Sequence[Task]],
    load: Callable[[RunConfig], tuple[Policy, Actors]],
    *,
    out: Path | None,
    label: str,
    progress: ConsoleProgress,
    num_done: int,
) -> dict[str, tuple[Sequence[TaskScores], float]]:
    """Scores of one model on every set, and the seconds of its rollouts without loading; sets whose partial file exists
    are read from it.

    The model loads at the first set without a partial file, and not at all if every set has one.
    """
    scores: dict[str, tuple[Sequence[TaskScores], float]] = {}
    loaded: tuple[Policy, Actors] | None = None
    with ExitStack() as stack:
        for number, (name, tasks) in enumerate(sets.items(), start=num_done + 1):
            partial_file = find_partial_file(out, config, name, tasks)
            if partial_file is not None and partial_file.exists():
                saved = load_json(partial_file)
                scores[name] = scores_from_json(saved["tasks"]), saved["seconds"]
                progress.show_done(number, f"{label} on {name}: already evaluated")
                continue
            progress.show_status(f"{label} on {name}: loading")
            if loaded is None:
                loaded = load(config)
                stack.enter_context(closing(loaded[0]))
            policy, actors = loaded
            started = time.perf_counter()
            groups = run_lockstep(evaluate_set(config, actors, name, tasks, progress), config.rollout)
            seconds = time.perf_counter() - started
            found = score_groups(groups, policy.service.recorder.renderer)
            scores[name] = found, seconds
            if partial_file is not None:
                save_json(partial_file, {"seconds": seconds, "tasks": scores_to_json(found)})
            progress.show_done(number, f"{label} on {name}: {len(tasks)} tasks in {format_duration(seconds)}")
    return scores


async def evaluate_set(
    config: RunConfig, actors: Actors, name: str, tasks: Sequence[Task], progress: ConsoleProgress
) -> list[Group]:
    """Run the agent on one task set."""
    limit = config.rollout.max_failure_rate
    async with build_evaluator(actors) as dispatcher:
        return await run_held_out(
            config, dispatcher, name, tasks, policy_version=0, max_failure_rate=limit, show=progress.show_status
        )


def check_output_folder(out: Path | None, models: Mapping[str, str]) -> None:
    """Raise ConfigError when the folder holds a comparison of other models; one of the same models is overwritten."""
    if out is None or not (out / JSON_FILE).exists():
        return
    try:
        results = [result for each in load_json(out / JSON_FILE).values() for result in each["models"].items()]
        compared = {label: result["path"] for label, result in results}
    except (AttributeError, KeyError, TypeError) as error:
        raise StorageError(f"{out / JSON_FILE} is no comparison of models: choose another folder") from error
    check_same(out, {"models": compared}, {"models": models})


def find_partial_file(out: Path | None, config: RunConfig, name: str, tasks: Sequence[Task]) -> Path | None:
    """File with one model's scores on one set until the comparison is complete; named by a hash of its inputs."""
    if out is None:
        return None
    settings = config.model_dump(mode="json", exclude={"monitor", "trainer", "algorithm", "save_interval_s"})
    if config.project == RunConfig.model_fields["project"].default:
        settings["project"] = AGENTSCOPE_PROJECT  # the default when parts were first written
    digest = compute_digest([settings, describe_weights(config.model.path), describe_rows(tasks), name])
    return out / PARTS / f"{digest[:16]}.json"


def save_comparison(out: Path, comparison: Comparison, *, has_plot: bool) -> None:
    """Write the results, then remove the partial files."""
    save_text(out / TABLE_FILE, format_comparison(comparison))
    if has_plot:
        save_plot(out / PLOT_FILE, comparison)
    save_json(out / JSON_FILE, {name: each.to_json() for name, each in comparison.items()})
    if (out / PARTS).exists():
        remove_tree(out / PARTS)


def release_memory() -> None:
    """Collect garbage and empty the CUDA cache, once a model is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_stage(config: EvalConfig) -> None:
    run = apply_suite(config.to_run_config(), config.suite)
    check_run(run, models=[find_model(path) for path in config.models.values()])
    if config.has_plot:
        check_plot()


def run_stage(config: EvalConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Compare the models; a killed evaluation resumes in `out_dir`."""
    comparison = run_eval(config, out=out_dir, build_model=choose_model(config.to_run_config())).sets
    results = {
        f"{label} on {name}": result
        for name, set_comparison in comparison.items()
        for label, result in set_comparison.results.items()
    }
    figures: dict[str, Any] = {TABLES: format_comparison(comparison)}
    return StageResult(
        tokens=sum(result.num_sampled_tokens for result in results.values()),
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures=figures
        | {
            name: f"{result.num_runs} runs, {result.num_sampled_tokens} tokens, {result.seconds:.1f} s"
            for name, result in results.items()
        },
        result=comparison,
    )
