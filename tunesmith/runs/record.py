"""One run as its folder tells it: kind, state, settings, metrics, evaluations, checkpoints, rollouts and errors.

Viewer, doctor, model card, reports, results of functions and resuming read runs through `RunRecord`. Everything is read
when it is asked for and nothing is written, so the run may still be going on. This module imports no torch. Locking,
resuming and committing a folder are `run_folder`'s.

    checkpoints/gsm8k/gpu/                    >>> run = RunRecord(Path("checkpoints/gsm8k/gpu"))
      config.yaml    total_steps: 8           >>> run.kind, run.num_steps, run.total_steps
      metrics.jsonl  steps 1, 2, 3            ('tune', 3, 8)
      stopped.json   "reward is 1"            >>> run.state, run.stop_reason
      rollouts/step_000001.parquet ...        (RunState.EARLY_STOPPED, 'reward is 1')
      eval/step_000003.json                   >>> run.rollouts.list_steps(), run.list_evaluated_steps()
      global_step_3/  DONE.json  ...          ([1, 2, 3], [3])
      last_commit.json  {"step": 3}           >>> run.committed_step, [path.name for path in run.checkpoints]
                                              (3, ['global_step_3'])
                                              >>> run.metrics.get("rollout/reward_mean").values
                                              array([0.25, 0.5, 1. ])

Without stopped.json this run is interrupted, because 3 of 8 steps are made; without global_step_3 and last_commit.json
too, because its last step was never saved.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import yaml

from tunesmith.errors import StorageError
from tunesmith.experience.step_files import JSON_STEPS, StepFiles
from tunesmith.experience.store import RolloutFiles
from tunesmith.monitor.metrics_file import MetricsLog
from tunesmith.storage import (
    CHECKPOINT,
    DONE,
    RunPaths,
    find_checkpoints,
    is_locked,
    load_json,
    parse_checkpoint_step,
    storage_errors,
)

MODEL = "model"
"""Folder of a complete fine-tuning's model."""
COMPARISON = "comparison.json"
"""The result of `tunesmith eval`."""
ARCHIVE_PREFIX = "old-"
"""Prefix of folders that hold archived files of later steps."""
OFFLINE_KEYS = frozenset(
    {"algorithm_type", "eval_dataset", "eval_fraction", "evaluation_interval_steps", "has_shuffling", "long_rows"}
    | {"max_rows_per_batch", "max_steps", "max_tokens_per_batch", "num_epochs", "terms_args"}
)
"""Top-level keys that the files of `tunesmith sft` and `prefer` have, and those of `tune` and `serve` do not."""
NUM_KEPT_EVALUATIONS = 16

RunKind = Literal["tune", "serve", "sft", "prefer", "eval", "other"]
"""The command that wrote the folder; other: it has metrics and no settings."""


class RunState(StrEnum):
    """How a run stands, in the words that viewer, doctor and reports use."""

    RUNNING = "running"
    FINISHED = "finished"
    """It made all its steps."""
    EARLY_STOPPED = "early-stopped"
    """It ended before its last step because a rule or a callback said so."""
    INTERRUPTED = "interrupted"
    """It was killed, or ended with Ctrl-C; it can be resumed."""
    FAILED = "failed"
    """It raised an error."""


class RunRecord:
    """The folder of a run, read only."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, RunPaths(root)
        self.rollouts = RolloutFiles(self.paths.rollouts(0).parent)
        """Which steps have rollouts on disk, and their rows."""
        self._load_evaluation = functools.lru_cache(maxsize=NUM_KEPT_EVALUATIONS)(lambda path, _: load_json(path))
        self._load_settings = functools.lru_cache(maxsize=1)(load_settings)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The values of config.yaml as it is now; empty if there is none."""
        path = self.paths.config
        return self._load_settings(path, path.stat().st_mtime_ns) if path.is_file() else {}

    @functools.cached_property
    def metrics(self) -> MetricsLog:
        """The metrics at the first use; their `refresh` follows a run that writes."""
        return MetricsLog(self.paths.metrics)

    @property
    def kind(self) -> RunKind:
        if (self.root / COMPARISON).is_file() and not self.paths.metrics.is_file():
            return "eval"
        if not self.settings:
            return "other"
        if self.settings.keys() & OFFLINE_KEYS:
            return "sft" if str(self.settings.get("algorithm_type", "sft")).startswith("sft") else "prefer"
        return "tune" if self.settings.get("serve") is None else "serve"

    @property
    def is_offline(self) -> bool:
        """Whether the run trains on rows instead of rollouts."""
        return self.kind in ("sft", "prefer")

    @property
    def state(self) -> RunState:
        """Whether the run is going on, and how it ended, from what is on disk now and the metrics read so far.

        A run of `total_epochs` does not record how many steps they are. It is finished if its last step is saved.
        """
        if self.kind == "eval":
            return RunState.FINISHED
        if is_locked(self.paths.lock):
            return RunState.RUNNING
        if self.paths.error.is_file():
            return RunState.FAILED
        if self.stop_reason is not None:
            return RunState.EARLY_STOPPED
        if self.is_offline:
            return RunState.INTERRUPTED if self.trained is None else RunState.FINISHED
        is_saved = 0 < self.num_steps <= self.committed_step
        has_all_steps = self.total_steps is None or self.num_steps >= self.total_steps
        return RunState.FINISHED if is_saved and has_all_steps else RunState.INTERRUPTED

    @property
    def error(self) -> Mapping[str, Any] | None:
        """Step, class (`error`) and message of the error that stopped the run."""
        error: Mapping[str, Any] | None = load_json(self.paths.error) if self.paths.error.is_file() else None
        return error

    @property
    def stop_reason(self) -> str | None:
        """Why the run ended before its last step although nothing failed; None if it did not."""
        if self.paths.stopped.is_file():
            return str(load_json(self.paths.stopped).get("reason", ""))
        reason = None if self.trained is None else load_json(self.trained / DONE).get("figures", {}).get("stop_reason")
        return None if reason is None else str(reason)

    @property
    def num_steps(self) -> int:
        """The last training step that has metrics."""
        return self.metrics.last_step

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is to make; None if that depends on the size of the data set."""
        total = self.settings.get("max_steps" if self.is_offline else "total_steps")
        return total if isinstance(total, int) else None

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return find_checkpoints(self.root)

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self.checkpoints), None)

    @property
    def trained(self) -> Path | None:
        """The model of a complete fine-tuning; None for other runs, and before."""
        return self.root / MODEL if (self.root / MODEL / DONE).is_file() else None

    @property
    def committed_step(self) -> int:
        """The newest step that has had a checkpoint, 0 if none.

        Older folders have no `last_commit.json`; they had a checkpoint at every `save_interval_steps` before the last
        logged step.
        """
        newest = 0 if self.last_checkpoint is None else parse_checkpoint_step(self.last_checkpoint)
        try:
            return max(newest, int(load_json(self.paths.last_commit)["step"]))
        except (StorageError, KeyError, TypeError, ValueError):
            interval = self.settings.get("save_interval_steps")
        return max(newest, max(self.num_steps - 1, 0) // interval * interval) if interval else newest

    def list_evaluated_steps(self) -> list[int]:
        """Steps that have an evaluation of held-out tasks."""
        return StepFiles(self.paths.evaluation(0).parent, JSON_STEPS).list_steps()

    def load_evaluation(self, step: int) -> Mapping[str, Any]:
        """Results by task set as in eval/step_N.json."""
        path = self.paths.evaluation(step)
        with storage_errors(path, "read"):
            modified = path.stat().st_mtime_ns
        loaded: Mapping[str, Any] = self._load_evaluation(path, modified)
        return loaded

    @functools.cached_property
    def comparison(self) -> Mapping[str, Any]:
        """The content of comparison.json; empty if there is none."""
        path = self.root / COMPARISON
        loaded: Mapping[str, Any] = load_json(path) if path.is_file() else {}
        return loaded


def load_settings(path: Path, modified: int) -> Mapping[str, Any]:
    """The values of a config.yaml as they are since `modified`."""
    with storage_errors(path, "read"):
        text = path.read_text(encoding="utf-8")
    try:
        values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise StorageError(f"cannot read {path}: it is not YAML ({error})") from error
    return values if isinstance(values, dict) else {}


def find_run_folder(path: Path) -> Path:
    """The run folder of a checkpoint or of the model of a fine-tuning; any other path is one itself."""
    is_inside = CHECKPOINT.fullmatch(path.name) is not None or path.name == MODEL
    paths = RunPaths(path.parent)
    return path.parent if is_inside and (paths.config.is_file() or paths.metrics.is_file()) else path


def find_run_folders(path: Path) -> list[Path]:
    """The run folder at or around a path, or those below it; StorageError if there are none."""
    if not path.is_dir():
        raise StorageError(f"{path} is not the folder of a run: there is no such folder")
    root = find_run_folder(path)
    names = (RunPaths(root).metrics.name, COMPARISON)
    if any((root / name).is_file() for name in names):
        return [root]
    below = {each.parent for depth in ("*", "*/*", "*/*/*") for name in names for each in path.glob(f"{depth}/{name}")}
    found = [
        each
        for each in sorted(below)
        if not any(part.startswith(ARCHIVE_PREFIX) for part in each.relative_to(path).parts)
    ]
    if not found:
        raise StorageError(
            f"{path} is not the folder of a run: it has no {' or '.join(names)}, nor any below it; a run that fails "
            "before its first step removes its folder"
        )
    return found
