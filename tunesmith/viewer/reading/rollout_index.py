"""A table of numbers with one row per trajectory of a run, in memory: about 40 bytes each.

It is built file by file, newest first, within a time limit per call, and follows files that are added or merged.
Text stays on disk; only the ids of tasks and the causes of failures are kept, each once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tunesmith.errors import StorageError
from tunesmith.experience.store import RolloutFiles, keep_stored, open_rollouts, reading
from tunesmith.rollout.failures import Cause, find_cause

SCALARS = ["group_index", "run_index", "task_id", "reward", "advantage", "failure_where", "failure_message"]
SCALARS += ["failure_line", "num_turns", "num_sampled_tokens"]
SAMPLED = "turns.sampled_ids"
NO_FAILURE = -1
ROW = np.dtype(
    [
        ("step", np.int32),
        ("position", np.int32),
        ("group", np.int32),
        ("run", np.int32),
        ("task", np.int32),
        ("reward", np.float32),
        ("advantage", np.float32),
        ("num_tokens", np.int32),
        ("num_turns", np.int16),
        ("failure", np.int16),
    ]
)
"""`position` is the row in the step's rollouts; `task` and `failure` are indices into the index's lists; a reward or an
advantage that a trajectory does not have is NaN."""
MAX_CAUSES = 2**15 - 1

Rows = NDArray[Any]


class RolloutIndex:
    """The rows of `ROW` of all rollouts that `extend` has read so far."""

    def __init__(self, files: RolloutFiles) -> None:
        self._files = files
        self._codes: dict[str, int] = {}
        self._cause_codes: dict[Cause, int] = {}
        self._rows: dict[Path, tuple[tuple[int, int], Rows]] = {}
        """File -> its modification time and size, and its rows."""
        self._order: list[Path] = []
        self.num_files = 0
        """Files on disk at the last call of `extend`."""

    def extend(self, *, limit_s: float | None = None) -> bool:
        """Read files that are new or changed, newest first; whether all are read now. Without a limit read all."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        files = self._files.list_files()
        self.num_files = len(files)
        self._order = [path for path, _ in files]
        self._rows = {path: self._rows[path] for path in self._order if path in self._rows}
        for path in self._order:
            try:
                stat = path.stat()
                stamp = (stat.st_mtime_ns, stat.st_size)
                if path not in self._rows or self._rows[path][0] != stamp:
                    if deadline is not None and time.monotonic() > deadline:
                        return False
                    self._rows[path] = (stamp, self._read(path))
            except (FileNotFoundError, StorageError):
                if path.exists():
                    raise
                continue  # merged with others just now; the next call finds it
        return True

    @property
    def task_ids(self) -> list[str]:
        return list(self._codes)

    @property
    def causes(self) -> list[Cause]:
        return list(self._cause_codes)

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self._rows.values())

    @property
    def stamp(self) -> tuple[Any, ...]:
        """Changes when rows are added or replaced."""
        return tuple((path, self._rows[path][0]) for path in self._order if path in self._rows)

    @property
    def num_read_files(self) -> int:
        return len(self._rows)

    def iter_rows(self) -> Iterator[Rows]:
        """Rows file by file, newest file first; within a file in ascending order of steps."""
        for path in self._order:
            if path in self._rows:
                yield self._rows[path][1]

    def find_step(self, step: int) -> Rows:
        """The rows of one step; its file is read if it is not in the index yet."""
        stamp = self._files.stamp(step)
        for known, rows in self._rows.values():
            if known == stamp and len(rows) and rows["step"][0] <= step <= rows["step"][-1]:
                first, last = np.searchsorted(rows["step"], [step, step + 1])
                return rows[first:last]
        return self._build(read_counted(lambda columns: self._files.read_table(step, columns)), step)

    def find_task(self, task_id: str) -> Rows:
        """The rows of one task, oldest step first."""
        code = self._codes.get(task_id)
        found = [rows[rows["task"] == code] for rows in self.iter_rows()]
        return np.concatenate(found[::-1]) if found else np.empty(0, ROW)

    def _read(self, path: Path) -> Rows:
        with reading(path), open_rollouts(path) as parquet:
            table = read_counted(
                lambda columns: parquet.read(keep_stored(parquet, [*columns, "step"]), use_threads=False)
            )
        if not path.name.startswith("steps_"):
            return self._build(table, int(path.stem.removeprefix("step_")))
        steps = read_numbers(table.column("step"))
        rows = self._build(table, steps)
        rows["position"] -= np.searchsorted(steps, steps).astype(np.int32)  # the steps of a merged file ascend
        return rows

    def _build(self, table: pa.Table, step: int | NDArray[Any]) -> Rows:
        rows = np.empty(len(table), ROW)
        rows["step"], rows["position"] = step, np.arange(len(table))
        rows["group"], rows["run"] = read_numbers(table.column("group_index")), read_numbers(table.column("run_index"))
        rows["reward"] = read_numbers(table.column("reward"))
        rows["advantage"] = read_numbers(table.column("advantage"))
        rows["num_tokens"], rows["num_turns"] = count_tokens(table)
        rows["task"] = self._encode_tasks(table.column("task_id"))
        rows["failure"] = self._encode_failures(table)
        return rows

    def _encode_tasks(self, column: pa.ChunkedArray) -> NDArray[np.int32]:
        encoded = column.combine_chunks().dictionary_encode()
        codes = np.empty(len(encoded.dictionary), np.int32)
        for number, task_id in enumerate(encoded.dictionary.to_pylist()):
            codes[number] = self._codes.setdefault(task_id, len(self._codes))
        return codes[read_numbers(encoded.indices)] if len(encoded) else codes

    def _encode_failures(self, table: pa.Table) -> NDArray[np.int16]:
        found = np.full(len(table), NO_FAILURE, np.int16)
        for row in np.flatnonzero(find_known(table.column("failure_where"))):
            where, message, line = (
                table.column(name)[int(row)].as_py() if name in table.column_names else None
                for name in ("failure_where", "failure_message", "failure_line")
            )
            next_code = min(len(self._cause_codes), MAX_CAUSES - 1)
            found[row] = self._cause_codes.setdefault(find_cause(where or "", message or "", line), next_code)
        return found


def read_counted(read: Callable[[list[str]], pa.Table]) -> pa.Table:
    """The columns that the index is built from; also the turns, if the file or a step merged into it has no counts."""
    table = read(SCALARS)
    return table if has_counts(table) else read([*SCALARS, SAMPLED])


def has_counts(table: pa.Table) -> bool:
    return "num_sampled_tokens" in table.column_names and table.column("num_sampled_tokens").null_count == 0


def count_tokens(table: pa.Table) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sampled tokens and turns of each row."""
    if has_counts(table):
        return read_numbers(table.column("num_sampled_tokens")), read_numbers(table.column("num_turns"))
    turns = table.column("turns").combine_chunks()
    num_turns = read_numbers(pc.list_value_length(turns))
    lengths = read_numbers(pc.list_value_length(pc.struct_field(turns.flatten(), "sampled_ids")))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    borders = np.concatenate([[0], np.cumsum(num_turns)])
    return ends[borders[1:]] - ends[borders[:-1]], num_turns


def read_numbers(column: pa.ChunkedArray | pa.Array) -> NDArray[Any]:
    """The values of a column; NaN for nulls. `to_numpy` and scalars of pyarrow would import pandas: 0.7 s and 40 MB."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count == 0:
        return np.from_dlpack(array) if len(array) else np.empty(0, np.int64)
    values = np.from_dlpack(pa.Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], 0, array.offset))
    return np.where(find_known(array), values, np.nan)


def find_known(column: pa.ChunkedArray | pa.Array) -> NDArray[np.bool_]:
    """Which values of a column are not null."""
    return read_numbers(pc.is_valid(column).cast(pa.uint8())).astype(bool)
