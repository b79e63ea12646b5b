"""The folder of one run: who may write it, whether a run may begin or go on there, and what it leaves behind.

`open_run_folder` is called before anything heavy. It makes the folder, proves that it can be written, takes its lock,
refuses a folder that holds another run, and on resuming compares the config with the saved one and removes what a
killed run wrote after its last commit.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.config import RunConfig, Section
from tunesmith.errors import ConfigError, StorageError
from tunesmith.model.checkpoint import find_last_checkpoint, remove_leftovers
from tunesmith.pipeline.load_config import dump_config, load_config
from tunesmith.storage import RunPaths, parse_checkpoint_step, save_text, storage_errors

FREE_KEYS = (
    "project",
    "name",
    "checkpoint_root_dir",
    "continue_from_checkpoint",
    "total_epochs",
    "total_steps",
    "save_interval_steps",
    "keep_checkpoints",
    "evaluation.interval_steps",
    "evaluation.at_start",
    "monitor",
    "rollout.timeout_s",
    "rollout.thread_patience_s",
    "rollout.max_failure_rate",
    "trainer.mismatch_warn",
    "trainer.mismatch_stop",
)
"""What may change between the parts of one run: where it is, when it ends, saves, evaluates, reports or gives up."""


@dataclass(slots=True, kw_only=True)
class RunFolder:
    """A run folder that this process alone writes, until `close`."""

    paths: RunPaths
    checkpoint: Path | None
    """The last commit, from which the run goes on; None when it starts anew."""
    changed_keys: tuple[str, ...]
    """Dotted keys in which a resumed run differs from its saved config, all of them free to change."""
    lock: BinaryIO

    @property
    def committed_step(self) -> int | None:
        return None if self.checkpoint is None else parse_checkpoint_step(self.checkpoint)

    def close(self) -> None:
        """Let other processes write the folder."""
        self.lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_run_folder(config: RunConfig, *, now: datetime | None = None) -> RunFolder:
    """Make or reopen the folder of a run and save its config there."""
    paths = RunPaths(resolve_run_root(config, now=now))
    with storage_errors(paths.root, "write"):
        paths.root.mkdir(parents=True, exist_ok=True)
        lock = take_lock(paths)
    try:
        checkpoint: Path | None = None
        changed_keys: tuple[str, ...] = ()
        if config.continue_from_checkpoint:
            checkpoint = find_last_checkpoint(paths.root)
        elif is_used(paths):
            raise ConfigError(
                f"{paths.root} already holds a run: choose another name, or go on with it "
                "by continue_from_checkpoint=true (--resume)"
            )
        if checkpoint is not None:
            changed_keys = check_same_run(load_config(paths.config), config)
        save_text(paths.config, dump_config(config))
        remove_leftovers(paths.root)
        remove_steps_after(paths, None if checkpoint is None else parse_checkpoint_step(checkpoint))
    except BaseException:
        lock.close()
        raise
    return RunFolder(paths=paths, checkpoint=checkpoint, changed_keys=changed_keys, lock=lock)


def resolve_run_root(config: RunConfig, *, now: datetime | None = None) -> Path:
    """The folder that a config names."""
    name = config.name
    if name is None:
        if config.continue_from_checkpoint:
            raise ConfigError("continue_from_checkpoint (--resume) needs the name of the run to go on with")
        name = f"Experiment-{now or datetime.now():%Y%m%d%H%M%S}"
    for key, part in (("project", config.project), ("name", name)):
        if part in {"", ".", ".."} or "/" in part or "\0" in part:
            raise ConfigError(f"{key} must be the name of one folder, got {part!r}")
    return Path(config.checkpoint_root_dir).expanduser().absolute() / config.project / name


def take_lock(paths: RunPaths) -> BinaryIO:
    """Hold the run's lock; the system lets go of it when the process ends, however it ends."""
    lock = paths.lock.open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip() or "unknown"
        lock.close()
        raise StorageError(
            f"{paths.root} is being written by process {holder}: wait for it, or choose another name"
        ) from error
    except OSError:
        lock.close()
        raise
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n".encode())
    lock.flush()
    return lock


def is_used(paths: RunPaths) -> bool:
    return any(entry != paths.lock for entry in paths.root.iterdir())


def check_same_run(saved: Section, config: Section, *, free_keys: Sequence[str] = FREE_KEYS) -> tuple[str, ...]:
    """Refuse a config that would make another run of it; return the free keys that changed."""
    before, after = flatten(saved.model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    changed = tuple(key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key))
    refused = [key for key in changed if not is_free(key, free_keys)]
    if refused:
        listed = "; ".join(f"{key} was {before.get(key)!r}, is {after.get(key)!r}" for key in refused)
        raise ConfigError(f"this run began with other settings: {listed}. Set them back, or choose another name")
    return changed


def is_free(key: str, free_keys: Sequence[str]) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in free_keys)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def remove_steps_after(paths: RunPaths, step: int | None) -> None:
    """Remove what belongs to steps that were not committed; it will be made again."""
    for any_step in (paths.rollouts(0), paths.evaluation(0), paths.selection(0)):
        folder, suffix = any_step.parent, any_step.suffix
        for path in sorted(folder.glob(f"step_*{suffix}*")):
            number = path.name.removeprefix("step_").split(".")[0]
            is_temporary = not path.name.endswith(suffix)
            if number.isdigit() and (is_temporary or step is None or int(number) > step):
                with storage_errors(path, "remove"):
                    path.unlink()
