"""A run folder as the checks see it: config, metrics as columns, evaluations and rollouts.

Metrics are read once, line by line, into columns of float64 (8 bytes for each number). Evaluations and rollouts are
read when a check asks for them, rollouts a few steps at a time and only the columns it needs. Nothing is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from tunesmith.commands.doctor.finding import RunState
from tunesmith.commands.doctor.series import Series
from tunesmith.config import OfflineConfig, PreferenceConfig, RunConfig, SftConfig
from tunesmith.errors import StorageError
from tunesmith.experience.step_files import SINGLE, iter_merged
from tunesmith.experience.store import load_table
from tunesmith.monitor.metrics_file import Kind, iter_metrics
from tunesmith.runs.load_config import build_section, load_values
from tunesmith.storage import CHECKPOINT, RunPaths, is_locked, load_json

MODEL, DONE = "model", "DONE.json"
"""Folder of a finished fine-tuning's model, and the file in it that is written last."""
MAX_LISTED_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What is known of a run."""

    config: RunConfig | OfflineConfig
    train: Mapping[str, Series]
    """Metrics of training steps by name."""
    evaluations: Mapping[str, Series] = field(default_factory=dict)
    """Metrics of evaluations by name; the step is that of the evaluated policy."""
    state: RunState = "finished"
    error: Mapping[str, Any] | None = None
    """Contents of error.json: step, class and message of the error that stopped the run."""
    paths: RunPaths | None = None
    """None for a record without files: then there are no rollouts and no results by task."""

    @property
    def num_steps(self) -> int:
        return max((series.span[1] for series in self.train.values()), default=0)

    def get(self, name: str) -> Series | None:
        """The finite values of a training metric; None if there are none."""
        series = self.train.get(name)
        finite = None if series is None else series.finite
        return finite if finite is not None and len(finite) else None

    def get_recent(self, name: str) -> Series | None:
        series = self.get(name)
        return None if series is None else series.recent

    def sum_recent(self, *names: str) -> float | None:
        """The sum of metrics over the recent steps; None if none of them is recorded."""
        found = [series for name in names if (series := self.get_recent(name)) is not None]
        return float(sum(series.values.sum() for series in found)) if found else None

    def list_rollout_steps(self) -> list[int]:
        """Steps whose rollouts are on disk, in ascending order."""
        if self.paths is None:
            return []
        folder = self.paths.rollouts(0).parent
        matches = (SINGLE.fullmatch(path.name) for path in folder.glob("step_*.parquet"))
        steps = {int(match[1]) for match in matches if match}
        for merged in iter_merged(folder, "parquet"):
            steps |= set(range(merged.first, merged.last + 1))
        return sorted(steps)

    def load_rollouts(self, step: int, columns: Sequence[str]) -> pa.Table:
        """Columns of the rollouts of a step; `turns.stop_reason` is field `stop_reason` of column `turns`."""
        assert self.paths is not None, "the step is one of list_rollout_steps"
        return load_table(self.paths.rollouts(step), [name.replace(".", ".list.element.") for name in columns])

    def load_evaluation(self, step: int) -> dict[str, Any]:
        """Results by task set as in eval/step_N.json; empty if there is no such file."""
        path = None if self.paths is None else self.paths.evaluation(step)
        return load_json(path) if path is not None and path.is_file() else {}


def find_run_folder(path: Path) -> Path:
    """The run folder of a checkpoint or of the model of a fine-tuning; any other path is one itself."""
    is_inside = CHECKPOINT.fullmatch(path.name) or path.name == MODEL
    return path.parent if is_inside and RunPaths(path.parent).metrics.is_file() else path


def load_record(root: Path) -> RunRecord:
    """Read the folder of a run; StorageError if it is none."""
    paths = RunPaths(root)
    if not paths.config.is_file() or not paths.metrics.is_file():
        raise StorageError(f"{root} is not the folder of a run{describe_runs_below(root)}")
    config = load_run_config(paths.config)
    train, evaluations = load_columns(paths.metrics)
    error = load_json(paths.error) if paths.error.is_file() else None
    num_steps = max((series.span[1] for series in train.values()), default=0)
    return RunRecord(
        config=config,
        train=train,
        evaluations=evaluations,
        state=find_state(paths, config, num_steps=num_steps, is_stopped=error is not None),
        error=error,
        paths=paths,
    )


def describe_runs_below(root: Path) -> str:
    """The rest of an error message: why it is none, or which run folders are below it."""
    if not root.is_dir():
        return ": there is no such folder"
    found = sorted({path.parent for depth in ("*", "*/*", "*/*/*") for path in root.glob(f"{depth}/metrics.jsonl")})
    if not found:
        return ": it has no config.yaml and metrics.jsonl; a run that fails before its first step removes its folder"
    return ": choose one of " + ", ".join(map(str, found[:MAX_LISTED_RUNS]))


def load_run_config(path: Path) -> RunConfig | OfflineConfig:
    """The config of any kind of run. Values that this version refuses, in the file of an earlier one, are left out."""
    values = load_values(path)
    kind: type[RunConfig | OfflineConfig] = RunConfig
    if values.keys() & (PreferenceConfig.model_fields.keys() - RunConfig.model_fields.keys()):
        kind = SftConfig if str(values.get("algorithm_type", "sft")).startswith("sft") else PreferenceConfig
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        for refused in error.errors():
            unknown = (refused["ctx"]["key"],) if refused["type"] == "unknown_key" else ()
            remove_value(values, (*refused["loc"], *unknown))
    return build_section(kind, values)


def remove_value(values: dict[str, Any], location: Sequence[str | int]) -> None:
    """Remove the value at a location, or the section or list that holds it."""
    current: Any = values
    for key in location[:-1]:
        if not isinstance(current.get(key), dict):
            current.pop(key, None)
            return
        current = current[key]
    if location:
        current.pop(location[-1], None)


def load_columns(path: Path) -> tuple[dict[str, Series], dict[str, Series]]:
    """Metrics of training steps and of evaluations, as columns."""
    columns: dict[Kind, dict[str, tuple[array[int], array[float]]]] = {"train": {}, "eval": {}}
    for record in iter_metrics(path):
        step, of_kind = record.pop("step"), columns[record.pop("kind")]
        for name, value in record.items():
            steps, values = of_kind.setdefault(name, (array("q"), array("d")))
            steps.append(step)
            values.append(float("nan") if value is None else value)
    train, evaluations = (
        {
            name: Series(name=name, steps=np.array(steps), values=np.array(values))
            for name, (steps, values) in of_kind.items()
        }
        for of_kind in columns.values()
    )
    return train, evaluations


def find_state(paths: RunPaths, config: RunConfig | OfflineConfig, *, num_steps: int, is_stopped: bool) -> RunState:
    """Whether the run is still running, and how it ended."""
    if is_locked(paths.lock):
        return "running"
    if is_stopped:
        return "stopped"
    if isinstance(config, OfflineConfig):
        return "finished" if (paths.root / MODEL / DONE).is_file() else "interrupted"
    steps = [int(match[1]) for entry in paths.root.iterdir() if (match := CHECKPOINT.fullmatch(entry.name))]
    if max(steps, default=0) < num_steps or not num_steps:
        return "interrupted"
    return "interrupted" if config.total_steps is not None and num_steps < config.total_steps else "finished"
