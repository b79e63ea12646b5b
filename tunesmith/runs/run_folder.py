"""The folder of one run: locking, resuming, and cleanup.

`open_run_folder` is called before models load. It creates the folder, checks that it is writable, acquires its lock and
refuses a folder that holds another run. On resuming it compares the config with the saved one and removes files that an
interrupted run wrote after its last commit. A run that fails before its first step removes its folder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.config import RunConfig, Section
from tunesmith.errors import ConfigError, StorageError
from tunesmith.model.checkpoint import remove_leftovers
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.runs.load_config import dump_config, load_config
from tunesmith.runs.resume_point import archive_later_steps, find_resume_point, list_step_files
from tunesmith.storage import (
    CHECKPOINT,
    RunPaths,
    parse_checkpoint_step,
    remove_tree,
    save_json,
    save_text,
    storage_errors,
)

MUTABLE_KEYS = (
    "project",
    "name",
    "checkpoint_root_dir",
    "continue_from_checkpoint",
    "resume_from_step",
    "total_epochs",
    "total_steps",
    "save_interval_steps",
    "keep_checkpoints",
    "keep_best",
    "early_stopping",
    "callbacks",
    "steps_per_file",
    "evaluation.interval_steps",
    "evaluation.at_start",
    "monitor",
    "cluster",
    "rollout.assignment",
    "rollout.timeout_s",
    "rollout.thread_patience_s",
    "rollout.max_failure_rate",
    "trainer.mismatch_warn",
    "trainer.mismatch_stop",
)
"""Keys that may change when a run is resumed: paths, length, saving, evaluation, callbacks, reporting and failure
limits, and the number of ranks."""


@dataclass(slots=True, kw_only=True)
class RunFolder:
    """A run folder locked by this process until `close`."""

    paths: RunPaths
    checkpoint: Path | None
    """The checkpoint that the run resumes from; None if it starts from the beginning."""
    changed_keys: tuple[str, ...]
    """Dotted keys in which a resumed run differs from its saved config; all are in `MUTABLE_KEYS`."""
    archive: Path | None
    """Folder that files of later steps were moved to; None if nothing was moved."""
    lock: BinaryIO

    @property
    def committed_step(self) -> int | None:
        return None if self.checkpoint is None else parse_checkpoint_step(self.checkpoint)

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            remove_empty_run(self.paths)
        self.close()


def open_run_folder(config: RunConfig, *, now: datetime | None = None) -> RunFolder:
    """Create or reopen the folder of a run and save its config there."""
    paths, lock = make_run_folder(config, now=now)
    try:
        checkpoint: Path | None = None
        changed_keys: tuple[str, ...] = ()
        if config.continue_from_checkpoint:
            checkpoint = find_resume_point(paths, step=config.resume_from_step)
        elif is_used(paths):
            raise ConfigError(
                f"{paths.root} already holds a run: choose another name, or resume it with "
                "continue_from_checkpoint=true (--resume)"
            )
        if checkpoint is not None:
            changed_keys = check_same_run(load_config(paths.config), config)
        archive = clear_later_steps(paths, checkpoint, is_chosen=config.resume_from_step is not None)
        save_text(paths.config, dump_config(config.model_copy(update={"resume_from_step": None})))
        remove_leftovers(paths.root)
        paths.error.unlink(missing_ok=True)
    except BaseException:
        lock.close()
        raise
    return RunFolder(paths=paths, checkpoint=checkpoint, changed_keys=changed_keys, archive=archive, lock=lock)


def make_run_folder(config: RunConfig, *, now: datetime | None = None) -> tuple[RunPaths, BinaryIO]:
    """Create the folder if it does not exist and acquire its lock; a run without a name always gets a new folder."""
    root = resolve_run_root(config, now=now)
    for number in count(2):
        paths = RunPaths(root)
        with storage_errors(paths.root, "write"):
            paths.root.parent.mkdir(parents=True, exist_ok=True)
            try:
                paths.root.mkdir(exist_ok=config.name is not None)
            except FileExistsError:
                if config.name is not None:
                    raise
                root = root.with_name(f"{resolve_run_root(config, now=now).name}-{number}")
                continue
            return paths, acquire_lock(paths)
    raise AssertionError("unreachable: count() is infinite")


def clear_later_steps(paths: RunPaths, checkpoint: Path | None, *, is_chosen: bool) -> Path | None:
    """Delete or archive files of steps after the checkpoint; return the archive folder, if any.

    Files after the newest checkpoint are deleted, because the resumed run recomputes them. Files after a checkpoint
    that the user chose, and files of a run without any checkpoint, are archived.
    """
    step = 0 if checkpoint is None else parse_checkpoint_step(checkpoint)
    archive = archive_later_steps(paths, after=step) if is_chosen or checkpoint is None else None
    if archive is not None and checkpoint is not None:
        save_json(paths.last_commit, {"step": step})
    for files in list_step_files(paths):
        files.remove_single_after(step)
    return archive


def resolve_run_root(config: RunConfig, *, now: datetime | None = None) -> Path:
    """The run folder of a config."""
    name = config.name
    if name is None:
        if config.continue_from_checkpoint:
            raise ConfigError("continue_from_checkpoint (--resume) needs the name of the run to resume")
        name = f"Experiment-{now or datetime.now():%Y%m%d%H%M%S}"
    for key, part in (("project", config.project), ("name", name)):
        if part in {"", ".", ".."} or "/" in part or "\0" in part:
            raise ConfigError(f"{key} must be a single folder name, got {part!r}")
    return Path(config.checkpoint_root_dir).expanduser().absolute() / config.project / name


@contextmanager
def locked_folder(root: Path) -> Iterator[None]:
    """Create the folder if it does not exist, and hold its lock in the block."""
    with storage_errors(root, "write"):
        root.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(RunPaths(root))
    with lock:
        yield


def acquire_lock(paths: RunPaths) -> BinaryIO:
    """Acquire the run's lock; the operating system releases it when the process exits."""
    lock = paths.lock.open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip() or "unknown"
        lock.close()
        raise StorageError(
            f"{paths.root} is locked by process {holder}: wait for it to exit, or choose another name or folder"
        ) from error
    except OSError:
        lock.close()
        raise
    if not is_same_file(lock, paths.lock):  # the holder removed it: its run failed before the first step
        lock.close()
        return acquire_lock(paths)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n".encode())
    lock.flush()
    return lock


def is_same_file(file: BinaryIO, path: Path) -> bool:
    """Whether the path still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_used(paths: RunPaths) -> bool:
    """Whether the folder holds a finished step, or files that are not of a run."""
    if not paths.config.is_file():
        return any(entry != paths.lock for entry in paths.root.iterdir())
    return has_steps(paths)


def has_steps(paths: RunPaths) -> bool:
    """Whether the run in this folder finished a training step."""
    has_checkpoint = any(CHECKPOINT.fullmatch(entry.name) for entry in paths.root.iterdir())
    return (
        has_checkpoint
        or paths.last_commit.exists()
        or any(each["kind"] == "train" for each in load_metrics(paths.metrics))
    )


def remove_empty_run(paths: RunPaths) -> None:
    """Remove the folder if no step was finished and nothing was sampled or evaluated."""
    files = [path for path in paths.root.rglob("*") if path.is_file()]
    ours = {paths.config, paths.lock, paths.metrics, paths.error}
    is_empty = all(path in ours or paths.monitor in path.parents for path in files)
    if is_empty and not (paths.metrics.exists() and paths.metrics.stat().st_size):
        with storage_errors(paths.root, "remove"):
            remove_tree(paths.root)


def check_same_run(saved: Section, config: Section, *, mutable_keys: Sequence[str] = MUTABLE_KEYS) -> tuple[str, ...]:
    """Raise if a key outside `mutable_keys` changed; return the changed keys."""
    before, after = flatten(saved.model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    changed = tuple(key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key))
    refused = [key for key in changed if not is_mutable_key(key, mutable_keys)]
    if refused:
        listed = "; ".join(f"{key} was {before.get(key)!r}, is {after.get(key)!r}" for key in refused)
        raise ConfigError(f"this run was started with other settings: {listed}. Restore them, or choose another name")
    return changed


def is_mutable_key(key: str, mutable_keys: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in mutable_keys)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
