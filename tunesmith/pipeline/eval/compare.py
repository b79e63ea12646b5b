"""Evaluating several models on the same held-out tasks, one after the other, with the same draws.

Each model is loaded once and let go before the next. With a folder, what is done is kept there model by model and set
by set, so a comparison that is killed goes on where it was; the results take its place at the end.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tunesmith.chat.renderer import Renderer
from tunesmith.config import EvalConfig, RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import ConfigError
from tunesmith.model.source.fingerprint import compute_fingerprint
from tunesmith.monitor.console import ConsoleProgress, format_duration
from tunesmith.pipeline.eval.comparison import Comparison, ModelResult, compare_results, compute_result
from tunesmith.pipeline.eval.comparison_plot import check_plot, save_plot
from tunesmith.pipeline.eval.comparison_table import format_comparison
from tunesmith.pipeline.eval.held_out import run_held_out
from tunesmith.pipeline.eval.sample_scores import AttemptedTask, load_attempts, read_attempts, save_attempts
from tunesmith.pipeline.session.actors import load_actors
from tunesmith.pipeline.session.load_function import load_function
from tunesmith.pipeline.session.policy import BuildModel, Policy, check_auxiliary, check_policy
from tunesmith.pipeline.session.trained_model import find_model_folder
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.groups import check_failures
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.storage import load_json, remove_tree, save_json, save_text
from tunesmith.tasks.load import load_tasks
from tunesmith.types import JudgeType, Task, WorkflowType

LABEL = re.compile(r"[^|\n]*[^|\s]")
JSON_FILE, TABLE_FILE, PLOT_FILE = "comparison.json", "comparison.md", "comparison.png"
PARTS = "parts"


def run_comparison(
    config: RunConfig,
    *,
    models: Mapping[str, str],
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    out: Path | None = None,
    has_plot: bool = False,
) -> Comparison:
    """Try each model, by label, on each of the config's held-out sets; write the results to `out`.

    Raises before a model loads for whatever is wrong with functions, sets or models, and afterwards when more runs of a
    set fail than `rollout.max_failure_rate` allows.
    """
    models = {label: find_model(path) for label, path in models.items()}
    sets = check_comparison(config, models=models, workflow=workflow, judge=judge)
    if has_plot:
        check_plot()
    if has_plot and out is None:
        raise ConfigError("a plot needs a folder to go to: give --out")
    check_out(out, models)
    results: dict[str, dict[str, ModelResult]] = {name: {} for name in sets}
    progress = ConsoleProgress(
        first_step=0,
        total_steps=len(models) * len(sets),
        has_progress=config.monitor.has_progress,
        log_interval_steps=1,
    )
    try:
        for number, (label, path) in enumerate(models.items()):
            each = with_model_path(config, path)
            parts = {name: find_part(out, each, name) for name in sets}
            tried = try_model(
                each,
                sets,
                parts,
                label=label,
                workflow=workflow,
                judge=judge,
                build_model=build_model,
                progress=progress,
                num_done=number * len(sets),
            )
            free_memory()
            for name, (tasks, seconds) in tried.items():
                results[name][label] = compute_result(
                    label,
                    path,
                    tasks,
                    seed=config.seed,
                    seconds=seconds,
                    outcome_key=config.experience.outcome_key,
                )
    finally:
        progress.close()
    comparison = {name: compare_results(name, of_set, seed=config.seed) for name, of_set in results.items()}
    if out is not None:
        save_comparison(out, comparison, has_plot=has_plot)
    return comparison


def run_eval(config: EvalConfig, *, out_dir: Path | None, build_model: BuildModel) -> Comparison:
    """The evaluation that a file of its own describes."""
    return run_comparison(
        config.to_run_config(),
        models=config.models,
        workflow=load_function(config.workflow, knob="workflow"),
        judge=None if config.judge is None else load_function(config.judge, knob="judge"),
        build_model=build_model,
        out=out_dir,
        has_plot=config.has_plot,
    )


def check_comparison(
    config: RunConfig, *, models: Mapping[str, str], workflow: WorkflowType, judge: JudgeType | None
) -> dict[str, list[Task]]:
    """The tasks of each set, when everything that needs no weights is in order."""
    check_workflow_function(workflow)
    if judge is not None:
        check_judge_function(judge)
    if not config.eval_datasets:
        raise ConfigError("eval_datasets is empty: name at least one held-out set, as eval_datasets.test.path=...")
    for label in models:
        if not LABEL.fullmatch(label):
            raise ConfigError(f"the label {label!r} of a model must be text on one line, without '|'")
    sets = {
        name: load_tasks(dataset, name=name)[: config.evaluation.max_tasks]
        for name, dataset in config.eval_datasets.items()
    }
    for path in models.values():
        check_policy(with_model_path(config, path).model)
    for name, section in config.auxiliary_models.items():
        check_auxiliary(name, section)
    return sets


def find_model(path: str) -> str:
    """The path itself, or the model that the run or stage in this folder left."""
    folder = Path(path).expanduser()
    return str(find_model_folder(folder.absolute())) if folder.is_dir() else path


def with_model_path(config: RunConfig, path: str) -> RunConfig:
    """The config for another model; an adapter's settings belong to the model that they were written for."""
    section = config.model
    if path != section.path:
        section = section.model_copy(update={"path": path, "base_path": None})
    return config.model_copy(update={"model": section.model_copy(update={"lora": None})})


Parts = Mapping[str, Path | None]
Tried = dict[str, tuple[list[AttemptedTask], float]]


def try_model(
    config: RunConfig,
    sets: Mapping[str, Sequence[Task]],
    parts: Parts,
    *,
    label: str,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    progress: ConsoleProgress,
    num_done: int,
) -> Tried:
    """One model's attempts and seconds by set; a set whose part is there is not tried again, and loads no model."""
    tried: Tried = {}
    loaded: tuple[Policy, Actors] | None = None
    for number, (name, tasks) in enumerate(sets.items(), start=num_done + 1):
        part = parts[name]
        if part is not None and part.exists():
            saved = load_json(part)
            tried[name] = load_attempts(saved["tasks"]), saved["seconds"]
            progress.show_done(number, f"{label} on {name}: done before")
            continue
        progress.show_status(f"{label} on {name}: loading")
        loaded = loaded or load_actors(config, workflow=workflow, judge=judge, build_model=build_model)
        attempts, seconds = try_set(config, *loaded, name, tasks, progress)
        tried[name] = attempts, seconds
        if part is not None:
            save_json(part, {"seconds": seconds, "tasks": save_attempts(attempts)})
        progress.show_done(number, f"{label} on {name}: {len(tasks)} tasks in {format_duration(seconds)}")
    return tried


def try_set(
    config: RunConfig, policy: Policy, actors: Actors, name: str, tasks: Sequence[Task], progress: ConsoleProgress
) -> tuple[list[AttemptedTask], float]:
    """Attempts and seconds."""
    started = time.perf_counter()
    running = run_held_out(config, actors, name, tasks, policy_version=0, status=progress)
    groups = run_lockstep(running, config.rollout)
    seconds = time.perf_counter() - started
    check_failures(groups, max_failure_rate=config.rollout.max_failure_rate)
    renderer = Renderer(
        policy.tokenizer,
        tool_call_parser=config.model.tool_call_parser,
        reasoning_parser=config.model.reasoning_parser,
    )
    return read_attempts(groups, renderer), seconds


def check_out(out: Path | None, models: Mapping[str, str]) -> None:
    """A folder may be written again, but not with other models than it tells of."""
    if out is None or not (out / JSON_FILE).exists():
        return
    for of_set in load_json(out / JSON_FILE).values():
        told = {label: result["path"] for label, result in of_set["models"].items()}
        if told != models:
            raise ConfigError(
                f"{out} holds a comparison of other models ({', '.join(told)}); choose another folder, or remove it"
            )


def find_part(out: Path | None, config: RunConfig, name: str) -> Path | None:
    """Where one model's attempts at one set are kept until all is done; named after all that they depend on."""
    if out is None:
        return None
    settings = config.model_dump(mode="json", exclude={"monitor", "trainer", "algorithm"})
    weights = compute_fingerprint(config.model.path)
    digest = hashlib.sha256(json.dumps([settings, weights, name], sort_keys=True).encode()).hexdigest()[:16]
    return out / PARTS / f"{digest}.json"


def save_comparison(out: Path, comparison: Comparison, *, has_plot: bool) -> None:
    """Write the results, and remove the parts that they were made of."""
    save_text(out / TABLE_FILE, format_comparison(comparison))
    if has_plot:
        save_plot(out / PLOT_FILE, comparison)
    save_json(out / JSON_FILE, {name: each.to_json() for name, each in comparison.items()})
    if (out / PARTS).exists():
        remove_tree(out / PARTS)


def free_memory() -> None:
    """Give back what a model held that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
