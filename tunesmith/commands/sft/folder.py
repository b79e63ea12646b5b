"""The output folder of supervised fine-tuning or preference training.

    config.yaml  metrics.jsonl  monitor/    settings and metrics
    global_step_N/                          checkpoints; `keep_checkpoints` of them remain at the end
    model/                                  the result; its DONE.json is written last and holds the summary

Repeating an interrupted command resumes from the last checkpoint. A folder with other settings is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.config import OfflineConfig
from tunesmith.errors import ConfigError, StorageError
from tunesmith.model.checkpoint import (
    DONE,
    TRAINER_FOLDER,
    check_complete,
    find_checkpoints,
    find_last_checkpoint,
    new_folder,
    remove_leftovers,
)
from tunesmith.runs.load_config import dump_config, load_section
from tunesmith.runs.run_folder import acquire_lock, check_same_run
from tunesmith.storage import (
    TEMPORARY,
    RunPaths,
    load_json,
    parse_checkpoint_step,
    remove_tree,
    save_text,
    storage_errors,
)

MODEL = "model"
MUTABLE_KEYS = ("save_interval_steps", "keep_checkpoints", "monitor", "num_cpu_threads")
"""Keys that may change when training is resumed."""


@dataclass(slots=True, kw_only=True)
class OfflineFolder:
    """An output folder locked by this process until the `with` block exits."""

    paths: RunPaths
    checkpoint: Path | None
    """The last checkpoint; None if there is none."""
    lock: BinaryIO

    @property
    def model(self) -> Path:
        return self.paths.root / MODEL

    @property
    def committed_step(self) -> int | None:
        return None if self.checkpoint is None else parse_checkpoint_step(self.checkpoint)

    def __enter__(self) -> OfflineFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.lock.close()


def load_finished_result(root: Path, config: OfflineConfig) -> dict[str, Any] | None:
    """The summary of a finished training, None if it has not finished; raises if the settings differ."""
    paths, model = RunPaths(root), root / MODEL
    if not (model / DONE).is_file():
        return None
    check_settings(paths, config)
    check_complete(model)
    num_kept = config.keep_checkpoints or 0
    if len(find_checkpoints(root)) > num_kept or any(TEMPORARY.search(path.name) for path in root.iterdir()):
        with closing(acquire_lock(paths)):  # interrupted after the model was written
            remove_leftovers(root)
            remove_checkpoints(root, num_kept=num_kept)
    summary: dict[str, Any] = load_json(model / DONE)["figures"]
    return summary


def open_offline_folder(config: OfflineConfig, root: Path) -> OfflineFolder:
    """Create or reopen the folder of an unfinished training, and save its settings there."""
    paths = RunPaths(root)
    with storage_errors(root, "write"):
        root.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(paths)
    try:
        check_settings(paths, config)
        checkpoint = find_whole_checkpoint(root)
        save_text(paths.config, dump_config(config))
        remove_leftovers(root)
        if (root / MODEL).exists():
            remove_tree(root / MODEL)
    except BaseException:
        lock.close()
        raise
    return OfflineFolder(paths=paths, checkpoint=checkpoint, lock=lock)


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


def check_settings(paths: RunPaths, config: OfflineConfig) -> None:
    """Raise if the folder holds other files, or a training with other settings."""
    if paths.config.is_file():
        try:
            saved = load_section(type(config), paths.config)
        except ConfigError as error:
            raise StorageError(
                f"{paths.root} already holds other files ({paths.config.name}: {error}): choose another folder"
            ) from error
        check_same_run(saved, config, mutable_keys=MUTABLE_KEYS)
        return
    others = sorted(path.name for path in paths.root.iterdir() if path != paths.lock)
    if others:
        raise StorageError(f"{paths.root} already holds other files ({', '.join(others[:3])}): choose another folder")


def remove_checkpoints(root: Path, *, num_kept: int, best_step: int | None = None) -> None:
    """Remove all checkpoints but the newest `num_kept` and the best one."""
    checkpoints = find_checkpoints(root)
    for checkpoint in checkpoints[: max(len(checkpoints) - num_kept, 0)]:
        if parse_checkpoint_step(checkpoint) != best_step:
            remove_tree(checkpoint)


def finish(folder: OfflineFolder, *, best_step: int, num_kept: int, summary: Mapping[str, Any]) -> None:
    """Copy the best checkpoint's model to `model/`, then remove checkpoints beyond `num_kept`."""
    best = folder.paths.checkpoint(best_step)
    check_complete(best)
    with new_folder(folder.model, {"step": best_step, "figures": dict(summary)}) as temporary:
        shutil.copytree(best, temporary, ignore=shutil.ignore_patterns(TRAINER_FOLDER, DONE), dirs_exist_ok=True)
    remove_checkpoints(folder.paths.root, num_kept=num_kept)
