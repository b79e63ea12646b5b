"""`tunesmith run`: runs the stages of a pipeline in order, skips completed ones and resumes unfinished ones.

Names, references, functions, data, models and packages are validated before the first stage runs. References to
earlier stages are resolved right before the stage that uses them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import datasets
import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from tunesmith.commands.run.check import check_stage
from tunesmith.commands.run.commands import ChooseModel, run_stage
from tunesmith.commands.run.folder import CONFIG_FILE, PipelineFolder, State
from tunesmith.commands.run.plan import PlannedStage, Reference, StageSelection, plan_stages
from tunesmith.commands.run.report import save_report
from tunesmith.config import PipelineConfig
from tunesmith.errors import ConfigError, StorageError
from tunesmith.monitor.console import format_duration
from tunesmith.runs.load_config import dump_config
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import save_text

SKIPPED = "done, will be skipped"
ACTIONS: Mapping[State, str] = {
    "done": SKIPPED,
    "begun": "unfinished, will be resumed",
    "changed": "will run again",
    "new": "will run",
}
"""What `tunesmith run` does with a stage in each state, as `--check` prints it."""


def run_pipeline(
    config: PipelineConfig, *, choose_model: ChooseModel, selection: StageSelection = StageSelection()
) -> Path:
    """Run the selected stages that are not done, up to the first that fails; returns the path of the report."""
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    stages = plan_stages(config)
    selected = selection.select(stages)
    folder = PipelineFolder(Path(config.folder).expanduser().absolute())
    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    check_selected(stages, selected, folder, is_rerun=selection.is_rerun)
    with Workspace(folder.root):
        save_text(folder.root / CONFIG_FILE, dump_config(config))
        for stage in selected:
            title = f"stage {[each.name for each in stages].index(stage.name) + 1}/{len(stages)} {stage.name}"
            if folder.find_state(stage) == "done" and not selection.is_rerun:
                screen.print(f"{title}: already done, skipped", markup=False)
                continue
            run_and_record(stage, folder, screen, title=title, choose_model=choose_model, is_rerun=selection.is_rerun)
        return save_report(folder, stages)


def check_pipeline(config: PipelineConfig, *, selection: StageSelection = StageSelection()) -> dict[str, str]:
    """Validate the selected stages and return what would happen to each; writes nothing."""
    folder = PipelineFolder(Path(config.folder).expanduser().absolute())
    stages = plan_stages(config)
    return check_selected(stages, selection.select(stages), folder, is_rerun=selection.is_rerun)


def check_selected(
    stages: Sequence[PlannedStage], selected: Sequence[PlannedStage], folder: PipelineFolder, *, is_rerun: bool
) -> dict[str, str]:
    """Validate every stage that would run, and the outputs of skipped stages and of input stages.

    A stage runs again if one of its input stages does. Returns the action for each selected stage.
    """
    check_dependencies(selected, folder)
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


def check_dependencies(selected: Sequence[PlannedStage], folder: PipelineFolder) -> None:
    """Raise ConfigError if a selected stage needs one that is neither selected nor done."""
    names = {stage.name for stage in selected}
    for stage in selected:
        for needed in stage.needs:
            if needed not in names and folder.load_done(needed) is None:
                raise ConfigError(f"stage {stage.name!r} needs {needed!r}, which is not done: run it first")


def run_and_record(
    stage: PlannedStage,
    folder: PipelineFolder,
    screen: Console,
    *,
    title: str,
    choose_model: ChooseModel,
    is_rerun: bool,
) -> None:
    """Run one stage, resuming an unfinished attempt unless `is_rerun`, and record its result."""
    state = folder.find_state(stage)
    message = "started"
    if state == "begun" and not is_rerun:
        message = "resumed"
    elif state != "new":
        aside = folder.set_aside(stage.name)
        message = "restarted" if aside is None else f"restarted; its previous output is in {aside.name}"
    screen.print(f"{title}: {message}", markup=False)
    folder.begin(stage)
    settings = stage.resolve(lambda reference: resolve_reference(reference, folder, stage_name=stage.name))
    started = time.monotonic()
    try:
        result = run_stage(stage.kind, settings, out_dir=folder.output_folder(stage.name), choose_model=choose_model)
    finally:
        folder.end_attempt(stage.name, time.monotonic() - started)
        release_memory()
    folder.finish(stage, model=result.model, tokens=result.tokens, device=result.device, figures=result.figures)
    screen.print(f"{title}: done in {format_duration(time.monotonic() - started)}", markup=False)


def resolve_reference(reference: Reference, folder: PipelineFolder, *, stage_name: str) -> str:
    """Path that a reference to a completed stage stands for."""
    if reference.file is not None:
        path = folder.output_folder(reference.stage) / reference.file
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


def release_memory() -> None:
    """Collect garbage and empty the CUDA cache after a stage."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
