"""A run as the checks see it: its record, its config with defaults, metrics over the recent steps, and comparisons
between the beginning and the end of a metric.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tunesmith.config import OfflineConfig, PreferenceConfig, RunConfig, Section, SftConfig
from tunesmith.errors import StorageError
from tunesmith.monitor.metrics_log import RECENT_SHARE, Series
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
MIN_TREND_STEPS = 10
"""A run has a beginning and an end to compare from this number of steps on."""
MIN_WINDOW_STEPS = 3
Config = TypeVar("Config", bound=RunConfig | OfflineConfig)


class NotRecordedError(Exception):
    """A metric that a check needs is not recorded, or not often enough."""


class CheckedRun(RunRecord, Generic[Config]):
    """The folder of a training run or of a fine-tuning."""

    @functools.cached_property
    def config(self) -> Config:
        """The settings. Values that this version refuses, in the file of an earlier one, are left out."""
        kind, values = CONFIGS[self.kind], load_values(self.paths.config)
        before = None
        while values != before and (errors := find_refused(kind, values)):
            before = copy.deepcopy(values)
            for refused in errors:
                remove_value(values, locate(refused))
        config: Config = build_section(kind, values)
        return config

    def get(self, name: str) -> Series | None:
        """The finite values of a training metric; None if there are none."""
        series = self.metrics.get(name, "train")
        finite = None if series is None else series.finite
        return finite if finite is not None and len(finite) else None

    def need(self, name: str) -> Series:
        """The same; raises NotRecordedError if there are none."""
        series = self.get(name)
        if series is None:
            raise NotRecordedError(name)
        return series

    def need_recent(self, name: str) -> Series:
        return self.need(name).recent

    def need_share(self, part: str, whole: str) -> tuple[Series, float, float]:
        """The recent values of a metric, the sum of another that it is a part of, and its share."""
        recent, total = self.need_recent(part), self.need_recent(whole).total
        if not total:
            raise NotRecordedError(whole)
        return recent, total, recent.total / total

    def get_recent(self, name: str) -> Series | None:
        series = self.get(name)
        return None if series is None else series.recent

    def sum_recent(self, name: str) -> float | None:
        """The sum of a metric over the recent steps; None if it is not recorded."""
        series = self.get_recent(name)
        return None if series is None else series.total


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


def find_refused(kind: type[Section], values: dict[str, Any]) -> list[ErrorDetails]:
    try:
        kind.model_validate(values)
    except ValidationError as error:
        return error.errors()
    return []


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


def split_ends(series: Series) -> tuple[Series, Series] | None:
    """The first and the last fifth of a series; None if it is too short for a trend."""
    if len(series) < MIN_TREND_STEPS:
        return None
    width = max(MIN_WINDOW_STEPS, len(series) // RECENT_SHARE)
    return series.first(width), series.last(width)


def need_ends(series: Series) -> tuple[Series, Series]:
    """The same; raises NotRecordedError if the series is too short."""
    ends = split_ends(series)
    if ends is None:
        raise NotRecordedError(series.name)
    return ends


def compute_slope_t(series: Series) -> float:
    """t-statistic of the slope of the least-squares line through the values."""
    x = series.steps - series.steps.mean()
    y = series.values - series.values.mean()
    slope = float(x @ y / (x @ x))
    residual = y - slope * x
    error = float(np.sqrt(residual @ residual / (len(series) - 2) / (x @ x)))
    return slope / error if error > 0 else float(np.sign(slope)) * np.inf


def find_spikes(series: Series, *, factor: float, width: int) -> np.ndarray:
    """Mask of the values above `factor` times the median of the `width` values before them."""
    values = series.values
    medians = [np.median(values[max(index - width, 0) : index]) for index in range(MIN_WINDOW_STEPS, len(values))]
    mask = np.zeros(len(values), bool)
    mask[MIN_WINDOW_STEPS:] = values[MIN_WINDOW_STEPS:] > factor * np.array(medians)
    return mask


def find_longest_streak(mask: np.ndarray) -> int:
    """Length of the longest run of True."""
    longest = current = 0
    for value in mask.tolist():
        current = current + 1 if value else 0
        longest = max(longest, current)
    return longest


def find_best_window(series: Series, width: int) -> Series:
    """The window of `width` steps with the highest mean, among adjacent windows from the first step on."""
    starts = range(0, max(len(series) - width, 0) + 1, width)
    windows = [series.select(slice(start, start + width)) for start in starts]
    return max(windows, key=lambda window: window.mean)
