"""From which checkpoint a run is resumed, and what becomes of files of later steps.

The newest checkpoint must be there and whole, with the rollouts that its replay buffer names; else the error names the
newest step that can be resumed, and `resume_from_step` chooses it. What lies after a chosen step is moved to
`old-<time>/` in the run folder. Only the steps that follow a whole newest checkpoint are removed: they are made again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tunesmith.errors import ConfigError, StorageError
from tunesmith.experience.step_files import JSON_STEPS, StepFiles
from tunesmith.experience.store import ROLLOUT_STEPS, check_rollouts
from tunesmith.model.checkpoint import RUN_STATE, check_complete, find_checkpoints, find_last_checkpoint
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.pipeline.session.load_config import load_config
from tunesmith.storage import CHECKPOINT, RunPaths, load_json, parse_checkpoint_step, storage_errors

OLD = "old-"
"""Begins the names of folders that hold what was set aside."""


def find_resume_point(paths: RunPaths, *, step: int | None) -> Path | None:
    """The checkpoint of `step`, or the newest where no step is named; None begins anew.

    Raises StorageError when it is missing or damaged, with the newest step that is not.
    """
    if step == 0:
        return None
    if step is not None and paths.checkpoint(step) not in find_checkpoints(paths.root):
        there = ", ".join(str(parse_checkpoint_step(each)) for each in find_checkpoints(paths.root)) or "none"
        raise ConfigError(
            f"resume_from_step={step}: {paths.root} has no checkpoint of that step; it has {there}, and 0 begins anew"
        )
    found = find_last_checkpoint(paths.root) if step is None else paths.checkpoint(step)
    try:
        if step is None:
            check_newest(paths, found)
        if found is not None:
            check_resumable(paths, found)
    except StorageError as error:
        raise StorageError(f"{error}; {advise(paths, before=found)}") from error
    return found


def check_newest(paths: RunPaths, found: Path | None) -> None:
    """Refuse to resume from `found`, or to begin anew, where a later step has been committed."""
    committed, newest = find_committed_step(paths), 0 if found is None else parse_checkpoint_step(found)
    if newest < committed:
        raise StorageError(f"{paths.checkpoint(committed)} is missing or not complete")


def find_committed_step(paths: RunPaths) -> int:
    """The newest step that had a checkpoint, 0 for none.

    Folders that do not say so had one at every `save_interval_steps` before the last step that was written.
    """
    try:
        return int(load_json(paths.last_commit)["step"])
    except (StorageError, KeyError, TypeError, ValueError):
        if not paths.config.is_file():
            return 0
    interval = load_config(paths.config).save_interval_steps
    steps = [record["step"] for record in load_metrics(paths.metrics)]
    return max(max(steps, default=0) - 1, 0) // interval * interval


def check_resumable(paths: RunPaths, checkpoint: Path) -> None:
    """Read all that resuming needs, and refuse what is damaged."""
    check_complete(checkpoint)
    if not (checkpoint / RUN_STATE).is_file():
        return
    entries = load_json(checkpoint / RUN_STATE).get("replay", {}).get("entries", [])
    for step in sorted({entry["step"] for entry in entries}):
        check_rollouts(paths.rollouts(step))


def advise(paths: RunPaths, *, before: Path | None) -> str:
    """What to do when `before` cannot be resumed."""
    step = 0
    for checkpoint in reversed(find_checkpoints(paths.root)):
        if before is not None and parse_checkpoint_step(checkpoint) > parse_checkpoint_step(before):
            continue
        try:
            check_resumable(paths, checkpoint)
        except StorageError:
            continue
        step = parse_checkpoint_step(checkpoint)
        break
    way = f"resume from step {step}, the newest that is whole," if step else "begin anew, for no checkpoint is whole,"
    way += f" with resume_from_step={step} (--resume-from {step})"
    return f"restore it, or {way}; later steps are moved to {OLD}<time>/"


def set_aside(paths: RunPaths, *, after: int, now: datetime | None = None) -> Path | None:
    """Move what belongs to steps after `after` to a folder of its own, of which all when that is 0; returns it.

    Checkpoints go first, and metrics are copied, so that a kill on the way leaves a folder that can be treated again.
    """
    moved = list(find_later(paths, after))
    has_metrics = any(record["step"] > after for record in load_metrics(paths.metrics))
    if not moved and not has_metrics:
        return None
    place = choose_old_folder(paths.root, now or datetime.now())
    with storage_errors(place, "write"):
        for path in moved:
            target = place / path.relative_to(paths.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        for path in (paths.metrics, paths.config):
            if path.is_file():
                shutil.copy2(path, place / path.name)
        if after == 0:
            for path in (paths.monitor, paths.metrics, paths.last_commit):
                if path.exists():
                    path.rename(place / path.name)
    return place


def find_later(paths: RunPaths, step: int) -> Iterator[Path]:
    """Checkpoints and files of steps after `step`, or of all where that is 0, the newest checkpoint first."""
    checkpoints = [each for each in paths.root.iterdir() if CHECKPOINT.fullmatch(each.name)]
    yield from sorted(
        (each for each in checkpoints if parse_checkpoint_step(each) > step), key=parse_checkpoint_step, reverse=True
    )
    for files in list_step_files(paths):
        files.split_merged(step)
        yield from files.find_after(step if step else -1)


def list_step_files(paths: RunPaths) -> tuple[StepFiles, ...]:
    """The folders of a run with a file for each step."""
    return (
        StepFiles(paths.rollouts(0).parent, ROLLOUT_STEPS),
        StepFiles(paths.evaluation(0).parent, JSON_STEPS),
        StepFiles(paths.selection(0).parent, JSON_STEPS),
    )


def choose_old_folder(root: Path, now: datetime) -> Path:
    """Make a folder for what is set aside."""
    name = f"{OLD}{now:%Y%m%d%H%M%S}"
    number = 1
    while True:
        place = root / (name if number == 1 else f"{name}-{number}")
        try:
            with storage_errors(place, "make"):
                place.mkdir()
        except StorageError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            number += 1
        else:
            return place
