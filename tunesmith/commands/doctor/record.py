"""A run as the checks see it: its record, its config with defaults, metrics over the recent steps, and comparisons
between the beginning and the end of a metric; and the results of checks: findings, figures within their limits, and
the diagnosis of a run.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tunesmith.config import OfflineConfig, PreferenceConfig, RunConfig, SftConfig
from tunesmith.errors import StorageError
from tunesmith.monitor.metrics_file import RECENT_SHARE, Series
from tunesmith.runs.load_config import build_section, load_values
from tunesmith.runs.record import RunKind, RunRecord, RunState, find_run_folder, find_run_folders

Severity = Literal["error", "warning", "note"]
"""error: the run stopped or cannot learn; warning: it learns less, slower or something else than it could; note: worth
knowing, nothing may have to change."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation that supports a finding."""

    source: str
    """A metric's name, or the path of a file in the run folder."""
    observed: str
    value: float | None = None
    """The number in `observed`, if there is one."""
    steps: tuple[int, int] | None = None
    """First and last step of the observation."""

    def __str__(self) -> str:
        if self.steps is None:
            return f"{self.source}: {self.observed}"
        first, last = self.steps
        return f"{self.source}: {self.observed}, " + (f"step {first}" if first == last else f"steps {first}-{last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """Something that is wrong with a run."""

    check: str = ""
    """Name of the check; its table gives it."""
    severity: Severity = "warning"
    problem: str
    """What is wrong, in one sentence."""
    evidence: tuple[Evidence, ...]
    change: str
    """What to change, in one sentence."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Suggested knobs of the run file and their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A check without a finding, and the figure that it looked at."""

    check: str
    figure: str


Outcome = CheckFinding | str | None
"""Result of a check: what is wrong, or the figure that is within its limits, or None if it does not apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that `tunesmith doctor` says about a run."""

    folder: Path
    state: RunState
    num_steps: int
    """The last step with metrics."""
    total_steps: int | None
    """Steps that the run was to make; None if that depends on the size of the data set."""
    findings: tuple[CheckFinding, ...]
    """Most severe first."""
    passed: tuple[Passed, ...]
    not_checked: tuple[str, ...]
    """Names of checks that do not apply, or whose metrics are not recorded."""
    step_time: str | None
    """Where the time of a step goes; None if it is not recorded."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder)}

    def __str__(self) -> str:
        steps = f"{self.num_steps} steps" if self.num_steps != 1 else "1 step"
        if self.total_steps is not None and self.num_steps < self.total_steps:
            steps = f"{self.num_steps} of {self.total_steps} steps"
        lines = [f"{self.folder}: {self.state}, {steps}"]
        if self.step_time is not None:
            lines.append(f"time of a step: {self.step_time}")
        lines += format_findings(self.findings, otherwise="no finding")
        if self.passed:
            lines += ["", "checked and within limits:"]
            lines += [f"  {each.check}: {each.figure}" for each in self.passed]
        if self.not_checked:
            lines += ["", f"not checked (not recorded, or of no use in this run): {', '.join(self.not_checked)}"]
        return "\n".join(lines)


def observe(series: Series, observed: str, value: float | None = None) -> Evidence:
    """Evidence from a metric; its value is the mean if no other is given."""
    return Evidence(
        source=series.name, observed=observed, value=series.mean if value is None else value, steps=series.span
    )


def format_settings(settings: Mapping[str, object]) -> str:
    """Knobs and values as in `--set`."""
    return " and ".join(
        f"{knob}={value:.2g}" if isinstance(value, float) else f"{knob}={value}" for knob, value in settings.items()
    )


def name_findings(outcomes: Mapping[str, Outcome]) -> tuple[CheckFinding, ...]:
    """The findings with the names of their checks, most severe first."""
    found = [replace(each, check=name) for name, each in outcomes.items() if isinstance(each, CheckFinding)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def format_findings(findings: Sequence[CheckFinding], *, otherwise: str) -> list[str]:
    """The lines of all findings, or the line `otherwise`."""
    lines: list[str] = []
    for finding in findings:
        lines += ["", f"{finding.severity}: {finding.check}: {finding.problem}"]
        lines += [f"  evidence: {each}" for each in finding.evidence]
        lines.append(f"  change: {finding.change}")
    return lines or ["", otherwise]


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
        config: Config
        kind, values, before = CONFIGS[self.kind], load_values(self.paths.config), None
        while values != before:
            before = copy.deepcopy(values)
            try:
                config = kind.model_validate(values)
                return config
            except ValidationError as error:
                for refused in error.errors():
                    remove_value(values, locate(refused))
        config = build_section(kind, values)  # raises: nothing more can be left out
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


def find_longest_streak(mask: np.ndarray) -> int:
    """Length of the longest run of True."""
    return max((len(list(run)) for value, run in groupby(mask.tolist()) if value), default=0)


def find_best_window(series: Series, width: int) -> Series:
    """The window of `width` steps with the highest mean, among adjacent windows from the first step on."""
    starts = range(0, max(len(series) - width, 0) + 1, width)
    windows = [series.select(slice(start, start + width)) for start in starts]
    return max(windows, key=lambda window: window.mean)
