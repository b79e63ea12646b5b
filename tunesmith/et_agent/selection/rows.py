"""Read and write files of rows for the stages of this package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunesmith.commands.sft.conversation_rows import Row, load_jsonl
from tunesmith.errors import DataError
from tunesmith.storage import open_atomic, storage_errors
from tunesmith.tasks.load import load_rows


def read_rows(path: str) -> list[Row]:
    """The rows of a JSON lines file, or of another data set file or folder (split train); DataError without rows."""
    file = Path(path).expanduser()
    rows = load_jsonl(file) if file.suffix == ".jsonl" and file.is_file() else load_rows(path, name=None, split="train")
    if not rows:
        raise DataError(f"{path!r} has no rows")
    return list(rows)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write JSON lines in one piece, lone surrogates escaped; returns the number of rows."""
    count = 0
    with storage_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as file:
            for row in rows:
                line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
                file.write(line.encode(errors="backslashreplace") + b"\n")
                count += 1
    return count
