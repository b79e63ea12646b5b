"""metrics.jsonl: one JSON object per line, `{"step": 3, "kind": "train", "train/loss": 0.1, ...}`.

A line is appended with one write and one fsync. A kill may leave an incomplete last line, which readers skip; a resumed
run removes it together with the lines of uncommitted steps. Non-finite numbers are written as null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tunesmith.errors import StorageError
from tunesmith.storage import open_atomic, storage_errors

Kind = Literal["train", "eval"]
KINDS: tuple[Kind, ...] = ("train", "eval")
TIME_PREFIX = "perf/"
"""Prefix of metrics that depend on time, and of no others: all other metrics are equal in equal runs."""


class MetricsFile:
    """Appends to metrics.jsonl, after removing lines past the last commit (all lines if there is none)."""

    def __init__(self, path: Path, *, committed_step: int | None) -> None:
        self._path = path
        kept = [] if committed_step is None else [r for r in load_metrics(path) if r["step"] <= committed_step]
        with open_atomic(path) as file:
            file.write("".join(format_line(record) for record in kept).encode())
        with storage_errors(path, "write"):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """Write one line."""
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        line = format_line({"step": step, "kind": kind} | finite).encode()
        with storage_errors(self._path, "write"):
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.truncate(self._path, self._path.stat().st_size - written)
                raise StorageError(f"cannot write {self._path}: no space is left on the disk")
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def load_metrics(path: Path, *, has_times: bool = True) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, empty if there is no file; `has_times=False` leaves out `perf/` metrics."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    with storage_errors(path, "read"), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # the write was interrupted
            record = parse_line(line, path=path, number=number)
            records.append(
                {key: value for key, value in record.items() if has_times or not key.startswith(TIME_PREFIX)}
            )
    return records


def parse_line(line: bytes, *, path: Path, number: int) -> dict[str, Any]:
    """The record in a line; the error names the file and the line's number."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise StorageError(f"cannot read {path}: line {number} is not JSON ({error})") from error
    return record


def format_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
