"""A run as the checks see it: its record, its config with defaults, and metrics over the recent steps."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tunesmith.config import OfflineConfig, PreferenceConfig, RunConfig, SftConfig
from tunesmith.errors import StorageError
from tunesmith.monitor.metrics_log import Series
from tunesmith.runs.load_config import build_section, load_values
from tunesmith.runs.record import RunKind, RunRecord, find_run_folder, find_run_folders

CONFIGS: Mapping[RunKind, type[Any]] = {
    "tune": RunConfig,
    "serve": RunConfig,
    "sft": SftConfig,
    "prefer": PreferenceConfig,
}
"""The class of the config.yaml of each kind of run that is checked."""
MAX_LISTED_RUNS = 5
NO_EFFECT = re.compile(r"(?:Value error, )?([\w.]+)(?:=\S*)? has no effect")
Config = TypeVar("Config", bound=RunConfig | OfflineConfig)


class CheckedRun(RunRecord, Generic[Config]):
    """The folder of a training run or of a fine-tuning."""

    @functools.cached_property
    def config(self) -> Config:
        """The settings. Values that this version refuses, in the file of an earlier one, are left out."""
        kind, values = CONFIGS[self.kind], load_values(self.paths.config)
        while True:
            before = json.dumps(values, default=str)
            try:
                config: Config = kind.model_validate(values)
                return config
            except ValidationError as error:
                for refused in error.errors():
                    remove_value(values, locate(refused))
            if json.dumps(values, default=str) == before:
                return build_section(kind, values)  # raises

    def get(self, name: str) -> Series | None:
        """The finite values of a training metric; None if there are none."""
        series = self.metrics.get(name, "train")
        finite = None if series is None else series.finite
        return finite if finite is not None and len(finite) else None

    def get_recent(self, name: str) -> Series | None:
        series = self.get(name)
        return None if series is None else series.recent

    def sum_recent(self, *names: str) -> float | None:
        """The sum of metrics over the recent steps; None if none of them is recorded."""
        found = [series for name in names if (series := self.get_recent(name)) is not None]
        return float(sum(series.values.sum() for series in found)) if found else None


RlRun: TypeAlias = CheckedRun[RunConfig]
OfflineRun: TypeAlias = CheckedRun[OfflineConfig]
AnyRun: TypeAlias = RlRun | OfflineRun


def open_run(path: Path) -> CheckedRun[Any]:
    """The run at a path, or of the checkpoint or model at a path; StorageError if there is none."""
    roots = find_run_folders(path)
    if roots != [find_run_folder(path)]:
        listed = ", ".join(map(str, roots[:MAX_LISTED_RUNS]))
        raise StorageError(f"{path} is not the folder of a run: choose one of {listed}")
    run: CheckedRun[Any] = CheckedRun(roots[0])
    if run.kind not in CONFIGS:
        raise StorageError(f"{path} is not the folder of a training run: it has no config.yaml and metrics.jsonl")
    return run


def locate(refused: ErrorDetails) -> tuple[str | int, ...]:
    """The keys of a refused value; the message of a condition on several knobs begins with the one that is refused."""
    if refused["type"] == "unknown_key":
        return (*refused["loc"], refused["ctx"]["key"])
    if refused["type"] == "value_error" and (named := NO_EFFECT.match(refused["msg"])):
        return (*refused["loc"], *named[1].split("."))
    return refused["loc"]


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
