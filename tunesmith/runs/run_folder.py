"""The workspace of a run of reinforcement learning: its name, the checkpoint it resumes from, and files of later steps.

`open_run_folder` is called before models load. It refuses a folder that holds another run. On resuming it compares the
config and the rows with the saved ones and removes files that an interrupted run wrote after its last commit. A run
that fails before its first step removes its folder.

The newest checkpoint must exist and be complete, with the rollouts that its replay buffer refers to; otherwise the
error names the newest resumable step, which the user selects with `resume_from_step`. Files of steps after a selected
step are moved to `old-<time>/` in the run folder. Only steps after a complete newest checkpoint are deleted, because
the resumed run recomputes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Self

from tunesmith.config import RunConfig
from tunesmith.config.run import AGENTSCOPE_PROJECT
from tunesmith.errors import ConfigError, StorageError
from tunesmith.experience.step_files import JSON_STEPS, StepFiles
from tunesmith.experience.store import ROLLOUT_STEPS, load_table
from tunesmith.model.checkpoint import RUN_STATE
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.runs.record import ARCHIVE_PREFIX, RunRecord
from tunesmith.runs.workspace import SPEED_KEYS, Workspace, iter_numbered, name_aside
from tunesmith.storage import (
    CHECKPOINT,
    RunPaths,
    check_complete,
    load_json,
    parse_checkpoint_step,
    remove_tree,
    save_json,
    storage_errors,
)

MUTABLE_KEYS = (
    "project", "name", "checkpoint_root_dir", "continue_from_checkpoint", "resume_from_step", "total_epochs",
    "total_steps", "save_interval_steps", "save_interval_s", "keep_checkpoints", "keep_best", "early_stopping",
    "callbacks", "steps_per_file", "evaluation.interval_steps", "evaluation.at_start", "monitor", "cluster",
    "rollout.assignment", "rollout.timeout_s", "rollout.thread_patience_s", "rollout.max_failure_rate",
    "rollout.http_port", "rollout.max_body_mib", "serve.host", "serve.port", "serve.public_url", "serve.api_key_env",
    "serve.lost_after_s", "serve.feedback_timeout_s", "serve.max_sessions", "serve.max_requests",
    "trainer.mismatch_warn", "trainer.mismatch_stop", *SPEED_KEYS,
)  # fmt: skip
"""Keys that may change when a run is resumed: paths, length, saving, evaluation, callbacks, reporting and failure
limits, addresses and limits of servers, the number of ranks, memory and speed."""


class RunFolder(Workspace):
    """The folder of a run, locked by this process until `close`."""

    checkpoint: Path | None = None
    """The checkpoint that the run resumes from; None if it starts from the beginning."""
    archive: Path | None = None
    """Folder that files of later steps were moved to; None if nothing was moved."""

    @property
    def committed_step(self) -> int | None:
        return None if self.checkpoint is None else parse_checkpoint_step(self.checkpoint)

    def __enter__(self) -> Self:
        return self  # it is locked already

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            remove_empty_run(self.paths)
        self.close()


def set_learning_rate(config: RunConfig) -> RunConfig:
    """The config with the number of its learning rate: of one that it leaves out, that with which the run began, if it
    resumes, or else the default."""
    rate = config.trainer.learning_rate
    if config.continue_from_checkpoint and config.name is not None:
        check_project(config)
        trainer = RunRecord(resolve_run_root(config)).settings.get("trainer")
        rate = rate or (trainer.get("learning_rate") if isinstance(trainer, dict) else None)
    trainer = config.trainer.model_copy(update={"learning_rate": rate or config.learning_rate})
    return config.model_copy(update={"trainer": trainer})


def check_project(config: RunConfig) -> None:
    """Raise if the run to resume is not in the default project, but in that of earlier versions."""
    root = resolve_run_root(config)
    earlier = root.parent.with_name(AGENTSCOPE_PROJECT) / root.name
    is_default = config.project == RunConfig.model_fields["project"].default
    if is_default and not RunPaths(root).config.is_file() and RunPaths(earlier).config.is_file():
        raise ConfigError(f"there is no run {root}, but {earlier}: to resume it, set project={AGENTSCOPE_PROJECT}")


def open_run_folder(
    config: RunConfig, *, sources: Mapping[str, str | None] | None = None, now: datetime | None = None
) -> RunFolder:
    """Create or reopen the folder of a run and save its config there; `sources` are digests of its data sets."""
    folder = lock_run_folder(config, now=now)
    try:
        paths = folder.paths
        if config.continue_from_checkpoint:
            folder.checkpoint = find_resume_point(paths, step=config.resume_from_step)
        elif is_used(folder):
            raise ConfigError(
                f"{paths.root} already holds a run: choose another name, or resume it with "
                "continue_from_checkpoint=true (--resume)"
            )
        if folder.checkpoint is not None:
            folder.check_config(config, mutable_keys=MUTABLE_KEYS, sources=sources)
        folder.archive = clear_later_steps(paths, folder.checkpoint, is_chosen=config.resume_from_step is not None)
        folder.begin(config.model_copy(update={"resume_from_step": None}), sources)
    except BaseException:
        folder.close()
        raise
    return folder


def lock_run_folder(config: RunConfig, *, now: datetime | None = None) -> RunFolder:
    """Create the folder if it does not exist and lock it; a run without a name always gets a new folder."""
    first = resolve_run_root(config, now=now)
    if config.name is not None:
        return RunFolder(first).lock()
    with storage_errors(first, "write"):
        first.parent.mkdir(parents=True, exist_ok=True)
        for root in iter_numbered(first):
            try:
                root.mkdir()
            except FileExistsError:
                continue
            return RunFolder(root).lock()
    raise AssertionError("unreachable: there is always another name")


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
    name = config.name
    if name is None:
        if config.continue_from_checkpoint:
            raise ConfigError("continue_from_checkpoint (--resume) needs the name of the run to resume")
        name = f"Experiment-{now or datetime.now():%Y%m%d%H%M%S}"
    for key, part in (("project", config.project), ("name", name)):
        if part in {"", ".", ".."} or "/" in part or "\0" in part:
            raise ConfigError(f"{key} must be a single folder name, got {part!r}")
    return Path(config.checkpoint_root_dir).expanduser().absolute() / config.project / name


def is_used(folder: RunFolder) -> bool:
    """Whether the folder holds a finished step, or files that are not of a run."""
    paths, names = folder.paths, folder.list_files()
    if not paths.config.is_file():
        return bool(names)
    return (
        any(map(CHECKPOINT.fullmatch, names))
        or paths.last_commit.exists()
        or any(each["kind"] == "train" for each in load_metrics(paths.metrics))
    )


def remove_empty_run(paths: RunPaths) -> None:
    """Remove the folder if no step was finished and nothing was sampled or evaluated."""
    files = [path for path in paths.root.rglob("*") if path.is_file()]
    ours = {paths.config, paths.sources, paths.lock, paths.metrics, paths.error}
    is_empty = all(path in ours or {paths.monitor, paths.tokenizer} & {*path.parents} for path in files)
    if is_empty and not (paths.metrics.exists() and paths.metrics.stat().st_size):
        with storage_errors(paths.root, "remove"):
            remove_tree(paths.root)


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
        newest = 0 if found is None else parse_checkpoint_step(found)
        if step is None and newest < run.committed_step:
            raise StorageError(f"{paths.checkpoint(run.committed_step)} is missing or not complete")
        if found is not None:
            check_resumable(paths, found)
    except StorageError as error:
        raise StorageError(f"{error}; {describe_recovery(paths, before=found)}") from error
    return found


def check_resumable(paths: RunPaths, checkpoint: Path) -> None:
    """Read everything that resuming needs; raise if any of it is damaged."""
    check_complete(checkpoint)
    if not (checkpoint / RUN_STATE).is_file():
        return
    entries = load_json(checkpoint / RUN_STATE).get("replay", {}).get("entries", [])
    for step in sorted({entry["step"] for entry in entries}):
        load_table(paths.rollouts(step))


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


def describe_interruption(config: RunConfig, root: Path, *, total_steps: int | None = None) -> str:
    """The console line of an interrupted run: its last checkpoint and how to resume, if it is not done."""
    run = RunRecord(root)
    checkpoint = run.last_checkpoint
    if checkpoint is None:
        return "interrupted before the first step was saved; a single Ctrl-C or SIGTERM finishes and saves the step"
    if run.stop_reason is not None or run.committed_step == (total_steps or run.total_steps):
        return f"interrupted after the last step; the run is done, and its model is {checkpoint}"
    resume = "" if config.continue_from_checkpoint else " with --resume (continue_from_checkpoint=true)"
    name = "" if config.name is not None else f"{' and' if resume else ' with'} name={root.name}"
    return f"interrupted; the last checkpoint is {checkpoint}: to resume from it, repeat the command{resume}{name}"


def archive_later_steps(paths: RunPaths, *, after: int) -> Path | None:
    """Move files of steps after `after` (of all steps if it is 0) to a new archive folder; return it.

    Checkpoints are moved first and metrics are copied, so that an interrupted call can be repeated.
    """
    moved = list(find_later(paths, after))
    has_metrics = any(record["step"] > after for record in load_metrics(paths.metrics))
    if not moved and not has_metrics:
        return None
    archive = name_aside(paths.root / ARCHIVE_PREFIX)
    with storage_errors(archive, "write"):
        archive.mkdir()
        for path in moved:
            target = archive / path.relative_to(paths.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        for path in (paths.metrics, paths.config, paths.sources):
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
