"""Choose the checkpoint to resume from, and archive files of later steps.

The newest checkpoint must exist and be complete, with the rollouts that its replay buffer refers to; otherwise the
error names the newest resumable step, which the user selects with `resume_from_step`. Files of steps after a selected
step are moved to `old-<time>/` in the run folder. Only steps after a complete newest checkpoint are deleted, because
the resumed run recomputes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError, StorageError
from tunesmith.experience.step_files import JSON_STEPS, StepFiles
from tunesmith.experience.store import ROLLOUT_STEPS, check_rollouts
from tunesmith.model.checkpoint import RUN_STATE
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.runs.record import ARCHIVE_PREFIX, RunRecord
from tunesmith.runs.workspace import name_aside
from tunesmith.storage import (
    CHECKPOINT,
    RunPaths,
    check_complete,
    load_json,
    parse_checkpoint_step,
    storage_errors,
)


def find_resume_point(paths: RunPaths, *, step: int | None) -> Path | None:
    """The checkpoint of `step`, or the newest if `step` is None; None means start from the beginning.

    Raises StorageError if it is missing or damaged; the message names the newest step that can be resumed.
    """
    if step == 0:
        return None
    run = RunRecord(paths.root)
    if step is not None and paths.checkpoint(step) not in run.checkpoints:
        existing = ", ".join(str(parse_checkpoint_step(each)) for each in run.checkpoints) or "none"
        raise ConfigError(
            f"resume_from_step={step}: {paths.root} has no checkpoint of that step; it has {existing}; "
            "0 restarts from the beginning"
        )
    found = run.last_checkpoint if step is None else paths.checkpoint(step)
    try:
        if step is None:
            check_newest(run, found)
        if found is not None:
            check_resumable(paths, found)
    except StorageError as error:
        raise StorageError(f"{error}; {describe_recovery(paths, before=found)}") from error
    return found


def check_newest(run: RunRecord, found: Path | None) -> None:
    """Raise if a later step than `found` was committed; without `found`, if any step was."""
    committed, newest = run.committed_step, 0 if found is None else parse_checkpoint_step(found)
    if newest < committed:
        raise StorageError(f"{run.paths.checkpoint(committed)} is missing or not complete")


def check_resumable(paths: RunPaths, checkpoint: Path) -> None:
    """Read everything that resuming needs; raise if any of it is damaged."""
    check_complete(checkpoint)
    if not (checkpoint / RUN_STATE).is_file():
        return
    entries = load_json(checkpoint / RUN_STATE).get("replay", {}).get("entries", [])
    for step in sorted({entry["step"] for entry in entries}):
        check_rollouts(paths.rollouts(step))


def describe_recovery(paths: RunPaths, *, before: Path | None) -> str:
    """Advice for the user if `before` cannot be resumed."""
    step = 0
    for checkpoint in reversed(RunRecord(paths.root).checkpoints):
        if before is not None and parse_checkpoint_step(checkpoint) > parse_checkpoint_step(before):
            continue
        try:
            check_resumable(paths, checkpoint)
        except StorageError:
            continue
        step = parse_checkpoint_step(checkpoint)
        break
    way = f"resume from step {step}, the newest complete one," if step else "restart, as no checkpoint is complete,"
    way += f" with resume_from_step={step} (--resume-from {step})"
    return f"restore it, or {way}; later steps are moved to {ARCHIVE_PREFIX}<time>/"


def describe_interruption(config: RunConfig, root: Path) -> str:
    """The console line of an interrupted run: its last checkpoint and how to resume."""
    checkpoint = RunRecord(root).last_checkpoint
    if checkpoint is None:
        return f"interrupted before the first checkpoint (save_interval_steps={config.save_interval_steps})"
    name = "" if config.name is not None else f" and name={root.name}"
    return (
        f"interrupted; the last checkpoint is {checkpoint}: to resume from it, repeat the command with --resume "
        f"(continue_from_checkpoint=true){name}"
    )


def archive_later_steps(paths: RunPaths, *, after: int, now: datetime | None = None) -> Path | None:
    """Move files of steps after `after` (of all steps if it is 0) to a new archive folder; return it.

    Checkpoints are moved first and metrics are copied, so that an interrupted call can be repeated.
    """
    moved = list(find_later(paths, after))
    has_metrics = any(record["step"] > after for record in load_metrics(paths.metrics))
    if not moved and not has_metrics:
        return None
    archive = name_aside(paths.root / ARCHIVE_PREFIX, now=now)
    with storage_errors(archive, "write"):
        archive.mkdir()
        for path in moved:
            target = archive / path.relative_to(paths.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        for path in (paths.metrics, paths.config):
            if path.is_file():
                shutil.copy2(path, archive / path.name)
        if after == 0:
            for path in (paths.monitor, paths.metrics, paths.last_commit):
                if path.exists():
                    path.rename(archive / path.name)
    return archive


def find_later(paths: RunPaths, step: int) -> Iterator[Path]:
    """Checkpoints and files of steps after `step` (of all steps if it is 0), newest checkpoint first."""
    checkpoints = [each for each in paths.root.iterdir() if CHECKPOINT.fullmatch(each.name)]
    yield from sorted(
        (each for each in checkpoints if parse_checkpoint_step(each) > step), key=parse_checkpoint_step, reverse=True
    )
    for files in list_step_files(paths):
        files.split_merged(step)
        yield from files.find_after(step if step else -1)


def list_step_files(paths: RunPaths) -> tuple[StepFiles, ...]:
    """The subfolders of a run that hold per-step files."""
    return (
        StepFiles(paths.rollouts(0).parent, ROLLOUT_STEPS),
        StepFiles(paths.evaluation(0).parent, JSON_STEPS),
        StepFiles(paths.selection(0).parent, JSON_STEPS),
    )
