"""metrics.jsonl as columns, read once and then only what was appended."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.errors import StorageError
from tunesmith.storage import storage_errors


@dataclass(slots=True)
class Column:
    """Steps and values of one metric; NaN where the run wrote null."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def thin(self, max_points: int) -> tuple[list[int], list[float | None]]:
        """At most about `max_points` finite points: of each bucket of steps the smallest and the largest value."""
        steps, values = np.array(self.steps), np.array(self.values)
        is_finite = np.isfinite(values)
        steps, values = steps[is_finite], values[is_finite]
        if len(steps) > max_points:
            kept: set[int] = {0, len(steps) - 1}
            for bucket in np.array_split(np.arange(len(steps)), max(max_points // 2, 1)):
                kept |= {int(bucket[values[bucket].argmin()]), int(bucket[values[bucket].argmax()])}
            order = np.array(sorted(kept))
            steps, values = steps[order], values[order]
        return steps.tolist(), values.tolist()


class MetricsLog:
    """The metrics of a run by name; `refresh` reads the lines that were added."""

    def __init__(self, path: Path) -> None:
        self.columns: dict[str, Column] = {}
        self.last_step = 0
        """The newest training step."""
        self.size = 0
        """Bytes read so far; it changes when the file does."""
        self._path = path
        self._inode = -1
        self._names: tuple[str, ...] = ()
        """Names in the last record; most records have the same."""
        self._named: list[Column | None] = []
        """Their columns."""

    def refresh(self) -> None:
        """Read complete lines that were appended; all lines if the file was replaced, as a resumed run does."""
        if not self._path.exists():
            return
        with storage_errors(self._path, "read"), self._path.open("rb") as file:
            stat = self._path.stat()
            if stat.st_ino != self._inode or stat.st_size < self.size:
                self.columns, self.last_step, self.size, self._inode = {}, 0, 0, stat.st_ino
                self._names = ()
            file.seek(self.size)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                try:
                    self._add(json.loads(line))
                except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
                    raise StorageError(f"cannot read {self._path}: a line is not a record of metrics") from error
                self.size += len(line)

    def _add(self, record: Mapping[str, Any]) -> None:
        step, kind = record["step"], record["kind"]
        if kind == "train":
            self.last_step = max(self.last_step, step)
        names = tuple(record)
        if names != self._names:
            self._names, self._named = names, [self.columns.get(name) for name in names]
        for index, (name, value) in enumerate(record.items()):
            if isinstance(value, str) or name in ("step", "kind"):
                continue
            column = self._named[index]
            if column is None:
                column = self._named[index] = self.columns.setdefault(name, Column())
            column.steps.append(step)
            column.values.append(math.nan if value is None else value)
