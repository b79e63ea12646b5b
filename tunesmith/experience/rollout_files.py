"""The rollouts of a run on disk: which steps there are, and rows of one step with only the columns asked for.

Steps are listed from file names. Rows are read in small batches, so that memory does not grow with the size of a step.
A file that was merged with others between listing and reading is looked up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tunesmith.errors import StorageError
from tunesmith.experience.step_files import StepFiles, locate_step
from tunesmith.experience.store import ROLLOUT_STEPS, SCHEMA, check_format, find_step
from tunesmith.storage import storage_errors

BATCH_ROWS = 64


class RolloutFiles:
    """Rollout files of one run; read only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = StepFiles(folder, ROLLOUT_STEPS)
        self._steps_of_merged: dict[Path, tuple[int, Mapping[int, int]]] = {}
        """Merged file -> its modification time, and its row groups by step."""

    def list_steps(self) -> list[int]:
        """Steps that have rollouts, in ascending order."""
        return self._files.list_steps()

    def list_files(self) -> list[tuple[Path, int]]:
        """Every file with its last step, newest first; a merged file replaces the files of its steps."""
        merged = self._files.find_merged()
        is_merged = {step for each in merged for step in range(each.first, each.last + 1)}
        files = [(path, step) for step, path in self._files.find_single().items() if step not in is_merged]
        return sorted([*files, *((each.path, each.last) for each in merged)], key=lambda file: -file[1])

    def iter_rows(
        self, step: int, columns: Sequence[str], *, first: int = 0, num_rows: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rows `first` and later of a step, at most `num_rows`; columns that the file lacks are None."""
        remaining, skipped = num_rows, first
        for batch in self._iter_batches(step, columns):
            if skipped >= len(batch):
                skipped -= len(batch)
                continue
            part = batch.slice(skipped, remaining)
            skipped = 0
            yield from ({name: row.get(name) for name in row.keys() | columns} for row in part.to_pylist())
            if remaining is not None:
                remaining -= len(part)
                if remaining <= 0:
                    return

    def read_table(self, step: int, columns: Sequence[str]) -> pa.Table:
        """Columns of all rows of a step; those that the file lacks are left out."""
        with self._open(step) as parquet:
            return read_row_group(parquet, self._find_row_group(parquet, step), columns)

    def stamp(self, step: int) -> tuple[int, int]:
        """Modification time and size of the file that holds a step; they change when it is written again."""
        path = self._find_path(step)
        with storage_errors(path, "read"):
            stat = path.stat()
        return stat.st_mtime_ns, stat.st_size

    def _iter_batches(self, step: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with self._open(step) as parquet:
            row_group = self._find_row_group(parquet, step)
            groups = range(parquet.num_row_groups) if row_group is None else [row_group]
            yield from parquet.iter_batches(
                BATCH_ROWS, row_groups=list(groups), columns=keep_stored(parquet, columns), use_threads=False
            )

    def _open(self, step: int) -> pq.ParquetFile:
        path = self._find_path(step)
        try:
            return open_rollouts(path)
        except (StorageError, FileNotFoundError):
            again = self._find_path(step)
            if again == path:
                raise
            return open_rollouts(again)

    def _find_path(self, step: int) -> Path:
        path, _ = locate_step(self._folder / f"step_{step:06d}.{ROLLOUT_STEPS.single}", ROLLOUT_STEPS.merged)
        if not path.exists():
            raise StorageError(f"there are no rollouts of step {step} in {self._folder}")
        return path

    def _find_row_group(self, parquet: pq.ParquetFile, step: int) -> int | None:
        """The row group of a step in a merged file; None reads the whole file of a single step."""
        path = self._find_path(step)
        if not path.name.startswith("steps_"):
            return None
        modified = path.stat().st_mtime_ns
        known = self._steps_of_merged.get(path)
        if known is None or known[0] != modified:
            known = (modified, list_row_groups(parquet))
            self._steps_of_merged[path] = known
        if step not in known[1]:
            raise StorageError(f"there are no rollouts of step {step} in {path}")
        return known[1][step]


def open_rollouts(path: Path) -> pq.ParquetFile:
    with storage_errors(path, "read"):
        try:
            parquet = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise StorageError(f"cannot read {path}: it is not a Parquet file ({error})") from error
    check_format(path, parquet.schema_arrow)
    return parquet


def list_row_groups(parquet: pq.ParquetFile) -> dict[int, int]:
    """Step -> row group of a merged file."""
    return {find_step(parquet, index): index for index in range(parquet.num_row_groups)}


def read_row_group(parquet: pq.ParquetFile, row_group: int | None, columns: Sequence[str]) -> pa.Table:
    stored = keep_stored(parquet, columns)
    if row_group is None:
        return parquet.read(stored, use_threads=False)
    return parquet.read_row_group(row_group, stored, use_threads=False)


def keep_stored(parquet: pq.ParquetFile, columns: Sequence[str]) -> list[str]:
    """The columns that the file has; `turns.sampled_ids` is field `sampled_ids` of column `turns`."""
    names = set(parquet.schema_arrow.names)
    unknown = [name for name in columns if name.split(".")[0] not in SCHEMA.names]
    assert not unknown, f"rollouts have no columns {unknown}"
    return [name.replace(".", ".list.element.") for name in columns if name.split(".")[0] in names]
