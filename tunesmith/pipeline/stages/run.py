"""`tunesmith run`: the stages of a pipeline in order, skipping what is done and going on with what was begun.

Everything that can be known beforehand is checked before the first stage: names, references, functions, data, models
and packages. A stage is told what earlier ones left when its turn comes.
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

from tunesmith.config import PipelineConfig
from tunesmith.errors import ConfigError, StorageError
from tunesmith.monitor.console import format_duration
from tunesmith.pipeline.session.load_config import dump_config
from tunesmith.pipeline.session.run_folder import acquire_lock
from tunesmith.pipeline.stages.check import check_stage
from tunesmith.pipeline.stages.commands import ChooseModel, run_stage
from tunesmith.pipeline.stages.folder import CONFIG_FILE, PipelineFolder, State
from tunesmith.pipeline.stages.plan import Choice, PlannedStage, Reference, plan_stages
from tunesmith.pipeline.stages.report import save_report
from tunesmith.storage import RunPaths, save_text, storage_errors

SKIPPED = "is done, and is skipped"
PLANS: Mapping[State, str] = {
    "done": SKIPPED,
    "begun": "was begun, and goes on",
    "changed": "is made anew",
    "new": "is made",
}


def run_pipeline(config: PipelineConfig, *, choose_model: ChooseModel, choice: Choice = Choice()) -> Path:
    """Run what is not done; returns the report. Raises what the first stage that fails raises."""
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    stages = plan_stages(config)
    chosen = choice.pick(stages)
    folder = PipelineFolder(Path(config.folder).expanduser().absolute())
    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    check_chosen(stages, chosen, folder, is_again=choice.is_again)
    with storage_errors(folder.root, "write"):
        folder.root.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(RunPaths(folder.root))
    with lock:
        save_text(folder.root / CONFIG_FILE, dump_config(config))
        for stage in chosen:
            title = f"stage {[each.name for each in stages].index(stage.name) + 1}/{len(stages)} {stage.name}"
            if folder.find_state(stage) == "done" and not choice.is_again:
                screen.print(f"{title}: done before, skipped", markup=False)
                continue
            make_stage(stage, folder, screen, title=title, choose_model=choose_model, is_again=choice.is_again)
        return save_report(folder, stages)


def check_pipeline(config: PipelineConfig, *, choice: Choice = Choice()) -> dict[str, str]:
    """What would become of each chosen stage, when nothing is wrong with any; nothing is written."""
    folder = PipelineFolder(Path(config.folder).expanduser().absolute())
    stages = plan_stages(config)
    return check_chosen(stages, choice.pick(stages), folder, is_again=choice.is_again)


def check_chosen(
    stages: Sequence[PlannedStage], chosen: Sequence[PlannedStage], folder: PipelineFolder, *, is_again: bool
) -> dict[str, str]:
    """Check every stage that would run, and what those left that would be skipped or are needed.

    A stage is made anew when one that it needs is.
    """
    check_order(chosen, folder)
    plans: dict[str, str] = {}
    for stage in chosen:
        is_stale = any(plans.get(needed, SKIPPED) != SKIPPED for needed in stage.needs)
        state = folder.find_state(stage)
        if state != "new" and (is_again or is_stale):
            state = "changed"
        plans[stage.name] = PLANS[state]
        if state != "done":
            check_stage(stage)
    check_outputs(stages, plans, folder)
    return plans


def check_outputs(stages: Sequence[PlannedStage], plans: Mapping[str, str], folder: PipelineFolder) -> None:
    """Refuse damage to what stages left that would be skipped, or are needed by one that would run."""
    needed = {name for stage in stages if plans.get(stage.name, SKIPPED) != SKIPPED for name in stage.needs}
    kept = {name for name in needed | plans.keys() if plans.get(name, SKIPPED) == SKIPPED}
    for stage in stages:
        if stage.name in kept:
            folder.check_output(stage)
        for reference in stage.references:
            if reference.stage in kept:
                find_input(reference, folder, where=stage.name)


def check_order(chosen: Sequence[PlannedStage], folder: PipelineFolder) -> None:
    """Refuse to leave out a stage that a chosen one needs and that is not done."""
    names = {stage.name for stage in chosen}
    for stage in chosen:
        for needed in stage.needs:
            if needed not in names and folder.load_done(needed) is None:
                raise ConfigError(f"stage {stage.name!r} needs {needed!r}, which is not done: run it first")


def make_stage(
    stage: PlannedStage,
    folder: PipelineFolder,
    screen: Console,
    *,
    title: str,
    choose_model: ChooseModel,
    is_again: bool,
) -> None:
    """Run one stage to its end, from where it was if that is what was asked for."""
    state = folder.find_state(stage)
    word = "begins"
    if state == "begun" and not is_again:
        word = "goes on"
    elif state != "new":
        aside = folder.set_aside(stage.name)
        word = "begins anew" if aside is None else f"begins anew; what it made before is in {aside.name}"
    screen.print(f"{title}: {word}", markup=False)
    folder.begin(stage)
    settings = stage.resolve(lambda reference: find_input(reference, folder, where=stage.name))
    started = time.monotonic()
    try:
        outcome = run_stage(stage.kind, settings, out_dir=folder.place(stage.name), choose_model=choose_model)
    finally:
        folder.end_attempt(stage.name, time.monotonic() - started)
        free_memory()
    folder.finish(stage, model=outcome.model, tokens=outcome.tokens, device=outcome.device, figures=outcome.figures)
    screen.print(f"{title}: done in {format_duration(time.monotonic() - started)}", markup=False)


def find_input(reference: Reference, folder: PipelineFolder, *, where: str) -> str:
    """The path that a reference means, now that its stage is done."""
    if reference.file is not None:
        path = folder.place(reference.stage) / reference.file
        if not path.exists():
            raise StorageError(
                f"stages.{where}: stage {reference.stage!r} made no {reference.file!r} in {path.parent}, or it is "
                f"gone; name another, or make it again with --only {reference.stage} --again"
            )
        return str(path)
    done = folder.load_done(reference.stage)
    assert done is not None and done.model is not None, "a stage whose model is referred to leaves one"
    model = folder.root / done.model
    if not model.exists():
        raise StorageError(
            f"stages.{where}: the model that stage {reference.stage!r} left is gone from {model}; "
            f"make it again with --only {reference.stage} --again"
        )
    return str(model)


def free_memory() -> None:
    """Give back what a stage's models held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
