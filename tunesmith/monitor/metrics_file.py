"""metrics.jsonl: one JSON object per line, `{"step": 3, "kind": "train", "train/loss": 0.1, ...}`.

A line is appended with one write and one fsync. A kill may leave an incomplete last line, which readers skip; a resumed
run removes it together with the lines of uncommitted steps. Non-finite numbers are written as null. `MetricsLog` reads
the file as series of numbers by name: once, and then only the lines that were appended.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from tunesmith.errors import StorageError
from tunesmith.monitor.metric_table import MetricTable
from tunesmith.storage import append_json_lines, encode_json_line, open_atomic, parse_json_line, storage_errors

Kind = Literal["train", "eval"]
KINDS: tuple[Kind, ...] = ("train", "eval")


def trim_metrics(path: Path, *, committed_step: int | None) -> None:
    """Remove the lines past the last commit; all lines if there is none."""
    kept = [] if committed_step is None else [r for r in load_metrics(path) if r["step"] <= committed_step]
    with open_atomic(path) as file:
        file.write(b"".join(map(encode_json_line, kept)))


def append_metrics(path: Path, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
    finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
    append_json_lines(path, {"step": step, "kind": kind} | finite)


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, empty if there is no file."""
    if not path.exists():
        return []
    with storage_errors(path, "read"), path.open("rb") as file:
        return [record for record, _ in read_records(file, path=path)]


def read_records(file: IO[bytes], *, path: Path, first: int = 1) -> Iterator[tuple[dict[str, Any], int]]:
    """The records of the lines from line `first` on, each with the number of bytes of its line."""
    whole = takewhile(lambda line: line.endswith(b"\n"), file)  # a line is being written, or its write was interrupted
    for number, line in enumerate(whole, start=first):
        record = parse_json_line(line, path=path, number=number)
        if not isinstance(record, dict) or record.get("kind") not in KINDS or type(record.get("step")) is not int:
            raise StorageError(f"cannot read {path}: line {number} is not a record of metrics")
        yield record, len(line)


RECENT_SHARE = 5
"""The recent steps are the last fifth of a run ..."""
MIN_RECENT_STEPS, MAX_RECENT_STEPS = 10, 100
"""... but enough that the noise of single steps averages out, and not what happened long ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values of one metric at the steps that report it, in ascending order; NaN where the run wrote null."""

    name: str
    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def total(self) -> float:
        return float(np.sum(self.values))

    @property
    def span(self) -> tuple[int, int]:
        """First and last step."""
        return int(self.steps[0]), int(self.steps[-1])

    @property
    def recent(self) -> Series:
        return self.last(min(max(MIN_RECENT_STEPS, len(self) // RECENT_SHARE), MAX_RECENT_STEPS))

    @property
    def finite(self) -> Series:
        return self.select(np.isfinite(self.values))

    def last(self, number: int) -> Series:
        return self.select(slice(max(len(self) - number, 0), None))

    def first(self, number: int) -> Series:
        return self.select(slice(number))

    def select(self, mask: np.ndarray | slice) -> Series:
        return Series(name=self.name, steps=self.steps[mask], values=self.values[mask])

    def thin(self, max_points: int) -> Series:
        """At most about `max_points` finite points: of each bucket of steps the smallest and the largest value."""
        finite = self.finite
        if len(finite) <= max_points:
            return finite
        kept: set[int] = {0, len(finite) - 1}
        for bucket in np.array_split(np.arange(len(finite)), max(max_points // 2, 1)):
            values = finite.values[bucket]
            kept |= {int(bucket[values.argmin()]), int(bucket[values.argmax()])}
        return finite.select(np.array(sorted(kept)))


class MetricsLog:
    """The metrics of a run by name, as far as they are written; `refresh` reads the lines that were added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._clear()
        self.refresh()

    def _clear(self) -> None:
        self.size = 0
        """Bytes read so far; it changes when the file does."""
        self._columns: dict[Kind, defaultdict[str, tuple[array[int], array[float]]]] = {
            kind: defaultdict(lambda: (array("q"), array("d"))) for kind in KINDS
        }
        """Steps and values of each metric; 16 bytes for each value."""
        self._steps: dict[Kind, array[int]] = {kind: array("q") for kind in KINDS}
        """The step of every record."""

    @property
    def last_step(self) -> int:
        """The newest training step; 0 if there is none."""
        return max(self._steps["train"], default=0)

    @property
    def train_steps(self) -> list[int]:
        """The step of every record of training."""
        return self._steps["train"].tolist()

    @property
    def names(self) -> set[str]:
        return set().union(*self._columns.values())

    def get(self, name: str, kind: Kind | None = None) -> Series | None:
        """The values of a metric in records of training or of evaluation, by default of both; None if there are
        none."""
        kinds = KINDS if kind is None else (kind,)
        found = [column for each in kinds if (column := self._columns[each].get(name)) is not None]
        if not found:
            return None
        steps, values = (np.concatenate(list(map(np.array, column))) for column in zip(*found, strict=True))
        series = Series(name=name, steps=steps, values=values)
        return series if len(found) == 1 else series.select(np.argsort(steps, kind="stable"))

    def list_series(self, kind: Kind) -> list[Series]:
        """All metrics of one kind of record."""
        return [series for name in self._columns[kind] if (series := self.get(name, kind)) is not None]

    def to_table(self, kind: Kind | None = None) -> MetricTable:
        """One row per step, with its metrics of training or of evaluation, by default of both."""
        kinds = KINDS if kind is None else (kind,)
        steps = sorted({step for each in kinds for step in self._steps[each]})
        rows: dict[int, dict[str, float | None]] = {step: {} for step in steps}
        for each in kinds:
            for name, column in self._columns[each].items():
                for step, value in zip(*column, strict=True):
                    rows[step][name] = value if math.isfinite(value) else None
        return MetricTable(rows)

    def refresh(self) -> None:
        """Read complete lines that were appended; all lines if the file was replaced, as a resumed run does."""
        if not self._path.exists():
            return
        with storage_errors(self._path, "read"), self._path.open("rb") as file:
            stat = os.fstat(file.fileno())  # of this file, which a resumed run may replace now
            if stat.st_ino != self._inode or stat.st_size < self.size:
                self._clear()
                self._inode = stat.st_ino
            file.seek(self.size)
            num_read = sum(map(len, self._steps.values()))
            for record, num_bytes in read_records(file, path=self._path, first=num_read + 1):
                self._add(record)
                self.size += num_bytes

    def _add(self, record: Mapping[str, Any]) -> None:
        step, kind = record["step"], record["kind"]
        self._steps[kind].append(step)
        for name, value in record.items():
            if (value is None or isinstance(value, int | float)) and name not in ("step", "kind"):
                steps, values = self._columns[kind][name]
                steps.append(step)
                values.append(math.nan if value is None else value)
