"""The output folder of supervised fine-tuning or preference training.

    config.yaml  metrics.jsonl  monitor/    settings and metrics
    global_step_N/                          checkpoints; `keep_checkpoints` of them remain at the end
    model/                                  the result; its DONE.json is written last and holds the summary

Repeating an interrupted command resumes from the last checkpoint. A folder with other settings is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.config import OfflineConfig
from tunesmith.errors import StorageError
from tunesmith.model.checkpoint import TRAINER_FOLDER, find_checkpoints, find_last_checkpoint, remove_old_checkpoints
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import DONE, TEMPORARY, RunPaths, check_complete, load_json, new_folder, remove_leftovers

MODEL = "model"
MUTABLE_KEYS = ("save_interval_steps", "keep_checkpoints", "monitor", "num_cpu_threads")
"""Keys that may change when training is resumed."""


def load_summary(workspace: Workspace, config: OfflineConfig) -> dict[str, Any] | None:
    """The summary of a finished training, None if it has not finished; raises if the settings differ."""
    root = workspace.root
    if not (root / MODEL / DONE).is_file():
        return None
    workspace.check_config(config, mutable_keys=MUTABLE_KEYS)
    check_complete(root / MODEL)
    num_kept = config.keep_checkpoints or 0
    if len(find_checkpoints(root)) > num_kept or any(TEMPORARY.search(path.name) for path in root.iterdir()):
        with workspace:  # interrupted after the model was written
            remove_leftovers(root)
            remove_old_checkpoints(root, num_kept=num_kept)
    summary: dict[str, Any] = load_json(root / MODEL / DONE)["figures"]
    return summary


def resume_training(workspace: Workspace, config: OfflineConfig) -> Path | None:
    """Prepare the locked folder for the remaining steps; returns the last checkpoint, None if there is none."""
    workspace.check_config(config, mutable_keys=MUTABLE_KEYS)
    checkpoint = find_whole_checkpoint(workspace.root)
    workspace.begin(config)
    workspace.remove(workspace.root / MODEL)
    return checkpoint


def find_whole_checkpoint(root: Path) -> Path | None:
    """The last checkpoint, None if there is none; if it is damaged, the error states how to resume from the one
    before."""
    checkpoint = find_last_checkpoint(root)
    if checkpoint is None:
        return None
    try:
        check_complete(checkpoint)
    except StorageError as error:
        older = [each.name for each in find_checkpoints(root)[:-1]]
        way = f"to resume from {older[-1]}" if older else "to restart"
        raise StorageError(f"{error}; restore it, or move {checkpoint.name} out of {root} {way}") from error
    return checkpoint


def finish(paths: RunPaths, *, best_step: int, num_kept: int, summary: Mapping[str, Any]) -> None:
    """Copy the best checkpoint's model to `model/`, then remove checkpoints beyond `num_kept`."""
    best = paths.checkpoint(best_step)
    check_complete(best)
    with new_folder(paths.root / MODEL, {"step": best_step, "figures": dict(summary)}) as temporary:
        shutil.copytree(best, temporary, ignore=shutil.ignore_patterns(TRAINER_FOLDER, DONE), dirs_exist_ok=True)
    remove_old_checkpoints(paths.root, num_kept=num_kept)
