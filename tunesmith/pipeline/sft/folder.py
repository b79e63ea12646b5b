"""The folder of one fine-tuning: what it holds while it runs, and the model it leaves.

    config.yaml  metrics.jsonl  monitor/    the settings and the numbers
    global_step_N/                          checkpoints; after the end as many as `keep_checkpoints` says
    model/                                  the result; its DONE.json is written last and holds the figures

The same command goes on where a killed one was, from its last commit. A folder of other settings is refused.
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
from tunesmith.pipeline.session.load_config import dump_config, load_section
from tunesmith.pipeline.session.run_folder import check_same_run, take_lock
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
FREE_KEYS = ("save_interval_steps", "keep_checkpoints", "monitor", "num_cpu_threads")
"""What may change between the parts of one fine-tuning."""


@dataclass(slots=True, kw_only=True)
class FinetuneFolder:
    """A folder that this process alone writes, until the block ends."""

    paths: RunPaths
    checkpoint: Path | None
    """The last commit; None when there is none."""
    lock: BinaryIO

    @property
    def model(self) -> Path:
        return self.paths.root / MODEL

    @property
    def committed_step(self) -> int | None:
        return None if self.checkpoint is None else parse_checkpoint_step(self.checkpoint)

    def __enter__(self) -> FinetuneFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.lock.close()


def load_figures(root: Path, config: OfflineConfig) -> dict[str, Any] | None:
    """The figures of a fine-tuning that has ended, or None; other settings than its own are an error."""
    paths, model = RunPaths(root), root / MODEL
    if not (model / DONE).is_file():
        return None
    check_settings(paths, config)
    check_complete(model)
    num_kept = config.keep_checkpoints or 0
    if len(find_checkpoints(root)) > num_kept or any(TEMPORARY.search(path.name) for path in root.iterdir()):
        with closing(take_lock(paths)):  # a kill came after the model was done
            remove_leftovers(root)
            remove_checkpoints(root, num_kept=num_kept)
    figures: dict[str, Any] = load_json(model / DONE)["figures"]
    return figures


def open_finetune_folder(config: OfflineConfig, root: Path) -> FinetuneFolder:
    """Make or reopen a folder whose fine-tuning has not ended, and save its settings there."""
    paths = RunPaths(root)
    with storage_errors(root, "write"):
        root.mkdir(parents=True, exist_ok=True)
        lock = take_lock(paths)
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
    return FinetuneFolder(paths=paths, checkpoint=checkpoint, lock=lock)


def find_whole_checkpoint(root: Path) -> Path | None:
    """The last commit; when it is damaged, an error that says how to go on from the one before."""
    checkpoint = find_last_checkpoint(root)
    if checkpoint is None:
        return None
    try:
        check_complete(checkpoint)
    except StorageError as error:
        older = [each.name for each in find_checkpoints(root)[:-1]]
        way = f"to go on from {older[-1]}" if older else "to begin anew"
        raise StorageError(f"{error}; restore it, or move {checkpoint.name} out of {root} {way}") from error
    return checkpoint


def check_settings(paths: RunPaths, config: OfflineConfig) -> None:
    """Refuse a folder that holds something else, or a fine-tuning with other settings."""
    if paths.config.is_file():
        try:
            saved = load_section(type(config), paths.config)
        except ConfigError as error:
            raise StorageError(
                f"{paths.root} already holds something else ({paths.config.name}: {error}): choose another folder"
            ) from error
        check_same_run(saved, config, free_keys=FREE_KEYS)
        return
    others = sorted(path.name for path in paths.root.iterdir() if path != paths.lock)
    if others:
        raise StorageError(
            f"{paths.root} already holds something else ({', '.join(others[:3])}): choose another folder"
        )


def remove_checkpoints(root: Path, *, num_kept: int, best_step: int | None = None) -> None:
    """Keep the newest `num_kept` checkpoints and the best one."""
    checkpoints = find_checkpoints(root)
    for checkpoint in checkpoints[: max(len(checkpoints) - num_kept, 0)]:
        if parse_checkpoint_step(checkpoint) != best_step:
            remove_tree(checkpoint)


def finish(folder: FinetuneFolder, *, best_step: int, num_kept: int, figures: Mapping[str, Any]) -> None:
    """Make the model of a checkpoint the result, then remove the checkpoints that are not to be kept."""
    best = folder.paths.checkpoint(best_step)
    check_complete(best)
    with new_folder(folder.model, {"step": best_step, "figures": dict(figures)}) as temporary:
        shutil.copytree(best, temporary, ignore=shutil.ignore_patterns(TRAINER_FOLDER, DONE), dirs_exist_ok=True)
    remove_checkpoints(folder.paths.root, num_kept=num_kept)
