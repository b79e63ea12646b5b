"""Load tasks from a folder, a file, a folder of `save_to_disk` or a hub id.

Hugging Face `datasets` reads all but plain JSON Lines files (`tunesmith.tasks.load_library`). Every problem with a data
set is a `DataError` of one sentence, raised before a model loads. Rows stay plain dicts; the order of the file is the
order of the tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tunesmith.config import DatasetSection
from tunesmith.errors import DataError
from tunesmith.storage import encode_json_line, open_atomic, storage_errors
from tunesmith.tasks.data_path import SINGLE_SPLIT, check_data_path
from tunesmith.types import Task

Row = Mapping[str, Any]
MAX_PLAIN_BYTES = 10 << 20
"""Bytes from which `datasets` chooses the types of all rows."""
DATE = re.compile(r"\d{4}-\d\d")


def load_tasks(dataset: DatasetSection, *, name: str) -> list[Task]:
    """Read all rows as tasks `<name>/<row index>` and check that they have the required fields."""
    rows = load_rows(dataset.path, name=dataset.name, split=dataset.split)
    check_required_fields(rows, dataset.required_fields, path=dataset.path, advice="change required_fields")
    rows = [add_fields(row, dataset.fields) for row in rows]
    return [Task(task_id=f"{name}/{index}", index=index, row=row) for index, row in enumerate(rows)]


def add_fields(row: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The row with these fields, where it has none of the name."""
    return row | {name: value for name, value in fields.items() if row.get(name) is None}


def load_jsonl(file: Path) -> list[Mapping[str, Any]]:
    """The objects of a JSON Lines file, without fields that only other rows have; blank lines are skipped."""
    return [row for _, row in iter_jsonl(file)]


def iter_jsonl(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The same one by one, each with the number of its line."""
    with storage_errors(file, "read"), file.open("rb") as lines:  # only \n separates them: text may have others
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"line {number} of {str(file)!r} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"line {number} of {str(file)!r} must be a JSON object, got {type(row).__name__}")
            yield number, row


def check_required_fields(rows: Sequence[Mapping[str, Any]], fields: Sequence[str], *, path: str, advice: str) -> None:
    """Refuse rows that lack a field."""
    for index, row in enumerate(rows):
        for field in fields:
            read_field(row, field, where=f"row {index} of {path!r}", advice=f". Fix the data, or {advice}")


def read_field(row: Mapping[str, Any], field: str, *, where: str, advice: str = "") -> Any:
    """The value of a field that the row `where` must have; `datasets` fills missing fields with None, so None counts as
    missing."""
    if row.get(field) is None:
        why = f"; its fields are {', '.join(sorted(row))}"
        if field in row:
            why = ": its value is empty (null, or not in this row)"
        raise DataError(f"{where} has no {field!r}{why}{advice}")
    return row[field]


def check_finite(rows: Iterable[Mapping[str, Any]], *, path: Path | str) -> None:
    """Refuse rows that `write_rows` would refuse later: JSON has no NaN and no infinite numbers."""
    for index, row in enumerate(rows):
        for field, value in row.items():
            try:
                json.dumps(value, allow_nan=False, default=str)
            except ValueError as error:
                raise DataError(
                    f"row {index} of {str(path)!r} has a number that is not finite in {field!r}, and JSON lines cannot "
                    "hold it: replace it by null, or remove the field"
                ) from error


def load_rows(path: str, *, name: str | None, split: str | None, num_rows: int | None = None) -> list[dict[str, Any]]:
    """The first `num_rows` rows of a split, or all rows if it is None; DataError without rows."""
    check_data_path(path)
    source = Path(path).expanduser()
    files = list_plain_files(source, split) if name is None else []
    if files and (rows := load_plain_rows(*files)) is not None:
        return rows[:num_rows]
    # `datasets` takes a second to import, and most runs read one file of plain rows
    from tunesmith.tasks.load_library import iter_library_rows

    try:
        rows = list(islice(iter_library_rows(path, name=name, split=split, is_streamed=num_rows is not None), num_rows))
    except DataError:
        if source.suffix == ".jsonl" and source.is_file() and name is None:
            load_jsonl(source)  # raises an error that names the line, if one is not JSON
        raise
    if not rows:
        raise DataError(f"the data set {path!r} (split {split or SINGLE_SPLIT!r}) has no rows")
    return rows


def list_plain_files(source: Path, split: str | None) -> list[Path]:
    """The JSON Lines file of a split, then those of the other splits; none where `datasets` has to find splits."""
    if source.is_file():
        return [source] if source.suffix == ".jsonl" and split in {None, SINGLE_SPLIT, source.stem} else []
    files = sorted(source.iterdir(), key=lambda file: file.stem != split) if source.is_dir() else []
    has_others = any(file.name not in ("train.jsonl", "validation.jsonl", "test.jsonl") for file in files)
    return [] if not files or has_others or files[0].stem != split else files


def load_plain_rows(file: Path, *others: Path) -> list[dict[str, Any]] | None:
    """The rows of a JSON Lines file that `datasets` would read as they are written: all, as those of the other splits,
    with the same fields, in each of them numbers, booleans or texts of one type. None for other files: it fills in
    missing fields, and turns numbers of two types into floats and texts that are dates into dates."""
    if not all(0 < each.stat().st_size <= MAX_PLAIN_BYTES for each in (file, *others)):
        return None
    parts = []
    for data in (each.read_bytes() for each in (file, *others)):
        if b"\\ud" in data.lower():
            return None
        try:
            parts.append([json.loads(line, object_pairs_hook=read_pairs) for line in data.decode().split("\n") if line])
        except ValueError:
            return None
    rows = [row for part in parts for row in part]
    kinds: dict[str, type] = {}
    fields = list(rows[0]) if rows and isinstance(rows[0], dict) else None
    for row in rows:
        if not isinstance(row, dict) or list(row) != fields:
            return None
        for field, value in row.items():
            if value is not None and (kinds.setdefault(field, type(value)) is not type(value) or not is_plain(value)):
                return None
    return parts[0] or None


def read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a field stands twice")
    return row


def is_plain(value: Any) -> bool:
    """Whether `datasets` keeps a value of this kind: texts that start like dates it may not."""
    if isinstance(value, str):
        return DATE.match(value) is None
    return isinstance(value, int | float) and -(2**63) <= value < 2**63


def read_rows(path: str) -> list[Row]:
    """The rows of a JSON lines file, or of another data set file or folder (split train); DataError without rows."""
    file = Path(path).expanduser()
    if file.suffix == ".jsonl" and file.is_file() and (rows := load_jsonl(file)):
        return rows
    return list(load_rows(path, name=None, split="train"))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write JSON lines in one piece, lone surrogates escaped; returns the number of rows."""
    count = 0
    with open_atomic(path) as file:
        for row in rows:
            file.write(encode_json_line(row, allow_nan=False, default=str))
            count += 1
    return count
