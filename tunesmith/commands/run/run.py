"""`tunesmith run`: runs the stages of a pipeline in order, skips completed ones and resumes unfinished ones.

Names, references, functions, data, models and packages are validated before the first stage runs. References to
earlier stages are resolved right before the stage that uses them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from transformers.utils import logging as transformers_logging

from tunesmith.commands.eval.compare import release_memory
from tunesmith.commands.references import StageReference
from tunesmith.commands.run.config import PipelineConfig, PlannedStage, StageSelection, plan_stages
from tunesmith.commands.run.folder import (
    CONFIG_FILE,
    REPORT_TABLE,
    STATES,
    PipelineFolder,
    PipelineResult,
    State,
    load_outcome,
    save_report,
)
from tunesmith.commands.stage import ChooseModel, StageResult
from tunesmith.commands.table import STAGES, import_named
from tunesmith.compat.chat_models import agent_output, choose_chat_model
from tunesmith.config import FunctionStage, RunConfig, Section
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.errors import ConfigError, StorageError, TunesmithError, shorten
from tunesmith.monitor.console import ConsoleProgress, format_duration
from tunesmith.runs.load_config import dump_config
from tunesmith.runs.load_function import load_function
from tunesmith.runs.policy import BuildModel
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import remove_leftovers, remove_tree, save_text, storage_errors

SKIPPED = "done, will be skipped"
ACTIONS: Mapping[State, str] = {
    "done": SKIPPED,
    "begun": "unfinished, will be resumed",
    "changed": "will run again",
    "new": "will run",
}
"""What `tunesmith run` does with a stage in each state, as `--check` prints it."""


def run_command(
    config: PipelineConfig,
    *,
    only: str | None = None,
    start_from: str | None = None,
    is_rerun: bool = False,
    is_check: bool = False,
) -> str:
    """`tunesmith run`: the report, or with `is_check` what would happen to each stage."""
    selection = StageSelection(only=only, start_from=start_from, is_rerun=is_rerun)
    if is_check:
        stages, folder = plan_stages(config), PipelineFolder(Path(config.folder).expanduser().absolute())
        actions = check_selected(stages, selection.select(stages), folder, is_rerun=is_rerun)
        return "\n".join(f"{name}: {action}" for name, action in actions.items())
    result = run_pipeline(config, selection=selection)
    return f"{result.report.read_text(encoding='utf-8')}\nreport: {result.report}"


def run_pipeline(config: PipelineConfig, *, selection: StageSelection) -> PipelineResult:
    """Run the selected stages that are not done, up to the first that fails, with the models and the console output
    that each stage names for its agents."""
    with agent_output(is_shown=False) as switch_output:

        def choose_model(run: RunConfig) -> BuildModel:
            switch_output(run.rollout.has_agent_output)
            return choose_chat_model(run.rollout.chat_model)

        return run_outside_of_loops(lambda: run_stages(config, choose_model=choose_model, selection=selection))


def run_stages(config: PipelineConfig, *, choose_model: ChooseModel, selection: StageSelection) -> PipelineResult:
    """Run the selected stages."""
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    stages = plan_stages(config)
    selected = selection.select(stages)
    folder = PipelineFolder(Path(config.folder).expanduser().absolute())
    screen = ConsoleProgress()
    check_selected(stages, selected, folder, is_rerun=selection.is_rerun)
    with Workspace(folder.root):
        for each in (folder.root, *(folder.root / STATES).glob("*")):
            remove_leftovers(each)
        save_text(folder.root / CONFIG_FILE, dump_config(config))
        for stage in selected:
            title = f"stage {[each.name for each in stages].index(stage.name) + 1}/{len(stages)} {stage.name}"
            if folder.find_state(stage) == "done" and not selection.is_rerun:
                screen.show_line(f"{title}: already done, skipped")
                continue
            settings = stage.resolve(partial(resolve_reference, folder=folder, stage_name=stage.name))
            screen.show_line(f"{title}: {begin_stage(stage, folder, is_rerun=selection.is_rerun)}")
            out_dir, started = folder.root / stage.name, time.monotonic()
            try:
                result = run_stage(stage.kind, settings, out_dir=out_dir, choose_model=choose_model)
            finally:
                folder.end_attempt(stage.name, time.monotonic() - started)
                release_memory()
            folder.finish(stage, result)
            screen.show_line(f"{title}: done in {format_duration(time.monotonic() - started)}")
        save_report(folder, stages)
    outcomes = {stage.name: load_outcome(folder, stage) for stage in stages}
    return PipelineResult(folder=folder.root, report=folder.root / REPORT_TABLE, stages=outcomes)


def begin_stage(stage: PlannedStage, folder: PipelineFolder, *, is_rerun: bool) -> str:
    """Record a new attempt, which resumes an unfinished one unless `is_rerun`; what the console says of it."""
    state, message = folder.find_state(stage), "started"
    if state == "begun" and not is_rerun:
        message = "resumed"
    elif state != "new":
        aside = folder.set_aside(stage.name)
        message = "restarted" if aside is None else f"restarted; its previous output is in {aside.name}"
    folder.begin(stage)
    return message


def check_selected(
    stages: Sequence[PlannedStage], selected: Sequence[PlannedStage], folder: PipelineFolder, *, is_rerun: bool
) -> dict[str, str]:
    """Validate every stage that would run, and the outputs of skipped stages and of input stages.

    A stage runs again if one of its input stages does. Returns the action for each selected stage. Raises ConfigError
    if a selected stage needs one that is neither selected nor done.
    """
    names = {stage.name for stage in selected}
    for stage in selected:
        for needed in stage.needs:
            if needed not in names and folder.load_done(needed) is None:
                raise ConfigError(f"stage {stage.name!r} needs {needed!r}, which is not done: run it first")
    plans: dict[str, str] = {}
    for stage in selected:
        is_stale = any(plans.get(needed, SKIPPED) != SKIPPED for needed in stage.needs)
        state = folder.find_state(stage)
        if state != "new" and (is_rerun or is_stale):
            state = "changed"
        plans[stage.name] = ACTIONS[state]
        if state != "done":
            check_stage(stage)
    check_outputs(stages, plans, folder)
    return plans


def check_outputs(stages: Sequence[PlannedStage], plans: Mapping[str, str], folder: PipelineFolder) -> None:
    """Raise StorageError if the output of a skipped stage, or of an input of a stage that would run, is damaged."""
    needed = {name for stage in stages if plans.get(stage.name, SKIPPED) != SKIPPED for name in stage.needs}
    kept = {name for name in needed | plans.keys() if plans.get(name, SKIPPED) == SKIPPED}
    for stage in stages:
        if stage.name in kept:
            folder.check_output(stage)
        for reference in stage.references:
            if reference.stage in kept:
                resolve_reference(reference, folder, stage_name=stage.name)


def check_stage(stage: PlannedStage) -> None:
    """Raise if a stage is invalid; the error names the stage."""
    entry = STAGES[stage.kind]
    check = entry.check or f"{str(entry.stage).partition(':')[0]}:check_stage"
    try:
        settings = stage.resolve(lambda reference: f"stage:{reference.stage}/{reference.file or ''}".rstrip("/"))
        import_named(check)(settings)
    except (TunesmithError, ValueError) as error:
        error.args = (f"stages.{stage.name}: {error}", *error.args[1:])
        raise


def run_stage(kind: str, settings: Section, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Run a stage with resolved references; an unfinished earlier attempt in `out_dir` is resumed."""
    entry = STAGES[kind]
    result: StageResult = import_named(str(entry.stage))(settings, out_dir=out_dir, choose_model=choose_model)
    if entry.figures is None:
        return result
    return replace(result, figures={**result.figures, **import_named(entry.figures)(settings, result.result)})


def resolve_reference(reference: StageReference, folder: PipelineFolder, *, stage_name: str) -> str:
    """Path that a reference to a completed stage stands for."""
    if reference.file is not None:
        path = folder.root / reference.stage / reference.file
        if not path.exists():
            raise StorageError(
                f"stages.{stage_name}: stage {reference.stage!r} wrote no {reference.file!r} to {path.parent}, or it "
                f"was removed; name another file, or run the stage again with --only {reference.stage} --again"
            )
        return str(path)
    done = folder.load_done(reference.stage)
    assert done is not None and done.model is not None, "a stage referred to by its model has one"
    model = folder.root / done.model
    if not model.exists():
        raise StorageError(
            f"stages.{stage_name}: the model of stage {reference.stage!r} is missing from {model}; "
            f"run the stage again with --only {reference.stage} --again"
        )
    return str(model)


MAX_FIGURE_CHARS = 200


def check_function(settings: FunctionStage) -> None:
    load_function(settings.function, knob="function")


def run_function(settings: FunctionStage, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Call the function with a new, empty folder; output of an earlier attempt is removed."""
    function = load_function(settings.function, knob="function")
    if out_dir.exists():
        remove_tree(out_dir)
    with storage_errors(out_dir, "write"):
        out_dir.mkdir(parents=True)
    figures = function(out_dir, **settings.args)
    if figures is not None and not isinstance(figures, Mapping):
        raise ConfigError(f"function={settings.function!r} must return a mapping or None, got {type(figures).__name__}")
    return StageResult(
        figures={str(name): read_figure(name, figure, settings) for name, figure in (figures or {}).items()}
    )


def read_figure(name: Any, figure: Any, settings: FunctionStage) -> Any:
    """A figure of a function as JSON values: numbers of numpy and torch become Python's."""
    try:
        return json.loads(json.dumps(figure, default=lambda each: each.item()))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"function={settings.function!r} returned {name}={shorten(repr(figure), MAX_FIGURE_CHARS)}, which is not "
            f"JSON ({error}): return numbers, text, lists and mappings of them"
        ) from error
