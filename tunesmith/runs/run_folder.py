"""The workspace of a run of reinforcement learning: its name, the checkpoint it resumes from, and files of later steps.

`open_run_folder` is called before models load. It refuses a folder that holds another run. On resuming it compares the
config with the saved one and removes files that an interrupted run wrote after its last commit. A run that fails before
its first step removes its folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.runs.resume_point import archive_later_steps, find_resume_point, list_step_files
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import (
    CHECKPOINT,
    RunPaths,
    parse_checkpoint_step,
    remove_tree,
    save_json,
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
    """The folder of a run, locked by this process until `close`."""

    workspace: Workspace
    checkpoint: Path | None
    """The checkpoint that the run resumes from; None if it starts from the beginning."""
    changed_keys: tuple[str, ...]
    """Dotted keys in which a resumed run differs from its saved config; all are in `MUTABLE_KEYS`."""
    archive: Path | None
    """Folder that files of later steps were moved to; None if nothing was moved."""

    @property
    def paths(self) -> RunPaths:
        return self.workspace.paths

    @property
    def committed_step(self) -> int | None:
        return None if self.checkpoint is None else parse_checkpoint_step(self.checkpoint)

    def close(self) -> None:
        """Release the lock."""
        self.workspace.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            remove_empty_run(self.paths)
        self.close()


def open_run_folder(config: RunConfig, *, now: datetime | None = None) -> RunFolder:
    """Create or reopen the folder of a run and save its config there."""
    workspace = lock_run_folder(config, now=now)
    try:
        paths = workspace.paths
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
            changed_keys = workspace.check_config(config, mutable_keys=MUTABLE_KEYS)
        archive = clear_later_steps(paths, checkpoint, is_chosen=config.resume_from_step is not None)
        workspace.begin(config.model_copy(update={"resume_from_step": None}))
        paths.error.unlink(missing_ok=True)
    except BaseException:
        workspace.close()
        raise
    return RunFolder(workspace=workspace, checkpoint=checkpoint, changed_keys=changed_keys, archive=archive)


def lock_run_folder(config: RunConfig, *, now: datetime | None = None) -> Workspace:
    """Create the folder if it does not exist and lock it; a run without a name always gets a new folder."""
    first = resolve_run_root(config, now=now)
    if config.name is not None:
        return Workspace(first).lock()
    with storage_errors(first, "write"):
        first.parent.mkdir(parents=True, exist_ok=True)
        for root in (first if number == 1 else first.with_name(f"{first.name}-{number}") for number in count(1)):
            try:
                root.mkdir()
            except FileExistsError:
                continue
            return Workspace(root).lock()
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
